"""TF32: Tensor Cores round float32 factors to 10 bits of mantissa, and add up the products in float32."""

from __future__ import annotations

import torch

from pipeline.processes import replaced
from pipeline.techniques.base import Setup, Technique


class TF32(Technique):
    """Uses TF32 in cuBLAS and cuDNN inside a step. Evaluation, between steps, computes in full float32."""

    name = "tf32"

    def change_step(self, setup: Setup) -> None:
        # torch's newer ``fp32_precision`` is not used: a process must not mix it with these two switches, which
        # ``assembly`` uses to switch TF32 off.
        for switches in (torch.backends.cuda.matmul, torch.backends.cudnn):
            setup.step.whole = replaced(switches, "allow_tf32", True)(setup.step.whole)
