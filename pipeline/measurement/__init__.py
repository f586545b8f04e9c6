"""Time and memory of steps, disturbances by the rest of the machine, and reasons to reject a number."""
