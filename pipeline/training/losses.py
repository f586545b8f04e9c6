"""Add up the losses of steps: on a CPU as a number, on a GPU as a tensor, which is seldom read."""

from __future__ import annotations

import math

import torch

from pipeline.distributed import World
from pipeline.errors import PipelineError, count


class NonFiniteLoss(PipelineError):
    """The training loss became infinite or NaN.

    ``steps_ago``: how many steps have ended since the first step with a bad loss, including that first step.
    """

    def __init__(self, message: str, steps_ago: int = 0) -> None:
        super().__init__(message)
        self.steps_ago = steps_ago


class HostLosses:
    """Adds up the losses of steps on a CPU, where a loss can be read without waiting.

    ``add`` raises NonFiniteLoss if a loss is infinite or NaN. It raises before the backward pass, so no rank gets the
    gradients of this loss.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.total = 0.0

    def add(self, loss: torch.Tensor) -> None:
        value = loss.item()
        if not math.isfinite(value):
            raise NonFiniteLoss(f"the loss became {value}, and the optimizer did not take this step")
        self.total += value

    def end_step(self) -> None:
        """Do nothing: ``add`` has already raised if the loss is bad."""

    def read(self) -> float:
        """Return the sum over steps since the last ``read_and_reset``, averaged over ranks.

        All ranks call this method together.
        """
        return self.world.sum_(torch.tensor(self.total, dtype=torch.float64)).item() / self.world.size

    def read_and_reset(self) -> float:
        """Return ``read()``, and reset the sum."""
        total = self.read()
        self.total = 0.0
        return total


class DeviceLosses:
    """Adds up the losses of steps on the device, without waiting for the device or for another rank.

    A sum that is NaN or infinite stays so. Therefore ``read`` still finds a bad loss, and its step, some steps later.
    By then the optimizer has taken these steps, so the weights are useless and must not be kept.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.total = torch.zeros((), device=world.device)
        self.bad_steps = torch.zeros((), device=world.device)
        """How many steps this rank has ended since its sum became infinite or NaN, including that step."""

    def add(self, loss: torch.Tensor) -> None:
        self.total += loss.detach()

    def end_step(self) -> None:
        self.bad_steps += torch.nan_to_num(self.total * 0.0, nan=1.0)  # finite: 0; infinite or NaN: 1

    def read(self) -> float:
        """Return the sum over steps since the last ``read_and_reset``, averaged over ranks. Waits for the device.

        All ranks call this method together. If the sum is not finite, all ranks raise NonFiniteLoss.
        """
        total = self.world.sum_(self.total.clone()).item() / self.world.size
        if not math.isfinite(total):
            ended = int(self.world.max_(self.bad_steps))
            raise NonFiniteLoss(
                f"the loss became {total}, which was noticed after {count(ended, 'step')}; by then the weights were "
                "useless, so none are kept",
                ended,
            )
        return total

    def read_and_reset(self) -> float:
        """Return ``read()``, and reset the sum."""
        total = self.read()
        self.total.zero_()
        return total
