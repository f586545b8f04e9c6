"""Measure time, memory and energy of steps, detect disturbances, and find reasons to reject a number."""
