"""Describe a measurement in words before it starts."""

from __future__ import annotations

import math
import statistics
import time

from pipeline.benchmark.rounds import FEWEST_ROUNDS
from pipeline.errors import count
from pipeline.results import Bench


def outlook(
    arms: int,
    steps: int,
    round_seconds: float,
    *,
    seconds: float,
    max_rounds: int | None,
    fewest: int,
    before: int = 0,
    deviation: float | None = None,
) -> str:
    """Return a sentence on what ``measure`` will do, when it will end, and how precise the ratios will be.

    ``seconds``, ``max_rounds``, ``fewest``: as in ``measure``. ``round_seconds``: estimated time of a round.
    ``before``: the number of rounds that exist already. ``deviation``: what ``deviation_of`` returns for an earlier
    bench; None if it is unknown.
    """
    fitting = max(1, int(seconds / round_seconds))
    rounds = max(fitting, fewest - before)
    if max_rounds is not None:
        rounds = min(rounds, max_rounds - before)
    ends = time.strftime("%H:%M %Z", time.localtime(time.time() + rounds * round_seconds))
    remark = ""
    if before + rounds < FEWEST_ROUNDS:
        remark = f" (a decision would need at least {FEWEST_ROUNDS})"
    elif rounds > fitting:
        remark = (
            f" (the smallest number that allows a decision; only {fitting} would fit into {seconds / 60:g} minutes)"
        )
    cost = f"{arms} arms of {steps} steps; a round takes about {round_seconds:.0f} s"
    known = "the precision of ratios cannot be forecast without an earlier bench of at least three rounds"
    if deviation is not None:
        # A median of normal values has sqrt(pi / 2) times the error of their mean. The A/A doubt is as large as this
        # error of the median. Adding the two in quadrature gives the last factor, sqrt(2).
        error = 1.96 * math.sqrt(math.pi / 2) * deviation / math.sqrt(before + rounds) * math.sqrt(2)
        known = f"the error of a throughput ratio will be about {error:.1%}, if rounds vary as in the last bench"
    return f"{cost}: the bench runs {count(rounds, 'round')}{remark}, until about {ends}; {known}"


def deviation_of(bench: Bench) -> float | None:
    """Return the standard deviation over rounds of log(control's speed / baseline's speed).

    Return None if fewer than three rounds have both speeds.
    """
    control, baseline = (bench.arm(role, bench.baseline) for role in ("aa_control", "variant"))
    if not (control and baseline):
        return None
    speeds = zip(*([each.samples_per_second for each in arm.samples] for arm in (control, baseline)), strict=False)
    logs = [math.log(one / other) for one, other in speeds if one and other]
    return statistics.stdev(logs) if len(logs) > 2 else None
