"""TF32: Tensor Cores round float32 factors to 10 bits of mantissa, and add up the products in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipeline.techniques.base import Setup, Technique


class TF32(Technique):
    """Uses TF32 in cuBLAS and cuDNN inside a step. Evaluation, between steps, computes in full float32."""

    name = "tf32"

    def change_step(self, setup: Setup) -> None:
        setup.step.whole = _tf32()(setup.step.whole)


@contextmanager
def _tf32() -> Iterator[None]:
    # torch's newer ``fp32_precision`` is not used: a process must not mix it with these two switches, which
    # ``assembly`` uses to switch TF32 off.
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
