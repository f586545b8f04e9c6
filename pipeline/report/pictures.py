"""The page's pictures, as positions: percentages of a plot's width from its left edge, or of its height from its top.

The template draws the positions as SVG in the page's own colours and fonts, and describes each picture in words. So the
same picture works at every width, in dark mode and on paper. Whatever a colour means is also shown by a shape, a dash
pattern, a number or a name.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pipeline import pages
from pipeline.comparison.champion import pareto_front
from pipeline.comparison.comparison_file import Comparison, Past, Trend
from pipeline.comparison.stats import Difference
from pipeline.comparison.summaries import over_rounds
from pipeline.pages import UNKNOWN, UNTRUSTED
from pipeline.params import Margins
from pipeline.report import facts
from pipeline.report.facts import LEDGER_PARTS
from pipeline.results import HistoryRow, Ledger
from pipeline.results.figures import MEMORY, THROUGHPUT, Figure

Histories = Mapping[str, Sequence[HistoryRow]]

DRAWN = (THROUGHPUT, MEMORY)
"""The figures of which there are pictures."""
FURTHEST = 1.5
"""Samples further than this factor from their arm's median are drawn at the strip's edge. Otherwise one outlier would
make all other samples look equal."""


class Tick(NamedTuple):
    at: float
    label: str


class Scale(NamedTuple):
    """Maps values to positions, in percent of the plot."""

    low: float
    high: float
    logarithmic: bool = False
    down: bool = False
    """True if positions are measured from the top of the plot."""

    def at(self, value: float) -> float:
        low, high, value = (math.log(number) if self.logarithmic else number for number in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return round(100 * (1 - share if self.down else share), 2)

    def ticks(self, label: Callable[[float, int], str] = pages.fixed, most: int = 5) -> tuple[Tick, ...]:
        """Return at most ``most`` + 1 ticks at round values. ``label`` gets a value and the number of its decimals.

        On a logarithmic scale over a factor of more than 4, the ticks are powers of 2.
        """
        if self.logarithmic and self.high / self.low > 4:
            first, last = math.ceil(math.log2(self.low)), math.floor(math.log2(self.high))
            stride = math.ceil((last - first + 1) / most)
            values = [2.0**power for power in range(first, last + 1) if power % stride == 0]
            return tuple(Tick(self.at(value), label(value, max(0, -math.floor(math.log2(value))))) for value in values)
        rough = (self.high - self.low) / most
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough * (1 - 1e-9))
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [round(index * step, decimals + 1) for index in range(first, last + 1)]
        return tuple(Tick(self.at(value), label(value, decimals)) for value in values)


def padded(values: Sequence[float], share: float, *, logarithmic: bool, down: bool = False) -> Scale:
    """Return a scale over the range of ``values``, extended at both ends by ``share`` of this range."""
    low, high = min(values), max(values)
    if logarithmic:
        padding = (high / low) ** share
        return Scale(low / padding, high * padding, logarithmic, down)
    return Scale(low - share * (high - low), high + share * (high - low), logarithmic, down)


# Intervals, drawn as whiskers: the variants' differences from the baseline, and the effects of single techniques.


class Mark(NamedTuple):
    """An interval and its estimate, as values that ``_forest`` turns into positions. None means unknown."""

    caption: str
    value: str
    at: float | None = None
    low: float | None = None
    high: float | None = None
    look: str = ""
    """The decision; for the baseline against itself, "noise" or "untrusted"; empty if nothing was measured."""


class Row(NamedTuple):
    label: str
    marks: tuple[Mark, ...]
    """Empty if the row's technique was not measured."""


class Forest(NamedTuple):
    title: str
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    band: tuple[float, float]
    """Left end and width of the band that shows the margin."""
    none: float
    """Position that means no difference."""


