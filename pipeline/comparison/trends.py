"""A variant's ratio to the baseline, session by session and commit by commit, and where it changed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby

from pipeline.comparison import stats
from pipeline.comparison.comparison_file import Change, Past, Trend
from pipeline.comparison.sessions import distinct, table_of
from pipeline.comparison.stats import Difference
from pipeline.params import Compare
from pipeline.results import Bench, sessions_of
from pipeline.results.figures import QUANTITIES

FEWEST_SESSIONS = 2
"""A change is confirmed by as many sessions before it, and after it."""
LEAST_ERROR = 1e-6
"""Standard error that is assumed where all sessions agree exactly."""


def trends(benches: Sequence[Bench], settings: Compare) -> tuple[Trend, ...]:
    """Return the trends of the variants that the first bench measured, over all benches of its job, data and device.

    The code may differ between sessions; the settings of a variant and of the baseline may not. Trends of fewer than
    two sessions are left out.
    """
    present = benches[0]
    same = [bench for bench in distinct(benches) if _job(bench) == _job(present)]
    drawn = []
    for variant in present.keys:
        for figure in QUANTITIES:
            margin = figure.margin_in(settings.margins)
            if variant == present.baseline or not margin:
                continue
            past = []
            for group in _groups([bench for bench in same if _measured(bench, variant) == _measured(present, variant)]):
                of_group = table_of(group[::-1], settings.max_spread, {}).ratios(
                    variant, present.baseline, figure, margin
                )
                past += [
                    Past(start_utc=group[0].session.start_utc, commit=group[-1].commit, ratio=ratio)
                    for ratio in of_group.values()
                    if ratio.estimate
                ]
            change = changed([one.ratio for one in past], margin, higher_is_better=figure.higher_is_better)
            if len(past) > 1:
                drawn.append(Trend(variant=variant, noun=figure.noun, past=tuple(past), change=change))
    return tuple(drawn)


def _job(bench: Bench) -> tuple[object, ...]:
    return bench.config.get("train"), bench.dataset, bench.arms[0].device, bench.baseline


def _measured(bench: Bench, variant: str) -> tuple[object, ...]:
    """Return the settings of the variant and of the baseline; an empty tuple if the bench did not measure them."""
    names, settings = (variant, bench.baseline), bench.config.get("variants", {})
    return tuple(settings.get(name) for name in names) if bench.keys.keys() >= {*names} else ()


def _groups(benches: Sequence[Bench]) -> Iterator[list[Bench]]:
    """Yield the benches of each session whose code is the same."""
    for session in sessions_of(benches):
        for _, group in groupby(session, key=lambda bench: bench.keys):
            yield [*group]


def changed(ratios: Sequence[Difference], margin: float, *, higher_is_better: bool = True) -> Change | None:
    """Return the change that the ratios of sessions show, the oldest first; None if they show none.

    At each place, a t test compares the logarithms before and after it, with the sessions' pooled variance; the error
    of 5% is divided among the places (Bonferroni). Untrusted ratios count nowhere. A session's own interval is not
    used: what differs between sessions counts.
    """
    from scipy.special import stdtrit

    counting = [place for place, ratio in enumerate(ratios) if ratio.counts]
    logs = [ratios[place].logs[0] for place in counting]
    places = range(FEWEST_SESSIONS, len(logs) - FEWEST_SESSIONS + 1)

    def shift_at(place: int) -> tuple[float, float]:
        parts = before, after = logs[:place], logs[place:]
        variance = sum(len(part) * statistics.pvariance(part) for part in parts) / (len(logs) - 2)
        error = math.sqrt(variance * sum(1 / len(part) for part in parts))
        return statistics.fmean(after) - statistics.fmean(before), max(error, LEAST_ERROR)

    shifts = {place: shift_at(place) for place in places}
    if not shifts:
        return None
    place, (shift, error) = max(shifts.items(), key=lambda item: abs(item[1][0]) / item[1][1])
    confidence = 1 - stats.ERROR / len(places)
    half = float(stdtrit(len(logs) - 2, (1 + confidence) / 2)) * error
    if abs(shift) <= half:
        return None
    estimate, low, high = (math.exp(value) for value in (shift, shift - half, shift + half))
    ratio = Difference(estimate=estimate, low=low, high=high, pairs=len(logs), confidence=confidence, margin=margin)
    decision = stats.decide(ratio, margin, higher_is_better=higher_is_better)
    return Change(sessions_before=counting[place], ratio=ratio.model_copy(update={"decision": decision}))
