"""State that ranks hold in parts: gathered into what a single device would have, and taken apart again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from pipeline.distributed import own_part
from pipeline.techniques.base import Stored


@contextmanager
def without_random_warning() -> Iterator[None]:
    """On CPUs DTensor warns that it would not draw random numbers consistently. Nothing here draws any with it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators")
        yield


@dataclass(frozen=True)
class Layout:
    """Which part of a tensor each rank of a mesh holds."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    """Of the whole."""

    @classmethod
    def of(cls, tensor: DTensor) -> Layout:
        return cls(tensor.device_mesh, tensor.placements, tensor.shape)

    def whole(self, held: torch.Tensor) -> torch.Tensor:
        """The whole tensor, on the mesh's device, from what every rank holds."""
        part = own_part(held).detach().to(self.mesh.device_type)
        stride = torch.empty(self.shape, device="meta").stride()
        whole = DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride
        ).full_tensor()
        return whole.detach()

    def part(self, whole: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """This rank's part of what every rank has whole, of the kind of ``held`` and with memory of its own."""
        with without_random_warning():
            part = distribute_tensor(whole.detach(), self.mesh, self.placements, src_data_rank=None).clone()
        return part if isinstance(held, DTensor) else own_part(part)


Layouts = Mapping[nn.Parameter, Layout]
"""Of the parameters that are plain tensors and yet parts; a DTensor knows its own."""


def whole_model(stored: Stored, model: nn.Module, layouts: Layouts) -> Stored:
    """``stored``, the state dict of ``model``, with whole tensors in the place of parts."""
    by_name = {name: layouts[each] for name, each in model.named_parameters() if each in layouts}

    def layout(name: str, held: Any) -> Layout | None:
        return Layout.of(held) if isinstance(held, DTensor) else by_name.get(name)

    def read() -> dict[str, Any]:
        state = stored.read()
        found = {name: layout(name, held) for name, held in state.items()}
        return {name: held if (each := found[name]) is None else each.whole(held) for name, held in state.items()}

    def load(state: dict[str, Any]) -> object:
        now = stored.read()
        found = {name: layout(name, now[name]) for name in state}
        return stored.load(
            {
                name: value if (each := found[name]) is None else each.part(value, now[name])
                for name, value in state.items()
            }
        )

    return Stored(read, load)


def whole_optimizer(stored: Stored, optimizer: torch.optim.Optimizer, layouts: Layouts) -> Stored:
    """The same for the state of ``optimizer``, read onto the host: a device need not have the memory for all of it.

    What a rank holds of it as it does of the parameter, momentum say, is a DTensor or has the shape of the rank's part;
    the rest, the count of steps say, is the same on every rank.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def layout(parameter: nn.Parameter) -> Layout | None:
        return Layout.of(parameter) if isinstance(parameter, DTensor) else layouts.get(parameter)

    def whole(parameter: nn.Parameter, held: Any) -> Any:
        if isinstance(held, DTensor):
            return Layout.of(held).whole(held).cpu()
        of_parameter = layout(parameter)
        in_parts = isinstance(held, torch.Tensor) and held.shape == parameter.shape
        return of_parameter.whole(held).cpu() if of_parameter and in_parts else held

    def part(parameter: nn.Parameter, value: Any) -> Any:
        of_parameter = layout(parameter)
        in_parts = of_parameter and isinstance(value, torch.Tensor) and value.shape == of_parameter.shape
        return of_parameter.part(value, parameter) if of_parameter and in_parts else value

    def each(state: dict[str, Any], change: Any) -> dict[str, Any]:
        return state | {
            "state": {
                index: {name: change(parameters[index], value) for name, value in values.items()}
                for index, values in state["state"].items()
            }
        }

    return Stored(lambda: each(stored.read(), whole), lambda state: stored.load(each(state, part)))
