"""Activation checkpointing of as many blocks as a memory budget asks for, chosen by what they keep and compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from pipeline.errors import ConfigError, first_line
from pipeline.techniques.activation_checkpointing import ActivationCheckpointing
from pipeline.techniques.precision import DTYPES


class CheckpointingBudget(ActivationCheckpointing):
    """Blocks are checkpointed until what the forward pass keeps is at most a fraction of what it would keep.

    What each block keeps and computes is measured on tensors without values, with the job's own micro-batch. Which
    blocks run again is a knapsack problem; see ``Kept.cheapest``.
    """

    name = "checkpointing_budget"

    def choice(self, model: nn.Module, found: Sequence[nn.Module], shape: tuple[int, int, int]) -> Sequence[nn.Module]:
        fraction = float(self.plan.applied.activation_checkpointing)
        try:
            images = (self.plan.micro_batch_size, *shape)
            kept = measured(model, found, images, DTYPES.get(self.plan.applied.precision))
        except Exception as error:  # whatever the model does that needs values
            raise ConfigError(
                f"{self.where}, but what {type(model).__name__} keeps cannot be measured on tensors without values "
                f"({type(error).__name__}: {first_line(error)}); allowed: false, true or 'selective'."
            ) from error
        everything, least = kept.bytes(()), kept.bytes(range(len(found)))
        if not everything:
            raise ConfigError(f"{self.where}, but {type(model).__name__} keeps no activations; allowed: false.")
        if least > fraction * everything:
            raise ConfigError(
                f"{self.where}, but with all {len(found)} blocks checkpointed {type(model).__name__} still keeps "
                f"{least / everything:.3f} of its activations' bytes; allowed: a fraction from there to 1."
            )
        chosen = kept.cheapest(fraction)
        self._findings = {
            "checkpointed_blocks": len(chosen),
            "blocks": len(found),
            "kept_activations_fraction": kept.bytes(chosen) / everything,
        }
        return [found[index] for index in sorted(chosen)]

    def findings(self) -> dict[str, float]:
        return self._findings


@dataclass
class Kept:
    """What a forward pass keeps for the backward pass: bytes by storage, and who keeps which storage."""

    sizes: dict[int, int] = field(default_factory=dict)
    outside: set[int] = field(default_factory=set)
    """What is kept outside of blocks."""
    inside: list[set[int]] = field(default_factory=list)
    """What each block keeps."""
    inputs: list[set[int]] = field(default_factory=list)
    """What each block would keep instead if it were checkpointed."""
    flops: list[int] = field(default_factory=list)
    """What a second forward pass of each block computes."""

    def bytes(self, checkpointed: Iterable[int]) -> int:
        """Bytes kept with these blocks checkpointed. Neighbours share tensors, so blocks' bytes do not just add up."""
        chosen = set(checkpointed)
        storages = set(self.outside)
        for index, (inside, inputs) in enumerate(zip(self.inside, self.inputs, strict=True)):
            storages |= inputs if index in chosen else inside
        return sum(self.sizes[storage] for storage in storages)

    def cheapest(self, fraction: float) -> set[int]:
        """Blocks to checkpoint so that at most ``fraction`` of the bytes is kept, with few operations done again.

        Greedy for the knapsack problem: always the block that saves most bytes an operation, until the budget is kept;
        then those that are not needed any more, the dearest first, are given up.
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
    model: nn.Module, blocks: Sequence[nn.Module], shape: tuple[int, ...], autocast: torch.dtype | None = None
) -> Kept:
    """What a forward pass of ``model`` over float32 images of ``shape`` keeps, on tensors without values.

    Parameters, buffers and the images themselves do not count. ``autocast``: the precision of products.
    """
    kept = Kept(inside=[set() for _ in blocks], inputs=[set() for _ in blocks], flops=[0] * len(blocks))
    with nullcontext() if detect_fake_mode() else FakeTensorMode(), FlopCounterMode(display=False) as counter:
        copied, shadows = _shadow(model, blocks)
        images = torch.empty(shape)
        standing = {_storage(tensor) for tensor in (*copied.parameters(), *copied.buffers(), images)}
        here: list[int] = []
        alive = []

        def note(tensor: torch.Tensor, place: set[int]) -> torch.Tensor:
            storage = _storage(tensor)
            if storage not in standing:
                kept.sizes[storage] = tensor.untyped_storage().nbytes()
                place.add(storage)
                alive.append(tensor.detach())  # or another tensor could take its place and its key
            return tensor.detach()

        def begins(index: int) -> Callable[..., None]:
            def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
                for value in inputs:
                    if isinstance(value, torch.Tensor):
                        note(value, kept.inputs[index])
                here.append(index)
                kept.flops[index] -= counter.get_total_flops()

            return enter

        def ends(index: int) -> Callable[..., None]:
            def leave(*_: Any) -> None:
                here.pop()
                kept.flops[index] += counter.get_total_flops()

            return leave

        for index, shadow in enumerate(shadows):
            shadow.register_forward_pre_hook(begins(index))
            shadow.register_forward_hook(ends(index))
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: note(tensor, kept.inside[here[-1]] if here else kept.outside), lambda tensor: tensor
            ),
            torch.autocast("cpu", dtype=autocast, enabled=autocast is not None),
            torch.enable_grad(),
        ):
            copied(images)
    return kept


def _shadow(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    """A copy of ``model`` on the CPU whose tensors have no values, and its ``blocks``. To be called in fake mode."""
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    copied: nn.Module = copy.deepcopy(model, copies)
    return copied, [copies[id(block)] for block in blocks]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
