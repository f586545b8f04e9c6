"""cuDNN's search for the fastest convolution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipeline.techniques.base import Setup, Technique


class CudnnBenchmark(Technique):
    """Sets ``torch.backends.cudnn.benchmark`` only during steps: evaluation has other shapes, and would search again.

    With ``train.deterministic`` the search chooses among cuDNN's deterministic algorithms only.
    """

    name = "cudnn_benchmark"

    def change_step(self, setup: Setup) -> None:
        setup.step.whole = _searching()(setup.step.whole)


@contextmanager
def _searching() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
