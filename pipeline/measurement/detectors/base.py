"""What a detector is, and what it says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

MAX_THROTTLED_FRACTION = 0.05
"""Of the measured windows: a CPU's time, a GPU's looks."""


class Refusal(NamedTuple):
    """Why numbers of the measured windows are not to be trusted. Every refusal voids the speeds and step times."""

    reason: str
    """What happened, how much of it, and what to do."""
    voids_memory: bool = False
    """The peak memory is not to be trusted either."""


class Detector(ABC):
    """Looks for one kind of disturbance in a run's measured windows."""

    @abstractmethod
    def open(self) -> None:
        """A window starts."""

    @abstractmethod
    def close(self, *, measured: bool) -> None:
        """The window ends. Measured ones add up, others are forgotten."""

    @abstractmethod
    def refusals(self) -> list[Refusal]:
        """Why the measured windows so far are not to be trusted; empty if nothing was seen."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on counting."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def restore(self, state: dict[str, Any]) -> None:
        """Undo of ``state``."""
        vars(self).update(state)
