"""Activation checkpointing: keep only the inputs of blocks, and run the blocks again in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from pipeline.errors import ConfigError
from pipeline.techniques.base import Setup, Technique

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The contexts of a block's forward pass and of its recomputation."""

_SEQUENCES = (nn.Sequential, nn.ModuleList)


_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_KEPT = [
    getattr(torch.ops.aten, name).default
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution"),
        *(f"_scaled_dot_product_{kind}" for kind in _ATTENTION),
    )
]
"""Operations whose outputs selective checkpointing keeps."""


class ActivationCheckpointing(Technique):
    """Every block of the model (see ``blocks``) keeps only its input, and runs again in the backward pass.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. The gradients are the same as without
    checkpointing, to the last bit. The second forward pass of a block repeats the random draws of the first, and does
    not update the running statistics of norms.
    """

    name = "activation_checkpointing"

    def change_model(self, setup: Setup) -> None:
        model = setup.model
        found = list(blocks(model))
        if not found:
            raise ConfigError(
                f"{self.where('activation_checkpointing')}, but {type(model).__name__} has no blocks to checkpoint: "
                "none of its submodules has submodules of its own. Put layers that belong together into an "
                "nn.Sequential, or remove activation_checkpointing."
            )
        for block in self.choice(setup, found):
            block.forward = _recomputed(block, self.contexts())  # a wrapper would change names in the state dict

    def choice(self, setup: Setup, found: Sequence[nn.Module]) -> Sequence[nn.Module]:  # noqa: ARG002
        """Return the blocks to checkpoint, out of the blocks ``found``."""
        return found

    def contexts(self) -> Callable[[], Contexts]:
        """Return the function that makes the contexts of a block's two forward passes."""
        return noop_context_fn


class SelectiveCheckpointing(ActivationCheckpointing):
    """Blocks also keep the outputs of matrix products, convolutions and attention, and recompute all other outputs.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023. Kept
    outputs must not be overwritten, so modules with ``inplace=True`` are set to write to new tensors.
    """

    name = "selective_checkpointing"

    def choice(self, setup: Setup, found: Sequence[nn.Module]) -> Sequence[nn.Module]:
        for block in found:
            for module in block.modules():
                if getattr(module, "inplace", False) is True:
                    module.inplace = False  # type: ignore[assignment]
        return super().choice(setup, found)

    def contexts(self) -> Callable[[], Contexts]:
        return partial(create_selective_checkpoint_contexts, _KEPT)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules to checkpoint: the outermost modules that have submodules and parameters.

    A module that contains a sequence of blocks is not a block. A ModuleList or ModuleDict is not a block either,
    because a model calls its elements, not the container.

    In a ResNet the blocks are the residual blocks; in a vision transformer, the encoder blocks and the head; in a plain
    stack of Sequentials, each Sequential of layers.
    """
    for child in model.children():
        if _holds_a_sequence_of_blocks(child) or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from blocks(child)
        elif any(child.children()) and any(True for _ in child.parameters()):
            yield child


def _holds_a_sequence_of_blocks(module: nn.Module) -> bool:
    return any(
        isinstance(part, _SEQUENCES) and any(any(child.children()) for child in part.children())
        for part in module.modules()
    )


def _recomputed(block: nn.Module, contexts: Callable[[], Contexts]) -> Callable[..., Any]:
    forward = block.forward
    norms = [module for module in block.modules() if isinstance(module, _NormBase) and module.track_running_stats]

    def with_statistics_held() -> Contexts:
        first, again = contexts()
        return first, _statistics_held(norms, again)

    def recomputed(*inputs: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            return checkpoint(forward, *inputs, use_reentrant=False, context_fn=with_statistics_held, **named)
        # When compiled code recomputes a block, it repeats no side effects, such as counting BatchNorm's batches. So
        # the statistics need no protection. Besides, the compiler accepts only the contexts of selective checkpointing.
        if contexts is noop_context_fn:
            return checkpoint(forward, *inputs, use_reentrant=False, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)

    return recomputed


@contextmanager
def _statistics_held(norms: list[_NormBase], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Keep ``norms`` from updating their running statistics while a block of the model runs again in ``inner``."""
    before = [(norm.momentum, norm.num_batches_tracked, norm.running_mean, norm.running_var) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
        # Even at momentum 0, InstanceNorm rounds its statistics, because it averages them over the samples.
        if not isinstance(norm, _BatchNorm):
            norm.running_mean, norm.running_var = copy.deepcopy((norm.running_mean, norm.running_var))
        if isinstance(norm, nn.SyncBatchNorm):  # SyncBatchNorm requires a count
            norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=norm.weight.device)
    try:
        with inner:
            yield
    finally:
        for norm, held in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked, norm.running_mean, norm.running_var = held
