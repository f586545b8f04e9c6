"""What a step is made of: floating-point operations, memory, time."""
