"""Gradient accumulation: one optimizer step over several micro-batches, which run one after the other."""

from __future__ import annotations

import torch

from pipeline.step import Inputs
from pipeline.techniques.base import Setup, Technique


class GradientAccumulation(Technique):
    """Divides the loss of each of N micro-batches by N, so their gradients add up to the batch's mean gradient.

    N is ``Plan.micro_batches``. ``TrainBatches`` splits the batch, ``TrainingStep`` runs the parts one by one, and this
    class only divides the loss. BatchNorm still normalises each micro-batch by its own statistics. Pipeline parallelism
    does not use this class, because its schedule runs the micro-batches.
    """

    name = "gradient_accumulation"

    def change_step(self, setup: Setup) -> None:
        forward = setup.step.forward

        def share(inputs: Inputs, targets: torch.Tensor) -> torch.Tensor:
            return forward(inputs, targets) / self.plan.micro_batches

        setup.step.forward = share


class AutoMicroBatch(GradientAccumulation):
    """Gradient accumulation with the smallest N for which a step fits into memory; ``Assembly.fitted`` finds N."""

    name = "auto_micro_batch"
