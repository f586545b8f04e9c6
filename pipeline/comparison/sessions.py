"""Combine several sessions of the bench into a ratio that holds beyond one session.

Within a session, a ratio's interval covers the variation between rounds. Conditions that are fixed for a session (the
memory layout, the boot, the neighbours, the day) are the same in all its rounds, and vary only between sessions.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy.special import stdtrit

from pipeline.comparison import figures, planning, stats, verdicts
from pipeline.comparison.comparison_file import SessionSummary
from pipeline.comparison.stats import Interval
from pipeline.comparison.verdicts import QUANTITIES, Noise, Quantity, Ratio, SessionRatio
from pipeline.results import Arm, Bench, session_starts

MOST_SESSIONS = 20
"""Adding more sessions than this is never advised."""


def over_sessions(intervals: Sequence[Interval], *, confidence: float = 0.95) -> Interval:
    """Return the geometric mean of the sessions' ratios, equally weighted, with its interval; one session, unchanged.

    The interval is a t interval with S - 1 degrees of freedom on the ratios' logarithms, as sessions are independent
    draws of the conditions. On each side it is at least as wide as the median of the sessions' own intervals: a few
    sessions that agree by chance know no more than their rounds. Raises ValueError if there is none, or one has no
    bounds.
    """
    if not intervals or any(each.low <= 0 for each in intervals):
        raise ValueError("sessions: expected at least one interval, and each with its bounds.")
    if len(intervals) == 1:
        return intervals[0]
    logs = [math.log(each.estimate) for each in intervals]
    return _mean(intervals, _half(statistics.stdev(logs), len(logs), confidence))


def by_session(found: Sequence[tuple[str, Interval]]) -> list[Interval]:
    """Return one interval per session, from pairs (start of a bench, its interval). Several benches of one session give
    their geometric mean, with the median width of their intervals."""
    starts = session_starts(start for start, _ in found)
    groups: list[list[Interval]] = [[] for _ in starts]
    for start, interval in found:
        groups[bisect.bisect(starts, start) - 1].append(interval)
    return [each[0] if len(each) == 1 else _mean(each) for each in groups]


def _mean(intervals: Sequence[Interval], half: float = 0.0) -> Interval:
    """Return the geometric mean with its interval. ``half``: the half-width on the logarithmic scale, raised to the
    intervals' median on each side."""
    mean = statistics.fmean(math.log(each.estimate) for each in intervals)
    below, above = _median_widths(intervals)
    low, high = mean - max(half, below), mean + max(half, above)
    return Interval(math.exp(mean), math.exp(low), math.exp(high), sum(each.count for each in intervals))


def _half(deviation: float, sessions: int, confidence: float = 0.95) -> float:
    return float(stdtrit(sessions - 1, (1 + confidence) / 2)) * deviation / math.sqrt(sessions)


def sessions_needed(intervals: Sequence[Interval], margin: float) -> int | None:
    """Estimate how many more sessions would decide, if mean, deviation and the sessions' own intervals stay.

    Return None if there is no forecast: there is only one session, the mean lies exactly on the margin, the sessions'
    own intervals are too wide for any number of sessions, or more than ``MOST_SESSIONS`` more would be needed.
    """
    if len(intervals) < 2:
        return None
    logs = [math.log(each.estimate) for each in intervals]
    room, deviation = abs(abs(statistics.fmean(logs)) - math.log1p(margin)), statistics.stdev(logs)
    if max(_median_widths(intervals)) >= room:
        return None
    return next((n for n in range(1, MOST_SESSIONS + 1) if _half(deviation, len(logs) + n) < room), None)


def _median_widths(intervals: Sequence[Interval]) -> tuple[float, float]:
    """Return the median widths of the intervals below and above their estimates, on the logarithmic scale."""
    return (
        statistics.median(math.log(each.estimate / each.low) for each in intervals),
        statistics.median(math.log(each.high / each.estimate) for each in intervals),
    )


def combined(found: Sequence[tuple[str, Ratio]], own: Ratio, quantity: Quantity) -> Ratio:
    """Combine the ratios of several benches, given as (start of the bench, its ratio), into one; ``own`` is the ratio
    of the bench itself.

    An untrusted ratio does not count, and the ratios of one session count as one. If only one ratio is trusted, it is
    returned; if none is, ``own``.
    """
    shown, trusted = [], []
    intervals: list[tuple[str, Interval]] = []
    for start, each in found:
        shown.append(
            SessionRatio(
                start_utc=start,
                estimate=each.estimate,
                low=each.low,
                high=each.high,
                pairs=each.pairs,
                trusted=each.decision != "untrusted",
            )
        )
        if shown[-1].counts and each.estimate and each.low and each.high:
            trusted.append(each)
            intervals.append((start, Interval(each.estimate, each.low, each.high, each.pairs)))
    if len(trusted) < 2:
        return (trusted or [own])[0].model_copy(update={"sessions": tuple(shown)})
    over, margin = by_session(intervals), trusted[0].margin
    interval = over_sessions(over)
    decision = stats.decide(interval, margin, higher_is_better=quantity.higher_is_better)
    needed = sessions_needed(over, margin)
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
    """True if ``other`` measured ``variants`` as ``one`` did, on the same data, and the baseline against itself."""
    same = all(other.keys.get(name) == one.keys.get(name) and other.arm("variant", name) for name in variants)
    return same and other.dataset == one.dataset and other.arm("aa_control", one.baseline) is not None


def distinct(sessions: Sequence[Bench]) -> list[Bench]:
    """Return the sessions without duplicates, the oldest first. Two sessions are duplicates if their common arms have
    the same samples, whatever their start times; the first one given is kept."""
    found: list[Bench] = []
    for each in sessions:
        arms = {arm.name: arm.samples for arm in each.arms}
        if not any(all(arms.get(arm.name, arm.samples) == arm.samples for arm in other.arms) for other in found):
            found.append(each)
    return sorted(found, key=lambda each: each.session.start_utc)


class Sitting(NamedTuple):
    """One session, and the noise of the baseline against itself in it."""

    bench: Bench
    throughput: Noise
    """This and the next two are in the order of ``QUANTITIES``."""
    memory: Noise
    energy: Noise

    def noise(self, quantity: Quantity, rounds: int) -> Noise:
        """Return the noise in the first ``rounds`` rounds only, for arms that took part in no more."""
        whole = self[1:][QUANTITIES.index(quantity)]
        return whole if rounds == self.bench.rounds else _noise(self.bench, quantity, whole.max_spread, rounds)


def sitting_of(bench: Bench, max_spread: float) -> Sitting:
    return Sitting(bench, *(_noise(bench, each, max_spread, bench.rounds) for each in QUANTITIES))


def _noise(bench: Bench, quantity: Quantity, max_spread: float, rounds: int) -> Noise:
    arms = (arm_of(bench, role, bench.baseline) for role in ("variant", "aa_control"))
    baseline, control = (arm.model_copy(update={"samples": arm.samples[:rounds]}) for arm in arms)
    return verdicts.noise(baseline, control, quantity, max_spread, planning.cost_of(bench))


def summary(sitting: Sitting, variants: Sequence[str]) -> SessionSummary:
    """Summarise a session. ``variants``: the variants that it measured as the first session did."""
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
    """Return the ``sessions`` that measured the baseline as ``bench`` did, without duplicates, the oldest first."""
    found = (each for each in distinct(sessions) if alike(bench, each, bench.baseline))
    return [sitting_of(each, max_spread) for each in found]


def arm_of(bench: Bench, role: str, variant: str) -> Arm:
    arm = bench.arm(role, variant)
    assert arm is not None  # consistency.check
    return arm
