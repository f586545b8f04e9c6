"""cuDNN's search for the fastest convolution."""

from __future__ import annotations

import torch

from pipeline.step import MicroBatches, TrainingStep
from pipeline.techniques.base import Technique


class CudnnBenchmark(Technique):
    """``torch.backends.cudnn.benchmark`` during steps alone: evaluation has other shapes, and would search again.

    With ``train.deterministic`` torch offers cuDNN's deterministic algorithms alone, among which the search chooses.
    """

    name = "cudnn_benchmark"

    def change_step(self, step: TrainingStep) -> None:
        take = step.take

        def searching(micro_batches: MicroBatches) -> None:
            before = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = True
            try:
                take(micro_batches)
            finally:
                torch.backends.cudnn.benchmark = before

        step.take = searching
