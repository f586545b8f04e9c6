"""Checkpoint only as many blocks as a memory budget requires, chosen by the memory and the operations of each block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from pipeline.errors import ConfigError, first_line
from pipeline.models.keeping import copied, storage_of
from pipeline.step import Inputs
from pipeline.techniques.activation_checkpointing import ActivationCheckpointing
from pipeline.techniques.base import Setup
from pipeline.techniques.precision import DTYPES


class CheckpointingBudget(ActivationCheckpointing):
    """Checkpoints blocks until at most a given fraction of the activations' bytes is still kept.

    The activations and operations of each block are measured on fake tensors, with the job's own micro-batch. The
    choice of blocks is a knapsack problem; see ``Kept.cheapest``.
    """

    name = "checkpointing_budget"

    def choice(self, setup: Setup, options: Sequence[nn.Module]) -> Sequence[nn.Module]:
        fraction, model = float(self.plan.applied.activation_checkpointing), setup.model
        where = self.where("activation_checkpointing")
        try:
            like = setup.task.inputs(self.plan.micro_batch_size)
            memory = measured(model, options, like, DTYPES.get(self.plan.applied.precision))
        except Exception as error:  # a model may use values, which fake tensors lack
            raise ConfigError(
                f"{where}, but {type(model).__name__}'s activations cannot be measured on tensors without values "
                f"({type(error).__name__}: {first_line(error)}); allowed: false, true or 'selective'."
            ) from error
        everything, least = memory.bytes(()), memory.bytes(range(len(options)))
        if not everything:
            raise ConfigError(f"{where}, but {type(model).__name__} keeps no activations; allowed: false.")
        if least > fraction * everything:
            smallest = math.ceil(1000 * least / everything) / 1000
            # A model that is mostly frozen keeps few activations anyway, and checkpointing then saves nothing.
            allowed = "a fraction from this value to 1" if smallest < 1 else "false"
            raise ConfigError(
                f"{where}, but with all {len(options)} blocks checkpointed, {type(model).__name__} still keeps "
                f"{smallest} times its activations' bytes; allowed: {allowed}."
            )
        chosen = memory.cheapest(fraction)
        self._findings = {
            "checkpointed_blocks": len(chosen),
            "blocks": len(options),
            "kept_activations_fraction": memory.bytes(chosen) / everything,
        }
        return [options[index] for index in sorted(chosen)]

    def findings(self) -> dict[str, float]:
        return self._findings


@dataclass
class Kept:
    """The storages that a forward pass keeps for the backward pass: their sizes in bytes, and the blocks that keep
    them."""

    sizes: dict[int, int] = field(default_factory=dict)
    outside: set[int] = field(default_factory=set)
    """Storages kept outside of blocks."""
    inside: list[set[int]] = field(default_factory=list)
    """Storages that each block keeps."""
    inputs: list[set[int]] = field(default_factory=list)
    """Storages that each block would keep instead if it were checkpointed."""
    flops: list[int] = field(default_factory=list)
    """Floating-point operations of each block's forward pass, which checkpointing would repeat."""

    def bytes(self, checkpointed: Iterable[int]) -> int:
        """Return the bytes kept if these blocks are checkpointed; a storage that blocks share counts once."""
        chosen = set(checkpointed)
        storages = set(self.outside)
        for index, (inside, inputs) in enumerate(zip(self.inside, self.inputs, strict=True)):
            storages |= inputs if index in chosen else inside
        return sum(self.sizes[storage] for storage in storages)

    def cheapest(self, fraction: float) -> set[int]:
        """Return the indices of blocks to checkpoint, so that at most ``fraction`` of the bytes is kept.

        A greedy search tries to keep the number of repeated operations small. Until the budget is met, the block that
        saves the most bytes per operation is added. Then each block without which the budget is still met is removed,
        the block with the most operations first.
        """
        budget, chosen = fraction * self.bytes(()), set[int]()

        def worth(index: int) -> float:
            saved = self.bytes(chosen) - self.bytes(chosen | {index})
            return saved / (self.flops[index] + 1) if saved > 0 else saved * (self.flops[index] + 1.0)

        while self.bytes(chosen) > budget:
            chosen.add(max(set(range(len(self.inside))) - chosen, key=worth))
        for index in sorted(chosen, key=lambda index: self.flops[index], reverse=True):
            if self.bytes(chosen - {index}) <= budget:
                chosen.remove(index)
        return chosen


def measured(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    like: Inputs,
    autocast: torch.dtype | None = None,
) -> Kept:
    """Measure on fake tensors which storages a forward pass of ``model`` keeps, and the operations of each block.

    The model's inputs have the shapes and dtypes of ``like``. ``autocast``: the dtype of autocast; None for no
    autocast. The storages of parameters, buffers and the inputs do not count.
    """
    memory = Kept(inside=[set() for _ in blocks], inputs=[set() for _ in blocks])
    with nullcontext() if detect_fake_mode() else FakeTensorMode(), FlopCounterMode(display=False) as counter:
        shadow_model, shadows = _shadow(model, blocks)
        inputs = tree_map(lambda values: torch.empty(values.shape, dtype=values.dtype), like)
        held = (*shadow_model.parameters(), *shadow_model.buffers(), *tree_leaves(inputs))
        standing = {storage_of(tensor) for tensor in held}
        runs: list[int] = []
        alive = []

        def note(tensor: torch.Tensor, place: set[int]) -> torch.Tensor:
            storage = storage_of(tensor)
            if storage not in standing:
                memory.sizes[storage] = tensor.untyped_storage().nbytes()
                place.add(storage)
                alive.append(tensor.detach())  # so that no later storage gets the same address, which is the key
            return tensor.detach()

        def enter(index: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
            for value in inputs:
                if isinstance(value, torch.Tensor):
                    note(value, memory.inputs[index])
            runs.append(index)

        for index, shadow in enumerate(shadows):
            shadow.register_forward_pre_hook(partial(enter, index))
            shadow.register_forward_hook(lambda *_: runs.clear())
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: note(tensor, memory.inside[runs[-1]] if runs else memory.outside), lambda tensor: tensor
            ),
            torch.autocast("cpu", dtype=autocast, enabled=autocast is not None),
            torch.enable_grad(),
        ):
            shadow_model(inputs)
    names, flops = {module: name for name, module in shadow_model.named_modules()}, counter.get_flop_counts()
    of_blocks = [flops.get(f"{type(shadow_model).__name__}.{names[shadow]}", {}) for shadow in shadows]
    memory.flops = [sum(counts.values()) for counts in of_blocks]
    return memory


def _shadow(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    """Copy ``model`` to fake tensors on the CPU; return the copy and its ``blocks``. The caller must have entered
    the fake mode."""
    shadow = copied(model, lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))
    place_of = {module: place for place, module in enumerate(model.modules())}
    shadows = list(shadow.modules())
    return shadow, [shadows[place_of[block]] for block in blocks]
