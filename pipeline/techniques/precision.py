"""Mixed precision: compute matrix products and convolutions in 16 bits, and keep parameters and sums in float32.

With float8, linear layers multiply tensors rounded to 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.plans import Plan
from pipeline.techniques.base import FirstPass, Setup, Technique
from pipeline.techniques.chunked_loss import head

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The variant's ``precision`` -> the dtype of autocast."""


class BFloat16(Technique):
    """Autocast to bfloat16, which has float32's range, so gradients need no scaling."""

    name = "bf16"
    dtype = DTYPES["bf16"]

    def change_step(self, setup: Setup) -> None:
        step = setup.step
        self._first = FirstPass(step, self.plan)
        step.forward = torch.autocast(self.world.device.type, dtype=self.dtype)(step.forward)

    def why_idle(self) -> str:
        if not self._first.names or self.dtype in self._first.dtypes:
            return ""
        return (
            f"{self.where('precision')}, but no operation of a step computed in {self.dtype}, because the model has no "
            "matrix product or convolution outside of an autocast of its own; allowed: 'fp32'."
        )


class Float16(BFloat16):
    """Autocast to float16 with a gradient scaler: the loss is scaled up so that small gradients do not vanish.

    If a step's scaled gradients overflow, the scaler skips the step's update and halves the scale.
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

        def update() -> None:  # replaces ``step.update``, so a technique that wraps it must come later
            self.scaler.step(step.optimizer)
            self.scaler.update()

        step.backward = lambda loss: backward(self.scaler.scale(loss))
        step.update = update
        step.unscale = lambda: self.scaler.unscale_(step.optimizer)

    def state(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


class Float8(BFloat16):
    """torchao's float8 training: linear layers multiply tensors rounded to 8 bits, each with a scale of its own.

    The layer that computes the model's outputs is not changed, as torchao's documentation advises. Layers that
    torchao's kernels do not support are not changed either. A device without float8 kernels multiplies the rounded
    tensors in float32.
    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
    """

    name = "float8"

    @classmethod
    def prepare_process(cls) -> None:
        import torchao.float8  # noqa: F401

    def change_model(self, setup: Setup) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model, last, device = setup.model, head(setup), self.world.device
        linears = [module for module in model.modules() if type(module) is nn.Linear and module is not last]
        fitting = [linear for linear in linears if linear.in_features % 16 == 0 and linear.out_features % 16 == 0]
        if not fitting:
            raise ConfigError(
                f"{self.where('precision')}, but {type(model).__name__} has no linear layer before its last layer "
                "with input and output sizes that are multiples of 16; allowed: 'bf16'."
            )
        native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
        config = Float8LinearConfig(emulate=not native, pad_inner_dim=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, _: layer in fitting)
