"""The memory ledger: the parts of a training step's peak memory, measured on the device and predicted without it.

Measurement and prediction each watch one step of a ``Training``. The measurement reads the allocations that torch's
profiler records (``tracker``); the prediction runs the step on fake tensors (``estimate``). The ledger is a sum. One
part is memory that exists during the whole step, such as parameters and optimizer state. The other part is the peak of
the memory that the step itself allocates (``AllocationTrace``).
"""

from __future__ import annotations

from pipeline.profiling.ledger.estimate import Estimate, PredictionError, predicted
from pipeline.profiling.ledger.prediction import parse_bytes, show
from pipeline.profiling.ledger.tracker import measured

__all__ = ["Estimate", "PredictionError", "measured", "parse_bytes", "predicted", "show"]
