"""Signals that make all ranks end after the same step."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

from pipeline.distributed.worlds import World


class Interruption:
    """Lets SIGINT and SIGTERM end the training after a step: the same step on every rank.

    After the first signal, the step is finished. A second signal ends a single process at once. Ranks ignore a second
    signal: it can be the first again, passed on by their launcher.

    ``max_step_skew``: how many steps a rank may be ahead of the main one, because not every step waits for all ranks.
    """

    def __init__(self, world: World, max_step_skew: int = 0) -> None:
        self.world, self.max_step_skew = world, max_step_skew
        self.signal: int | None = None
        """The last signal that this process has received; None before the first."""
        self._steps = 0
        self._announced = False
        self._last: int | None = None

    @property
    def exit_code(self) -> int:
        """The exit code that shells use: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.signal or 0)

    def agreed(self) -> bool:
        """Return True if all ranks end after this step. Call it after every step, on every rank.

        It costs nothing until a signal comes. Then each rank that has received the signal notes that in the group's
        store. Once all have, the main rank names the last step: its next step, plus ``max_step_skew``. No rank can be
        past the last step by then: after its signal, a rank waits for its device after each step, and it can be at most
        ``max_step_skew`` steps ahead of the main rank. If some rank gets no signal, the training goes on until the
        launcher ends it.
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
        except RuntimeError:  # the launcher, which held the store, has ended: that counts as a signal
            sys.exit(self.exit_code)
        return self._last is not None and self._steps >= self._last

    def _hear(self, number: int, _: FrameType | None) -> None:
        again = self.signal is not None
        self.signal = number
        if again and self.world.size == 1:
            sys.exit(self.exit_code)


@contextmanager
def interruption(world: World, max_step_skew: int = 0) -> Iterator[Interruption]:
    """While the block runs, SIGINT and SIGTERM do not kill the process; see ``Interruption``. Only in the main thread.

    Ranks that have received a signal also ignore signals after the block, and end by themselves, because a launcher
    may pass on a signal late that the whole group has received.
    """
    heard = Interruption(world, max_step_skew)
    before = {number: signal.signal(number, heard._hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if heard.signal and world.size > 1 else handler)
