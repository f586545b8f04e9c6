"""Read and load state that ranks hold in parts. It is read as DTensors, and each rank loads its own parts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from pipeline.distributed import World, own_part
from pipeline.techniques.base import Setup, Stored


@contextmanager
def without_random_warning() -> Iterator[None]:
    """Hide DTensor's warning about inconsistent random numbers on CPUs; the block must not draw random numbers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators")
        yield


@dataclass(frozen=True)
class Layout:
    """Which part of a tensor each rank of a mesh holds."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    """Shape of the whole tensor."""

    @property
    def divides(self) -> bool:
        """True if the ranks hold different parts, False if each holds the whole tensor."""
        return any(placement.is_shard() for placement in self.placements)

    def dtensor(self, part: torch.Tensor) -> DTensor:
        """Return this rank's ``part``, a plain tensor, as a DTensor over the same memory."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            part.detach(), self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride
        )


Layouts = Mapping[nn.Parameter, Layout]
"""Layouts of the parameters whose parts are plain tensors; a DTensor contains its own layout."""


def in_parts(setup: Setup, model: nn.Module, layouts: Layouts, world: World) -> None:
    """Make checkpoints read each rank's parts of ``model`` and of its optimizer's state. When a checkpoint is loaded,
    the main rank sends the whole tensors to all ranks, one tensor after the other.

    Optimizer state that is split like its parameter, such as momentum, is a DTensor or has the shape of the rank's
    part. Other state, such as the count of steps, is the same on every rank.
    """
    parameters, optimizer = dict(model.named_parameters()), setup.step.optimizer

    def part(name: str, held: Any) -> Any:
        """Return ``held``, the parameter's value or a value of its optimizer state, as a DTensor if it is a part."""
        parameter: Any = parameters.get(name)
        if parameter in layouts and isinstance(held, torch.Tensor) and held.shape == parameter.shape:
            return layouts[parameter].dtensor(held)
        return held

    def loaded(name: str, held: Any, saved: Any) -> Any:
        """If ``saved`` is a tensor, copy this rank's part into ``held`` and return ``held``; else return ``saved``."""
        if not isinstance(saved, torch.Tensor):
            return saved
        value, own = world.sent(saved), part(name, held)
        if isinstance(own, DTensor):
            with without_random_warning():
                value = own_part(distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None))
        own_part(held).copy_(value)
        return held

    def read_model() -> dict[str, Any]:
        return {name: part(name, held) for name, held in get_model_state_dict(model).items()}

    def load_model(saved: dict[str, Any]) -> None:
        held = get_model_state_dict(model)
        set_model_state_dict(model, {name: loaded(name, held[name], value) for name, value in saved.items()})

    def read_optimizer() -> dict[str, Any]:
        held: Any = get_optimizer_state_dict(model, optimizer)
        state = {name: {key: part(name, value) for key, value in own.items()} for name, own in held["state"].items()}
        return {**held, "state": state}

    def load_optimizer(saved: dict[str, Any]) -> None:
        held: Any = get_optimizer_state_dict(model, optimizer)["state"]
        state = {
            name: {key: loaded(name, held[name][key], value) for key, value in own.items()}
            for name, own in saved["state"].items()
        }
        lenient = StateDictOptions(strict=False)  # a parameter that no step has used has no state
        set_optimizer_state_dict(model, optimizer, saved | {"state": state}, options=lenient)

    setup.model_state = Stored(read_model, load_model)
    setup.optimizer_state = Stored(read_optimizer, load_optimizer)
