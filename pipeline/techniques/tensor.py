"""Tensor parallelism: ranks share pairs of linear layers, split along the hidden width between the two layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipeline.errors import ConfigError
from pipeline.plans import WhyNot, WhyNotHeldBy
from pipeline.techniques.base import Setup, Technique
from pipeline.techniques.ddp import arrange_buckets, reduced, replicated
from pipeline.techniques.sharded_state import Layout, in_parts, without_random_warning

_ELEMENT_BY_ELEMENT = (
    *(nn.Dropout, nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh),
)


class Tensor(Technique):
    """Applies ``parallelize_module`` to pairs of linear layers with only element-wise functions between them.

    A model can also name two layers with attention heads between them (``tensor_pair`` of
    ``pipeline.models.gpt.Attention``). Pairs that the ranks cannot share evenly are not split.

    Each rank computes a part of the first layer's outputs and, from this part, a partial result of the second layer.
    The partial results of all ranks are added up. The rest of the model is on every rank, so all ranks take the same
    samples and draw the same random numbers outside the pairs. With ``replicas``, each group of ranks holds one model.
    The groups divide the batch among themselves, and average their gradients as in DDP.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
    """

    name = "tensor"

    @classmethod
    def why_not_held_by(cls, setup: Setup) -> WhyNotHeldBy:
        return partial(_why_not_cut, setup.model)

    def change_model(self, setup: Setup) -> None:
        self._setup, model = setup, setup.model
        replicas, ranks = self.plan.data_processes, self.plan.model_processes
        mesh = self.world.mesh(data=replicas, model=ranks)
        rank = mesh["model"].get_local_rank()
        self.model = model
        self.layouts: dict[nn.Parameter, Layout] = {}
        fitting = [pair for pair in pairs(model) if pair.parts % ranks == 0]
        if not fitting:
            raise ConfigError(f"{self.where('parallelism')}, but {_why_not_cut(model, ranks)}.")
        for pair in fitting:
            for linear, style in ((pair.first, ColwiseParallel()), (pair.second, RowwiseParallel())):
                with without_random_warning():
                    # No rank sends its weights to the others, because all ranks have the same weights.
                    parallelize_module(linear, mesh["model"], style, src_data_rank=None)
                self.layouts |= _with_plain_parameters(linear)
            for module in pair.between:
                # The first layer's output is a view, and autograd does not allow changes of this view in place.
                if getattr(module, "inplace", False):
                    vars(module)["inplace"] = False
                if isinstance(module, nn.Dropout):
                    vars(module)["forward"] = _part_of_whole_dropout(module, rank, ranks)
            # The second layer's output is such a view too, but later modules may change a copy in place.
            pair.second.register_forward_hook(lambda _module, _inputs, output: output.clone())
        setup.shard_group = mesh["model"].get_group()
        setup.is_shard = lambda parameter: parameter in self.layouts and self.layouts[parameter].divides
        self.wrapped = (
            None if replicas == 1 else replicated(model, self.plan, self.world, process_group=mesh["data"].get_group())
        )
        setup.model = self.wrapped or model

    def restore(self, state: dict[str, Any]) -> None:  # noqa: ARG002
        if self.wrapped:
            arrange_buckets(self.wrapped, self._setup, self.plan)

    def change_step(self, setup: Setup) -> None:
        if self.wrapped:
            setup.step.accumulate = reduced(self.wrapped, self.plan)(setup.step.accumulate)
            setup.step.no_sync = self.wrapped.no_sync

    def change_checkpoint(self, setup: Setup) -> None:
        in_parts(setup, self.model, self.layouts, self.world)


def _why_not_cut(model: nn.Module, ranks: int) -> WhyNot | None:
    """Return why no pair of ``model`` can be cut into ``ranks`` parts; None if some pair can."""
    widths = sorted({pair.parts for pair in pairs(model)})
    if any(width % ranks == 0 for width in widths):
        return None
    if widths:
        return WhyNot(
            f"{type(model).__name__} has {', '.join(map(str, widths))} values or heads between linear layers, which "
            f"{ranks} processes cannot share evenly",
            "a number of processes (per replica) that divides one of these numbers",
        )
    return WhyNot(
        f"{type(model).__name__} has no two linear layers with only element-wise functions between them",
        "a model with such a pair in an nn.Sequential or an nn.TransformerEncoderLayer, or another parallelism",
    )


@dataclass(frozen=True)
class Pair:
    """Two linear layers, and the element-wise modules or the attention heads between these layers."""

    first: nn.Linear
    between: tuple[nn.Module, ...]
    second: nn.Linear
    parts: int
    """Largest number of parts into which the pair can be cut: the number of values between the layers, or of heads."""


def pairs(model: nn.Module) -> Iterator[Pair]:
    """Yield the pairs of linear layers that can be cut along the width between them; no two pairs share a layer.

    A pair is left out if the model also uses one of its layers or dropouts in another place, because that place needs
    the whole width.
    """
    uses = Counter(id(part) for _, part in model.named_modules(remove_duplicate=False))
    uses.update(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    chained = (pair for chain in _chains(model) for pair in _pairs_of(chain))
    for pair in (*_attentions(model), *chained):
        dropouts = [module for module in pair.between if isinstance(module, nn.Dropout)]
        parts = (pair.first, pair.second, *dropouts)
        if all(uses[id(tensor)] == 1 for part in parts for tensor in (part, *part.parameters())):
            yield pair


def _attentions(model: nn.Module) -> Iterator[Pair]:
    """Yield the layers before and after the attention heads of each module whose ``tensor_pair`` names these layers.

    The first layer's outputs must be ordered head by head. The module's forward pass must work with any number of
    heads.
    """
    for module in model.modules():
        if names := getattr(module, "tensor_pair", None):
            first, second = map(module.get_submodule, names)
            assert isinstance(first, nn.Linear)
            assert isinstance(second, nn.Linear)
            yield Pair(first, (), second, int(module.heads))  # type: ignore[arg-type]


def _chains(model: nn.Module) -> Iterator[Sequence[nn.Module]]:
    """Yield sequences of modules that run one after the other, each on the output of the one before."""
    for module in model.modules():
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            yield list(module)
        elif type(module) is nn.TransformerEncoderLayer:  # the activation is an element-wise function
            yield [module.linear1, module.dropout, module.linear2]


def _pairs_of(chain: Iterable[nn.Module]) -> Iterator[Pair]:
    first: nn.Linear | None = None
    between: list[nn.Module] = []
    for module in chain:
        if type(module) is nn.Linear and first is not None:
            yield Pair(first, tuple(between), module, first.out_features)
            first = None
        elif type(module) is nn.Linear:
            first, between = module, []
        elif type(module) in _ELEMENT_BY_ELEMENT:
            between.append(module)
        else:
            first = None


def _with_plain_parameters(linear: nn.Linear) -> dict[nn.Parameter, Layout]:
    """Replace ``linear``'s DTensors by this rank's parts, as plain tensors; return the layout of each part.

    Optimizers, their fused kernels and DistributedDataParallel do not accept DTensors mixed with plain parameters. The
    forward pass uses DTensors again, over the same memory.
    """
    layouts: dict[str, Layout] = {}
    for name, parameter in list(linear.named_parameters()):
        assert isinstance(parameter, DTensor)
        layouts[name] = Layout(parameter.device_mesh, parameter.placements, parameter.shape)
        part = parameter.to_local().detach().clone()  # the part may be a view of the whole
        linear.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))

    def as_dtensor(name: str) -> torch.Tensor | None:
        part, layout = getattr(linear, name), layouts.get(name)
        return DTensor.from_local(part, layout.mesh, layout.placements, run_check=False) if layout else part

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        weight = as_dtensor("weight")
        assert weight is not None
        return F.linear(hidden, weight, as_dtensor("bias"))

    vars(linear)["forward"] = forward  # replaced only in this instance
    return {linear.get_parameter(name): layout for name, layout in layouts.items()}


def _part_of_whole_dropout(dropout: nn.Dropout, rank: int, ranks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that applies dropout to this rank's part [..., width / ranks] of the hidden values.

    Every rank draws the mask of the whole width, as a single device does, and uses its part of the mask. So the ranks'
    parts of the mask are independent, and all ranks' generators stay in the same state.
    """

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not dropout.training or dropout.p == 0:
            return hidden
        kept = F.dropout(hidden.new_ones(*hidden.shape[:-1], hidden.shape[-1] * ranks), dropout.p)
        return hidden * kept.chunk(ranks, -1)[rank]

    return forward
