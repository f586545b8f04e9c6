"""SIGINT and SIGTERM make all ranks of a training end after the same step."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

from pipeline.distributed.worlds import World


class Interruption:
    """Lets SIGINT and SIGTERM end the training after a step, which is the same step on every rank.

    After the first signal, the step is finished. In a training of one process, a second signal ends the process at
    once. In a training of several ranks, a second signal is ignored, because a launcher may send the same signal more
    than once.

    ``max_step_skew`` is the number of steps by which a rank may be ahead of the main rank. It is above 0 if ranks do
    not wait for each other in every step.
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

        The call costs nothing until a signal comes. Each rank that has received the signal records it in the group's
        store. Once all ranks have recorded the signal, the main rank sets the last step: its next step, plus
        ``max_step_skew``. No rank can be past this step already. A rank that has received the signal waits for its
        device after each step. So it is at most ``max_step_skew`` steps ahead of the main rank. If a rank gets no
        signal, the training continues until the launcher ends it.
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
        except RuntimeError:  # the launcher, which ran the store, is gone: exit without a checkpoint
            sys.exit(self.exit_code)
        return self._last is not None and self._steps >= self._last

    def _hear(self, number: int, _: FrameType | None) -> None:
        again = self.signal is not None
        self.signal = number
        if again and self.world.size == 1:
            sys.exit(self.exit_code)


@contextmanager
def interruption(world: World, max_step_skew: int = 0) -> Iterator[Interruption]:
    """While the block runs, SIGINT and SIGTERM do not kill the process; see ``Interruption``.

    Works only in the main thread. A rank that has received a signal also ignores signals after the block, because a
    launcher may send the same signal again later. The rank then ends by itself.
    """
    heard = Interruption(world, max_step_skew)
    before = {number: signal.signal(number, heard._hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if heard.signal and world.size > 1 else handler)
