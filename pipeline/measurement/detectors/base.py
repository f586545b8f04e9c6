"""The base class of detectors, and the rejections that they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.measurement.windows import Resumable

MAX_THROTTLED_FRACTION = 0.05
"""Largest accepted throttling in the measured windows. On a CPU it is a share of the time, on a GPU of the queries."""


class Rejection(NamedTuple):
    """The reason why numbers of the measured windows cannot be trusted. Every rejection voids speeds and step times."""

    reason: str
    """Says what happened and, if possible, to what extent and what to do."""
    voids_memory: bool = False
    """True if the peak memory cannot be trusted either."""


class Detector(Resumable, ABC):
    """Looks for one kind of disturbance in a run's measured windows."""

    @abstractmethod
    def open(self) -> None:
        """Start a window."""

    @abstractmethod
    def close(self, *, measured: bool) -> None:
        """End the window. Windows that are not measured are ignored."""

    @abstractmethod
    def rejections(self) -> Iterator[Rejection]:
        """Yield the reasons to reject the measured windows so far."""
