"""Choose which of PyTorch's kernels computes ``scaled_dot_product_attention`` in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.errors import ConfigError
from pipeline.processes import replaced
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


class FlexAttention(Attention):
    """Computes ``scaled_dot_product_attention`` by ``flex_attention`` where a step's forward pass is compiled.

    A causal mask's blocks without an allowed pair are skipped. A mask or bias that the model passes is added to the
    scores inside the generated kernel. Source: Dong et al., "Flex Attention: A Programming Model for Generating
    Optimized Attention Kernels", MLSys 2025.
    """

    name = "flex_attention"

    def change_model(self, setup: Setup) -> None:
        from torch.nn.attention.flex_attention import create_block_mask  # the import takes a second

        super().change_model(setup)
        usual, self._causal = F.scaled_dot_product_attention, dict[tuple[int, int], Any]()

        def tried(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            **named: Any,
        ) -> Tensor:
            if dropout_p or query.dim() != 4:
                raise ConfigError(
                    f"{self.where('attention')}, but the attention of {type(setup.model).__name__} has dropout, or no "
                    "dimension of heads; allowed: 'auto', or a model with heads and without dropout there."
                )
            sizes = query.shape[-2], key.shape[-2]
            if is_causal and sizes not in self._causal:
                self._causal[sizes] = create_block_mask(_is_earlier, None, None, *sizes, device=query.device)
            return usual(query, key, value, attn_mask, dropout_p, is_causal, **named)

        with replaced(F, "scaled_dot_product_attention", tried):
            setup.outputs()

    def change_step(self, setup: Setup) -> None:
        part = replaced(F, "scaled_dot_product_attention", flexible(F.scaled_dot_product_attention, self._causal))
        setup.step.forward = part(setup.step.forward)


def flexible(usual: Callable[..., Tensor], causal: Mapping[tuple[int, int], Any]) -> Callable[..., Tensor]:
    """Return a function like ``scaled_dot_product_attention`` that calls ``flex_attention`` in compiled code and
    ``usual`` elsewhere. ``causal``: numbers of queries and of keys -> the block mask of causal attention."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **named: Any,
    ) -> Tensor:
        if not torch.compiler.is_compiling():
            return usual(query, key, value, attn_mask, dropout_p, is_causal, **named)
        sizes = query.shape[-2], key.shape[-2]
        block_mask, score_mod = causal[sizes] if is_causal else None, None
        if attn_mask is not None:
            mask = attn_mask.expand(*query.shape[:2], *sizes)

            def masked(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
                own = mask[batch, head, row, column]
                return torch.where(own, score, -torch.inf) if mask.dtype == torch.bool else score + own

            score_mod = masked
        output: Tensor = flex_attention(query, key, value, score_mod, block_mask, **named)
        return output

    return attend


def _is_earlier(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return column <= row
