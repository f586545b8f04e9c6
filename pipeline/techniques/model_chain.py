"""Split a model into a chain of units, each of which passes only one tensor to the next unit, and choose where a
pipeline cuts the chain, from the time that each unit takes on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from pipeline.distributed import World
from pipeline.errors import count
from pipeline.models.keeping import unchanged
from pipeline.step import Inputs
from pipeline.techniques.activation_checkpointing import _SEQUENCES


class NotAChain(Exception):
    """A model cannot be cut; the message says why."""


def chain(model: nn.Module) -> list[nn.Sequential]:
    """Return modules that, run one after the other, compute the same as ``model``, with the model's own parameters.

    torch.fx records the operations of the model's forward pass; a layer, or a block in a sequence of blocks, is one
    operation. The model is split between two operations if all later operations need only one of the tensors computed
    so far. So it is never split inside a residual connection. Each unit has trainable parameters.

    Raises NotAChain, whose message says why, if the model has no such chain.
    """
    if _changed(model, "_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        raise NotAChain(f"{type(model).__name__} as a whole has hooks that are not plain forward pre-hooks")
    try:
        graph = _Tracer().trace(model)
    except Exception as error:
        raise NotAChain(f"torch.fx cannot record {type(model).__name__}: {error}") from error
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node.args[0] for node in graph.nodes if node.op == "output")
    if len(inputs) != 1 or not isinstance(output, fx.Node):
        raise NotAChain(f"{type(model).__name__} takes or returns more than one tensor")
    pieces: list[nn.Module] = [_Entry(model)] if model._forward_pre_hooks else []
    pieces += _pieces(model, graph, inputs[0], output)
    units: list[list[nn.Module]] = []
    for piece in pieces:
        if units and not (_trains(*units[-1]) and _trains(piece)):
            units[-1].append(piece)
        else:
            units.append([piece])
    chained = [nn.Sequential(*unit) for unit in units]
    _check_shared(chained)
    return chained


def joined(units: Sequence[nn.Sequential], joins: Sequence[int]) -> list[nn.Sequential]:
    """Return the chain with each unit whose index is in ``joins`` merged into the unit before it."""
    parts: list[list[nn.Module]] = []
    for index, unit in enumerate(units):
        if index in joins:
            parts[-1] += unit
        else:
            parts.append(list(unit))
    return [nn.Sequential(*part) for part in parts]


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Split ``costs`` into ``parts`` non-empty runs of neighbours; return the index after the last cost of each run.

    The largest sum of a run is as small as possible. There must be at least ``parts`` costs, and none may be negative.
    Uses dynamic programming over the prefixes of ``costs``: O(parts * len(costs)^2).
    Source: Skiena, The Algorithm Design Manual, 2nd ed., section 8.5, "The Partition Problem".

    >>> balanced([1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    [5, 7, 9]
    """
    count = len(costs)
    before = [0.0, *accumulate(costs)]
    # ``best[end]`` is the best split of the first ``end`` costs: the cost of its costliest part, and the parts' ends.
    best: dict[int, tuple[float, list[int]]] = {end: (before[end], [end]) for end in range(1, count + 1)}
    for made in range(1, parts):
        best = {
            end: min((max(best[cut][0], before[end] - before[cut]), [*best[cut][1], end]) for cut in range(made, end))
            for end in range(made + 1, count + 1)
        }
    return best[count][1]


class _Tracer(fx.Tracer):
    """Records the operations of the model, of its Sequentials and of modules with a sequence of blocks. Any other
    module is recorded as one operation."""

    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        if _changed(module, "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            return True  # for example, a checkpointed block
        return type(module).forward is not nn.Sequential.forward and not _has_several_blocks(module)


def _has_several_blocks(module: nn.Module) -> bool:
    """True if a sequence of at least two blocks, between which the model can be cut, is inside the module."""
    return any(
        isinstance(part, _SEQUENCES) and sum(any(child.children()) for child in part.children()) > 1
        for part in module.modules()
        if part is not module
    )


def _pieces(model: nn.Module, graph: fx.Graph, entering: fx.Node, output: fx.Node) -> list[nn.Module]:
    """Cut the graph wherever all later operations need only one of the values computed so far; return the pieces."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    place = {node: index for index, node in enumerate(nodes)}
    last_use = {
        value: len(nodes)
        if value is output
        else max((place[user] for user in value.users if user in place), default=-1)
        for value in (entering, *nodes)
    }
    pieces: list[nn.Module] = []
    begin = 0
    for index in range(len(nodes)):
        alive = [value for value in (entering, *nodes[begin : index + 1]) if last_use[value] > index]
        if len(alive) == 1:
            pieces.append(_piece(model, nodes[begin : index + 1], entering, alive[0]))
            begin, entering = index + 1, alive[0]
    return pieces


def _piece(model: nn.Module, nodes: Sequence[fx.Node], entering: fx.Node, leaving: fx.Node) -> nn.Module:
    """Return a module that runs only the operations ``nodes``, from ``entering`` to ``leaving``."""
    graph = fx.Graph()
    copies = {entering: graph.placeholder("entering")}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter or buffer
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copied)
    graph.output(copied(leaving))
    return fx.GraphModule(model, graph)


class _Entry(nn.Module):
    """Runs the model's forward pre-hooks, such as a hook that resizes images, on its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._before: list[Callable[[Any], Any]] = [partial(hook, model) for hook in model._forward_pre_hooks.values()]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for hook in self._before:
            changed = hook((images,))
            if changed is not None:
                images = changed[0] if isinstance(changed, tuple) else changed
        return images


def _changed(module: nn.Module, *hooks: str) -> bool:
    """Return whether the module has hooks of these kinds, or a ``forward`` that is not its class's."""
    return "forward" in vars(module) or any(getattr(module, name) for name in hooks)


def _trains(*modules: nn.Module) -> bool:
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())


def _check_shared(units: Sequence[nn.Module]) -> None:
    seen: dict[int, int] = {}
    for index, unit in enumerate(units):
        for name, tensor in (*unit.named_parameters(), *unit.named_buffers()):
            if seen.setdefault(id(tensor), index) != index:
                raise NotAChain(f"{name} is used in more than one place (gpt: set tied to false in model_options)")


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
    images: Inputs,
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
    assert isinstance(images, torch.Tensor)  # a chain has one input
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
    costs = tuple(statistics.median(runs[1:]) for runs in seconds)  # the first run is a warm-up
    return Cut(joins, costs, tuple(forms), tuple(balanced(costs, stages)))


def parts(
    model: nn.Module, images: Inputs, autocast: Callable[[], AbstractContextManager[object]] = nullcontext
) -> tuple[list[nn.Sequential], tuple[int, ...]]:
    """Return the units between which ``model`` can be cut, and their ``joins`` (see ``Cut``).

    ``images``: inputs of the model, on its device. The model and the random state stay unchanged. Raises NotAChain if
    the model cannot be cut.
    """
    if not isinstance(images, torch.Tensor):
        raise NotAChain(
            f"{type(model).__name__} takes several inputs ({', '.join(images)}), and a stage passes only one"
        )
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
    ends = []
    for index, unit in enumerate(units):
        version = passing._version
        output = unit(passing)
        if index and passing._version != version:
            ends.append(index)
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            raise NotAChain("a part of the model does not return a tensor of floating-point numbers")
        passing = output
    return passing, tuple(ends)
