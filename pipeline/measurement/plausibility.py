"""Find reasons to reject a run in its own figures: time, memory, number of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.measurement.windows import Clock, Memory
from pipeline.results.rejections import Rejection, rejection

CLOCK_TOLERANCE_FRACTION = 0.05
"""Largest accepted difference between the sum of the step times and the wall time, as a share of the wall time."""
MAX_ASIDE_FRACTION = 0.05
"""Largest accepted CPU time that an arm of the bench uses between its turns, as a share of the arm's measured seconds.
Work between the turns is not measured, so the arm can seem faster by this share."""
MAX_IDLE_FRACTION = 0.01
"""This share of the seconds between the turns is accepted in addition, because gloo's idle threads take up to 0.3%."""


def of_clock(clock: Clock, max_input_wait: float | None, *, resident: bool) -> Iterator[Rejection]:
    """Yield the reasons to reject one rank's step times. If ``max_input_wait`` is None, any wait for input is allowed.

    ``resident``: the data set is on the device, so the device prepares the input.
    """
    steps, wall = sum(clock.step_seconds), clock.measured_seconds
    if abs(steps - wall) > CLOCK_TOLERANCE_FRACTION * wall:
        yield rejection("clocks_disagree", steps_seconds=steps, wall_seconds=wall, limit=CLOCK_TOLERANCE_FRACTION)
    if max_input_wait is not None and clock.input_seconds > max_input_wait * wall:
        advice = None if resident else ("train.placement", "resident")
        yield rejection("input_wait", advice, share=clock.input_seconds / wall, limit=max_input_wait)


def of_memory(memory: Memory) -> Iterator[Rejection]:
    """Yield the reason to reject a rank's speeds and peak memory, if the rank's allocator had to flush its cache."""
    if memory.retries:
        yield rejection("allocator_retried", retries=memory.retries)


def of_turns(aside_seconds: float, waited_seconds: float, clock: Clock) -> Iterator[Rejection]:
    """Yield the reason to reject an arm because of the CPU time that it used while other arms took their turns.

    ``aside_seconds``: CPU time used between the turns; ``waited_seconds``: total time between the turns."""
    if aside_seconds > MAX_ASIDE_FRACTION * clock.measured_seconds + MAX_IDLE_FRACTION * waited_seconds:
        yield rejection(
            "worked_between_turns",
            aside_seconds=aside_seconds,
            of_measured=MAX_ASIDE_FRACTION,
            measured_seconds=clock.measured_seconds,
            of_waited=MAX_IDLE_FRACTION,
            waited_seconds=waited_seconds,
        )


def of_steps(measured: Sequence[int], *, requested: int, warmup: int) -> Iterator[Rejection]:
    """Yield the reasons to reject a run whose ranks measured too few steps, or different numbers of steps.

    ``measured``: the number of measured steps of each rank; ``requested``: the smallest accepted number."""
    fewest = min(measured)
    if len(set(measured)) > 1:
        yield rejection("steps_differ", steps=", ".join(map(str, sorted(set(measured)))))
    if not fewest:
        yield rejection("no_step", warmup=warmup)
    elif fewest < requested:
        yield rejection("few_steps", measured=fewest, requested=requested)
