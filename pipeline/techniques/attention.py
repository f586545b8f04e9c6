"""Choose which of PyTorch's kernels computes ``scaled_dot_product_attention`` in a step."""

from __future__ import annotations

import torch._functorch.config
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.errors import ConfigError
from pipeline.techniques.base import Setup, Technique, explained


class Attention(Technique):
    """Allows only one kernel in a step's forward and backward passes, with ``sdpa_kernel``.

    The backward pass is included because checkpointed blocks run again there. Evaluation keeps PyTorch's choice.
    """

    name = "attention"

    @classmethod
    def prepare_process(cls) -> None:
        # The compiler's cache could return a graph that was compiled for another kernel.
        torch._functorch.config.enable_autograd_cache = False

    def change_model(self, setup: Setup) -> None:
        try:
            with sdpa_kernel([]):  # forbids every kernel, so scaled_dot_product_attention fails
                setup.outputs()
        except RuntimeError as error:
            if "scaled_dot_product_attention" in str(error):
                return
            raise
        raise ConfigError(
            f"{self.where('attention')}, but {type(setup.model).__name__} does not call scaled_dot_product_attention; "
            "allowed: 'auto', or a model that calls it, such as vit_b_16."
        )

    def change_step(self, setup: Setup) -> None:
        kernel = self.plan.applied.attention
        # A CPU has only one fused kernel. A memory prediction, which runs on the CPU, uses this kernel in place of any
        # fused kernel of a GPU.
        fused = "flash" if self.world.device.type == "cpu" else kernel
        allowed = SDPBackend.MATH if kernel == "math" else getattr(SDPBackend, f"{fused.upper()}_ATTENTION")
        explanation = (
            f"{self.where('attention')}, but this kernel cannot compute the model's attention on this device "
            "(PyTorch's warnings above say why); allowed: 'auto', or another kernel."
        )
        # All three parts are needed: a pipeline's schedule does not call ``backward``, and a trial step does not call
        # ``whole``.
        for name in ("forward", "backward", "whole"):
            part = sdpa_kernel(allowed)(getattr(setup.step, name))
            setattr(setup.step, name, explained("No available kernel", explanation)(part))
