"""What is about to be measured, in words, before it takes the user's minutes."""

from __future__ import annotations

import time

from pipeline.benchmark.rounds import FEWEST_ROUNDS
from pipeline.errors import count


def outlook(
    arms: int,
    steps: int,
    round_seconds: float,
    *,
    seconds: float,
    max_rounds: int | None,
    fewest: int,
    before: int = 0,
) -> str:
    """Say in words what ``measure`` is about to do, and when it will end. ``round_seconds``: estimate for one round;
    ``before``: the rounds that there are already."""
    fitting = max(1, int(seconds / round_seconds))
    rounds = max(fitting, fewest - before)
    if max_rounds is not None:
        rounds = min(rounds, max_rounds - before)
    ends = time.strftime("%H:%M %Z", time.localtime(time.time() + rounds * round_seconds))
    remark = ""
    if before + rounds < FEWEST_ROUNDS:
        remark = f" (at least {FEWEST_ROUNDS} would be needed to decide anything)"
    elif rounds > fitting:
        remark = f" (the fewest that can decide anything; {seconds / 60:g} minutes give {fitting})"
    cost = f"{arms} arms of {steps} steps, a round takes about {round_seconds:.0f} s"
    return f"{cost}: {count(rounds, 'round')}{remark}, until about {ends}"
