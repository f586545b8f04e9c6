"""The samples of all sessions of the bench as one table, and the ratios that they give.

The interval of a ratio in one session covers only the variation between rounds. Some conditions vary only between
sessions: the memory layout, the boot, other users of the machine, the day. So several sessions are combined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.comparison import planning, stats, verdicts
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import Difference
from pipeline.results import Arm, Bench, sessions_of
from pipeline.results.figures import Figure

Column = tuple[str, str, str | None]
"""An arm of the table: its role, variant and technique."""


def column(variant: str) -> Column:
    """Return the column of the arm that runs ``variant`` itself."""
    return "variant", variant, None


@dataclass(frozen=True)
class SharedRounds:
    """The rounds of a session, or of a gate, in which certain arms took part."""

    arms: Mapping[Column, Arm]
    """The arms, the baseline and its control. Samples with the same index were measured side by side."""
    baseline: str
    cost: RoundCost
    max_spread: float
    noises: dict[Figure, Difference] = field(default_factory=dict)
    """The known A/A noises. The session shares them between all ``SharedRounds`` that are the same rounds."""

    def noise(self, figure: Figure) -> Difference:
        """Return the A/A noise of ``figure`` in these rounds."""
        if figure not in self.noises:
            baseline, control = (self.arms[name] for name in self.equal_to(column(self.baseline)))
            self.noises[figure] = verdicts.noise_between(baseline, control, figure, self.max_spread, self.cost)
        return self.noises[figure]

    def ratio(
        self, above: Column, below: Column, figure: Figure, margin: float, confidence: float = 0.95, **options: Any
    ) -> Difference:
        """Return the ratio of two arms that took part. ``options``: those of ``verdicts.ratio``."""
        references, noise = [self.arms[name] for name in self.equal_to(below)], self.noise(figure)
        return verdicts.ratio(self.arms[above], references, figure, margin, noise, confidence, **options)

    def equal_to(self, name: Column) -> tuple[Column, ...]:
        """Return ``name`` and, for the baseline, its control, which is measured in the same way."""
        return (name, ("aa_control", self.baseline, None)) if name == column(self.baseline) else (name,)


def columns(bench: Bench) -> dict[Column, Arm]:
    return {arm.column: arm for arm in reversed(bench.arms)}  # of arms that are alike, the first


@dataclass(frozen=True)
class Sitting:
    """A session, as a part of the table: the benches of one boot that follow each other within an hour. The record
    ``Session`` is about a single bench."""

    benches: tuple[Bench, ...]
    """With those arms only that were measured as the present bench measured them."""
    baseline: str
    max_spread: float
    _rounds: dict[tuple[Column, ...], SharedRounds | None] = field(default_factory=dict)
    _noises: dict[tuple[tuple[int, int], ...], dict[Figure, Difference]] = field(default_factory=dict)

    @property
    def start_utc(self) -> str:
        return self.benches[0].session.start_utc

    def rounds(self, *wanted: Column) -> SharedRounds | None:
        """Return the rounds in which all the ``wanted`` arms took part, and the baseline and its control; None if no
        bench counts for all of them."""
        names = tuple(dict.fromkeys((("aa_control", self.baseline, None), column(self.baseline), *wanted)))
        if names not in self._rounds:
            self._rounds[names] = self._joined(names)
        return self._rounds[names]

    def _joined(self, names: Sequence[Column]) -> SharedRounds | None:
        shared = {
            place: list(zip(*(arms[name].samples for name in names), strict=False))
            for place, arms in enumerate(map(columns, self.benches))
            if arms.keys() >= set(names)
        }
        if not shared:
            return None
        rows = [row for of_bench in shared.values() for row in of_bench]
        last = self.benches[max(shared)]
        arms = {
            name: columns(last)[name].model_copy(update={"samples": tuple(row[place] for row in rows)})
            for place, name in enumerate(names)
        }
        cost = planning.cost_of(last, len(rows), sum(self.benches[place].seconds for place in shared))
        noises = self._noises.setdefault(tuple((place, len(of_bench)) for place, of_bench in shared.items()), {})
        return SharedRounds(arms, self.baseline, cost, self.max_spread, noises)


class SampleTable(NamedTuple):
    """The samples of all sessions that measured the baseline as the present bench did: a row per round, a column per
    arm."""

    bench: Bench
    """The present bench."""
    sessions: tuple[Sitting, ...]
    """The oldest first."""
    own: Sitting
    """The session in which the present bench was measured."""
    present: Sitting
    """The part of ``own`` from the present bench alone."""
    set_aside: int
    """Number of benches that do not count."""

    @property
    def arms(self) -> Mapping[Column, Arm]:
        """The arms of the present bench."""
        return columns(self.present.benches[0])

    def ratios(
        self, above: str, below: str, figure: Figure, margin: float, confidence: float = 0.95
    ) -> dict[str, Difference]:
        """Return start of a session -> the ratio of two variants, for each session in which both took part."""
        arms = column(above), column(below)
        of_sessions = {session.start_utc: session.rounds(*arms) for session in self.sessions}
        known = {start: rounds for start, rounds in of_sessions.items() if rounds}
        return {start: rounds.ratio(*arms, figure, margin, confidence, sides=True) for start, rounds in known.items()}

    def compared(self, names: Sequence[str], figure: Figure, margin: float, below: str = "") -> dict[str, Difference]:
        """Return variant -> its ratio to ``below``, or to the baseline, over all sessions, decided together
        (``stats.step_down``)."""

        def judged(undecided: int) -> dict[str, Difference]:
            confidence = stats.confidence_of(undecided)
            of_variants = {
                name: self.ratios(name, below or self.bench.baseline, figure, margin, confidence) for name in names
            }
            return {
                name: combined(of_sessions, of_sessions[self.own.start_utc], figure)
                for name, of_sessions in of_variants.items()
            }

        return stats.decided_together(judged, len(names))


def combined(sessions: Mapping[str, Difference], own: Difference, figure: Figure) -> Difference:
    """Combine the ratios of several sessions into one ratio.

    ``sessions``: start of a session -> its ratio. ``own``: the ratio of the bench's own session.

    A ratio counts if it is trusted and has bounds. If only one ratio counts, return it; if none counts, return ``own``.
    """
    trusted = [ratio for ratio in sessions.values() if ratio.counts]
    if len(trusted) < 2:
        return (trusted or [own])[0].model_copy(update={"parts": dict(sessions)})
    mean, margin = stats.over_sessions(trusted), trusted[0].margin
    decision = stats.decide(mean, margin, higher_is_better=figure.higher_is_better)
    return mean.model_copy(
        update={
            "rejected": sum(ratio.rejected for ratio in trusted),
            "margin": margin,
            "decision": decision,
            "fixed": max(ratio.fixed for ratio in trusted),
            "more_sessions": planning.sessions_needed(trusted, margin) if decision == "undecided" else None,
            "parts": dict(sessions),
        }
    )


def table_of(benches: Sequence[Bench], max_spread: float, advised: Mapping[str, float]) -> SampleTable:
    """Return the table of ``benches``, without duplicates. The first is the present bench.

    ``advised``: the values that all rejections advise in texts (``Rejection.advising``).
    """
    present, baseline = benches[0], benches[0].baseline

    def counted(bench: Bench) -> Bench:
        same = [arm for arm in bench.arms if bench.keys.get(arm.variant) == present.keys.get(arm.variant)]
        return bench.model_copy(update={"arms": tuple(arm.advising(advised) for arm in same)})

    kept = [counted(bench) for bench in distinct(benches)]
    needed = {("aa_control", baseline, None), column(baseline)}
    counting = [bench for bench in kept if bench.dataset == present.dataset and columns(bench).keys() >= needed]
    sessions = tuple(Sitting(tuple(session), baseline, max_spread) for session in sessions_of(counting))
    own = next(session for session in sessions if any(bench.session == present.session for bench in session.benches))
    alone = own if len(own.benches) == 1 else Sitting((counted(present),), baseline, max_spread)
    return SampleTable(present, sessions, own, alone, len(kept) - len(counting))


def distinct(benches: Sequence[Bench]) -> list[Bench]:
    """Return the benches without duplicates, the oldest first.

    Two benches are duplicates if they have common arms, all of which begin with the same samples, or if they began at
    the same uptime, even with different start times. The bench that comes first in ``benches`` is kept.
    """

    def duplicates(bench: Bench, earlier: Bench) -> bool:
        arms = {arm.name: arm.samples for arm in bench.arms}
        pairs = [pair for arm in earlier.arms for pair in zip(arms.get(arm.name, ()), arm.samples, strict=False)]
        uptimes = {bench.session.uptime_seconds, earlier.session.uptime_seconds}
        return (len(uptimes) == 1 and None not in uptimes) or (bool(pairs) and all(a == b for a, b in pairs))

    kept: list[Bench] = []
    for bench in benches:
        if not any(duplicates(bench, earlier) for earlier in kept):
            kept.append(bench)
    return sorted(kept, key=lambda bench: bench.session.start_utc)
