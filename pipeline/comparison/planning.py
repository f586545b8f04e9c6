"""What more rounds or seeds would bring, and what they would take: foreseen from those there are."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from pipeline.comparison.stats import FEWEST_PAIRS, Equivalence, Interval, decide
from pipeline.results import Bench

LONGEST_MINUTES = 60
"""To measure for longer is no advice."""

_FORESEEABLE = 1000
"""More pairs or seeds than this are no plan."""


class RoundCost(NamedTuple):
    """What rounds took."""

    key: str
    """Of params.yaml: what ended them."""
    rounds: int
    seconds: float | None
    """Of all rounds; None: not known."""
    minutes: float = 0.0
    """That were allowed: where they would do already, they were not what ended the rounds."""

    def affordable(self) -> float:
        """So many rounds in all are no more than ``LONGEST_MINUTES``; infinite where that is not known.

        Less one: the last must fit as well, and some take longer.
        """
        return 60 * LONGEST_MINUTES * self.rounds // self.seconds - 1 if self.seconds else math.inf

    def remedy(self, rounds: int) -> str:
        """What gives so many rounds in all: the key with its value, or what makes rounds cheaper."""
        if not self.seconds:
            return f"raise {self.key}"
        minutes = (rounds + 1) * self.seconds / self.rounds / 60
        if rounds > self.affordable():
            return (
                f"{rounds} rounds would take {minutes:.0f} minutes here; fewer variants or a smaller "
                "bench.window_seconds make them cheaper"
            )
        value = rounds if self.key.endswith("rounds") else math.ceil(2 * minutes) / 2
        if self.key.endswith("minutes") and value <= self.minutes:
            return "make again"
        return f"set {self.key}: {value:g}"


def cost_of(bench: Bench) -> RoundCost:
    """What the bench's rounds took, and what ended them."""
    rounds, limit = bench.rounds, bench.config["bench"]["max_rounds"]
    key = "bench.max_minutes" if limit is None or rounds < limit else "bench.max_rounds"
    return RoundCost(key, rounds, bench.seconds, bench.config["bench"]["max_minutes"])


def rounds_for(wanted: int, pairs: int, rejected: int) -> int:
    """Rounds in all for so many pairs, if as many are rejected as so far."""
    return math.ceil(wanted * (pairs + rejected) / pairs)


def remedies(aa: Interval, max_spread: float, rejected: int, why_rejected: str | None, cost: RoundCost) -> str:
    """What may make a machine calm that ``stats.distrust`` calls noisy. ``rejected``: rounds that are no pair."""
    found = [why_rejected] if why_rejected else []
    if aa.low > 0 and not found:
        found = ["let nothing else run here"]
    if calm := calm_pairs(aa, max_spread):
        rounds = rounds_for(calm, aa.count, rejected)
        if not found or rounds <= cost.affordable():
            found.append(cost.remedy(rounds))
    return "; or ".join(found)


def pairs_needed(interval: Interval, margin: float) -> int | None:
    """About how many more pairs would decide, if the estimate stays and the interval shrinks with 1 / sqrt(n).

    0 if it is decided. None if that cannot be foreseen: there is no interval yet, the estimate lies on the
    margin's very edge, or more than 1000 pairs would be missing.
    """
    if decide(interval, margin) != "undecided":
        return 0
    if interval.low <= 0:
        return None
    bound = math.log1p(margin)
    estimate, low, high = (math.log(value) for value in (interval.estimate, interval.low, interval.high))
    if estimate > bound:
        sides = [(estimate - low, estimate - bound)]
    elif estimate < -bound:
        sides = [(high - estimate, -bound - estimate)]
    else:
        sides = [(high - estimate, bound - estimate), (estimate - low, estimate + bound)]
    if not all(room > 0 for _, room in sides):
        return None
    missing = max(interval.count * (width / room) ** 2 for width, room in sides) - interval.count
    return max(1, math.ceil(missing)) if missing <= _FORESEEABLE else None


def calm_pairs(aa: Interval, max_spread: float) -> int | None:
    """About how many pairs in all would do away with what ``distrust`` says of too few or too wide a spread.

    Of a spread: if log(high / low) shrinks with 1 / sqrt(n). None where more pairs do not help.
    """
    if aa.low <= 0:
        return FEWEST_PAIRS
    if aa.spread > max_spread:
        return math.ceil(aa.count * (math.log1p(aa.spread) / math.log1p(max_spread)) ** 2)
    return None


def margin_decided(interval: Interval, pairs: int) -> float:
    """The smallest margin at which so many pairs in all would show the ratio to be the *same*.

    If the estimate r stays and the interval shrinks from n to N pairs as in ``pairs_needed``: it ends at
    log r -+ w sqrt(n / N) for its widths w on either side, and 1 + margin is the farther end's distance from 1.
    Raises ValueError for an interval that bounds nothing.
    """
    if interval.low <= 0:
        raise ValueError("interval: found one without bounds, of which nothing can be foreseen.")
    estimate, low, high = (math.log(value) for value in (interval.estimate, interval.low, interval.high))
    shrunk = math.sqrt(interval.count / pairs)
    return math.expm1(max(estimate + (high - estimate) * shrunk, -estimate + (estimate - low) * shrunk))


def seeds_needed(result: Equivalence) -> int | None:
    """About how many more seeds would decide, if mean and deviation stay: equivalent, inferior or superior.

    0 if it is decided. None if that cannot be foreseen: a single seed shows no deviation, the mean lies on the margin's
    very edge, or more than 1000 seeds would be missing.
    """
    if result.decision != "undecided":
        return 0
    room = abs(abs(result.mean) - result.margin)
    if result.count == 1 or room == 0:
        return None
    counts = np.arange(result.count + 1, result.count + _FORESEEABLE + 1)
    enough = stdtrit(counts - 1, result.confidence) * result.deviation / np.sqrt(counts) < room
    return int(enough.argmax()) + 1 if enough.any() else None


def margin_of_seeds(mean: float, half: float, count: int, seeds: int, *, confidence: float = 0.95) -> float:
    """The smallest margin at which ``seeds`` in all would be equivalent, in the unit of ``mean``.

    If mean and deviation stay: ``half``, the half-width t_n-1 s / sqrt(n) of the interval of ``count`` = n differences
    (at least two), becomes t_N-1 s / sqrt(N), and the margin is |mean| plus that.
    """
    narrower = stdtrit(seeds - 1, confidence) / stdtrit(count - 1, confidence) * math.sqrt(count / seeds)
    return abs(mean) + half * float(narrower)