def forests(comparison: Comparison) -> list[Forest]:
    """Return the intervals of every variant's throughput, memory and accuracy against the baseline. For throughput and
    memory, the last row is the A/A control."""
    others, margins = comparison.variants[1:], comparison.margins
    ratios = {compared.variant: compared.ratios for compared in others}
    drawn = forests_of(ratios, comparison.noises, comparison.baseline, margins)
    accuracies = [Row(compared.variant, (_mark(compared.accuracy),)) for compared in others]
    score = pages.heading(facts.score(comparison))
    if not comparison.seeds:
        return drawn
    return [*drawn, _forest(score, accuracies, 100 * margins.accuracy, ratios=False)]


def forests_of(
    ratios: Mapping[str, Mapping[Figure, Difference]],
    noises: Mapping[Figure, Difference],
    baseline: str,
    margins: Margins,
) -> list[Forest]:
    """Return the intervals of variants' throughput and memory against the baseline, and last those of its control; no
    pictures without ``noises``."""
    drawn = []
    for figure in DRAWN if noises else ():
        rows = [Row(name, (_mark(of.get(figure)),)) for name, of in ratios.items()]
        noise = noises[figure]
        look = UNTRUSTED if noise.why_untrusted else "noise"
        control = Row(f"{baseline}, A/A control", (_mark(noise)._replace(look=look),))
        drawn.append(_forest(figure.heading, [*rows, control], getattr(margins, figure.margin)))
    return drawn


def share_forests(comparison: Comparison) -> list[Forest]:
    """Return each technique's ratios in each ablated variant: added alone to the baseline, and combined with
    the variant's other techniques."""
    drawn = []
    for variant in dict.fromkeys(share.variant for share in comparison.shares):
        for figure in DRAWN:
            rows = []
            for share in comparison.shares:
                if share.variant == variant:
                    added, stacked = (share.by_figure(prefix).get(figure) for prefix in share.prefixes)
                    marks = (_mark(added, "added"), _mark(stacked, "in the stack"))
                    rows.append(Row(share.technique, () if share.why_not else marks))
            title = f"{figure.heading}: the techniques of {variant}"
            drawn.append(_forest(title, rows, getattr(comparison.margins, figure.margin)))
    return drawn


def trend_forests(trends: Sequence[Trend]) -> list[tuple[Trend, Forest]]:
    """Return each trend with its ratios, session by session."""

    def row(past: Past) -> Row:
        return Row(f"{pages.minute(past.start_utc)}, {pages.commit(past.commit)}", (_mark(past.ratio),))

    return [
        (trend, _forest(f"{trend.variant}: {trend.noun}", [*map(row, trend.past)], trend.past[0].ratio.margin))
        for trend in trends
    ]


def _mark(difference: Difference | None, caption: str = "") -> Mark:
    if difference is None:
        return Mark(caption, "not measured")
    scale = 1 if difference.unit == "ratio" else 100
    ends = (difference.estimate, difference.low, difference.high)
    at, low, high = (None if end is None else scale * end for end in ends)
    return Mark(caption, facts.text(difference), at, low, high, difference.decision)


def _forest(title: str, rows: Sequence[Row], margin: float, *, ratios: bool = True) -> Forest:
    """Draw ``rows`` on a common scale. No difference is a ratio of 1, or 0 percentage points."""
    none, band = (1.0, (1 / (1 + margin), 1 + margin)) if ratios else (0.0, (-margin, margin))
    marks = [mark for row in rows for mark in row.marks]
    known = [value for mark in marks for value in (mark.at, mark.low, mark.high) if value is not None]
    scale = padded([*known, *band], 0.04, logarithmic=ratios)

    def drawn(mark: Mark) -> Mark:
        at, low, high = (None if value is None else scale.at(value) for value in (mark.at, mark.low, mark.high))
        return mark._replace(at=at, low=low, high=high)

    left, right = scale.at(band[0]), scale.at(band[1])
    placed = tuple(row._replace(marks=tuple(map(drawn, row.marks))) for row in rows)
    return Forest(title, placed, scale.ticks(), (left, round(right - left, 2)), scale.at(none))


# The memory ledgers, which divide the peak memory into parts, as stacked bars.


