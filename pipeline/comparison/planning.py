"""Forecast, from the existing rounds and seeds, how many more a decision needs, and how long more rounds take."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from pipeline.comparison.stats import FEWEST_PAIRS, Equivalence, Interval, decide
from pipeline.results import Bench

LONGEST_MINUTES = 60
"""Measuring for longer than this is never advised."""

_FORESEEABLE = 1000
"""Largest number of further pairs or seeds in a forecast."""


class RoundCost(NamedTuple):
    """The time that rounds took, and the setting that limited their number."""

    key: str
    """The key of params.yaml that limited the number of rounds."""
    rounds: int
    seconds: float
    """Time of all rounds together."""
    minutes: float = 0.0
    """The allowed minutes. If the wanted rounds fit into this time, something else limited the number of rounds."""

    def affordable(self) -> float:
        """Return how many rounds fit into ``LONGEST_MINUTES``.

        One round is subtracted, because the last round must fit too and some rounds take longer than the mean.
        """
        return 60 * LONGEST_MINUTES * self.rounds // self.seconds - 1

    def minutes_of(self, rounds: int) -> float:
        """Return the minutes for ``rounds`` rounds and one more, rounded up to half minutes."""
        return math.ceil((rounds + 1) * self.seconds / self.rounds / 30) / 2

    def remedy(self, rounds: int) -> str:
        """Advise how to get ``rounds`` rounds in all: set a key to a value, make rounds cheaper, or bench again."""
        minutes = self.minutes_of(rounds)
        if rounds > self.affordable():
            shorter = "fewer variants or a smaller bench.window_seconds make rounds shorter"
            return f"{rounds} rounds would take {minutes:.0f} minutes here; {shorter}"
        value = rounds if self.key.endswith("rounds") else minutes
        if self.key.endswith("minutes") and value <= self.minutes:
            return "bench --again"
        return f"set {self.key}: {value:g}"


def cost_of(bench: Bench) -> RoundCost:
    """Return the time that the bench's rounds took, and the setting that limited their number."""
    settings, rounds = bench.config.get("bench", {}), bench.rounds
    limit = settings.get("max_rounds")
    key = "bench.max_minutes" if limit is None or rounds < limit else "bench.max_rounds"
    return RoundCost(key, rounds, bench.seconds, settings.get("max_minutes", 0.0))


def rounds_for(wanted: int, pairs: int, rejected: int) -> int:
    """Return how many rounds in all give ``wanted`` pairs, if the share of rejected rounds stays the same."""
    return math.ceil(wanted * (pairs + rejected) / pairs)


def remedies(aa: Interval, max_spread: float, rejected: int, why_rejected: str | None, cost: RoundCost) -> str:
    """Say what helps on a machine that ``stats.distrust`` finds too noisy: a quieter machine, or more rounds.

    ``rejected``: number of rounds without a pair. ``why_rejected``: this number as text, and the most common reason.
    """
    quiet = why_rejected or ("let nothing else run here" if aa.low > 0 else None)
    more = None
    if calm := calm_pairs(aa, max_spread):
        rounds = rounds_for(calm, aa.count, rejected)
        if not quiet or rounds <= cost.affordable():
            more = cost.remedy(rounds)
    return "; or ".join(filter(None, (quiet, more) if why_rejected else (more, quiet)))


def pairs_needed(interval: Interval, margin: float, fixed: float = 0.0) -> int | None:
    """Estimate how many more pairs a decision needs, if the estimate stays the same.

    The forecast assumes that the width of the interval is proportional to 1 / sqrt(n) for n pairs, except for its part
    ``fixed``, which more pairs do not reduce. ``fixed`` is a half-width on the logarithmic scale. ``stats.widened`` has
    added it in quadrature.

    Return 0 if the ratio is decided. Return None if there is no interval yet, or if the estimate is no further than
    ``fixed`` from a margin. Also return None if more than 1000 further pairs would be needed.
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
    if not all(room > fixed for _, room in sides):
        return None
    shrinking = max((width**2 - fixed**2) / (room**2 - fixed**2) for width, room in sides)
    missing = interval.count * shrinking - interval.count
    return max(1, math.ceil(missing)) if missing <= _FORESEEABLE else None


def calm_pairs(aa: Interval, max_spread: float) -> int | None:
    """Estimate how many pairs in all would satisfy ``distrust``, if it found too few pairs or too large a spread.

    The estimate assumes that log(high / low) is proportional to 1 / sqrt(n) for n pairs. Return None if more pairs do
    not help.
    """
    if aa.low <= 0:
        return FEWEST_PAIRS
    if aa.spread > max_spread:
        return math.ceil(aa.count * (math.log1p(aa.spread) / math.log1p(max_spread)) ** 2)
    return None


def margin_decided(interval: Interval, pairs: int, fixed: float = 0.0) -> float:
    """Return the smallest margin at which ``pairs`` pairs in all would show the ratio to be the *same*.

    The estimate is assumed to stay the same, and the interval to shrink as in ``pairs_needed``. On the logarithmic
    scale, let w be the distance from the estimate to one end of the interval, f = ``fixed``, n the present number of
    pairs, and N = ``pairs``. Then w shrinks to sqrt((w^2 - f^2) n / N + f^2). At the returned margin, log(1 + margin)
    equals the larger distance from 0 to an end of the shrunk interval. The interval must have bounds.
    """
    estimate, low, high = (math.log(value) for value in (interval.estimate, interval.low, interval.high))

    def shrunk(width: float) -> float:
        return math.sqrt((width**2 - fixed**2) * interval.count / pairs + fixed**2)

    return math.expm1(max(estimate + shrunk(high - estimate), shrunk(estimate - low) - estimate))


def seeds_needed(result: Equivalence) -> int | None:
    """Estimate how many more seeds a decision (*same*, *worse* or *better*) needs, if mean and deviation stay the same.

    Return 0 if the result is decided. Return None for a single seed, which shows no deviation, or if the mean lies
    exactly on the margin. Also return None if more than 1000 further seeds would be needed.
    """
    if result.decision != "undecided":
        return 0
    room = abs(abs(result.mean) - result.margin)
    if result.count == 1 or room == 0:
        return None
    counts = np.arange(result.count + 1, result.count + _FORESEEABLE + 1)
    enough = stdtrit(counts - 1, result.confidence) * result.deviation / np.sqrt(counts) < room
    return int(enough.argmax()) + 1 if enough.any() else None


def margin_of_seeds(mean: float, half: float, count: int, seeds: int) -> float:
    """Return the smallest margin, in the unit of ``mean``, at which ``seeds`` seeds in all would show equivalence.

    Mean and deviation are assumed to stay the same. ``half``: the half-width of the present interval, which has
    ``count`` differences (at least two). For n differences with the standard deviation s, the half-width is
    t s / sqrt(n). Here t is the 95% quantile of Student's t distribution with n - 1 degrees of freedom. The margin is
    |mean| plus the half-width for n = ``seeds``.
    """
    narrower = stdtrit(seeds - 1, 0.95) / stdtrit(count - 1, 0.95) * math.sqrt(count / seeds)
    return abs(mean) + half * float(narrower)
