"""What must be alike on all ranks during a forward pass: the modules that communicate, and the parameters.

A rank that would run another module than the other ranks must not begin to communicate: the ranks would wait for each
other, or would exchange the parameters of different modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from pipeline.distributed import World
from pipeline.errors import ConfigError

USE_EVERY_PART = (
    "Let every step run every part of the model: multiply the output of a part that is dropped at random (LayerDrop) "
    "by 0 instead of skipping the part. Or set parallelism: none"
)


def keep_in_step(
    model: nn.Module, kind: Any, world: World, where: str, first: list[str], training: bool = True
) -> None:
    """Raise ConfigError before a module of this ``kind`` inside ``model`` communicates if another rank, or an earlier
    forward pass, runs another module there.

    In the first pass, the ranks compare names before each module runs. Each later pass must repeat the first, which a
    rank checks alone. ``where``: the beginning of the error. ``first``: gets the names of the modules of the first
    pass, in order. ``training``: the mode of the passes that are checked.
    """
    passed: list[str] | None = None  # None outside a pass, such as while a block is recomputed

    def begin(*_: Any) -> None:
        nonlocal passed
        passed = [] if model.training is training else None

    def check(name: str, *_: Any) -> None:
        if passed is None:
            return
        names = [first[len(passed)], name] if first else world.gather(name)
        if differing := next((module for module in names if module != names[0]), None):
            raise ConfigError(
                f"{where}, whose processes must run the same parts of the model in the same order in each step, but "
                f"one ran {names[0]} where another process or step ran {differing}. {USE_EVERY_PART}."
            )
        passed.append(name)

    def end(*_: Any) -> None:
        nonlocal passed
        check("no more part")
        first[:], passed = passed or first, None

    for name, part in model.named_modules():
        if isinstance(part, kind) and part is not model:
            part.register_forward_pre_hook(partial(check, name), prepend=True)
    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end)


def keep_parameters(part: nn.Module, named: Callable[[], Iterable[tuple[str, Tensor]]], where: str) -> None:
    """Make the next forward pass of ``part`` raise ConfigError if it changes one of the ``named`` parameters.

    Each copy of the model, on a rank or a GPU, would change the parameter for its own samples, as ``nn.Embedding`` with
    ``max_norm`` does, so the copies would drift apart. ``where``: the beginning of the error.
    """
    before: list[tuple[str, Tensor, int]] = []

    def note(*_: Any) -> None:
        first.remove()
        before.extend((name, parameter, parameter._version) for name, parameter in named())

    def compare(*_: Any) -> None:
        last.remove()
        if changed := [name for name, parameter, version in before if parameter._version != version]:
            raise ConfigError(
                f"{where}, but the model's forward pass changes its parameter {changed[0]}. Each copy of the model "
                "would change it for its own samples, so the copies would differ. Allowed: parallelism: none, or a "
                "model that leaves its parameters to the optimizer (nn.Embedding without max_norm)."
            )
        before.clear()

    first, last = part.register_forward_pre_hook(note), part.register_forward_hook(compare, prepend=True)
