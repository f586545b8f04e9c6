"""Optimizer in the backward pass: each parameter is updated when its gradient is complete, which is then freed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pipeline.step import TrainingStep
from pipeline.techniques.base import Technique


class OptimizerInBackward(Technique):
    """The optimizer takes its step for one parameter at a time, so that gradients are never all in memory.

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", ACL 2024 (LOMO).
    It is the plain optimizer, with all its state and its groups' learning rates, that sees a single parameter at a
    time: the weights are the same to the last bit.
    """

    name = "optimizer_in_backward"

    def change_step(self, step: TrainingStep) -> None:
        self.optimizer, self.update = step.optimizer, step.update
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(self._update, number))
        step.update = lambda: None

    def _update(self, number: int, parameter: torch.Tensor) -> None:
        """What happens when ``parameter``, of the optimizer's group ``number``, has its gradient."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        self.optimizer.param_groups = [groups[number] | {"params": [parameter]}]
        try:
            self.update()
        finally:
            self.optimizer.param_groups = groups
        parameter.grad = None
