"""Time and memory of steps, what else the machine did, and why a number is rejected."""
