"""Steps of DDP without the exchange of gradients: their arithmetic, and when each bucket of gradients is ready."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed import World
from pipeline.measurement.windows import Clock
from pipeline.plans import Plan
from pipeline.results import Arithmetic
from pipeline.step import MicroBatches
from pipeline.techniques import Setup, Technique

NOTED_STEPS = 200
"""The last steps, of which ``Unreduced`` tells."""


class Unreduced(Technique):
    """Each rank's gradients stay as they are (``Plan.reduces``), and the times when DDP would reduce them are noted.

    Without synchronisation, as in ``Training.arithmetic_seconds``, DDP fills no buckets, and shows no such times.
    """

    name = "unreduced"

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self._clock = Clock(world.device)
        self._steps: deque[tuple[Any, list[tuple[Any, int]]]] = deque(maxlen=NOTED_STEPS)
        """For each step: a mark at its start, then each bucket's mark and bytes."""

    def change_model(self, setup: Setup) -> None:
        assert isinstance(setup.model, DistributedDataParallel)
        setup.model.register_comm_hook(None, lambda _, bucket: self._ready(bucket))

    def change_step(self, setup: Setup) -> None:
        take = setup.step.whole

        def noted(micro_batches: MicroBatches) -> None:
            self._steps.append((self._clock.mark(), []))
            take(micro_batches)

        setup.step.whole = noted

    def _ready(self, bucket: Any) -> Future[torch.Tensor]:
        if self._steps:  # a trial may run the model before the first step
            self._steps[-1][1].append((self._clock.mark(), bucket.buffer().nbytes))
        kept: Future[torch.Tensor] = Future()
        kept.set_result(bucket.buffer())
        return kept

    def read(self, clock: Clock) -> Arithmetic:
        """Return this rank's steps so far, of which ``clock`` has the times."""
        self._clock.now()  # waits until the device has reached all marks
        sizes = [size for _, size in self._steps[-1][1]]  # DDP may rearrange buckets after the first step
        alike = [(start, ready) for start, ready in self._steps if [size for _, size in ready] == sizes]
        seconds = [
            statistics.median(self._clock.between(start, ready[place][0]) for start, ready in alike)
            for place in range(len(sizes))
        ]
        return Arithmetic(
            host=self.world.host,
            step_seconds=tuple(clock.step_seconds[-NOTED_STEPS:]),
            buckets=tuple(zip(seconds, sizes, strict=True)),
        )
