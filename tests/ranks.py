"""Runs a function in several gloo processes, as stand-ins for several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from pipeline.distributed import forked, world


def run_ranks(function: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Any]:
    """``function(world, *arguments)`` on each of ``size`` ranks; what each returned, in rank order.

    ``function`` must be importable (a module's own), its arguments and values picklable. Raises WorkerError with the
    traceback of a rank that failed.
    """
    with forked(_joined, (function, arguments), size, preload=["pipeline.training", "torch._dynamo"]) as ask:
        return ask(None)


def _joined(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Generator[Any, None, None]:
    with world("cpu") as joined:
        yield function(joined, *arguments)
