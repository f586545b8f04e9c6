"""The losses of a training's steps: added up where they are, read when a row of history is due."""

from __future__ import annotations

import math

import torch

from pipeline.config import PipelineError
from pipeline.distributed import World


class NonFiniteLoss(PipelineError):
    """The training loss became infinite or NaN; the optimizer has not taken that step.

    ``steps_ago``: how many steps have ended since that one began.
    """

    def __init__(self, message: str, steps_ago: int = 0) -> None:
        super().__init__(message)
        self.steps_ago = steps_ago


class HostLosses:
    """Adds up the losses of steps on a CPU, where reading one waits for nothing, and stops at the first bad one.

    It stops before the backward pass, so no rank gets this rank's gradients and none takes the step.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.total = 0.0

    def add(self, loss: torch.Tensor) -> None:
        value = loss.item()
        if not math.isfinite(value):
            raise NonFiniteLoss(f"the loss became {value}")
        self.total += value

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do: a bad loss did not come this far."""

    def take(self) -> float:
        """The sum over steps since the last call, averaged over ranks."""
        total = self.world.sum_(torch.tensor(self.total, dtype=torch.float64)).item() / self.world.size
        self.total = 0.0
        return total


class DeviceLosses:
    """Adds up the losses of steps on the device, without waiting for it.

    NaN and infinity stay in a sum for good. So from the first bad loss on, ``found_inf`` is 1 on every
    rank, the fused optimizers leave the parameters as they are, and ``take`` raises when the sum is read.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.total = torch.zeros((), device=world.device)
        self.bad_steps = torch.zeros((), device=world.device)

    def add(self, loss: torch.Tensor) -> None:
        self.total += loss.detach()

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        found_inf = torch.nan_to_num(self.total * 0.0, nan=1.0)  # finite: 0; infinite or NaN: 1
        self.bad_steps += self.world.max_(found_inf)
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]

    def take(self) -> float:
        """The sum over steps since the last call, averaged over ranks. Waits for the device."""
        total = self.world.sum_(self.total).item() / self.world.size
        self.total.zero_()
        if not math.isfinite(total):
            raise NonFiniteLoss(f"the loss became {total}", steps_ago=int(self.bad_steps))
        return total
