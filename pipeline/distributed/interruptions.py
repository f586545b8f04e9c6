"""Signals, heard by all ranks as the wish to end after the same step."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

from pipeline.distributed.worlds import World


class Interruption:
    """SIGINT and SIGTERM, heard as the wish to end after a step: the same step on every rank.

    The first signal waits for the step. A single process takes a second one literally and ends at once; ranks cannot
    tell it from their launcher's, which passes on what the whole group has heard, so they stay with the first.

    ``max_step_skew``: how many steps a rank may be ahead of the main one, because not every step waits for all ranks.
    """

    def __init__(self, world: World, max_step_skew: int = 0) -> None:
        self.world, self.max_step_skew = world, max_step_skew
        self.signal: int | None = None
        """The signal that this process has heard."""
        self._steps = 0
        self._announced = False
        self._last: int | None = None

    @property
    def exit_code(self) -> int:
        """As shells say it: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.signal or 0)

    def agreed(self) -> bool:
        """Whether all ranks end here. To be called after every step, on every rank.

        Costs nothing until a signal comes. Then each rank that has heard it says so in the group's store, and once all
        have, the main rank names its next step as the last, or the one after the free steps. No rank can be past that
        step by then: from its signal on a rank waits for its device after a step, and no step but a free one ends
        before the main rank has taken part in it. Where not all ranks hear it, the training goes on until the launcher
        ends it.
        """
        self._steps += 1
        if self.signal is None or self.world.size == 1:
            return self.signal is not None
        self.world.synchronise()
        try:
            store = dist.distributed_c10d._get_default_store()
            if not self._announced:
                store.add("interrupted", 1)
                self._announced = True
            if self.world.is_main and self._last is None and store.add("interrupted", 0) == self.world.size:
                store.set("last_step", str(self._steps + 1 + self.max_step_skew))
            if self._last is None and store.check(["last_step"]):
                self._last = int(store.get("last_step"))
        except RuntimeError:  # the launcher is gone, and the store with it: its end was the signal
            sys.exit(self.exit_code)
        return self._last is not None and self._steps >= self._last

    def _hear(self, number: int, _: FrameType | None) -> None:
        again = self.signal is not None
        self.signal = number
        if again and self.world.size == 1:
            sys.exit(self.exit_code)


@contextmanager
def interruption(world: World, max_step_skew: int = 0) -> Iterator[Interruption]:
    """While the block runs, SIGINT and SIGTERM end no process; see ``Interruption``. For the main thread.

    Nor do they afterwards on ranks that have heard one, which are to end by themselves: a launcher passes on, perhaps
    late, what the whole group has heard.
    """
    heard = Interruption(world, max_step_skew)
    before = {number: signal.signal(number, heard._hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if heard.signal and world.size > 1 else handler)
