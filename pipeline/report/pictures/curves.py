"""Accuracy and loss over time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeline.comparison.comparison_file import Comparison
from pipeline.report import formats, sentences
from pipeline.report.pictures.scales import Scale, Tick, plain
from pipeline.results import HistoryRow

Histories = Mapping[str, Sequence[HistoryRow]]


class Line(NamedTuple):
    variant: str
    points: str
    """x,y pairs in the format of SVG's polyline."""
    thick: bool
    """True for the line that combines all seeds, False for the line of one seed."""


class Chart(NamedTuple):
    title: str
    alt: str
    x_label: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    target: Tick | None


_Run = list[tuple[int, float, float]]
"""(step, x, y) of each point of a line."""


def charts(comparison: Comparison, histories: Histories) -> list[Chart]:
    return [_accuracy_chart(comparison, histories), _loss_chart(comparison, histories)]


def _accuracy_chart(comparison: Comparison, histories: Histories) -> Chart:
    disturbed = [f"{each.variant}: {text}" for each in comparison.variants for text in sentences.disturbed(each)]
    runs = _runs(comparison, histories, lambda row: (row.train_seconds, row.test_accuracy))
    target = comparison.target_accuracy_fraction
    heights = [target, *(y for lines in runs.values() for line in lines for _, _, y in line)]
    low, high = min(heights), max(heights)
    padding = max(0.06 * (high - low), 0.002)
    y_scale = Scale(low - padding, high + padding, down=True)
    return _chart(
        f"{formats.heading(sentences.score(comparison))} over training time",
        "; ".join(["training seconds, without evaluation", *disturbed]), runs, y_scale,
        "the mean accuracy at the median time",
        lambda value, decimals: f"{100 * value:.{max(0, decimals - 2)}f}%",
        Tick(y_scale.at(target), f"target {sentences.target(comparison)}"),
    )  # fmt: skip


def _loss_chart(comparison: Comparison, histories: Histories) -> Chart:
    runs = _runs(comparison, histories, lambda row: (row.epoch, row.train_loss))
    highest = max((y for lines in runs.values() for line in lines for _, _, y in line), default=1.0)
    y_scale = Scale(0, 1.04 * highest or 1.0, down=True)
    return _chart("Training loss", "epochs", runs, y_scale, "the mean", plain, None)


def _runs(
    comparison: Comparison, histories: Histories, place: Callable[[HistoryRow], tuple[float, float | None]]
) -> dict[str, list[_Run]]:
    """Return, for each variant, one line per seed of its result. ``place``: row -> its x and y."""
    found = {}
    for each in comparison.variants:
        lines: dict[int, _Run] = {run.seed: [] for run in each.runs}
        for row in histories[each.variant]:
            x, y = place(row)
            if row.seed in lines and y is not None and math.isfinite(y):
                lines[row.seed].append((row.step, x, y))
        found[each.variant] = list(lines.values())
    return found


def _chart(
    title: str,
    x_label: str,
    runs: Mapping[str, Sequence[_Run]],
    y_scale: Scale,
    thick: str,
    y_tick: Callable[[float, int], str],
    target: Tick | None,
) -> Chart:
    """Return the chart: for each variant a thick line, and a thin line for each seed if there are several seeds.

    ``thick``: what the thick line shows, in words.
    """
    furthest = max((x for lines in runs.values() for line in lines for _, x, _ in line), default=1.0)
    x_scale = Scale(0, 1.01 * furthest or 1.0)

    def polyline(line: Iterable[tuple[float, float]]) -> str:
        points = [(x_scale.at(x), y_scale.at(y)) for x, y in line]
        if len(points) == 1:  # a job of one epoch; a single point would not be seen
            ((x, y),) = points
            points = [(x - 1, y), (x + 1, y)]
        return " ".join(f"{x:g},{y:g}" for x, y in points)

    drawn, ends = [], []
    for variant, lines in runs.items():
        whole = _together(lines)
        drawn += [Line(variant, polyline((x, y) for _, x, y in line), thick=False) for line in lines if len(lines) > 1]
        drawn.append(Line(variant, polyline(whole), thick=True))
        ends += [f"{variant} ends at {y_tick(y, 4)}" for _, y in whole[-1:]]
    alt = f"Line chart with a thin line for each seed and a thick line for {thick}. {'; '.join(ends)}."
    return Chart(title, alt, x_label, tuple(drawn), x_scale.ticks(plain), y_scale.ticks(y_tick), target)


def _together(lines: Sequence[_Run]) -> list[tuple[float, float]]:
    """Return the median of x and the mean of y at each step that all lines have. The tables also show medians of times
    and means of accuracies."""
    known = [{step: (x, y) for step, x, y in line} for line in lines]
    shared = sorted(set.intersection(*(set(line) for line in known)))
    return [
        (statistics.median(line[step][0] for line in known), statistics.fmean(line[step][1] for line in known))
        for step in shared
    ]
