"""Activation checkpointing: keep the inputs of blocks, and compute what is inside again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from pipeline.config import ConfigError
from pipeline.techniques.base import Technique

_SEQUENCES = (nn.Sequential, nn.ModuleList)


class ActivationCheckpointing(Technique):
    """Every block of the model (see ``blocks``) keeps its input alone, and runs again when its gradient is due.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. The gradients are the same
    to the last bit; a block's random draws are repeated, and BatchNorm's running statistics are updated
    by the first forward pass alone.
    """

    name = "activation_checkpointing"
    recomputes = True

    def wrap_model(self, model: nn.Module) -> nn.Module:
        found = list(blocks(model))
        if not found:
            raise ConfigError(
                f"variants.{self.plan.name}.activation_checkpointing: found true, but {type(model).__name__} has no "
                "blocks to checkpoint; allowed: false, or a model with parts in an nn.Sequential or nn.ModuleList."
            )
        for block in found:
            block.forward = _recomputed(block)  # the instance's own: names in the state dict stay as they are
        return model


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The modules to checkpoint: the outermost ones with parts and parameters that contain no sequence of such blocks.

    For a ResNet these are its residual blocks, for a vision transformer its encoder blocks, for a plain
    stack of Sequentials each Sequential of layers.
    """
    for child in model.children():
        if _holds_a_sequence_of_blocks(child):
            yield from blocks(child)
        elif any(child.children()) and any(True for _ in child.parameters()):
            yield child


def _holds_a_sequence_of_blocks(module: nn.Module) -> bool:
    return any(
        isinstance(part, _SEQUENCES) and any(any(child.children()) for child in part.children())
        for part in module.modules()
    )


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_held(norms)

    def recomputed(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)

    return recomputed


@contextmanager
def _statistics_held(norms: list[_BatchNorm]) -> Iterator[None]:
    """While a block runs for the second time, its BatchNorms normalise as before but do not count the batch again."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
