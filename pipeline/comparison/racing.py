"""A race of many arms: which of them need no further rounds, because another one beats them.

The bench compares each variant with the baseline; a race also compares the variants with each other. Few rounds must
suffice for it. So the scatter of a ratio is at least that of all pairs of arms together, which two rounds of many arms
show well. A race only chooses what is measured further: the ratios of what it chose come from other rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import stdtrit

from pipeline.comparison import stats, verdicts
from pipeline.comparison.stats import Difference
from pipeline.params import Margins
from pipeline.results import Arm
from pipeline.results.figures import MEMORY, THROUGHPUT, Figure

Floats = np.ndarray[Any, np.dtype[np.float64]]

RACED = (THROUGHPUT, MEMORY)
FEWEST_ROUNDS = 2
"""A race looks after every second round, whose order is the reverse of the round before."""
FEWEST_FREEDOM = 3
"""With fewer degrees of freedom, such as two rounds of two arms, the interval at 99.9% spans orders of magnitude."""
MOST_FINALISTS = 3


@dataclass(frozen=True)
class Race:
    """The ratios between all arms of a race, from the rounds so far."""

    names: Sequence[str]
    """The baseline, and the other variants."""
    logs: Mapping[Figure, Floats]
    """The logarithms of the figures, [arms, rounds], in the order of the names; NaN for an unknown one."""
    margins: Mapping[Figure, float]
    doubts: Mapping[Figure, Floats]
    """95% half-widths that rounds do not show, [arms, arms]."""

    @classmethod
    def of(cls, arms: Sequence[Arm], baseline: str, margins: Margins) -> Race:
        """Return the race of the baseline, its control and variants, whose samples with the same index were measured
        side by side. The baseline's figures are the geometric means of its own and its control's. A speed that was
        rejected because the machine was disturbed counts: the disturbance is a part of the scatter."""
        rows: dict[str, list[Arm]] = {baseline: []}
        for arm in arms:
            rows.setdefault(arm.variant, []).append(arm)
        rounds = max(len(arm.samples) for arm in arms)
        heaps = [max(map(verdicts.heap_share, equal)) for equal in rows.values()]
        none = np.zeros((len(rows), len(rows)))
        return cls(
            list(rows),
            {figure: np.array([_logs(equal, figure, rounds) for equal in rows.values()]) for figure in RACED},
            {figure: figure.margin_in(margins) for figure in RACED},
            {THROUGHPUT: none, MEMORY: np.log1p(np.maximum.outer(heaps, heaps) / 2)},
        )

    def ratio(self, above: str, below: str, figure: Figure, confidence: float = verdicts.SURE) -> Difference:
        """Return the ratio of two arms with its interval; without an interval if fewer than two rounds have both, or if
        the race is too small to know the scatter."""
        first, second = list(self.names).index(above), list(self.names).index(below)
        estimates, errors, counts, freedom = self._of[figure]
        estimate, pairs = estimates[first, second], int(counts[first, second])
        if not pairs:
            return Difference(margin=self.margins[figure])
        known = Difference(estimate=math.exp(estimate), pairs=pairs, margin=self.margins[figure], confidence=confidence)
        half = float(errors[first, second] * stdtrit(freedom, (1 + confidence) / 2))
        if not math.isfinite(half) or freedom < FEWEST_FREEDOM:
            return known
        return known.model_copy(update={"low": math.exp(estimate - half), "high": math.exp(estimate + half)})

    def beaten(self, among: Collection[str], apart: Collection[str] = ()) -> dict[str, str]:
        """Return variant -> what beats it, for those ``among`` which no further round can be expected to bring back.

        A variant is beaten by another if it is surely worse in speed or memory, by more than the margin, and surely not
        better by more than the margin in the other. By the baseline it is beaten even if it is worse in nothing: then
        it gains nothing. What ``apart`` holds beats nobody, because it is another training. Surely: by intervals of a
        look (``stats.confidence_of``), with the error divided by the number of variants.
        """
        count, rivals = len(self.names), [name not in apart for name in self.names]
        better_possible, worse = np.zeros((count, count), bool), np.zeros((count, count), bool)
        for figure, margin in self.margins.items():
            estimates, errors, counts, freedom = self._of[figure]
            if not counts.any():  # this machine cannot measure the figure
                continue
            confidence = stats.confidence_of(len(among), look=True)
            half = errors * stdtrit(freedom, (1 + confidence) / 2)
            sign, bound = 1 if figure.higher_is_better else -1, math.log1p(margin)
            better_possible |= ~(sign * estimates + half < bound)
            worse |= sign * estimates + half < -bound
        beats = ~better_possible & worse & np.array(rivals)
        beats[:, 0] |= ~better_possible[:, 0]
        return {
            name: self.names[int(np.flatnonzero(beats[place])[0])]
            for place, name in enumerate(self.names)
            if place and name in among and beats[place].any()
        }

    @cached_property
    def _of(self) -> dict[Figure, tuple[Floats, Floats, Floats, float]]:
        """Figure -> the logarithms of all ratios, [above, below], their standard errors, the numbers of rounds, and the
        degrees of freedom."""
        return {figure: _paired(logs, self.doubts[figure]) for figure, logs in self.logs.items()}


def _logs(equal: Sequence[Arm], figure: Figure, rounds: int) -> Floats:
    """Return the logarithms of the geometric means of equal arms."""
    logs = np.full((len(equal), rounds), np.nan)
    for place, arm in enumerate(equal):
        for number, sample in enumerate(arm.samples):
            value = figure.of(sample) or (sample.disturbed_samples_per_second if figure is THROUGHPUT else None)
            logs[place, number] = math.log(value) if value else np.nan
    known = ~np.isnan(logs)
    return np.where(known.any(axis=0), np.nansum(logs, axis=0) / np.maximum(1, known.sum(axis=0)), np.nan)


def _paired(logs: Floats, doubts: Floats) -> tuple[Floats, Floats, Floats, float]:
    """Return, for logarithms of figures [arms, rounds] with NaN for unknown ones, what ``Race._of`` holds. ``doubts``:
    95% half-widths that rounds do not show."""
    differences = logs[:, None] - logs[None]
    counts = (~np.isnan(differences)).sum(axis=-1)
    first, second = np.triu_indices(logs.shape[1])
    walsh = np.sort((differences[..., first] + differences[..., second]) / 2, axis=-1)  # NaN comes last
    known = counts * (counts + 1) // 2
    if not walsh.shape[-1]:
        return (np.full(counts.shape, np.nan),) * 2 + (counts, 1.0)
    middles = [
        np.take_along_axis(walsh, np.maximum(place, 0)[..., None], axis=-1)[..., 0]
        for place in ((known - 1) // 2, known // 2 - (known == 0))
    ]
    centers = np.where(known > 0, (middles[0] + middles[1]) / 2, np.nan)
    squares = np.nansum((differences - centers[..., None]) ** 2, axis=-1)
    off = ~np.eye(len(logs), dtype=bool)
    freedoms = np.maximum(counts - 1, 0)
    pooled = squares[off & (counts > 1)].sum() / max(1, freedoms[off & (counts > 1)].sum())
    own = np.divide(squares, freedoms, out=np.zeros_like(squares), where=freedoms > 0)
    variances = np.maximum(own, pooled) * math.pi / 3
    errors = np.sqrt(np.divide(variances, counts, out=np.full_like(squares, np.inf), where=counts > 1))
    # As many independent residuals as the arms leave, the shared course of each round taken away.
    freedom = float(max(1, (len(logs) - 1) * (max(2, int(counts.max(initial=2))) - 1)))
    return centers, np.hypot(errors, doubts / 1.96), counts, freedom


def finalists(standing: Mapping[str, tuple[float, float]], margins: Margins) -> list[str]:
    """Return up to ``MOST_FINALISTS`` variants on the front of speed and memory that gain something, the fastest first:
    the fastest, the one with the least memory, and the one whose gains together are the largest. A difference within
    the margin does not count.

    ``standing``: variant -> its ratios to the baseline, of throughput and of memory.
    """
    fast, lean = (1 + figure.margin_in(margins) for figure in RACED)

    def gains(name: str, over: tuple[float, float]) -> bool:
        return standing[name][0] > over[0] * fast or standing[name][1] < over[1] / lean

    ahead = [name for name in standing if gains(name, (1.0, 1.0))]
    ahead = [
        name
        for name in ahead
        if not any(gains(other, standing[name]) and not gains(name, standing[other]) for other in ahead)
    ]
    ahead.sort(key=lambda name: (-standing[name][0], standing[name][1]))
    if len(ahead) <= MOST_FINALISTS:
        return ahead
    first, *between, last = ahead
    return [first, max(between, key=lambda name: standing[name][0] / standing[name][1]), last]


def interaction(combined: Difference, alone: Difference) -> Difference:
    """Return the ratio of what a technique does beside others (``combined``) to what it does ``alone``. Above 1, the
    figure is larger than the product of the two alone; the errors of both ratios add up in quadrature."""
    if not combined.estimate or not alone.estimate:
        return Difference(margin=alone.margin)
    estimate = combined.estimate / alone.estimate
    known = Difference(estimate=estimate, pairs=min(combined.pairs, alone.pairs), margin=alone.margin)
    if combined.low is None or alone.low is None:
        return known
    below, above = (
        math.hypot(width, other) for width, other in zip(combined.widths, reversed(alone.widths), strict=True)
    )
    return known.model_copy(update={"low": estimate * math.exp(-below), "high": estimate * math.exp(above)})
