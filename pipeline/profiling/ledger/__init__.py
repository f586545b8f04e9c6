"""The memory ledger: the parts of a training step's peak memory, measured on the device and predicted without it.

Measurement and prediction watch one step of the same ``Training``. The measurement reads the allocations that torch's
profiler records (``tracker``); the prediction runs the step on fake tensors (``estimate``). The ledger counts memory
that is allocated during the whole step, such as parameters and optimizer state, and adds the peak of the allocations
during the step (``allocation_trace``).
"""

from __future__ import annotations

from pipeline.profiling.ledger.estimate import Estimate, PredictionError, predicted
from pipeline.profiling.ledger.prediction import parse_bytes, show
from pipeline.profiling.ledger.tracker import measured

__all__ = ["Estimate", "PredictionError", "measured", "parse_bytes", "predicted", "show"]
