"""Throughput against memory, with the Pareto front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.comparison.comparison_file import Comparison
from pipeline.comparison.pareto import pareto_front
from pipeline.comparison.verdicts import Ratio
from pipeline.report import formats
from pipeline.report.formats import UNTRUSTED
from pipeline.report.pictures.scales import Scale, Tick, padded, plain


class Point(NamedTuple):
    number: int
    """The variant's number in the comparison, from 1."""
    variant: str
    accuracy: str
    x: float
    y: float
    across: tuple[float, float] | None
    """Ends of the throughput's interval."""
    along: tuple[float, float] | None
    """Ends of the memory's interval, as positions from the top."""
    on_front: bool


class Front(NamedTuple):
    title: str
    alt: str
    points: tuple[Point, ...]
    steps: tuple[tuple[float, float, float, float], ...]
    """Lines (x1, y1, x2, y2) of the front of throughput and memory alone. A variant above and left of these
    lines is slower and needs more memory than a variant on this front."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    baseline: tuple[float, float]
    absent: tuple[str, ...]
    """Variants that are not drawn."""


def front(comparison: Comparison) -> Front | None:
    """Return a plot of the ratios to the baseline, which is at (1, 1). Variants with an untrusted verdict are left out.
    Return None if only the baseline remains."""
    drawn = [each for each in comparison.variants if each.verdict != UNTRUSTED]
    if len(drawn) < 2:
        return None
    across = _ratio_scale(each.throughput for each in drawn)
    along = _ratio_scale((each.memory for each in drawn), down=True)
    estimates = [(_estimate(each.throughput), _estimate(each.memory)) for each in drawn]
    numbers = {each.variant: number for number, each in enumerate(comparison.variants, 1)}
    points = tuple(
        Point(
            numbers[each.variant], each.variant, formats.percent(each.test_accuracy_mean_fraction), across.at(x),
            along.at(y), _ends(each.throughput, across), _ends(each.memory, along), each.on_front,
        )
        for each, (x, y) in zip(drawn, estimates, strict=True)
    )  # fmt: skip
    told = "; ".join(
        f"{point.number} {point.variant}: {formats.times(x)} the throughput at {formats.times(y)} the memory with "
        f"{point.accuracy}{', on the front' if point.on_front else ''}"
        for point, (x, y) in zip(points, estimates, strict=True)
    )
    best = sorted({estimates[index] for index in pareto_front(estimates, [True, False])})
    return Front(
        "Throughput against memory",
        f"Scatter chart relative to {comparison.baseline}. Points further right are faster; lower points need less "
        f"memory. {told}.",
        points,
        tuple(_staircase([(across.at(x), along.at(y)) for x, y in best])),
        across.ticks(plain),
        along.ticks(plain),
        (across.at(1), along.at(1)),
        tuple(each.variant for each in comparison.variants if each.verdict == UNTRUSTED),
    )


def _estimate(ratio: Ratio | None) -> float:
    return (ratio and ratio.estimate) or 1.0


def _ratio_scale(ratios: Iterable[Ratio | None], *, down: bool = False) -> Scale:
    known = [
        value for ratio in ratios if ratio for value in (ratio.estimate, ratio.low, ratio.high) if value is not None
    ]
    return padded([1 / 1.05, 1.05, *known], 0.1, logarithmic=True, down=down)


def _ends(ratio: Ratio | None, scale: Scale) -> tuple[float, float] | None:
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return scale.at(ratio.low), scale.at(ratio.high)


def _staircase(best: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float, float, float]]:
    """Yield the lines of a staircase from the left edge to the top edge, through the points ``best``, which are sorted
    from left to right."""
    left = 0.0
    for (x, y), (_, above) in zip(best, [*best[1:], (0.0, 0.0)], strict=True):
        yield left, y, x, y
        yield x, y, x, above
        left = x
