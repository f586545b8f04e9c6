"""Choose where a pipeline cuts its model, from the time that each unit of the model's chain takes on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from pipeline.distributed import World
from pipeline.errors import count
from pipeline.models.keeping import unchanged
from pipeline.techniques.model_chain import NotAChain, balanced, chain, joined

RUNS = 5
"""Timed runs of each unit, forward and backward, after one warm-up run."""


class Form(NamedTuple):
    """Shape and dtype of the tensor that one unit passes to the next unit, for one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> torch.Tensor:
        """Return a tensor of this form on the meta device."""
        trains = self.dtype.is_floating_point  # tokens have no gradient
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=trains)


class Cut(NamedTuple):
    """Where the model is cut. Every rank has the same ``Cut``."""

    joins: tuple[int, ...]
    """Indices of the units that change their input in place; each is joined to the unit before it."""
    costs: tuple[float, ...]
    """Seconds that each unit, after joining, takes for one micro-batch, forward and backward."""
    forms: tuple[Form, ...]
    """The form of each unit's input, then of the last unit's output."""
    ends: tuple[int, ...]
    """For each stage, the index after its last unit."""


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """Return the share of a step's time in which a stage waits, if all stages are equally slow. GPipe and 1F1B have the
    same share.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
    2021, section 2.2. With p stages and m micro-batches, the paper gives the bubble as (p - 1) / m of the time without
    a bubble.

    >>> bubble_fraction(4, 12)
    0.2
    """
    return (stages - 1) / (micro_batches + stages - 1)


def best_cut(
    model: nn.Module,
    images: torch.Tensor,
    stages: int,
    world: World,
    autocast: Callable[[], AbstractContextManager[object]],
) -> Cut:
    """Return the cut of the model into ``stages`` stages for which the slowest stage is as fast as possible.

    Each unit is timed alone on this rank's device. ``images``: the inputs of a micro-batch. ``autocast``: makes the
    step's autocast, which decides the dtypes of the tensors between stages. The model and the random state stay
    unchanged. Raises NotAChain if the model cannot be cut into so many stages.
    """
    units, joins = parts(model, images, autocast)
    if len(units) < stages:
        raise NotAChain(f"{type(model).__name__} can be cut into {count(len(units), 'part')} at most")
    seconds: list[list[float]] = [[] for _ in units]
    for _ in range(RUNS + 1):
        with unchanged(model):
            passing, forms = images.clone(), [Form(tuple(images.shape), images.dtype)]
            for index, unit in enumerate(units):
                passing = passing.detach().requires_grad_(index > 0)
                start = _now(world)
                with autocast():
                    output = unit(passing)
                output.backward(torch.ones_like(output))
                seconds[index].append(_now(world) - start)
                forms.append(Form(tuple(output.shape), output.dtype))
                passing = output
    model.zero_grad()
    costs = tuple(statistics.median(each[1:]) for each in seconds)  # the first run is a warm-up
    return Cut(joins, costs, tuple(forms), tuple(balanced(costs, stages)))


def parts(
    model: nn.Module, images: torch.Tensor, autocast: Callable[[], AbstractContextManager[object]] = nullcontext
) -> tuple[list[nn.Sequential], tuple[int, ...]]:
    """Return the units between which ``model`` can be cut, and their ``joins`` (see ``Cut``).

    ``images``: inputs of the model, on its device. The model and the random state stay unchanged. Raises NotAChain if
    the model cannot be cut.
    """
    units = chain(model)
    with unchanged(model), torch.no_grad(), autocast():
        expected = model(images.clone())
    with unchanged(model), torch.no_grad(), autocast():
        computed, joins = _written_in_place(units, images.clone())
    if not torch.allclose(computed, expected, rtol=1e-3, atol=1e-4):
        raise NotAChain(f"torch.fx's recording of {type(model).__name__} computes other outputs than the model")
    return joined(units, joins), joins


def described(cut: Cut, micro_batches: int) -> str:
    """Describe in words how evenly the model is cut, and the bubble's share of a step."""
    bounds, stages = list(pairwise((0, *cut.ends))), len(cut.ends)
    costs, counts = [sum(cut.costs[begin:end]) for begin, end in bounds], [end - begin for begin, end in bounds]
    times = " + ".join(f"{1e3 * cost:.2f}" for cost in costs)
    return (
        f"{stages} stages of {' + '.join(map(str, counts))} units, {times} ms per micro-batch; the slowest stage "
        f"takes {max(costs) * stages / sum(costs):.2f} times an even share, and "
        f"{bubble_fraction(stages, micro_batches):.0%} of a step is the pipeline's bubble"
    )


def _now(world: World) -> float:
    world.synchronise()
    return time.perf_counter()


def _written_in_place(units: Sequence[nn.Module], passing: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Run the chain; return its output, and the indices of units after the first that change their input in place.

    Such a unit cannot begin a stage, because autograd could not compute the gradient of the stage's input.
    """
    found = []
    for index, unit in enumerate(units):
        version = passing._version
        output = unit(passing)
        if index and passing._version != version:
            found.append(index)
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            raise NotAChain("a part of the model does not return a tensor of floating-point numbers")
        passing = output
    return passing, tuple(found)
