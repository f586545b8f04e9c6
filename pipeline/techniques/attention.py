"""Choose which of PyTorch's kernels computes ``scaled_dot_product_attention`` in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch._functorch.config
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.plans import Plan
from pipeline.techniques.base import Setup, Technique, explained

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Attention(Technique):
    """Allows only one kernel in a step's forward and backward passes, with ``sdpa_kernel``.

    The backward pass is included because checkpointed blocks run again there. Evaluation keeps PyTorch's choice.
    """

    name = "attention"

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        kernel = plan.applied.attention
        # A CPU has only one fused kernel. A memory prediction, which runs on the CPU, uses this kernel in place of any
        # fused kernel of a GPU.
        self._kernel = _KERNELS["flash" if world.device.type == "cpu" and kernel != "math" else kernel]

    @classmethod
    def prepare_process(cls) -> None:
        # The compiler's cache could return a graph that was compiled for another kernel.
        torch._functorch.config.enable_autograd_cache = False

    def change_model(self, setup: Setup) -> None:
        if not _attends(setup):
            raise ConfigError(
                f"{self.where('attention')}, but {type(setup.model).__name__} does not call "
                "scaled_dot_product_attention; allowed: 'auto', or a model that calls it, such as vit_b_16."
            )

    def change_step(self, setup: Setup) -> None:
        step = setup.step
        # All three parts are needed: a pipeline's schedule does not call ``backward``, and a trial step does not call
        # ``whole``.
        step.forward = self._alone()(step.forward)
        step.backward = self._alone()(step.backward)
        step.whole = self._alone()(step.whole)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        explanation = (
            f"{self.where('attention')}, but this kernel cannot compute the model's attention on this device "
            "(PyTorch's warnings above say why); allowed: 'auto', or another kernel."
        )
        with explained("No available kernel", explanation), sdpa_kernel(self._kernel):
            yield


def _attends(setup: Setup) -> bool:
    """Return whether the model calls scaled_dot_product_attention, which fails when every kernel is forbidden."""
    try:
        with sdpa_kernel([]):
            setup.outputs()
    except RuntimeError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return True
    return False
