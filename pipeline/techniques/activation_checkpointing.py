"""Activation checkpointing: keep only the inputs of blocks, and run the blocks again in the backward pass."""

from __future__ import annotations

import copy
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from pipeline.errors import ConfigError
from pipeline.models.keeping import TORCHS_OWN
from pipeline.techniques.base import Setup, Technique, explained

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The contexts of a block's forward pass and of its recomputation."""

State = list[tuple[dict[str, Any], dict[str, Any]]]
"""The dictionaries that hold the attributes and buffers of a block's modules, each with a copy."""

_SEQUENCES = (nn.Sequential, nn.ModuleList)
_COPIED: dict[type, Callable[[Any], Any]] = {
    torch.Tensor: torch.clone,
    torch.Generator: torch.Generator.clone_state,
    **dict.fromkeys((random.Random, np.random.Generator), copy.deepcopy),
    **dict.fromkeys((list, dict, OrderedDict, set, deque, np.ndarray), copy.copy),
}
"""Types of attributes that a forward pass can change in place -> the function that copies such an attribute."""

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
    checkpointing, to the last bit. The second forward pass of a block repeats the random draws of the first, and begins
    with the block's buffers and attributes as they were before the first. It leaves no change of them behind.
    """

    name = "activation_checkpointing"
    ran_again = False
    """Whether a block has run again in a backward pass."""

    def change_model(self, setup: Setup) -> None:
        model = setup.model
        options = list(blocks(model))
        if not options:
            raise ConfigError(
                f"{self.where('activation_checkpointing')}, but {type(model).__name__} has no blocks to checkpoint: "
                "none of its submodules has submodules of its own. Put layers that belong together into an "
                "nn.Sequential, or remove activation_checkpointing."
            )
        self._model = type(model).__name__
        for block in self.choice(setup, options):
            block.forward = self._recomputed(block)  # a wrapper would change names in the state dict
        setup.outputs()  # shows which blocks overwrite their inputs; the other blocks need no copies of them

    def change_step(self, setup: Setup) -> None:
        setup.step.whole = explained(
            "torch.utils.checkpoint: |has been mutated|modified by an inplace operation",
            f"{self.where('activation_checkpointing')}, but a block of {self._model} does not repeat its forward pass "
            "when it runs again: it overwrites what is kept, or depends on a state outside of the block; allowed: "
            "false, or a block that repeats.",
        )(setup.step.whole)

    def why_idle(self) -> str:
        if self.ran_again or self.plan.applied.compile != "none":  # compiled code does not run this module's code
            return ""
        return (
            f"{self.where('activation_checkpointing')}, but no block of {self._model} ran again in a backward pass, so "
            "no memory was saved. The model calls its blocks by another method than forward, or trains none of them; "
            "allowed: false, or blocks that are called like functions."
        )

    def choice(self, setup: Setup, options: Sequence[nn.Module]) -> Sequence[nn.Module]:  # noqa: ARG002
        """Return the blocks to checkpoint, out of the blocks ``options``."""
        return options

    def contexts(self) -> Callable[[], Contexts]:
        """Return the function that makes the contexts of a block's two forward passes."""
        return noop_context_fn

    def _recomputed(self, block: nn.Module) -> Callable[..., Any]:
        """Return the forward pass of ``block``, which keeps only its inputs and runs again in the backward pass."""
        forward, contexts = block.forward, self.contexts()
        overwrites = True  # until a forward pass has shown that the block leaves its inputs as they are

        def with_state() -> Contexts:
            first, again = contexts()
            return first, self._running_again(_state_of(block), again)

        def recomputed(*inputs: Any, **named: Any) -> Any:
            nonlocal overwrites
            if not (overwrites or torch.is_grad_enabled()):  # an evaluation
                return forward(*inputs, **named)
            if torch.compiler.is_compiling():
                # When compiled code recomputes a block, it repeats no side effects, such as counting BatchNorm's
                # batches. Besides, the compiler accepts only the contexts of selective checkpointing.
                only: dict[str, Any] = {} if contexts is noop_context_fn else {"context_fn": contexts}
                return checkpoint(forward, *inputs, use_reentrant=False, **only, **named)
            versions, given, drawn = _versions((inputs, named)), [(inputs, named)], overwrites and _drawn()
            kept = tree_map_only(torch.Tensor, torch.clone, given[0]) if overwrites else given[0]

            def passed(*inputs: Any, **named: Any) -> Any:
                inputs, named = given.pop() if given else (inputs, named)  # the first pass may overwrite its inputs
                return forward(*inputs, **named)

            outputs = checkpoint(passed, *kept[0], use_reentrant=False, context_fn=with_state, **kept[1])
            if overwrites and _drawn() != drawn:
                raise ConfigError(
                    f"{self.where('activation_checkpointing')}, but {self._model} draws from the generator of Python "
                    "or numpy, and a block that runs again would draw other numbers; allowed: false, or torch's draws."
                )
            overwrites = _versions((inputs, named)) != versions
            return outputs

        return recomputed

    @contextmanager
    def _running_again(self, before: State, inner: AbstractContextManager[Any]) -> Iterator[None]:
        self.ran_again = True
        with _in_state(before), inner:
            yield


