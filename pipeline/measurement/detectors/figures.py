"""Find reasons to reject a run in its own figures: time, memory, number of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.errors import count
from pipeline.measurement.detectors.base import Rejection
from pipeline.measurement.windows import Clock, Memory

MAX_ASIDE_FRACTION = 0.05
"""Largest accepted CPU time that an arm of the bench uses between its turns, as a share of the arm's measured seconds.
Work between the turns is not measured, so the arm can seem faster by this share."""
MAX_IDLE_FRACTION = 0.01
"""This share of the seconds between the turns is accepted in addition, because gloo's idle threads take up to 0.3%."""


def of_clock(clock: Clock, max_input_wait: float | None, *, resident: bool) -> Iterator[Rejection]:
    """Yield the reasons to reject one rank's step times. If ``max_input_wait`` is None, any wait for input is allowed.

    ``resident``: the data set is on the device, so the device prepares the input.
    """
    if disagreement := clock.disagreement():
        yield Rejection(disagreement)
    if max_input_wait is not None and clock.input_seconds > max_input_wait * clock.measured_seconds:
        remedy = "" if resident else "set train.placement to 'resident', "
        yield Rejection(
            f"the steps waited for input {clock.input_seconds / clock.measured_seconds:.0%} of the time (at most "
            f"{max_input_wait:.0%} is allowed): this measures the input, not the technique; {remedy}shorten "
            "train.augment, or raise bench.max_input_wait"
        )


def of_memory(memory: Memory) -> Iterator[Rejection]:
    """Yield the reason to reject a rank's speeds and peak memory, if the rank's allocator had to flush its cache."""
    if memory.retries:
        yield Rejection(
            f"the allocator ran out of memory and flushed its cache {count(memory.retries, 'time')}; lower "
            "train.batch_size or apply a technique that saves memory",
            voids_memory=True,
        )


def of_turns(aside_seconds: float, waited_seconds: float, clock: Clock) -> Iterator[Rejection]:
    """Yield the reason to reject an arm because of the CPU time that it used while other arms took their turns.

    ``aside_seconds``: CPU time used between the turns; ``waited_seconds``: total time between the turns."""
    if aside_seconds > MAX_ASIDE_FRACTION * clock.measured_seconds + MAX_IDLE_FRACTION * waited_seconds:
        yield Rejection(
            f"the arm used {aside_seconds:.2f} s of CPU time between its turns; the limit on this time is "
            f"{MAX_ASIDE_FRACTION:.0%} of the arm's measured time ({clock.measured_seconds:.2f} s) plus "
            f"{MAX_IDLE_FRACTION:.0%} of the time between turns ({waited_seconds:.2f} s). This work is missing in the "
            "arm's own figures and disturbs the other arms; a technique's threads and processes must wait while no "
            "step runs"
        )


def of_steps(measured: Sequence[int], *, requested: int, warmup: int) -> Iterator[Rejection]:
    """Yield the reasons to reject a run whose ranks measured too few steps, or different numbers of steps.

    ``measured``: the number of measured steps of each rank; ``requested``: the smallest accepted number."""
    fewest = min(measured)
    if len(set(measured)) > 1:
        yield Rejection(f"the ranks measured different numbers of steps: {sorted(set(measured))}")
    if not fewest:
        yield Rejection(
            f"no step was measured: the run ended within the {warmup} steps of its warm-up; raise train.epochs or "
            "lower train.warmup_steps"
        )
    elif fewest < requested:
        yield Rejection(f"{fewest} of {requested} steps were measured: the run ended early; raise train.epochs")


def of_ranks(ranks: Sequence[Sequence[Rejection]]) -> Iterator[Rejection]:
    """Yield the rejections of all ranks; with several ranks, each reason names its rank."""
    for rank, rejections in enumerate(ranks):
        for rejection in rejections:
            named = f"rank {rank}: {rejection.reason}" if len(ranks) > 1 else rejection.reason
            yield rejection._replace(reason=named)
