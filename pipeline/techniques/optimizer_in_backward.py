"""Optimizer in the backward pass: update each parameter when its gradient is complete, and free the gradient."""

from __future__ import annotations

from typing import Any
from weakref import proxy

import torch

from pipeline.processes import replaced
from pipeline.techniques.base import Setup, Technique


class OptimizerInBackward(Technique):
    """The optimizer updates one parameter at a time, so the gradients are never all in memory.

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", ACL 2024 (LOMO).
    The job's own optimizer makes each update, with its own state and its groups' learning rates. So the weights are the
    same as without this technique, to the last bit.
    """

    name = "optimizer_in_backward"

    def change_step(self, setup: Setup) -> None:
        self.optimizer, self.update = setup.step.optimizer, setup.step.update
        # A weak reference, because the garbage collector cannot follow a parameter's hook and would never free a cycle.
        technique = proxy(self)
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        lambda parameter, number=number: technique._update(number, parameter)
                    )
        setup.step.update = self._nothing

    def _nothing(self) -> None:
        """Do nothing: the parameters are already updated. The step's reference to this method keeps ``self`` alive."""

    def _update(self, number: int, parameter: torch.Tensor) -> None:
        """Update ``parameter``, which is in the optimizer's group ``number``, and free its gradient."""
        group: dict[str, Any] = self.optimizer.param_groups[number] | {"params": [parameter]}
        with replaced(self.optimizer, "param_groups", [group]):
            self.update()
        parameter.grad = None