class Segment(NamedTuple):
    part: str
    left: float
    width: float


class Bar(NamedTuple):
    caption: str
    value: str
    segments: tuple[Segment, ...]
    tensors: float | None
    """Position at which the memory of tensors ends; None if that is the bar's end."""


class Bars(NamedTuple):
    unit: str
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]
    """Pairs (variant, its bars)."""
    ticks: tuple[Tick, ...]
    parts: tuple[str, ...]
    """The parts that occur in a bar, for the legend."""


def bars(comparison: Comparison) -> Bars | None:
    """Return bars of the measured and the predicted ledgers; None if no variant has a ledger."""
    ledgers = facts.ledgers(comparison)
    if not ledgers:
        return None
    largest = max(1, *(ledger.peak_bytes for *_, ledger in ledgers))
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    scale = Scale(0, 1.02 * largest / unit)
    rows = tuple(
        (variant, tuple(_bar(kind, ledger, scale, unit) for name, kind, ledger in ledgers if name == variant))
        for variant in dict.fromkeys(variant for variant, *_ in ledgers)
    )
    used = {segment.part for _, row in rows for bar in row for segment in bar.segments}
    ticks = scale.ticks(lambda value, decimals: f"{pages.fixed(value, decimals)}{'' if value else f' {name}'}")
    return Bars(name, rows, ticks, tuple(part for part in LEDGER_PARTS if part in used))


def _bar(kind: str, ledger: Ledger, scale: Scale, unit: int) -> Bar:
    segments, below = [], 0
    for part in LEDGER_PARTS:
        amount = getattr(ledger, f"{part}_bytes")
        if amount > 0:
            left = scale.at(below / unit)
            below += amount
            segments.append(Segment(part, left, round(scale.at(below / unit) - left, 2)))
    beyond = ledger.tensors_bytes < ledger.peak_bytes
    tensors = scale.at(ledger.tensors_bytes / unit) if beyond else None
    return Bar(kind, pages.size(ledger.peak_bytes), tuple(segments), tensors)


# Throughput against memory, with the Pareto front.


class Point(NamedTuple):
    number: int
    """The variant's number in the comparison, from 1."""
    variant: str
    throughput: float
    memory: float
    accuracy: str
    """Empty if it is not known."""
    x: float
    y: float
    across: tuple[float, float] | None
    """Ends of the throughput's interval."""
    along: tuple[float, float] | None
    """Ends of the memory's interval, as positions from the top."""
    on_front: bool


class Front(NamedTuple):
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
    spots = [
        Spot(
            number, compared.variant, compared.throughput, compared.memory, compared.on_front, facts.accuracy(compared)
        )
        for number, compared in enumerate(comparison.variants, 1)
        if compared.verdict != UNTRUSTED
    ]
    return front_of(spots, [compared.variant for compared in comparison.variants if compared.verdict == UNTRUSTED])


class Spot(NamedTuple):
    """A variant to be drawn."""

    number: int
    variant: str
    throughput: Difference | None
    """None: that of the baseline."""
    memory: Difference | None
    on_front: bool
    accuracy: str = ""


def front_of(spots: Sequence[Spot], absent: Sequence[str] = ()) -> Front | None:
    """Return the plot of the variants whose ratios are known; None for fewer than two."""
    spots = [spot for spot in spots if all(not ratio or ratio.estimate for ratio in (spot.throughput, spot.memory))]
    if len(spots) < 2:
        return None
    across = _ratio_scale(spot.throughput for spot in spots)
    along = _ratio_scale((spot.memory for spot in spots), down=True)
    points = []
    for spot in spots:
        speed, memory = ((ratio and ratio.estimate) or 1.0 for ratio in (spot.throughput, spot.memory))
        points.append(
            Point(
                spot.number, spot.variant, speed, memory, spot.accuracy, across.at(speed), along.at(memory),
                _ends(spot.throughput, across), _ends(spot.memory, along), spot.on_front,
            )
        )  # fmt: skip
    estimates = [(point.throughput, point.memory) for point in points]
    best = sorted({estimates[index] for index in pareto_front(estimates, [True, False])})
    return Front(
        tuple(points),
        tuple(_staircase([(across.at(x), along.at(y)) for x, y in best])),
        across.ticks(),
        along.ticks(),
        (across.at(1), along.at(1)),
        tuple(absent),
    )


