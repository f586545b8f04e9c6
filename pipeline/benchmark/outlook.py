"""Describe a measurement in words before it starts."""

from __future__ import annotations

import time

from pipeline.benchmark.rounds import FEWEST_ROUNDS
from pipeline.errors import count


def outlook(
    arms: int, steps: int, round_seconds: float, *, seconds: float, max_rounds: int | None, fewest: int, before: int = 0
) -> str:
    """Return a sentence on what ``measure`` will do, and when it will end.

    ``seconds``, ``max_rounds``, ``fewest``: as in ``measure``. ``round_seconds``: estimated time of a round.
    ``before``: the number of rounds that exist already.
    """
    rounds = max(1, int(seconds / round_seconds), fewest - before)
    if max_rounds is not None:
        rounds = min(rounds, max_rounds - before)
    ends = time.strftime("%H:%M %Z", time.localtime(time.time() + rounds * round_seconds))
    remark = f" (a decision would need at least {FEWEST_ROUNDS})" if before + rounds < FEWEST_ROUNDS else ""
    cost = f"{arms} arms of {steps} steps; a round takes about {round_seconds:.0f} s"
    return f"{cost}: the bench runs {count(rounds, 'round')}{remark}, until about {ends}"
