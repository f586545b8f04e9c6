"""What the page's pictures show, as positions: percentages of a plot's width from its left, or height from its top.

The template draws them as SVG in the page's own colours and letters, so that one picture serves every width, a dark
screen and paper. Colour is never alone: shapes, dashes, numbers or names say the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeline import stats
from pipeline.ablation import Share
from pipeline.comparison import Compared, Comparison
from pipeline.report import words
from pipeline.report.words import LEDGER_PARTS, UNKNOWN, UNTRUSTED
from pipeline.results import Arm, HistoryRow, Ledger
from pipeline.verdicts import Accuracy, Noise, Ratio

Histories = Mapping[str, Sequence[HistoryRow]]


class Tick(NamedTuple):
    at: float
    label: str


class Scale(NamedTuple):
    """From values to positions."""

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return round(100 * (value - low) / (high - low), 2)

    def ticks(self, label: Callable[[float, int], str], most: int = 5) -> tuple[Tick, ...]:
        """Round values. ``label`` gets one of them and the number of its decimals."""
        if self.logarithmic and self.high / self.low > 4:
            first, last = math.ceil(math.log2(self.low)), math.floor(math.log2(self.high))
            stride = math.ceil((last - first + 1) / most)
            values = [2.0**power for power in range(first, last + 1) if power % stride == 0]
            return tuple(Tick(self.at(value), f"{value:g}") for value in values)
        rough = (self.high - self.low) / most
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough * (1 - 1e-9))
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [round(index * step, decimals + 1) for index in range(first, last + 1)]
        return tuple(Tick(self.at(value), label(value, decimals)) for value in values)


def _plain(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}".replace("-", words.MINUS)


# Intervals as whiskers


class Whisker(NamedTuple):
    at: float
    low: float | None
    high: float | None
    look: str
    """The decision, or "noise" for the baseline against itself."""


class Mark(NamedTuple):
    caption: str
    value: str
    whisker: Whisker | None
    """None: nothing is known."""


class Row(NamedTuple):
    label: str
    marks: tuple[Mark, ...]
    note: str = ""


class Forest(NamedTuple):
    title: str
    alt: str
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    band: tuple[float, float]
    """Left end and width of what does not matter."""
    none: float
    """Where no difference is."""


class _Estimate(NamedTuple):
    caption: str
    value: str
    estimate: float | None
    low: float | None
    high: float | None
    look: str


_Row = tuple[str, Sequence[_Estimate], str]
"""Label, estimates and a note."""


def _of_ratio(ratio: Ratio | None, caption: str = "") -> _Estimate:
    if ratio is None:
        return _Estimate(caption, "not measured", None, None, None, "")
    return _Estimate(caption, words.ratio_text(ratio), ratio.estimate, ratio.low, ratio.high, ratio.decision)


def _of_noise(noise: Noise) -> _Estimate:
    value, look = (UNTRUSTED, UNTRUSTED) if noise.why_untrusted else (words.noise_text(noise), "noise")
    return _Estimate("", value, noise.estimate, noise.low, noise.high, look)


def _forest(title: str, rows: Sequence[_Row], margin: float, *, ratios: bool) -> Forest:
    """``rows`` over a common scale: of ratios about 1, or of percentage points about 0."""
    none, band = (1.0, (1 / (1 + margin), 1 + margin)) if ratios else (0.0, (-margin, margin))
    known = [*band, none]
    for _, estimates, _ in rows:
        for each in estimates:
            known += [value for value in (each.estimate, each.low, each.high) if value is not None]
    scale = _padded(known, 0.04, logarithmic=ratios)
    left, right = scale.at(band[0]), scale.at(band[1])
    numbers = [
        f"{label}{f' {each.caption}' if each.caption else ''}: {each.value}"
        for label, estimates, _ in rows
        for each in estimates
    ]
    return Forest(
        title, f"Intervals. {'; '.join(numbers)}.",
        tuple(Row(label, tuple(_mark(each, scale) for each in estimates), note) for label, estimates, note in rows),
        scale.ticks(_plain), (left, round(right - left, 2)), scale.at(none),
    )  # fmt: skip


def _mark(each: _Estimate, scale: Scale) -> Mark:
    if each.estimate is None:
        return Mark(each.caption, each.value, None)
    low, high = (None if end is None else scale.at(end) for end in (each.low, each.high))
    return Mark(each.caption, each.value, Whisker(scale.at(each.estimate), low, high, each.look))


def _padded(values: Sequence[float], share: float, *, logarithmic: bool) -> Scale:
    """A scale that holds ``values`` and beyond them a share of their range."""
    low, high = min(values), max(values)
    if logarithmic:
        padding = (high / low) ** share
        return Scale(low / padding, high * padding, logarithmic=True)
    return Scale(low - share * (high - low), high + share * (high - low))


def forests(comparison: Comparison) -> list[Forest]:
    """Throughput, memory and accuracy of every variant beside the baseline, the baseline against itself last."""
    others, margins = comparison.variants[1:], comparison.margins
    again = f"{comparison.baseline} again (A/A)"
    made = [
        _forest(
            "Throughput",
            [
                *((each.variant, [_of_ratio(each.throughput)], "") for each in others),
                (again, [_of_noise(comparison.noise_throughput)], ""),
            ],
            margins.throughput,
            ratios=True,
        ),
        _forest(
            "Peak memory",
            [
                *((each.variant, [_of_ratio(each.memory)], "") for each in others),
                (again, [_of_noise(comparison.noise_memory)], ""),
            ],
            margins.memory,
            ratios=True,
        ),
    ]
    accuracies: list[_Row] = [(each.variant, [_of_accuracy(each.accuracy)], "") for each in others if each.accuracy]
    if accuracies:
        made.append(_forest("Test accuracy", accuracies, 100 * margins.accuracy, ratios=False))
    return made


def _of_accuracy(accuracy: Accuracy) -> _Estimate:
    ends = (accuracy.low_fraction, accuracy.high_fraction)
    low, high = (None if end is None else 100 * end for end in ends)
    line, interval = words.accuracy_lines(accuracy)
    return _Estimate("", f"{line} ({interval})", 100 * accuracy.mean_fraction, low, high, accuracy.decision)


def share_forests(comparison: Comparison) -> list[Forest]:
    """Each technique's share in each ablated variant, added and in the stack."""
    margins, made = comparison.margins, []
    for variant in dict.fromkeys(share.variant for share in comparison.shares):
        shares = [share for share in comparison.shares if share.variant == variant]
        of_throughput = [_share_row(each, each.added_throughput, each.stacked_throughput) for each in shares]
        of_memory = [_share_row(each, each.added_memory, each.stacked_memory) for each in shares]
        made += [
            _forest(f"Throughput: the techniques of {variant}", of_throughput, margins.throughput, ratios=True),
            _forest(f"Peak memory: the techniques of {variant}", of_memory, margins.memory, ratios=True),
        ]
    return made


