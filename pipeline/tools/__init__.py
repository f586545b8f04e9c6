"""Commands that nothing else needs, each on its own."""
