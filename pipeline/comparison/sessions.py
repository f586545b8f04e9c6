"""Combine several sessions of the bench into a ratio that is valid beyond one session.

The interval of a ratio in one session covers only the variation between rounds. Some conditions vary only between
sessions: the memory layout, the boot, other users of the machine, the day.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy.special import stdtrit

from pipeline.comparison import figures, planning, stats, verdicts
from pipeline.comparison.comparison_file import SessionSummary
from pipeline.comparison.stats import Interval
from pipeline.comparison.verdicts import MEMORY, THROUGHPUT, Estimated, Noise, Quantity, Ratio, SessionRatio, estimated
from pipeline.results import Arm, Bench, Window, sessions_of

MOST_SESSIONS = 20
"""Adding more sessions than this is never advised."""


def over_sessions(intervals: Sequence[Interval]) -> Interval:
    """Return the equally weighted geometric mean of the sessions' ratios with its 95% interval.

    Every interval must have bounds. The interval of a single session is returned unchanged. Each session is an
    independent draw of the conditions. So the interval of S sessions is a t interval with S - 1 degrees of freedom on
    the logarithms of the ratios. On each side it is at least as wide as the median of the sessions' own intervals,
    because a few sessions can agree by chance.
    """
    if len(intervals) == 1:
        return intervals[0]
    logs = [math.log(each.estimate) for each in intervals]
    mean, half = statistics.fmean(logs), _half(statistics.stdev(logs), len(logs))
    below, above = _median_widths(intervals)
    low, high = mean - max(half, below), mean + max(half, above)
    return Interval(math.exp(mean), math.exp(low), math.exp(high), sum(each.count for each in intervals))


def _half(deviation: float, sessions: int) -> float:
    return float(stdtrit(sessions - 1, 0.975)) * deviation / math.sqrt(sessions)


def sessions_needed(intervals: Sequence[Interval], margin: float) -> int | None:
    """Estimate how many more sessions a decision needs, if the sessions' mean, deviation and intervals stay the same.

    Return None if there is only one session, or if the mean lies exactly on the margin. Also return None if the
    sessions' own intervals are too wide for any number of sessions, or if more than ``MOST_SESSIONS`` further
    sessions would be needed.
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


def combined(found: Mapping[str, Ratio], own: Ratio, quantity: Quantity) -> Ratio:
    """Combine the ratios of several sessions into one ratio.

    ``found``: start of a session -> its ratio. ``own``: the ratio of the bench's own session.

    A ratio counts if it is trusted and has bounds. If only one ratio counts, return it; if none counts, return ``own``.
    """
    shown = tuple(
        SessionRatio(
            **{key: getattr(each, key) for key in Estimated.model_fields},
            start_utc=start,
            trusted=each.decision != "untrusted",
        )
        for start, each in found.items()
    )
    trusted = [found[each.start_utc] for each in shown if each.counts]
    if len(trusted) < 2:
        return (trusted or [own])[0].model_copy(update={"sessions": shown})
    intervals = [each.interval for each in trusted]
    interval, margin = over_sessions(intervals), trusted[0].margin
    decision = stats.decide(interval, margin, higher_is_better=quantity.higher_is_better)
    needed = sessions_needed(intervals, margin)
    return Ratio(
        **estimated(interval),
        rejected=sum(each.rejected for each in trusted),
        margin=margin,
        decision=decision,
        more_sessions=needed if decision == "undecided" else None,
        sessions=shown,
    )


def alike(one: Bench, other: Bench, *variants: str) -> bool:
    """True if ``other`` has an A/A control, and measured ``variants`` in the same way as ``one``, on the same data."""
    same = all(other.keys.get(name) == one.keys.get(name) and other.arm("variant", name) for name in variants)
    return same and other.dataset == one.dataset and other.arm("aa_control", one.baseline) is not None


def distinct(benches: Sequence[Bench]) -> list[Bench]:
    """Return the benches without duplicates, the oldest first.

    Two benches are duplicates if they have common arms, all of which begin with the same samples, or if they began at
    the same uptime, even with different start times. The bench that comes first in ``benches`` is kept.
    """

    def duplicates(one: Bench, other: Bench) -> bool:
        arms = {arm.name: arm.samples for arm in one.arms}
        pairs = [pair for arm in other.arms for pair in zip(arms.get(arm.name, ()), arm.samples, strict=False)]
        uptimes = {one.session.uptime_seconds, other.session.uptime_seconds}
        return (len(uptimes) == 1 and None not in uptimes) or (bool(pairs) and all(a == b for a, b in pairs))

    found: list[Bench] = []
    for each in benches:
        if not any(duplicates(each, other) for other in found):
            found.append(each)
    return sorted(found, key=lambda each: each.session.start_utc)


