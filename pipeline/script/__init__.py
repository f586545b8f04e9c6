"""Measure anybody's own training script, unchanged: its arms take optimizer steps on request."""
