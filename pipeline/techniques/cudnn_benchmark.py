"""Let cuDNN search for the fastest algorithm of each convolution."""

from __future__ import annotations

import torch

from pipeline.processes import replaced
from pipeline.techniques.base import FirstPass, Setup, Technique


class CudnnBenchmark(Technique):
    """Sets ``torch.backends.cudnn.benchmark`` only during steps. Evaluation has other shapes, and would search again.

    With ``train.deterministic`` the search chooses among cuDNN's deterministic algorithms only.
    """

    name = "cudnn_benchmark"

    def change_step(self, setup: Setup) -> None:
        self._first = FirstPass(setup.step, self.plan)
        setup.step.whole = replaced(torch.backends.cudnn, "benchmark", True)(setup.step.whole)

    def why_idle(self) -> str:
        if not self._first.names or any("convolution" in name for name in self._first.names):
            return ""
        return f"{self.where('cudnn_benchmark')}, but a step runs no convolution to search for; allowed: false."
