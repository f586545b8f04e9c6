"""Gradient clipping: scale the gradients down if their norm over all parameters is too large."""

from __future__ import annotations

import torch

from pipeline.techniques import Setup, Technique

from . import Options


class GradientClipping(Technique):
    """Calls ``torch.nn.utils.clip_grad_norm_`` between the backward pass and the update."""

    name = "gradient_clipping"

    def change_step(self, setup: Setup) -> None:
        step = setup.step
        update = step.update
        options = Options.model_validate(self.plan.applied.extra[self.name])
        parameters = [parameter for group in step.optimizer.param_groups for parameter in group["params"]]

        def clipped() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, options.max_norm)
            update()

        step.update = clipped