def _ratio_scale(ratios: Iterable[Difference | None], *, down: bool = False) -> Scale:
    known = [
        value for ratio in ratios if ratio for value in (ratio.estimate, ratio.low, ratio.high) if value is not None
    ]
    return padded([1 / 1.05, 1.05, *known], 0.1, logarithmic=True, down=down)


def _ends(ratio: Difference | None, scale: Scale) -> tuple[float, float] | None:
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


# Accuracy and loss over time.


class Line(NamedTuple):
    variant: str
    points: str
    """x,y pairs in the format of SVG's polyline."""
    thick: bool
    """True for the line that combines all seeds, False for the line of one seed."""
    end: str = ""
    """The last value of a thick line; empty if the line has no point."""


class Chart(NamedTuple):
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    target: Tick | None


_Run = list[tuple[int, float, float]]
"""(step, x, y) of each point of a line."""


def charts(comparison: Comparison, histories: Histories) -> tuple[Chart, Chart]:
    """Return the charts of the accuracy over training time, and of the training loss over epochs."""
    runs = _runs(comparison, histories, lambda row: (row.train_seconds, row.test_accuracy))
    target = comparison.target_accuracy_fraction
    heights = [target, *(y for lines in runs.values() for line in lines for _, _, y in line)]
    low, high = min(heights), max(heights)
    padding = max(0.06 * (high - low), 0.002)
    y_scale = Scale(low - padding, high + padding, down=True)
    goal = Tick(y_scale.at(target), f"target {facts.target(comparison)}")
    accuracy = _chart(runs, y_scale, lambda value, decimals: pages.percent(value, max(0, decimals - 2)), goal)
    losses = _runs(comparison, histories, lambda row: (row.epoch, row.train_loss))
    heights = [0.0, *(y for lines in losses.values() for line in lines for _, _, y in line)]
    low, high = 1.04 * min(heights), 1.04 * max(heights)  # a loss of the user's own may be negative
    return accuracy, _chart(losses, Scale(low, high if low < high else 1.0, down=True), pages.fixed)


def loglog(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    x_tick: Callable[[float, int], str],
    y_tick: Callable[[float, int], str],
    level: tuple[float, str] | None = None,
) -> Chart:
    """Return a chart of curves of positive numbers, (x, y), with logarithmic scales. ``level``: a height, with its
    label."""
    points = [point for curve in curves.values() for point in curve]
    heights = [y for _, y in points] + ([level[0]] if level else [])
    x_scale = padded([x for x, _ in points], 0.02, logarithmic=True)
    y_scale = padded(heights, 0.06, logarithmic=True, down=True)
    lines = tuple(
        Line(name, " ".join(f"{x_scale.at(x):g},{y_scale.at(y):g}" for x, y in curve), True, y_tick(curve[-1][1], 3))
        for name, curve in curves.items()
    )
    target = Tick(y_scale.at(level[0]), level[1]) if level else None
    return Chart(lines, x_scale.ticks(x_tick), y_scale.ticks(y_tick), target)


def _runs(
    comparison: Comparison, histories: Histories, place: Callable[[HistoryRow], tuple[float, float | None]]
) -> dict[str, list[_Run]]:
    """Return, for each variant, one line per seed of its result. ``place``: row -> its x and y."""
    by_variant = {}
    for compared in comparison.variants:
        lines: dict[int, _Run] = {run.seed: [] for run in compared.runs}
        for row in histories[compared.variant]:
            x, y = place(row)
            if row.seed in lines and y is not None and math.isfinite(y):
                lines[row.seed].append((row.step, x, y))
        by_variant[compared.variant] = list(lines.values())
    return by_variant


