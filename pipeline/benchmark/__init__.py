"""Measure all variants side by side, in rounds of fresh processes."""
