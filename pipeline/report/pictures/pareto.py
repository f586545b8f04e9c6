"""Throughput against memory, with the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pipeline.comparison.comparison_file import Compared, Comparison
from pipeline.comparison.pareto import pareto_front
from pipeline.comparison.verdicts import Ratio
from pipeline.report import formats
from pipeline.report.formats import UNTRUSTED
from pipeline.report.pictures.scales import Scale, Tick, down, padded, plain


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
    """Lines (x1, y1, x2, y2) that bound an area. A variant in this area is slower, and needs more memory, than some
    variant on the front."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    baseline: tuple[float, float]
    absent: tuple[str, ...]
    """Variants that are not drawn."""


def front(comparison: Comparison) -> Front | None:
    """Return a plot of the ratios to the baseline, which is at (1, 1). Variants with an untrusted verdict are left out.
    Return None if all verdicts are untrusted."""
    placed: list[tuple[int, Compared, Ratio | None, Ratio | None]] = [(1, comparison.variants[0], None, None)]
    for number, each in enumerate(comparison.variants[1:], 2):
        if each.verdict != UNTRUSTED:
            placed.append((number, each, each.throughput, each.memory))
    if len(placed) < 2:
        return None
    across, along = _ratio_scale(each[2] for each in placed), _ratio_scale(each[3] for each in placed)
    estimates = [_estimates(speed, memory) for _, _, speed, memory in placed]
    points = tuple(
        Point(
            number, each.variant, formats.percent(each.test_accuracy_mean_fraction), across.at(x), down(along, y),
            _ends(speed, across.at), _ends(memory, lambda value: down(along, value)), each.on_front,
        )
        for (number, each, speed, memory), (x, y) in zip(placed, estimates, strict=True)
    )  # fmt: skip
    best = [estimates[index] for index in pareto_front(estimates, [True, False])]
    numbers = "; ".join(
        f"{point.number} {point.variant}: {formats.times(x)} the throughput at {formats.times(y)} the memory with "
        f"{point.accuracy}{', on the front' if point.on_front else ''}"
        for point, (x, y) in zip(points, estimates, strict=True)
    )
    return Front(
        "Throughput against memory",
        f"Scatter chart relative to {comparison.baseline}. Points further right are faster; lower points need less "
        f"memory. {numbers}.",
        points,
        tuple(_staircase([(across.at(x), down(along, y)) for x, y in sorted(set(best))])),
        across.ticks(plain),
        tuple(Tick(round(100 - at, 2), label) for at, label in along.ticks(plain)),
        (across.at(1), down(along, 1)),
        tuple(each.variant for each in comparison.variants if each.variant not in {point.variant for point in points}),
    )


def _estimates(speed: Ratio | None, memory: Ratio | None) -> tuple[float, float]:
    return (speed and speed.estimate) or 1.0, (memory and memory.estimate) or 1.0


def _ratio_scale(ratios: Iterable[Ratio | None]) -> Scale:
    known = [1 / 1.05, 1.05]
    for ratio in ratios:
        if ratio:
            known += [value for value in (ratio.estimate, ratio.low, ratio.high) if value is not None]
    return padded(known, 0.1, logarithmic=True)


def _ends(ratio: Ratio | None, at: Callable[[float], float]) -> tuple[float, float] | None:
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return at(ratio.low), at(ratio.high)


def _staircase(best: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float, float, float]]:
    """Yield the lines of a staircase from the left edge to the top edge, through the points ``best``, which are sorted
    from left to right."""
    left = 0.0
    for (x, y), (_, above) in zip(best, [*best[1:], (0.0, 0.0)], strict=True):
        yield left, y, x, y
        yield x, y, x, above
        left = x
