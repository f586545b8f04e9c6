"""bitsandbytes' AdamW, whose moments take one byte per value instead of float32's four."""

from __future__ import annotations

from pipeline.errors import ConfigError
from pipeline.models.optimizers import OptimizerChoice
from pipeline.processes import load_bitsandbytes
from pipeline.techniques.base import Setup, Technique

LEAST_VALUES = 4096
"""Size, in values, of the smallest tensor whose moments bitsandbytes keeps in 8 bits."""


class LowBitOptimizer(Technique):
    """bitsandbytes' AdamW keeps both moments in 8 bits; each block of 256 values has its own scale.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022. Tensors of fewer than 4096
    values keep their moments in float32, because their state is small and its accuracy matters more.
    """

    name = "low_bit_optimizer"
    prepare_process = staticmethod(load_bitsandbytes)

    def change_model(self, setup: Setup) -> None:
        if not any(weight.requires_grad and weight.numel() >= LEAST_VALUES for weight in setup.model.parameters()):
            raise ConfigError(
                f"{self.where('optimizer_state')}, but of {type(setup.model).__name__} no parameter of {LEAST_VALUES} "
                "values or more is trained; the state of smaller ones stays in float32; allowed: 'fp32'."
            )

    def change_optimizer(self, setup: Setup) -> None:
        from bitsandbytes.optim import AdamW8bit  # an optional extra

        options = setup.optimizer_choice.options
        kept = {key: options[key] for key in ("lr", "betas", "eps", "weight_decay")}
        setup.optimizer_choice = OptimizerChoice(AdamW8bit, kept)