def _chart(
    runs: Mapping[str, Sequence[_Run]], y_scale: Scale, y_tick: Callable[[float, int], str], target: Tick | None = None
) -> Chart:
    """Return the chart: for each variant a thick line, and a thin line for each seed if there are several seeds."""
    furthest = max((x for lines in runs.values() for line in lines for _, x, _ in line), default=1.0)
    x_scale = Scale(0, 1.01 * furthest or 1.0)

    def polyline(line: Iterable[tuple[float, float]]) -> str:
        points = [(x_scale.at(x), y_scale.at(y)) for x, y in line]
        if len(points) == 1:  # a job of one epoch; a single point would not be seen
            ((x, y),) = points
            points = [(x - 1, y), (x + 1, y)]
        return " ".join(f"{x:g},{y:g}" for x, y in points)

    drawn = []
    for variant, lines in runs.items():
        whole = _together(lines)
        drawn += [Line(variant, polyline((x, y) for _, x, y in line), thick=False) for line in lines if len(lines) > 1]
        drawn.append(Line(variant, polyline(whole), thick=True, end=y_tick(whole[-1][1], 4) if whole else ""))
    return Chart(tuple(drawn), x_scale.ticks(), y_scale.ticks(y_tick), target)


def _together(lines: Sequence[_Run]) -> list[tuple[float, float]]:
    """Return the median of x and the mean of y at each step that all lines have. The tables also show medians of times
    and means of accuracies."""
    known = [{step: (x, y) for step, x, y in line} for line in lines]
    shared = sorted(set.intersection(*(set(line) for line in known)))
    return [
        (statistics.median(line[step][0] for line in known), statistics.fmean(line[step][1] for line in known))
        for step in shared
    ]


# Every sample of the bench: one strip per arm, such as a variant or the A/A control.


class Dot(NamedTuple):
    x: float
    y: float
    rejected: bool
    title: str


class Strip(NamedTuple):
    label: str
    value: str
    """The median of the samples that were not rejected."""
    dots: tuple[Dot, ...]


class Strips(NamedTuple):
    title: str
    factor: str
    """The largest factor, such as "1.50", by which a sample may differ from the median of its arm and still be drawn at
    its value."""
    strips: tuple[Strip, ...]


def strips(comparison: Comparison) -> list[Strips]:
    """Return strips of the throughput and the peak memory of every sample of every arm, in the order of the rounds."""
    return [_strips(figure, comparison) for figure in DRAWN]


def _strips(figure: Figure, comparison: Comparison) -> Strips:
    arms, shown = comparison.bench.arms, partial(pages.of_figure, figure, unit=comparison.unit)
    medians = [over_rounds(figure, arm.samples) for arm in arms]
    ratios = [
        [value / median if median and (value := figure.of(sample)) else None for sample in arm.samples]
        for arm, median in zip(arms, medians, strict=True)
    ]
    furthest = max([1.02, *(max(ratio, 1 / ratio) for of_arm in ratios for ratio in of_arm if ratio)])
    edge, rounds = min(furthest, FURTHEST), max(map(len, ratios))
    scale = padded([1 / edge, edge], 0.125, logarithmic=True, down=True)
    drawn = []
    for arm, of_arm, median in zip(arms, ratios, medians, strict=True):
        dots = []
        for index, ratio in enumerate(of_arm):
            x, about = round(100 * (index + 0.5) / rounds, 2), f"round {index + 1}: "
            if ratio and median:
                y = scale.at(min(max(ratio, 1 / edge), edge))
                dots.append(Dot(x, y, False, about + shown(ratio * median)))
            elif figure.taken_in(arm.samples[index]):
                why = [rejection.advising(comparison.advised).text for rejection in arm.samples[index].rejections]
                dots.append(Dot(x, 50, True, f"{about}rejected, {'; '.join(why) or UNKNOWN}"))
        drawn.append(Strip(arm.name, shown(median), tuple(dots)))
    return Strips(figure.heading, f"{edge:.2f}", tuple(drawn))
