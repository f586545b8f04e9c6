"""The cost of a training step: floating-point operations, memory, time."""
