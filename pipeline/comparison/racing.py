"""A race of many arms: which of them need no further rounds, because another one beats them.

The bench compares each variant with the baseline; a race also compares the variants with each other. Few rounds must
suffice for it. So the scatter of a ratio is at least that of all pairs of arms together, which two rounds of many arms
show well. A race only chooses what is measured further: the ratios of what it chose come from other rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from pipeline.comparison import stats, verdicts
from pipeline.comparison.stats import Difference
from pipeline.params import Margins
from pipeline.results import Arm
from pipeline.results.figures import MEMORY, THROUGHPUT, Figure

Floats = np.ndarray[Any, Any]
Ratios = Mapping[Figure, Difference]
"""Figure -> the ratio of an arm to the baseline."""

RACED = (THROUGHPUT, MEMORY)
FEWEST_ROUNDS = 2
"""A race looks after so many rounds, the second in the reverse order of the first, and then after each."""
FEWEST_FREEDOM = 3
"""With fewer degrees of freedom, such as two rounds of two arms, the interval at 99.9% spans orders of magnitude."""


@dataclass(frozen=True)
class Race:
    """The ratios between all arms of a race, from the rounds so far."""

    names: Sequence[str]
    """The baseline, and the other variants."""
    pairs: Mapping[Figure, tuple[Floats, Floats, Floats, float]]
    """What ``paired`` returns for the arms in the order of the names."""
    margins: Mapping[Figure, float]

    @classmethod
    def of(cls, arms: Sequence[Arm], baseline: str, margins: Margins) -> Race:
        """Return the race of the baseline, its control and variants, whose samples with the same index were measured
        side by side. The baseline's figures are the geometric means of its own and its control's. A speed that was
        rejected because the machine was disturbed counts: the disturbance is a part of the scatter."""
        names = list(dict.fromkeys((baseline, *(arm.variant for arm in arms))))
        rounds, pairs = max(len(arm.samples) for arm in arms), {}
        for figure in RACED:
            values = np.full((len(arms), rounds), np.nan)
            for row, arm in zip(values, arms, strict=True):
                row[: len(arm.samples)] = [figure.of(sample) or np.nan for sample in arm.undisturbed().samples]
            known = np.ma.log(np.ma.masked_invalid(values))
            equal = ([arm.variant == name for arm in arms] for name in names)
            pairs[figure] = paired(np.array([known[of].mean(axis=0).filled(np.nan) for of in equal]))
        return cls(names, pairs, {figure: figure.margin_in(margins) for figure in RACED})

    def ratios(self, above: str, below: str) -> Ratios:
        """Return the ratios of two arms with intervals at ``verdicts.SURE``; without an interval if fewer than two
        rounds have both, or if the race is too small to know the scatter."""
        pair, ratios = (self.names.index(above), self.names.index(below)), dict[Figure, Difference]()
        for figure, (estimates, errors, counts, freedom) in self.pairs.items():
            center, quantile = float(estimates[pair]), float(stdtrit(freedom, (1 + verdicts.SURE) / 2))
            half = float(errors[pair]) * quantile if freedom >= FEWEST_FREEDOM else math.inf
            ends = {"estimate": center, "low": center - half, "high": center + half}
            known: dict[str, Any] = {name: math.exp(end) for name, end in ends.items() if math.isfinite(end)}
            known |= {"pairs": int(counts[pair]), "margin": self.margins[figure], "confidence": verdicts.SURE}
            ratios[figure] = Difference(**known)
        return ratios

    def beaten(self, among: Collection[str], apart: Collection[str] = ()) -> dict[str, str]:
        """Return variant -> what beats it, for those ``among`` which no further round can be expected to bring back.

        A variant is beaten by another if it is surely worse in speed or memory, by more than the margin, and surely not
        better by more than the margin in the other. By the baseline it is beaten even if it is worse in nothing: then
        it gains nothing. What ``apart`` holds beats nobody, such as another training. Surely: by intervals of a look
        (``stats.confidence_of``), with the error divided by the number of variants.
        """
        count, confidence = len(self.names), stats.confidence_of(len(among), look=True)
        better_possible, worse = np.zeros((2, count, count), bool)
        for figure, margin in self.margins.items():
            estimates, errors, counts, freedom = self.pairs[figure]
            if counts.any():  # else this machine cannot measure the figure
                sign, bound = 1 if figure.higher_is_better else -1, math.log1p(margin)
                highest = sign * estimates + errors * stdtrit(freedom, (1 + confidence) / 2)
                better_possible |= ~(highest < bound)
                worse |= highest < -bound
        beats = ~better_possible & worse & ~np.isin(self.names, [*apart])
        beats[:, 0] |= ~better_possible[:, 0]
        rivals = dict(zip(self.names, beats, strict=True))
        return {name: self.names[int(rivals[name].argmax())] for name in among if rivals[name].any()}


def paired(logs: Floats) -> tuple[Floats, Floats, Floats, float]:
    """Return, for logarithms of figures [arms, rounds] with NaN for unknown ones, the logarithms of all ratios, [above,
    below], their standard errors, the numbers of rounds, and the degrees of freedom."""
    differences = np.ma.masked_invalid(logs[:, None] - logs[None])
    counts = differences.count(axis=-1)
    first, second = np.triu_indices(logs.shape[1])
    walsh = (differences[..., first] + differences[..., second]) / 2
    centers = np.ma.median(walsh, axis=-1)  # type: ignore[no-untyped-call]
    squares = ((differences - centers[..., None]) ** 2).sum(axis=-1).filled(0.0)
    off, freedoms = ~np.eye(len(logs), dtype=bool), np.maximum(counts - 1, 0)
    pooled = squares[off].sum() / max(1, freedoms[off].sum())
    variances = np.maximum(squares / np.maximum(freedoms, 1), pooled) * math.pi / 3
    errors = np.where(counts > 1, np.sqrt(variances / np.maximum(counts, 1)), np.inf)
    # As many independent residuals as the arms leave, the shared course of each round taken away.
    freedom = float((len(logs) - 1) * (max(2, int(counts.max(initial=2))) - 1))
    return centers.filled(np.nan), errors, counts, freedom


def gain(ratios: Ratios, *figures: Figure) -> float:
    """Return how many times as good as the baseline a variant is in these figures together."""
    factors = ((ratios[figure].estimate or 1.0) ** (1 if figure.higher_is_better else -1) for figure in figures)
    return math.prod(factors)


def gaining(standing: Mapping[str, Ratios]) -> list[str]:
    """Return the variants that gain more than the margin in speed or memory, the largest gains together first."""
    ahead = [name for name, of in standing.items() if any(gain(of, figure) > 1 + of[figure].margin for figure in RACED)]
    return sorted(ahead, key=lambda name: -gain(standing[name], *RACED))


def foremost(standing: Mapping[str, Ratios], figure: Figure) -> str:
    """Return the best variant in the ``figure``: of those that are no further from the best than the margin, the one
    whose gains together are the largest."""
    most = max(gain(ratios, figure) / (1 + ratios[figure].margin) for ratios in standing.values())
    near = [name for name, ratios in standing.items() if gain(ratios, figure) >= most]
    return max(near, key=lambda name: gain(standing[name], *RACED))


def finalists(standing: Mapping[str, Ratios]) -> list[str]:
    """Return up to three variants that gain something, without repeats: the fastest, the one whose gains together are
    the largest, and the one with the least memory. ``standing``: variant -> its ratios."""
    ahead = {name: standing[name] for name in gaining(standing)}
    ends = (foremost(ahead, THROUGHPUT), next(iter(ahead)), foremost(ahead, MEMORY)) if ahead else ()
    return list(dict.fromkeys(ends))


def interaction(combined: Difference, alone: Difference) -> Difference:
    """Return the ratio of what a technique does beside others (``combined``) to what it does ``alone``. Above 1, the
    figure is larger than the product of the two alone; the errors of both ratios add up in quadrature."""
    if None in (combined.low, alone.low) or not alone.estimate:
        return Difference()
    return stats.widened(combined.times(1 / alone.estimate), max(alone.widths))