class PooledSession(NamedTuple):
    """The benches of one boot that follow each other within an hour and measured the baseline as ``compared`` did."""

    compared: Bench
    """The present bench. Another bench counts for the variants that it measured in the same way."""
    benches: tuple[Bench, ...]
    max_spread: float

    @property
    def start_utc(self) -> str:
        return self.benches[0].session.start_utc

    def rounds_of(self, *variants: str) -> Bench | None:
        """Return the session's rounds in which all ``variants`` took part; None if no bench counts for all of them.

        The rounds form one bench, whose arms are ``variants``, the baseline and its control.
        """
        found = [each for each in self.benches if alike(self.compared, each, *variants)]
        return _pooled(found, variants) if found else None

    def ratio(self, above: str, below: str, quantity: Quantity, margin: float) -> Ratio | None:
        """Return the ratio of two variants in the session's rounds that have both; None if there are no such rounds."""
        rounds = self.rounds_of(above, below)
        if rounds is None:
            return None
        arm, reference = (arm_of(rounds, "variant", name) for name in (above, below))
        noise = noise_of(rounds, quantity, self.max_spread)
        return verdicts.ratio(arm, reference, quantity, margin, noise, widen=True)

    def noise(self, quantity: Quantity, *variants: str) -> Noise:
        """Return the A/A noise of ``quantity`` in ``rounds_of(*variants)``."""
        found = self.rounds_of(*variants)
        assert found is not None
        return noise_of(found, quantity, self.max_spread)


def _pooled(benches: Sequence[Bench], variants: Sequence[str]) -> Bench:
    roles = [("aa_control", benches[0].baseline), *(("variant", name) for name in (benches[0].baseline, *variants))]
    arms = []
    for role in dict.fromkeys(roles):
        parts: list[Window] = []
        for bench in benches:
            shared = min(len(arm_of(bench, *each).samples) for each in roles)
            parts += arm_of(bench, *role).samples[:shared]
        arms.append(arm_of(benches[-1], *role).model_copy(update={"samples": tuple(parts)}))
    seconds = sum(each.seconds for each in benches)
    return benches[-1].model_copy(update={"arms": tuple(arms), "seconds": seconds})


def noise_of(bench: Bench, quantity: Quantity, max_spread: float, rounds: int | None = None) -> Noise:
    """Return the A/A noise of ``quantity`` in the first ``rounds`` rounds of ``bench``; with None, in all rounds."""
    arms = (arm_of(bench, role, bench.baseline) for role in ("variant", "aa_control"))
    baseline, control = (arm.model_copy(update={"samples": arm.samples[:rounds]}) for arm in arms)
    return verdicts.noise_between(baseline, control, quantity, max_spread, planning.cost_of(bench))


def summary(session: PooledSession, variants: Sequence[str]) -> SessionSummary:
    """Summarise a session. ``variants``: the variants to look for in its rounds."""
    whole = session.rounds_of()
    assert whole is not None
    return SessionSummary(
        **session.benches[0].session.model_dump(),
        benches=len(session.benches),
        commit=whole.commit,
        rounds=whole.rounds,
        baseline_samples_per_second=figures.median_of(arm_of(whole, "variant", whole.baseline), "samples_per_second"),
        noise_throughput=session.noise(THROUGHPUT),
        noise_memory=session.noise(MEMORY),
        variants=tuple(name for name in variants if session.rounds_of(name)),
    )


def pooled_like(bench: Bench, benches: Sequence[Bench], max_spread: float) -> list[PooledSession]:
    """Return the sessions of those ``benches`` that measured the baseline as ``bench`` did, without duplicates, the
    oldest first."""
    found = [each for each in distinct(benches) if alike(bench, each, bench.baseline)]
    return [PooledSession(bench, tuple(each), max_spread) for each in sessions_of(found)]


def arm_of(bench: Bench, role: str, variant: str) -> Arm:
    arm = bench.arm(role, variant)
    assert arm is not None  # consistency.check has checked it
    return arm
