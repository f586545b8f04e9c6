"""Let cuDNN search for the fastest algorithm of each convolution."""

from __future__ import annotations

import torch

from pipeline.techniques.base import Setup, Technique, replaced


class CudnnBenchmark(Technique):
    """Sets ``torch.backends.cudnn.benchmark`` only during steps. Evaluation has other shapes, and would search again.

    With ``train.deterministic`` the search chooses among cuDNN's deterministic algorithms only.
    """

    name = "cudnn_benchmark"

    def change_step(self, setup: Setup) -> None:
        setup.step.whole = replaced(torch.backends.cudnn, "benchmark", True)(setup.step.whole)
