"""All variants side by side: rounds, and the processes that measure."""