def _share_row(share: Share, added: Ratio | None, stacked: Ratio | None) -> _Row:
    if share.why_not:
        return share.technique, [], "not measured"
    return share.technique, [_of_ratio(added, "added"), _of_ratio(stacked, "in the stack")], ""


# The ledger as stacked bars


class Segment(NamedTuple):
    part: str
    left: float
    width: float


class Bar(NamedTuple):
    caption: str
    value: str
    segments: tuple[Segment, ...]
    tensors: float | None
    """Where what tensors take ends; None: at the bar's end."""


class Bars(NamedTuple):
    title: str
    alt: str
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]
    """(variant, its bars)."""
    ticks: tuple[Tick, ...]
    parts: tuple[str, ...]
    """Those that are there, for the legend."""


def bars(comparison: Comparison) -> Bars | None:
    """Measured beside predicted; None where no variant has a ledger."""
    ledgers = [
        (each.variant, kind, ledger)
        for each in comparison.variants
        if each.ledgers
        for kind, ledger in (("measured", each.ledgers.measured), ("predicted", each.ledgers.predicted))
        if ledger
    ]
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
    numbers = "; ".join(f"{variant} {kind} {words.size(ledger.peak_bytes)}" for variant, kind, ledger in ledgers)
    ticks = scale.ticks(lambda value, decimals: f"{_plain(value, decimals)}{f' {name}' if value == 0 else ''}")
    return Bars(
        f"Peak memory, by what holds it ({name})", f"Stacked bars of the peak's parts. {numbers}.", rows, ticks,
        tuple(part for part in LEDGER_PARTS if part in used),
    )  # fmt: skip


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
    return Bar(kind, words.size(ledger.peak_bytes), tuple(segments), tensors)


# The Pareto front


class Point(NamedTuple):
    number: int
    """Of the variant in the comparison, from 1."""
    variant: str
    accuracy: str
    x: float
    y: float
    across: tuple[float, float] | None
    """Ends of the throughput's interval."""
    along: tuple[float, float] | None
    """Ends of the memory's interval, from the top."""
    on_front: bool


