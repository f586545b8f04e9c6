"""The memory ledger: where the bytes of a training step's peak are, measured on the device and predicted without it.

Both watch one step of the same ``Training``: on the device, through what torch's allocators report (``tracker``); in
the prediction, on fake tensors (``estimate``). What is there throughout, parameters and optimizer state, is counted;
what comes and goes is written in an ``allocation_trace``, and the ledger is what that shows where it is at its highest.
"""

from __future__ import annotations

from pipeline.profiling.ledger.estimate import PredictionError, Rehearsal, predicted
from pipeline.profiling.ledger.prediction import parse_bytes, show
from pipeline.profiling.ledger.tracker import measured

__all__ = ["PredictionError", "Rehearsal", "measured", "parse_bytes", "predicted", "show"]
