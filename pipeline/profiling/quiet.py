"""Silence Kineto, the library that torch's profiler uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Kineto while the block runs, because it reports a missing GPU as an error.

    If the user has set a log level, this level stays.
    """
    silenced = _LEVEL not in os.environ
    if silenced:
        os.environ[_LEVEL] = "99"
    try:
        yield
    finally:
        if silenced:
            del os.environ[_LEVEL]
