"""Measure which PyTorch speed, memory and multi-GPU technique pays on your model, data and machine."""
