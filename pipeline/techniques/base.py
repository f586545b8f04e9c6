"""What a technique may change: the model, the forward pass, the backward pass, the update, gradient synchronisation.

Each hook is called once, when a run is set up, with what is there so far, and returns what shall be there
instead. Nothing is asked again inside a step, so a technique that is not applied costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from pipeline.config import Plan
from pipeline.distributed import World

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Images float32 [b, C, H, W] and labels int64 [b] to this micro-batch's share of the loss, a scalar."""
Backward = Callable[[torch.Tensor], None]
"""Adds the gradients of a loss to the parameters'."""
Update = Callable[[], object]
"""Changes the parameters by their gradients."""
HoldSync = Callable[[], AbstractContextManager[object]]
"""A context in which gradients stay on their rank: for every micro-batch of a step but the last."""


class Technique:
    """One change that a variant applies; this base changes nothing."""

    name: ClassVar[str]

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan = plan
        self.world = world

    @classmethod
    def is_asked(cls, plan: Plan) -> bool:
        """Whether the variant applies this technique."""
        raise NotImplementedError

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """``model`` on its device, changed in place or wrapped."""
        return model

    def wrap_forward(self, forward: Forward) -> Forward:
        return forward

    def wrap_backward(self, backward: Backward) -> Backward:
        return backward

    def wrap_update(self, update: Update, optimizer: torch.optim.Optimizer) -> Update:  # noqa: ARG002
        return update

    def wrap_hold_sync(self, hold_sync: HoldSync) -> HoldSync:
        return hold_sync

    def state(self) -> dict[str, Any]:
        """What the technique must remember to resume exactly: plain values and tensors."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Undo of ``state``."""
