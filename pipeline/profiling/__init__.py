"""The cost of a training step: floating-point operations, memory, time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")

QUIET = {"KINETO_LOG_LEVEL": "99"}
"""Environment variable that silences Kineto, the library of torch's profiler, which reports a missing GPU as an
error."""


def each_within(context: Callable[[], AbstractContextManager[object]], items: Iterator[T]) -> Iterator[T]:
    """Yield ``items``. Each item is made within a ``context()`` of its own."""
    while True:
        with context():
            item = next(items, None)
        if item is None:
            return
        yield item