class SelectiveCheckpointing(ActivationCheckpointing):
    """Blocks also keep the outputs of matrix products, convolutions and attention, and recompute all other outputs.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023. Kept
    outputs must not be overwritten, so modules with ``inplace=True`` are set to write to new tensors.
    """

    name = "selective_checkpointing"

    def choice(self, setup: Setup, options: Sequence[nn.Module]) -> Sequence[nn.Module]:
        if modules := [
            part for block in options for part in block.modules() if getattr(part, "inplace", False) is True
        ]:
            expected = setup.outputs()
            for module in modules:
                vars(module)["inplace"] = False
            outputs = setup.outputs()
            has_values = type(expected) is torch.Tensor and not expected.is_meta
            if has_values and not torch.equal(outputs.nan_to_num(), expected.nan_to_num()):
                raise ConfigError(
                    f"{self.where('activation_checkpointing')}, but the outputs of {type(setup.model).__name__} "
                    "differ if its modules with inplace=True write to new tensors, as selective checkpointing needs; "
                    "allowed: true, or a model that computes the same with inplace=False."
                )
        return super().choice(setup, options)

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
        if _has_blocks(child) or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from blocks(child)
        elif any(child.children()) and any(True for _ in child.parameters()):
            yield child


def _has_blocks(module: nn.Module) -> bool:
    """True if the module is a sequence of blocks, or contains one, even of a single block."""
    return any(
        isinstance(part, _SEQUENCES) and any(any(child.children()) for child in part.children())
        for part in module.modules()
    )


def _state_of(block: nn.Module) -> State:
    """Return the attributes and buffers of the block's modules. Those of a type in ``_COPIED`` are copied, except
    tensors that belong to a graph."""
    copies: dict[int, Any] = {}  # two modules may share a buffer

    def copied(held: dict[str, Any]) -> dict[str, Any]:
        return held | {
            name: copies.setdefault(id(value), _COPIED[type(value)](value))
            for name, value in held.items()
            if type(value) in _COPIED and name not in TORCHS_OWN and not getattr(value, "requires_grad", False)
        }

    return [(held, copied(held)) for module in block.modules() for held in (vars(module), module._buffers)]


@contextmanager
def _in_state(state: State) -> Iterator[None]:
    """While the block runs, the modules have this ``state``, and change its copies."""
    now = [(held, held.copy()) for held, _ in state]
    _put(state)
    try:
        yield
    finally:
        _put(now)


def _put(state: State) -> None:
    for held, contents in state:
        held.clear()
        held.update(contents)


def _drawn() -> bytes:
    """Return the states of Python's and numpy's generators."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


def _versions(values: Any) -> list[int]:
    return [tensor._version for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor)]
