"""cuDNN's search for the fastest convolution."""

from __future__ import annotations

import torch

from pipeline.techniques.base import MicroBatches, Step, Technique


class CudnnBenchmark(Technique):
    """``torch.backends.cudnn.benchmark`` during steps alone: evaluation has other shapes, and would search again.

    With ``train.deterministic`` torch offers cuDNN's deterministic algorithms alone, among which the search chooses.
    """

    name = "cudnn_benchmark"

    def wrap_step(self, step: Step) -> Step:
        def searching(micro_batches: MicroBatches) -> None:
            before = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = True
            try:
                step(micro_batches)
            finally:
                torch.backends.cudnn.benchmark = before

        return searching
