"""Steps whose ranks exchange nothing: their arithmetic, and when each bucket or shard could be exchanged."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed import World
from pipeline.measurement.windows import Clock
from pipeline.plans import Plan
from pipeline.results import Arithmetic, Exchange
from pipeline.results.records import Operation
from pipeline.step import MicroBatches
from pipeline.techniques import Setup, Technique

NOTED_STEPS = 200
"""The last steps, of which ``Unreduced`` tells."""


class _OwnShard:
    """A collective of ``fully_shard`` in which this rank's own shard stands for those of all ranks."""

    allocate = staticmethod(torch.empty)

    def __init__(self, note: Callable[[int, Operation], None]) -> None:
        self._note = note

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **_: Any) -> None:
        if len(output_tensor) > len(input_tensor):
            self._note(output_tensor.nbytes, "all_gather")
            output_tensor.view(group.size(), -1).copy_(input_tensor.clone())  # it is a part of the output
        else:
            self._note(input_tensor.nbytes, "reduce_scatter")
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


class Unreduced(Technique):
    """Ranks exchange nothing (``Plan.reduces``), and the times when they would exchange something are noted.

    Each rank's gradients stay its own, and fully_shard gets copies of a rank's own shard in place of the others'.
    Copies into buckets and updates of shards are as in the variant.
    Without synchronisation, as in ``Training.arithmetic_seconds``, DDP fills no buckets, and shows no such times.
    """

    name = "unreduced"

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self._clock = Clock(world.device)
        self._steps: deque[tuple[Any, list[tuple[Any, int, Operation]]]] = deque(maxlen=NOTED_STEPS)
        """For each step: a mark at its start, then each ``Exchange``, with a mark in place of its seconds."""

    def change_model(self, setup: Setup) -> None:
        setup.shard_group = None  # the limit of the gradients' norm takes the norm of a rank's own shards
        if isinstance(setup.model, DistributedDataParallel):
            setup.model.register_comm_hook(None, lambda _, bucket: self._ready(bucket))
        sharded: list[Any] = [part for part in setup.model.modules() if hasattr(part, "set_custom_all_gather")]
        for part in sharded:
            part.set_custom_all_gather(_OwnShard(self._noted))
            part.set_custom_reduce_scatter(_OwnShard(self._noted))

    def change_step(self, setup: Setup) -> None:
        take = setup.step.whole

        def noted(micro_batches: MicroBatches) -> None:
            self._steps.append((self._clock.mark(), []))
            take(micro_batches)

        setup.step.whole = noted

    def _noted(self, size_bytes: int, operation: Operation) -> None:
        if self._steps:  # a trial may run the model before the first step
            self._steps[-1][1].append((self._clock.mark(), size_bytes, operation))

    def _ready(self, bucket: Any) -> Future[torch.Tensor]:
        in_half = self.plan.requested.communication_hook in ("fp16", "bf16")
        self._noted(bucket.buffer().nbytes // (1 + in_half), "all_reduce")
        kept: Future[torch.Tensor] = Future()
        kept.set_result(bucket.buffer())
        return kept

    def read(self, clock: Clock) -> Arithmetic:
        """Return all ranks' steps so far, of which each rank's ``clock`` has the times."""
        self._clock.now()  # waits until the device has reached all marks
        last = [exchange[1:] for exchange in self._steps[-1][1]]  # DDP may rearrange buckets after the first step
        alike = [step for step in self._steps if [exchange[1:] for exchange in step[1]] == last]
        seconds = [
            statistics.median(self._clock.between(start, exchanges[place][0]) for start, exchanges in alike)
            for place in range(len(last))
        ]
        hosts, steps = zip(*self.world.gather((self.world.host, clock.step_seconds[-NOTED_STEPS:])), strict=True)
        return Arithmetic(
            hosts=hosts,
            rank_seconds=tuple(map(statistics.fmean, steps)),
            latest_seconds=statistics.fmean(map(max, zip(*steps, strict=True))),
            buckets=tuple(Exchange(ready, *kind) for ready, kind in zip(seconds, last, strict=True)),
        )
