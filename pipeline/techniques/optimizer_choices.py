"""Techniques that change the optimizer's kernels or its state, or how it clears the gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from pipeline.models.optimizers import OptimizerChoice
from pipeline.techniques.base import Setup, Technique


class ForeachOptimizer(Technique):
    """Runs one kernel per operation of the update, for all parameters together."""

    name = "foreach_optimizer"
    kernel: ClassVar[dict[str, bool]] = {"fused": False, "foreach": True}

    def change_optimizer(self, setup: Setup) -> None:
        choice = setup.optimizer_choice
        setup.optimizer_choice = replace(choice, options=choice.options | self.kernel)


class ForLoopOptimizer(ForeachOptimizer):
    """Runs one kernel per operation of the update, for each parameter separately."""

    name = "for_loop_optimizer"
    kernel: ClassVar[dict[str, bool]] = {"fused": False, "foreach": False}


class FactoredOptimizer(Technique):
    """Uses Adafactor in place of AdamW, with the job's learning rate and weight decay.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018. In
    ``torch.optim.Adafactor`` the learning rate bounds how far a step changes a tensor, relative to the root mean
    square of the tensor's values.
    """

    name = "factored_optimizer"

    def change_optimizer(self, setup: Setup) -> None:
        options = {key: setup.optimizer_choice.options[key] for key in ("lr", "weight_decay")}
        setup.optimizer_choice = OptimizerChoice(torch.optim.Adafactor, options)


class ZeroedGradients(Technique):
    """Keeps the gradients' memory and fills it with zeros, instead of freeing the gradients."""

    name = "zeroed_gradients"

    def change_step(self, setup: Setup) -> None:
        setup.step.zero_grad = partial(setup.step.optimizer.zero_grad, set_to_none=False)
