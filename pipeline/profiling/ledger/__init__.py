"""The memory ledger: where the bytes of a training step's peak are, measured on the device and predicted without it.

Both watch one step of the same ``Training``: the measurement through the reports of torch's allocators (``tracker``),
the prediction on fake tensors (``estimate``). Memory that is allocated throughout the step, parameters and optimizer
state, is counted; allocations during the step are recorded in an ``allocation_trace``, and enter with their peak.
"""

from __future__ import annotations

from pipeline.profiling.ledger.estimate import Estimate, PredictionError, predicted
from pipeline.profiling.ledger.prediction import parse_bytes, show
from pipeline.profiling.ledger.tracker import measured

__all__ = ["Estimate", "PredictionError", "measured", "parse_bytes", "predicted", "show"]
