"""Gradient clipping: scale the gradients down where their norm over all parameters is too large."""

from __future__ import annotations

import torch

from pipeline.techniques import Technique, Update

from . import Options


class GradientClipping(Technique):
    """``torch.nn.utils.clip_grad_norm_`` between the backward pass and the update."""

    name = "gradient_clipping"

    def wrap_update(self, update: Update, optimizer: torch.optim.Optimizer) -> Update:
        options = Options.model_validate(self.plan.applied.extra[self.name])
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

        def clipped() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, options.max_norm)
            update()

        return clipped
