"""What the measured figures say against themselves."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.measurement.detectors.base import Refusal
from pipeline.measurement.windows import Clock, Memory

MAX_ASIDE_FRACTION = 0.05
"""Of an arm's measured seconds: so much faster, at most, can it seem by what it does between its turns."""
MAX_IDLE_FRACTION = 0.01
"""Of the seconds between them, beside that: the threads of gloo look after themselves in up to 0.3%."""


def of_clock(clock: Clock, max_input_wait: float | None, *, resident: bool) -> list[Refusal]:
    """What the step times of one rank say against themselves. None for ``max_input_wait``: any wait for input goes.

    ``resident``: the data set lies on the device, so that the input is made there.
    """
    found = []
    disagreement = clock.disagreement()
    if disagreement:
        found.append(Refusal(disagreement))
    if max_input_wait is not None and clock.input_seconds > max_input_wait * clock.measured_seconds:
        remedy = "" if resident else "set train.placement to 'resident', "
        found.append(
            Refusal(
                f"the steps waited for input {clock.input_seconds / clock.measured_seconds:.0%} of the time (at most "
                f"{max_input_wait:.0%} is allowed): this measures the input, not the technique; {remedy}lighten "
                "train.augment, or raise bench.max_input_wait"
            )
        )
    return found


def of_memory(memory: Memory) -> list[Refusal]:
    """What the memory of one rank says against speeds and peak."""
    if not memory.retries:
        return []
    return [
        Refusal(
            f"the allocator ran out of memory and flushed its cache {memory.retries} time(s); lower train.batch_size "
            "or apply a technique that saves memory",
            voids_memory=True,
        )
    ]


def of_turns(aside_seconds: float, waited_seconds: float, clock: Clock) -> list[Refusal]:
    """``aside_seconds``: CPU time that an arm used while it waited from each of its turns to the next, for
    ``waited_seconds`` in all, and others were measured."""
    if aside_seconds <= MAX_ASIDE_FRACTION * clock.measured_seconds + MAX_IDLE_FRACTION * waited_seconds:
        return []
    return [
        Refusal(
            f"it used {aside_seconds:.2f} s of CPU time between its turns, beside {clock.measured_seconds:.2f} s of "
            f"measured ones (at most {MAX_ASIDE_FRACTION:.0%} of these and {MAX_IDLE_FRACTION:.0%} of the "
            f"{waited_seconds:.2f} s between is allowed): what is done there is in no figure of its own and in the "
            "others'; let a technique's threads and processes wait while no step is taken"
        )
    ]


def of_steps(measured: Sequence[int], *, asked: int, warmup: int) -> list[Refusal]:
    """``measured``: steps in the measured windows, one figure a rank; ``asked``: how many there should be at least."""
    fewest = min(measured)
    if not fewest:
        return [
            Refusal(
                f"no step was measured: the run ended within the {warmup} steps of its warm-up; raise train.epochs or "
                "lower train.warmup_steps"
            )
        ]
    found = []
    if len(set(measured)) > 1:
        found.append(Refusal(f"the ranks measured different numbers of steps: {sorted(set(measured))}"))
    if fewest < asked:
        found.append(Refusal(f"{fewest} of {asked} steps were measured: the run ended early; raise train.epochs"))
    return found


def of_ranks(ranks: Sequence[Sequence[Refusal]]) -> list[Refusal]:
    """The refusals of all ranks in one list; where there are several ranks, each reason names its own."""
    if len(ranks) == 1:
        return list(ranks[0])
    return [
        refusal._replace(reason=f"rank {rank}: {refusal.reason}")
        for rank, refusals in enumerate(ranks)
        for refusal in refusals
    ]