class Front(NamedTuple):
    title: str
    alt: str
    points: tuple[Point, ...]
    steps: tuple[tuple[float, float, float, float], ...]
    """Lines x1, y1, x2, y2 that bound what a point of the front beats in throughput and memory."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    baseline: tuple[float, float]
    absent: tuple[str, ...]
    """Variants without a place."""


def front(comparison: Comparison) -> Front | None:
    """Ratios to the baseline, which is at 1 and 1. What is not trusted has no place; None if that is all."""
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
            number, each.variant, words.percent(each.test_accuracy_mean_fraction), across.at(x), _down(along, y),
            _ends(speed, across.at), _ends(memory, lambda value: _down(along, value)), each.on_front,
        )
        for (number, each, speed, memory), (x, y) in zip(placed, estimates, strict=True)
    )  # fmt: skip
    best = [estimates[index] for index in stats.pareto_front(estimates, [True, False])]
    numbers = "; ".join(
        f"{point.number} {point.variant}: {words.times(x)} the throughput at {words.times(y)} the memory with "
        f"{point.accuracy}{', on the front' if point.on_front else ''}"
        for point, (x, y) in zip(points, estimates, strict=True)
    )
    return Front(
        "Throughput against memory",
        f"Scatter chart, relative to {comparison.baseline}. Further right is faster, lower needs less. {numbers}.",
        points,
        tuple(_staircase([(across.at(x), _down(along, y)) for x, y in sorted(set(best))])),
        across.ticks(_plain),
        tuple(Tick(round(100 - at, 2), label) for at, label in along.ticks(_plain)),
        (across.at(1), _down(along, 1)),
        tuple(each.variant for each in comparison.variants if each.variant not in {point.variant for point in points}),
    )


def _estimates(speed: Ratio | None, memory: Ratio | None) -> tuple[float, float]:
    return (speed and speed.estimate) or 1.0, (memory and memory.estimate) or 1.0


def _ratio_scale(ratios: Iterable[Ratio | None]) -> Scale:
    known = [1 / 1.05, 1.05]
    for ratio in ratios:
        if ratio:
            known += [value for value in (ratio.estimate, ratio.low, ratio.high) if value is not None]
    return _padded(known, 0.1, logarithmic=True)


def _down(scale: Scale, value: float) -> float:
    return round(100 - scale.at(value), 2)


def _ends(ratio: Ratio | None, at: Callable[[float], float]) -> tuple[float, float] | None:
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return at(ratio.low), at(ratio.high)


def _staircase(best: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float, float, float]]:
    """From the left edge to the top one, through points that go right and up."""
    left = 0.0
    for (x, y), (_, above) in zip(best, [*best[1:], (0.0, 0.0)], strict=True):
        yield left, y, x, y
        yield x, y, x, above
        left = x


# Accuracy and loss over time


class Line(NamedTuple):
    variant: str
    points: str
    """x,y pairs as SVG's polyline takes them."""
    thick: bool
    """The mean over seeds, not one seed."""


class Chart(NamedTuple):
    title: str
    alt: str
    x_label: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    target: Tick | None


def charts(comparison: Comparison, histories: Histories) -> list[Chart]:
    return [_accuracy_chart(comparison, histories), _loss_chart(comparison, histories)]


def _accuracy_chart(comparison: Comparison, histories: Histories) -> Chart:
    runs = {
        each.variant: _runs(
            each, ((row.seed, row.step, row.train_seconds, row.test_accuracy) for row in histories[each.variant])
        )
        for each in comparison.variants
    }
    ends = "; ".join(
        f"{each.variant} ends at {words.percent(each.test_accuracy_mean_fraction)} after "
        f"{words.number(each.train_seconds, 's')}"
        for each in comparison.variants
    )
    target = comparison.target_accuracy_fraction
    heights = [target, *(y for lines in runs.values() for line in lines for _, _, y in line)]
    low, high = min(heights), max(heights)
    padding = max(0.06 * (high - low), 0.002)
    y_scale = Scale(low - padding, high + padding)
    return _chart(
        "Test accuracy over training time", "training seconds, without evaluation", runs, y_scale,
        f"Line chart, one thin line a seed and a thick mean. {ends}.",
        lambda value, decimals: f"{100 * value:.{max(0, decimals - 2)}f}%",
        Tick(_down(y_scale, target), f"target {words.target(comparison)}"),
    )  # fmt: skip


def _loss_chart(comparison: Comparison, histories: Histories) -> Chart:
    runs = {
        each.variant: _runs(each, ((row.seed, row.step, row.epoch, row.train_loss) for row in histories[each.variant]))
        for each in comparison.variants
    }
    ends = "; ".join(
        f"{each.variant} ends at {statistics.fmean(run.train_loss for run in each.runs):.3f}"
        for each in comparison.variants
    )
    highest = max((y for lines in runs.values() for line in lines for _, _, y in line), default=1.0)
    return _chart(
        "Training loss", "epochs", runs, Scale(0, 1.04 * highest or 1.0),
        f"Line chart, one thin line a seed and a thick mean. {ends}.", _plain, None,
    )  # fmt: skip


