"""AdamW whose state takes a byte where float32 takes four, from bitsandbytes."""

from __future__ import annotations

from pipeline.optimizers import OptimizerChoice
from pipeline.techniques.base import Technique


class LowBitOptimizer(Technique):
    """bitsandbytes' AdamW: both moments in 8 bits, each block of 256 values with a scale of its own.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022. Tensors of less than 4096
    values keep their moments in float32: they save little and matter more.
    """

    name = "low_bit_optimizer"
    foreseen = False

    @classmethod
    def prepare_process(cls) -> None:
        import bitsandbytes.optim  # noqa: F401

    def change_optimizer(self, choice: OptimizerChoice) -> OptimizerChoice:
        from bitsandbytes.optim import AdamW8bit  # an optional extra

        return OptimizerChoice(AdamW8bit, {key: choice.options[key] for key in ("lr", "betas", "weight_decay")})
