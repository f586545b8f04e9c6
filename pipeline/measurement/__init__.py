"""Time and memory of steps, disturbances by the rest of the machine, and why a number is rejected."""
