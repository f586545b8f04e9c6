"""A variant's ratio to the baseline, session by session and commit by commit, and where it changed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from pipeline.comparison import stats
from pipeline.comparison.comparison_file import Change, Past, Trend
from pipeline.comparison.sessions import SampleTable, distinct, table_of
from pipeline.comparison.stats import Difference
from pipeline.params import Compare
from pipeline.results import Bench
from pipeline.results.figures import QUANTITIES, Figure

FEWEST_SESSIONS = 2
"""A change is confirmed by as many sessions before it, and after it."""
LEAST_ERROR = 1e-6
"""Standard error that is assumed where all sessions agree exactly."""


def trends(table: SampleTable, benches: Sequence[Bench], settings: Compare) -> tuple[Trend, ...]:
    """Return the trends of the variants of ``table``, over all ``benches`` of its job, data and device.

    The code may differ between sessions; the settings of a variant and of the baseline may not. Trends of fewer than
    two sessions are left out.
    """
    present, drawn = table.bench, []
    same_job = [bench for bench in reversed(distinct(benches)) if _job(bench) == _job(present)]
    for variant in [name for name in present.keys if name != present.baseline]:
        names = variant, present.baseline
        with_other_code: dict[tuple[str | None, ...], list[Bench]] = {}
        for bench in same_job:
            keys = tuple(map(bench.keys.get, names))
            if keys != tuple(map(present.keys.get, names)) and _settings(bench, names) == _settings(present, names):
                with_other_code.setdefault(keys, []).append(bench)  # ``table`` has those with the present code
        tables = table, *(table_of(group, settings.max_spread, {}) for group in with_other_code.values())
        for figure in QUANTITIES:
            if margin := figure.margin_in(settings.margins):
                past = [one for part in tables for one in _past(part, *names, figure, margin)]
                past.sort(key=attrgetter("start_utc"))
                change = changed([one.ratio for one in past], margin, higher_is_better=figure.higher_is_better)
                if len(past) > 1:
                    drawn.append(Trend(variant=variant, noun=figure.noun, past=tuple(past), change=change))
    return tuple(drawn)


def _past(table: SampleTable, variant: str, baseline: str, figure: Figure, margin: float) -> list[Past]:
    commits = {session.start_utc: session.benches[-1].commit for session in table.sessions}
    ratios = table.ratios(variant, baseline, figure, margin)
    return [
        Past(start_utc=start, commit=commits[start], ratio=ratio) for start, ratio in ratios.items() if ratio.estimate
    ]


def _job(bench: Bench) -> tuple[object, ...]:
    return bench.config.get("train"), bench.dataset, bench.arms[0].device, bench.baseline


def _settings(bench: Bench, names: Sequence[str]) -> list[Any]:
    return [bench.config.get("variants", {}).get(name) for name in names]


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
