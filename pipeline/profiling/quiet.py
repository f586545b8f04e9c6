"""torch's profiler without the messages of its library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def quiet() -> Iterator[None]:
    """Kineto speaks of itself, and on a CPU calls it an error that there is no GPU. A level that the user set stays."""
    silenced = _LEVEL not in os.environ
    if silenced:
        os.environ[_LEVEL] = "99"
    try:
        yield
    finally:
        if silenced:
            del os.environ[_LEVEL]