_Run = list[tuple[int, float, float]]
"""Steps with their x and y."""


def _runs(each: Compared, rows: Iterable[tuple[int, int, float, float | None]]) -> list[_Run]:
    """One line a seed of the result, from rows of (seed, step, x, y)."""
    lines: dict[int, _Run] = {run.seed: [] for run in each.runs}
    for seed, step, x, y in rows:
        if seed in lines and y is not None and math.isfinite(y):
            lines[seed].append((step, x, y))
    return list(lines.values())


def _chart(
    title: str,
    x_label: str,
    runs: Mapping[str, Sequence[_Run]],
    y_scale: Scale,
    alt: str,
    y_tick: Callable[[float, int], str],
    target: Tick | None,
) -> Chart:
    furthest = max((x for lines in runs.values() for line in lines for _, x, _ in line), default=1.0)
    x_scale = Scale(0, 1.01 * furthest or 1.0)

    def polyline(line: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{x_scale.at(x):g},{_down(y_scale, y):g}" for x, y in line)

    drawn = []
    for variant, lines in runs.items():
        drawn += [Line(variant, polyline((x, y) for _, x, y in line), thick=False) for line in lines if len(lines) > 1]
        drawn.append(Line(variant, polyline(_mean(lines)), thick=True))
    return Chart(
        title, alt, x_label, tuple(drawn), x_scale.ticks(_plain),
        tuple(Tick(round(100 - at, 2), label) for at, label in y_scale.ticks(y_tick)), target,
    )  # fmt: skip


def _mean(lines: Sequence[_Run]) -> list[tuple[float, float]]:
    """Means of x and y at the steps that all lines have."""
    known = [{step: (x, y) for step, x, y in line} for line in lines]
    shared = sorted(set.intersection(*(set(line) for line in known)))
    return [
        (statistics.fmean(line[step][0] for line in known), statistics.fmean(line[step][1] for line in known))
        for step in shared
    ]


# Every sample


class Dot(NamedTuple):
    x: float
    y: float
    refused: bool
    title: str


class Strip(NamedTuple):
    label: str
    value: str
    """The median of what was not refused."""
    dots: tuple[Dot, ...]


class Strips(NamedTuple):
    title: str
    alt: str
    range: str
    """What the height of a strip stands for."""
    strips: tuple[Strip, ...]


FURTHEST = 1.5
"""Samples further than this from their arm's median are drawn at the strip's edge, so that they flatten no other."""


def strips(comparison: Comparison) -> list[Strips]:
    """Throughput and peak memory of every sample of every arm in the order of the rounds."""
    arms = comparison.bench.arms
    return [
        _strips("Throughput of every sample", arms, "samples_per_second", lambda v: words.number(v, "samples/s")),
        _strips("Peak memory of every sample", arms, "peak_memory_bytes", words.size),
    ]


def _strips(title: str, arms: Sequence[Arm], field: str, shown: Callable[[float | None], str]) -> Strips:
    values = [[getattr(sample, field) for sample in arm.samples] for arm in arms]
    medians = [statistics.median(known) if (known := [v for v in arm if v]) else None for arm in values]
    deviations = [
        abs(math.log(value / median))
        for arm, median in zip(values, medians, strict=True)
        if median
        for value in arm
        if value
    ]
    furthest = min(max([*deviations, math.log(1.02)]), math.log(FURTHEST))
    drawn = []
    for arm, each, median in zip(arms, values, medians, strict=True):
        dots = []
        for index, value in enumerate(each):
            x = round(100 * (index + 0.5) / len(each), 2)
            about = f"round {index + 1}: "
            if value and median:
                y = 50 - 40 * max(-1.0, min(1.0, math.log(value / median) / furthest))
                dots.append(Dot(x, round(y, 2), False, about + shown(value)))
            else:
                why = "; ".join(arm.samples[index].refusals) or UNKNOWN
                dots.append(Dot(x, 50, True, f"{about}refused, {why}"))
        drawn.append(Strip(arm.name, shown(median), tuple(dots)))
    counts = "; ".join(
        f"{strip.label}: median {strip.value}, {sum(dot.refused for dot in strip.dots)} of {len(strip.dots)} refused"
        for strip in drawn
    )
    return Strips(
        title, f"Strips of dots, one a round. {counts}.", f"{100 * (math.exp(furthest) - 1):.0f}%",
        tuple(drawn),
    )  # fmt: skip
