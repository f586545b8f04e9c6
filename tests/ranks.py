"""Run a function in several processes, the ranks of one process group."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Literal

from pipeline.distributed import forked, world


def run_ranks(
    function: Callable[..., Any], *arguments: Any, size: int = 2, device: Literal["cpu", "cuda"] = "cpu"
) -> list[Any]:
    """Run ``function(world, *arguments)`` on each of ``size`` ranks; return the ranks' values.

    With ``device`` "cuda", each rank has a GPU. ``function`` must be defined at a module's top level, and its arguments
    and values must be picklable. Raises WorkerError with the traceback of a rank that failed.
    """
    preload = ["pipeline.training.loop", "torch._dynamo"]
    with forked(_joined, (function, arguments, device), size, preload=preload) as ask:
        return ask(None)


def _joined(
    function: Callable[..., Any], arguments: tuple[Any, ...], device: Literal["cpu", "cuda"]
) -> Generator[Any, None, None]:
    with world(device) as joined:
        yield function(joined, *arguments)
