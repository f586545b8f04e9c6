"""Mixed precision: matrix products and convolutions in 16 bits, parameters and sums in float32."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.distributed import World
from pipeline.plans import Plan
from pipeline.techniques.base import Setup, Technique

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The variant's ``precision`` -> the dtype of autocast."""


class BFloat16(Technique):
    """Autocast to bfloat16: float32's range, so gradients need no scaling."""

    name = "bf16"
    dtype = DTYPES["bf16"]

    def change_step(self, setup: Setup) -> None:
        step = setup.step
        step.forward = torch.autocast(self.world.device.type, dtype=self.dtype)(step.forward)


class Float16(BFloat16):
    """Autocast to float16 with a gradient scaler: the loss is scaled up so that small gradients do not vanish.

    The scaler skips the update of a step whose scaled gradients overflow, and halves its scale.
    """

    name = "fp16"
    dtype = DTYPES["fp16"]

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self.scaler = torch.amp.GradScaler(world.device.type)

    def change_step(self, setup: Setup) -> None:
        super().change_step(setup)
        step = setup.step
        backward = step.backward

        def update() -> None:  # replaces the step's: a technique that wraps ``update`` must come later
            self.scaler.step(step.optimizer)
            self.scaler.update()

        step.backward = lambda loss: backward(self.scaler.scale(loss))
        step.update = update

    def state(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)
