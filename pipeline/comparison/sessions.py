"""What several sessions of the bench say together: a ratio that holds beyond one sitting.

Within a session a ratio's interval covers its rounds. What is drawn once a sitting (the layout of memory, the boot, the
neighbours, the day) is the same in all of them, and shows only between sessions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy.special import stdtrit

from pipeline.comparison import figures, planning, stats, verdicts
from pipeline.comparison.comparison_file import SessionSummary
from pipeline.comparison.stats import Interval
from pipeline.comparison.verdicts import MEMORY, THROUGHPUT, Noise, Quantity, Ratio, SessionRatio
from pipeline.results import Arm, Bench

MOST_SESSIONS = 20
"""To add more of them is no advice."""


def over_sessions(intervals: Sequence[Interval], *, confidence: float = 0.95) -> Interval:
    """The geometric mean of the sessions' ratios, each counting the same, with its interval; of one, itself.

    A t interval of S - 1 degrees of freedom on their logarithms, as sessions are independent draws of what a sitting
    brings. On neither side is it narrower than the median of the sessions' own intervals: a few that happen to agree
    know no more than their rounds do. Raises ValueError for none, or for one without bounds.
    """
    if not intervals or any(each.low <= 0 for each in intervals):
        raise ValueError("sessions: expected at least one interval, and each with its bounds.")
    if len(intervals) == 1:
        return intervals[0]
    logs = [math.log(each.estimate) for each in intervals]
    below = statistics.median(log - math.log(each.low) for log, each in zip(logs, intervals, strict=True))
    above = statistics.median(math.log(each.high) - log for log, each in zip(logs, intervals, strict=True))
    mean, half = statistics.fmean(logs), _half(statistics.stdev(logs), len(logs), confidence)
    low, high = mean - max(half, below), mean + max(half, above)
    return Interval(math.exp(mean), math.exp(low), math.exp(high), sum(each.count for each in intervals))


def _half(deviation: float, sessions: int, confidence: float = 0.95) -> float:
    return float(stdtrit(sessions - 1, (1 + confidence) / 2)) * deviation / math.sqrt(sessions)


def sessions_needed(logs: Sequence[float], margin: float) -> int | None:
    """About how many more sessions would decide, if mean and deviation stay. None if that cannot be foreseen: there is
    one alone, the mean lies on the margin's very edge, or more than ``MOST_SESSIONS`` would be missing."""
    if len(logs) < 2:
        return None
    room, deviation = abs(abs(statistics.fmean(logs)) - math.log1p(margin)), statistics.stdev(logs)
    return next((n for n in range(1, MOST_SESSIONS + 1) if _half(deviation, len(logs) + n) < room), None)


def combined(found: Sequence[tuple[str, Ratio]], quantity: Quantity) -> Ratio:
    """One ratio of those that the sessions gave: (when it started, the ratio), at least one.

    An untrusted session counts for nothing. Where fewer than two are trusted, it is that one's, or the first's.
    """
    shown, trusted, intervals = [], [], []
    for start, each in found:
        counts = each.decision != "untrusted" and each.low is not None
        shown.append(
            SessionRatio(
                start_utc=start, estimate=each.estimate, low=each.low, high=each.high, pairs=each.pairs, counts=counts
            )
        )
        if counts and each.estimate and each.low and each.high:
            trusted.append(each)
            intervals.append(Interval(each.estimate, each.low, each.high, each.pairs))
    if len(trusted) < 2:
        return (trusted or [found[0][1]])[0].model_copy(update={"sessions": tuple(shown)})
    interval, margin = over_sessions(intervals), trusted[0].margin
    decision = stats.decide(interval, margin, higher_is_better=quantity.higher_is_better)
    needed = sessions_needed([math.log(each.estimate) for each in intervals], margin)
    return Ratio(
        estimate=interval.estimate,
        low=interval.low,
        high=interval.high,
        pairs=interval.count,
        refused=sum(each.refused for each in trusted),
        margin=margin,
        decision=decision,
        more_pairs=None,
        why_untrusted=None,
        more_sessions=needed if decision == "undecided" else None,
        sessions=tuple(shown),
    )


def alike(one: Bench, other: Bench, *variants: str) -> bool:
    """Whether ``other`` measured these ``variants`` as ``one`` did, with its data, and the baseline against itself."""
    same = all(other.keys.get(name) == one.keys.get(name) and other.arm("variant", name) for name in variants)
    return same and other.dataset == one.dataset and other.arm("aa_control", one.baseline) is not None


def distinct(sessions: Sequence[Bench]) -> list[Bench]:
    """Each once, the oldest first. Two of the very same samples are one, whatever they say of their time."""
    found = {tuple(arm.samples for arm in each.arms): each for each in reversed(sessions)}
    return sorted(found.values(), key=lambda each: each.session.start_utc)


class Sitting(NamedTuple):
    """One session, and the baseline against itself in it."""

    bench: Bench
    throughput: Noise
    memory: Noise

    @property
    def is_calm(self) -> bool:
        return not self.throughput.why_untrusted and not self.memory.why_untrusted


def noises_of(bench: Bench, max_spread: float) -> tuple[Noise, Noise]:
    """Of throughput and of memory."""
    arms = arm_of(bench, "variant", bench.baseline), arm_of(bench, "aa_control", bench.baseline)
    cost = planning.cost_of(bench)
    return verdicts.noise(*arms, THROUGHPUT, max_spread, cost), verdicts.noise(*arms, MEMORY, max_spread, cost)


def summary(sitting: Sitting, variants: Sequence[str]) -> SessionSummary:
    """``variants``: those that it measured as the first session did."""
    bench = sitting.bench
    arm = arm_of(bench, "variant", bench.baseline)
    return SessionSummary(
        **bench.session.model_dump(),
        commit=bench.commit,
        rounds=len(arm.samples),
        baseline_samples_per_second=figures.median_of(arm, "samples_per_second"),
        noise_throughput=sitting.throughput,
        noise_memory=sitting.memory,
        variants=tuple(variants),
    )


def sittings_like(bench: Bench, sessions: Sequence[Bench], max_spread: float) -> list[Sitting]:
    """The ``sessions`` that measured the baseline as ``bench`` did, each once, the oldest first."""
    found = (each for each in distinct(sessions) if alike(bench, each, bench.baseline))
    return [Sitting(each, *noises_of(each, max_spread)) for each in found]


def to_show(bench: Bench, sittings: Sequence[Sitting], variants: Sequence[str], max_spread: float) -> Sitting:
    """Whose figures are shown that are no ratios: the oldest calm one's that measured all ``variants``, or ``bench``'s.

    Ledgers, operations and why something was not ablated are always those of ``bench``.
    """
    found = next((each for each in sittings if each.is_calm and alike(bench, each.bench, *variants)), None)
    found = found or Sitting(bench, *noises_of(bench, max_spread))
    described = {key: getattr(bench, key) for key in ("ledgers", "flops", "not_ablated")}
    return found._replace(bench=found.bench.model_copy(update=described))


def arm_of(bench: Bench, role: str, variant: str) -> Arm:
    arm = bench.arm(role, variant)
    assert arm is not None  # consistency.check
    return arm
