"""Measure all variants side by side: the rounds, and the processes that measure."""
