"""Split a model into a chain of units, each of which passes only one tensor to the next unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn

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
    found = [nn.Sequential(*unit) for unit in units]
    _check_shared(found)
    return found


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
        return type(module).forward is not nn.Sequential.forward and not _holds_a_sequence_of_blocks(module)


def _holds_a_sequence_of_blocks(module: nn.Module) -> bool:
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
