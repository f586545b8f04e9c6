"""What must be alike on all ranks during a forward pass: the modules that communicate, and the parameters.

A rank that would run another module than the other ranks must not begin to communicate: the ranks would wait for each
other, or would exchange the parameters of different modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from pipeline.distributed import World
from pipeline.errors import ConfigError

USE_EVERY_PART = (
    "Let every step run every part of the model: multiply the output of a part that is dropped at random (LayerDrop) "
    "by 0 instead of skipping the part. Or set parallelism: none"
)


class Lockstep:
    """Raises ConfigError before a module communicates if another rank, or an earlier pass, runs another module there.

    In the first pass, the ranks compare names before each module runs. Each later pass must repeat the first, which a
    rank checks alone. ``where``: the beginning of the error.
    """

    def __init__(self, world: World, where: str) -> None:
        self.world, self.where = world, where
        self._first: dict[bool, list[str]] = {}
        """Whether the model was in training mode -> the names of the modules of the first pass, in order."""
        self._now: list[str] | None = None
        """The names of the modules of the present pass; None outside a pass, such as while a block is recomputed."""

    def watch(self, model: nn.Module, parts: Mapping[str, nn.Module], training: bool = True) -> None:
        """Check the forward passes of ``model`` in this mode. ``parts``: name -> module that communicates."""
        for name, part in parts.items():
            part.register_forward_pre_hook(partial(self._next, name, training), prepend=True)
        model.register_forward_pre_hook(partial(self._begin, training), prepend=True)
        model.register_forward_hook(partial(self._next, "no more part", training))

    def _begin(self, training: bool, model: nn.Module, _: Any) -> None:
        self._now = [] if model.training is training else None

    def _next(self, name: str, training: bool, *passed: Any) -> None:
        if self._now is None:
            return
        first, place = self._first.get(training), len(self._now)
        names = self.world.gather(name) if first is None else [first[place], name]
        if len(set(names)) > 1:
            why = (
                f"one process ran {names[0]} and another process ran {next(each for each in names if each != names[0])}"
                if first is None
                else f"a step ran {name} where the first step ran {first[place]}"
            )
            raise ConfigError(
                f"{self.where}, whose processes must run the same parts of the model in the same order, but {why}. "
                f"{USE_EVERY_PART}."
            )
        self._now.append(name)
        if len(passed) > 2:  # the end of the pass: the model's hook also gets the outputs
            self._first[training], self._now = self._now, None


def keep_parameters(part: nn.Module, named: Callable[[], Iterable[tuple[str, Tensor]]], where: str) -> None:
    """Make the next forward pass of ``part`` raise ConfigError if it changes one of the ``named`` parameters.

    Each rank would change the parameter for its own samples, as ``nn.Embedding`` with ``max_norm`` does, so the ranks'
    models would drift apart. ``where``: the beginning of the error.
    """
    before: list[tuple[str, Tensor, int]] = []

    def note(*_: Any) -> None:
        before.extend((name, each, each._version) for name, each in named())

    def compare(*_: Any) -> None:
        for hook in hooks:
            hook.remove()
        if changed := [name for name, each, version in before if each._version != version]:
            raise ConfigError(
                f"{where}, but the model's forward pass changes its parameter {changed[0]}. Each process would "
                "change it for its own samples, so the processes' models would differ. Allowed: parallelism: none, or "
                "a model that leaves its parameters to the optimizer (nn.Embedding without max_norm)."
            )
        before.clear()

    hooks = [part.register_forward_pre_hook(note), part.register_forward_hook(compare, prepend=True)]
