"""Forecast, from the existing rounds, sessions and seeds, how many more a decision needs, and how long rounds take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from pipeline.comparison.stats import FEWEST_SEEDS, Difference, decide, half_width, median_widths
from pipeline.results import Bench
from pipeline.results.bench_file import FEWEST_PAIRS

LONGEST_MINUTES = 60
"""Measuring for longer than this is never advised."""
MOST_SESSIONS = 20
"""Adding more sessions than this is never advised."""

_FORESEEABLE = 1000
"""Largest number of further pairs or seeds in a forecast."""


class RoundCost(NamedTuple):
    """The time that rounds took, and the setting that limited their number."""

    key: str
    """The key of params.yaml, or the option, that limited the number of rounds."""
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


def cost_of(bench: Bench, rounds: int, seconds: float) -> RoundCost:
    """Return the time of ``rounds`` rounds, of which the last were in ``bench``, and the setting that limited their
    number."""
    settings = bench.config.get("bench", {})
    limit = settings.get("max_rounds")
    key = bench.budget if limit is None or rounds < limit else "bench.max_rounds"
    minutes = settings.get("max_minutes", 0.0) if key == "bench.max_minutes" else 0.0
    return RoundCost(key, rounds, seconds, minutes)


def rounds_for(wanted: int, pairs: int, rejected: int) -> int:
    """Return how many rounds in all give ``wanted`` pairs, if the share of rejected rounds stays the same."""
    return math.ceil(wanted * (pairs + rejected) / pairs)


def remedies(
    aa: Difference, max_spread: float, rejected: int, why_rejected: str | None, cost: RoundCost, fewest: int
) -> str:
    """Say what helps on a machine that ``stats.distrust`` finds too noisy: a quieter machine, or more rounds.

    ``rejected``: number of rounds without a pair. ``why_rejected``: this number as text, and the most common reason.
    ``fewest``: number of pairs that give an interval.
    """
    quiet = why_rejected or ("let nothing else run here" if aa.low is not None else None)
    more = None
    if calm := calm_pairs(aa, max_spread, fewest):
        rounds = rounds_for(calm, aa.pairs, rejected)
        if not quiet or rounds <= cost.affordable():
            more = cost.remedy(rounds)
    return "; or ".join(filter(None, (quiet, more) if why_rejected else (more, quiet)))


def pairs_needed(ratio: Difference, margin: float, fixed: float = 0.0) -> int | None:
    """Estimate how many more pairs a decision needs, if the estimate stays the same.

    The forecast assumes that the width of the interval is proportional to 1 / sqrt(n) for n pairs, except for its part
    ``fixed``, which more pairs do not reduce. ``fixed`` is a half-width on the logarithmic scale. ``stats.widened`` has
    added it in quadrature.

    Return 0 if the ratio is decided. Return None if there is no interval yet, or if the estimate is no further than
    ``fixed`` from a margin. Also return None if more than 1000 further pairs would be needed.
    """
    if decide(ratio, margin) != "undecided":
        return 0
    if ratio.low is None:
        return None
    bound = math.log1p(margin)
    estimate, low, high = ratio.logs
    if estimate > bound:
        sides = [(estimate - low, estimate - bound)]
    elif estimate < -bound:
        sides = [(high - estimate, -bound - estimate)]
    else:
        sides = [(high - estimate, bound - estimate), (estimate - low, estimate + bound)]
    if not all(room > fixed for _, room in sides):
        return None
    shrinking = max((width**2 - fixed**2) / (room**2 - fixed**2) for width, room in sides)
    missing = ratio.pairs * shrinking - ratio.pairs
    return max(1, math.ceil(missing)) if missing <= _FORESEEABLE else None


def rounds_help(ratio: Difference) -> bool:
    """False if the part of the interval that more rounds do not reduce keeps ``ratio`` undecided."""
    if ratio.low is None or not ratio.fixed:
        return True
    estimate = ratio.logs[0]
    at_best = Difference(low=math.exp(estimate - ratio.fixed), high=math.exp(estimate + ratio.fixed))
    return ratio.narrows and decide(at_best, ratio.margin) != "undecided"


def sessions_needed(ratios: Sequence[Difference], margin: float) -> int | None:
    """Estimate how many more sessions a decision needs, if the sessions' mean, deviation and intervals stay the same.

    Return None if there is only one session, or if the mean lies exactly on the margin. Also return None if the
    sessions' own intervals are too wide for any number of sessions, or if more than ``MOST_SESSIONS`` further
    sessions would be needed.
    """
    if len(ratios) < 2:
        return None
    logs = [ratio.logs[0] for ratio in ratios]
    room, deviation = abs(abs(statistics.fmean(logs)) - math.log1p(margin)), statistics.stdev(logs)
    if max(median_widths(ratios)) >= room:
        return None
    confidence, more = ratios[0].confidence, range(1, MOST_SESSIONS + 1)
    return next((n for n in more if half_width(deviation, len(logs) + n, confidence) < room), None)


def calm_pairs(aa: Difference, max_spread: float, fewest: int = FEWEST_PAIRS) -> int | None:
    """Estimate how many pairs in all would satisfy ``distrust``, if it found too few pairs or too large a spread.

    The estimate assumes that log(high / low) is proportional to 1 / sqrt(n) for n pairs. Return None if more pairs do
    not help.
    """
    if aa.low is None:
        return fewest
    if aa.spread > max_spread:
        return math.ceil(aa.pairs * (math.log1p(aa.spread) / math.log1p(max_spread)) ** 2)
    return None


def margin_decided(ratio: Difference, pairs: int, fixed: float = 0.0) -> float:
    """Return the smallest margin at which ``pairs`` pairs in all would show the ratio to be the *same*.

    The estimate is assumed to stay the same, and the interval to shrink as in ``pairs_needed``. On the logarithmic
    scale, let w be the distance from the estimate to one end of the interval, f = ``fixed``, n the present number of
    pairs, and N = ``pairs``. Then w shrinks to sqrt((w^2 - f^2) n / N + f^2). At the returned margin, log(1 + margin)
    equals the larger distance from 0 to an end of the shrunk interval. The ratio must have bounds.
    """
    estimate, low, high = ratio.logs

    def shrunk(width: float) -> float:
        return math.sqrt((width**2 - fixed**2) * ratio.pairs / pairs + fixed**2)

    return math.expm1(max(estimate + shrunk(high - estimate), shrunk(estimate - low) - estimate))


SURE = 1.2816
"""The 90% quantile of the normal distribution: four of five means lie within so many of their standard deviations."""


def deviation_shown(seeds: int, margin: float) -> float:
    """Return the largest standard deviation of seeds' differences with which so many seeds show that an equal variant
    is the *same*, in about three of four cases. 0 for fewer than two seeds."""
    return margin * math.sqrt(seeds) / (float(stdtrit(seeds - 1, 0.95)) + SURE) if seeds > 1 else 0.0


def seeds_for(deviation: float, margin: float) -> int | None:
    """Return the fewest seeds, at least ``FEWEST_SEEDS``, for which ``deviation_shown`` is not smaller than
    ``deviation``. Return None for more than 1000."""
    counts = np.arange(FEWEST_SEEDS, _FORESEEABLE)
    enough = (stdtrit(counts - 1, 0.95) + SURE) * deviation <= margin * np.sqrt(counts)
    return int(counts[enough.argmax()]) if enough.any() else None


def seeds_needed(accuracy: Difference) -> int | None:
    """Estimate how many more seeds a decision (*same*, *worse* or *better*) needs, if mean and deviation stay the same.

    Return 0 if the result is decided. Return None for a single seed, which shows no deviation, or if the mean lies
    exactly on the margin. Also return None if more than 1000 further seeds would be needed.
    """
    if accuracy.decision != "undecided":
        return 0
    room = abs(abs(accuracy.estimate or 0.0) - accuracy.margin)
    if accuracy.deviation is None or room == 0:
        return None
    counts = np.arange(accuracy.pairs + 1, accuracy.pairs + _FORESEEABLE + 1)
    enough = stdtrit(counts - 1, accuracy.confidence) * accuracy.deviation / np.sqrt(counts) < room
    return int(enough.argmax()) + 1 if enough.any() else None


def margin_of_seeds(accuracy: Difference, seeds: int) -> float:
    """Return the smallest margin at which ``seeds`` seeds in all would show equivalence.

    Mean and deviation are assumed to stay the same; ``accuracy`` must have a deviation. The margin is |mean| plus the
    half-width of the interval for ``seeds`` differences (``stats.equivalence``).
    """
    half = float(stdtrit(seeds - 1, accuracy.confidence)) * (accuracy.deviation or 0.0) / math.sqrt(seeds)
    return abs(accuracy.estimate or 0.0) + half
