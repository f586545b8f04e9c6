"""The comparison as files: JSON for programs, Markdown for a pull request, one HTML page for a person, and
what ``dvc metrics`` and ``dvc plots`` read.

The same comparison gives the same bytes. The page needs nothing but itself: no network, no script.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipeline.comparison import AccuracyDifference, Compared, Comparison
from pipeline.results import HistoryRow, write_text

REPORTS = Path("reports")
TEMPLATE = Path(__file__).with_name("report.html")

MINUS, TIMES, DASH, JOINED = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{NO-BREAK SPACE}"
UNKNOWN = "unknown"

CAVEAT = (
    "These ratios are descriptive. Each variant was trained once a seed, one variant after the other on one machine, "
    "so its state at the time is part of every number. Nothing here says that a difference is significant, and there "
    "are no verdicts."
)

Histories = Mapping[str, Sequence[HistoryRow]]


def write(comparison: Comparison, histories: Histories, directory: Path = REPORTS) -> None:
    """Write the whole report into ``directory``.

    ``comparison.{json,md,html}``; ``metrics/<variant>.json``, a row of ``dvc metrics show`` each; ``accuracy.csv`` and
    ``loss.csv``, the data of ``dvc plots show``. Metrics of variants that are no longer compared are removed.
    """
    write_text(directory / "comparison.json", comparison.to_json())
    write_text(directory / "comparison.md", markdown(comparison))
    write_text(directory / "comparison.html", html(comparison, histories))
    write_text(directory / "accuracy.csv", accuracy_csv(comparison, histories))
    write_text(directory / "loss.csv", loss_csv(comparison, histories))
    files = {directory / "metrics" / f"{quote(each.variant, safe='')}.json": each for each in comparison.variants}
    for stale in set((directory / "metrics").glob("*.json")) - files.keys():
        stale.unlink()
    for file, each in files.items():
        write_text(file, json.dumps(metrics(each), indent=2, allow_nan=False) + "\n")


# Numbers in words


def _number(value: float | None, unit: str, digits: int = 3) -> str:
    """``value`` with at least ``digits`` significant digits and its unit."""
    if value is None:
        return UNKNOWN
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    return f"{value:,.{max(0, digits - magnitude)}f}{JOINED if unit else ''}{unit}"


def _bytes(value: int | None) -> str:
    if value is None:
        return UNKNOWN
    return _number(value / 2**30, "GiB") if value >= 2**30 else _number(value / 2**20, "MiB")


def _percent(fraction: float | None, decimals: int = 2) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.{decimals}f}{JOINED}%"


def _target(comparison: Comparison) -> str:
    return f"{100 * comparison.target_accuracy_fraction:g}{JOINED}%"


def _points(fraction: float | None) -> str:
    """A difference in percentage points, with its sign; one that rounds to zero has none."""
    if fraction is None:
        return UNKNOWN
    text = f"{100 * fraction:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", MINUS)


def _times(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{ratio:.2f}{TIMES}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def _flat(values: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings and lists of them as dotted keys with their values as text."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return rows


def _spread(difference: AccuracyDifference) -> tuple[str, ...]:
    """The mean difference and, of several seeds, how theirs lie about it."""
    mean = _points(difference.mean_fraction)
    if difference.spread_fraction is None:
        return (f"{mean} points",)
    low, high = _points(difference.min_fraction), _points(difference.max_fraction)
    return f"{mean} \N{PLUS-MINUS SIGN} {100 * difference.spread_fraction:.2f} points", f"({low} to {high})"


# What the report says of a variant


class Cell(NamedTuple):
    value: str
    beside: tuple[str, ...] = ()
    """The value against the baseline's, in short lines; empty for the baseline."""


class Column(NamedTuple):
    """One number of a variant: its heading, its one definition, and its cell."""

    heading: str
    definition: str
    cell: Callable[[Compared], Cell]


def _headline_columns(comparison: Comparison) -> tuple[Column, ...]:
    target = _target(comparison)

    def beside(each: Compared, ratio: float | None) -> tuple[str, ...]:
        return () if each.variant == comparison.baseline else (_times(ratio),)

    def accuracy(each: Compared) -> Cell:
        difference = each.accuracy_difference
        if difference is None:
            return Cell(_percent(each.test_accuracy_mean_fraction))
        return Cell(_percent(each.test_accuracy_mean_fraction), _spread(difference))

    def reached(each: Compared) -> Cell:
        time = each.time_to_target
        if time.train_seconds is None:
            seeds = f"{time.reached_count} of {_count(len(time.seeds), 'seed')}"
            return Cell("not by every seed" if time.reached_count else "not reached", (seeds,))
        return Cell(_number(time.train_seconds, "s"), beside(each, each.time_to_target_ratio))

    return (
        Column(
            "Throughput",
            "Samples of the global batch over wall seconds of the slowest process, in the measured window after the "
            "warm-up steps; median over seeds.",
            lambda each: Cell(_number(each.samples_per_second, "samples/s"), beside(each, each.throughput_ratio)),
        ),
        Column(
            "Peak memory",
            "Of the largest process, largest over seeds. On a GPU: the most bytes PyTorch had allocated. "
            "On a CPU: the peak resident set above what the process held after its imports.",
            lambda each: Cell(_bytes(each.peak_memory_bytes), beside(each, each.peak_memory_ratio)),
        ),
        Column(
            "Test accuracy",
            "Correct over all test samples after the last epoch, mean over seeds. The difference is taken seed by "
            "seed, in percentage points: mean \N{PLUS-MINUS SIGN} sample standard deviation (smallest to largest).",
            accuracy,
        ),
        Column(
            f"Time to {target}",
            f"Training time, without evaluation, at the first evaluation of at least {target} test accuracy; median "
            "over seeds, given only if every seed reached it. Evaluations are an epoch apart, so it is as coarse.",
            reached,
        ),
    )


def _time_columns(comparison: Comparison) -> tuple[Column, ...]:
    def steps(each: Compared) -> Cell:
        parts = [_number(value, "") for value in (each.step_p50_ms, each.step_p90_ms, each.step_p99_ms)]
        return Cell(UNKNOWN if set(parts) == {UNKNOWN} else f"{' / '.join(parts)} ms")

    def training(each: Compared) -> Cell:
        beside = () if each.variant == comparison.baseline else (_times(each.train_time_ratio),)
        return Cell(_number(each.train_seconds, "s"), beside)

    return (
        Column(
            "Step p50 / p90 / p99",
            "Percentiles of the time of one optimizer step in the measured window; medians over seeds.",
            steps,
        ),
        Column(
            "Input wait",
            "Share of the measured window that the process that waited longest spent waiting for input; median over "
            "seeds.",
            lambda each: Cell(_percent(each.input_wait_fraction, 1)),
        ),
        Column(
            "Training",
            "Wall time of all training steps, the first and the warm-up steps included, without evaluation; median "
            "over seeds.",
            training,
        ),
        Column(
            "Cold start",
            "From the start of the process to its first step; of the first seed, as later seeds start warm.",
            lambda each: Cell(_number(each.startup_seconds, "s")),
        ),
        Column(
            "First step",
            "The first step, with compilation, autotuning and allocation; of the first seed. It is in no throughput.",
            lambda each: Cell(_number(each.first_step_seconds, "s")),
        ),
    )


def metrics(each: Compared) -> dict[str, float | int | None]:
    """One variant in the numbers that ``dvc metrics show`` and ``diff`` print. DVC leaves out unknown ones."""
    difference = each.accuracy_difference
    return {
        "samples_per_second": each.samples_per_second,
        "throughput_ratio": each.throughput_ratio,
        "step_p50_ms": each.step_p50_ms,
        "peak_memory_bytes": each.peak_memory_bytes,
        "peak_memory_ratio": each.peak_memory_ratio,
        "test_accuracy_mean_fraction": each.test_accuracy_mean_fraction,
        "accuracy_difference_mean_fraction": difference.mean_fraction if difference else None,
        "train_seconds": each.train_seconds,
        "time_to_target_seconds": each.time_to_target.train_seconds,
    }


def sentence(each: Compared, comparison: Comparison) -> str:
    """One variant in plain words, with its numbers."""
    base = comparison.variants[0]
    target, seeds = _target(comparison), _count(len(each.runs), "seed")
    where = " (its largest process)" if each.world_size > 1 else ""
    time, reference = each.time_to_target, base.time_to_target
    if time.train_seconds is not None:
        arrival = f"Reaches {target} after {_number(time.train_seconds, 's')} of training"
    elif time.reached_count:
        arrival = f"Reaches {target} with {time.reached_count} of {seeds} only"
    else:
        arrival = f"Does not reach {target}"
    difference = each.accuracy_difference
    if difference is None:
        return (
            f"The reference. Trains at {_number(each.samples_per_second, 'samples/s')} with a peak memory of "
            f"{_bytes(each.peak_memory_bytes)}{where}. Test accuracy is {_percent(each.test_accuracy_mean_fraction)} "
            f"(mean of {seeds}). {arrival}."
        )

    speeds = f"{_number(each.samples_per_second, '')} against {_number(base.samples_per_second, 'samples/s')}"
    sizes = f"{_bytes(each.peak_memory_bytes)} against {_bytes(base.peak_memory_bytes)}"
    if each.throughput_ratio is None:
        speed = f"Its throughput beside {base.variant} is unknown ({speeds})"
    else:
        speed = f"Trains {each.throughput_ratio:.2f} times as fast as {base.variant} ({speeds})"
    if each.peak_memory_ratio is None:
        memory = f"Its peak memory{where} beside {base.variant} is unknown ({sizes})"
    else:
        memory = f"Peak memory{where} is {each.peak_memory_ratio:.2f} times as large ({sizes})"
    mean = f"{_points(difference.mean_fraction)}{JOINED}points"
    low, high = _points(difference.min_fraction), _points(difference.max_fraction)
    spread = f"mean of {seeds}, from {low} to {high}" if len(each.runs) > 1 else f"a single {seeds[2:]}"
    accuracy = f"Test accuracy differs by {mean} ({spread})"
    if reference.train_seconds is not None:
        arrival += f", {base.variant} after {_number(reference.train_seconds, 's')}"
    elif time.train_seconds is not None:
        arrival += f", {base.variant} not with every seed"
    return f"{speed}. {memory}. {accuracy}. {arrival}."


def notes(comparison: Comparison) -> list[tuple[str, str]]:
    """(variant, what a reader of its numbers must know): left-out techniques, refused numbers, resumed runs."""
    found = []
    for each in comparison.variants:
        found += [
            (each.variant, f"Left out: {name}, as {reason.rstrip('.')}.") for name, reason in each.left_out.items()
        ]
        reasons = dict.fromkeys(reason for run in each.runs for reason in run.refusals)
        for reason in reasons:
            seeds = [str(run.seed) for run in each.runs if reason in run.refusals]
            found.append((each.variant, f"Refused, seed {', '.join(seeds)}: {reason.rstrip('.')}."))
        resumed = [str(run.seed) for run in each.runs if run.resumes]
        if resumed:
            found.append((each.variant, f"Interrupted and resumed: seed {', '.join(resumed)}."))
    return found


def _setup(each: Compared) -> str:
    backend = f" over {each.backend}" if each.backend else ""
    return f"{_count(each.world_size, 'process')}{backend}"


def _job(comparison: Comparison) -> list[str]:
    train, data = comparison.train, comparison.dataset
    parts = [
        comparison.device,
        _count(comparison.parameter_count, "parameter"),
        f"{data.train_count:,} training and {data.test_count:,} test images",
    ]
    if "epochs" in train:
        parts.append(_count(train["epochs"], "epoch"))
    if "batch_size" in train:
        parts.append(f"global batch {train['batch_size']}")
    return [*parts, f"seed{'s' if len(comparison.seeds) > 1 else ''} {', '.join(map(str, comparison.seeds))}"]


def _title(comparison: Comparison) -> str:
    return f"{comparison.train.get('model', 'model')} on {comparison.dataset.name}"


# Markdown


def markdown(comparison: Comparison) -> str:
    """The comparison for a pull request: a table, what to know about it, and a second table to unfold."""
    headline, times = _headline_columns(comparison), _time_columns(comparison)
    lines = [f"### {_escaped(_title(comparison))}: {_count(len(comparison.variants), 'variant')} compared", ""]
    lines += [_escaped(", ".join(_job(comparison))) + ".", ""]
    lines += _markdown_table(comparison, headline)
    known = notes(comparison)
    if known:
        lines += ["", *(f"- **{_escaped(variant)}**: {_escaped(text)}" for variant, text in known)]
    lines += ["", f"_{CAVEAT}_", "", "<details><summary>Where the time goes, and what each number is</summary>", ""]
    lines += _markdown_table(comparison, times)
    lines += ["", *(f"- **{column.heading}**: {column.definition}" for column in (*headline, *times))]
    return "\n".join([*lines, "", "</details>", ""])


def _markdown_table(comparison: Comparison, columns: Sequence[Column]) -> list[str]:
    rows = []
    for each in comparison.variants:
        name = f"**{_escaped(each.variant)}**<br>{_escaped(', '.join(each.techniques) or 'no technique')}"
        cells = [column.cell(each) for column in columns]
        rows.append([name, *("<br>".join((cell.value, *cell.beside)) for cell in cells)])
    heading = ["Variant", *(column.heading for column in columns)]
    lines = [heading, [":--", *("--:" for _ in columns)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _escaped(text: str) -> str:
    """``text`` without a meaning in Markdown or HTML, on one line."""
    shown = " ".join(text.split())
    shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|#~!])", r"\\\1", shown)


# HTML


def html(comparison: Comparison, histories: Histories) -> str:
    """The page, whole: style and pictures are inside."""
    columns = (*_headline_columns(comparison), *_time_columns(comparison))
    page = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(TEMPLATE.read_text(encoding="utf-8"))
    style = {each.variant: _style(index) for index, each in enumerate(comparison.variants)}
    return page.render(
        comparison=comparison,
        title=_title(comparison),
        count=_count(len(comparison.variants), "variant"),
        job=_job(comparison),
        caveat=CAVEAT,
        target=_target(comparison),
        answers=[
            {
                "each": each,
                "setup": _setup(each),
                "sentence": sentence(each, comparison),
                "figures": _figures(each),
                "notes": [text for variant, text in notes(comparison) if variant == each.variant],
                "style": style[each.variant],
            }
            for each in comparison.variants
        ],
        tables=[
            ("The comparison", _headline_columns(comparison)),
            ("Where the time goes", _time_columns(comparison)),
        ],
        pictures=_pictures(comparison, histories),
        notes=notes(comparison),
        run_rows=[row for each in comparison.variants for row in _run_rows(each)],
        environment=_flat(comparison.environment),
        train=_flat(comparison.train),
        dataset=_flat(comparison.dataset.model_dump()),
        columns=columns,
        setup=_setup,
    )


def _figures(each: Compared) -> list[tuple[str, str]]:
    """The few (number, label) that a reader looks for first."""
    difference = each.accuracy_difference
    if difference is None:
        return [
            (_number(each.samples_per_second, ""), "samples/s"),
            (_bytes(each.peak_memory_bytes), "peak memory"),
            (_percent(each.test_accuracy_mean_fraction), "test accuracy"),
        ]
    return [
        (_times(each.throughput_ratio), "throughput"),
        (_times(each.peak_memory_ratio), "peak memory"),
        (_points(difference.mean_fraction), "accuracy points"),
    ]


def _run_rows(each: Compared) -> list[list[str]]:
    """One row a seed, in the order of the page's headings."""
    paired = each.accuracy_difference.seeds if each.accuracy_difference else ()
    differences = {item.seed: item.difference_fraction for item in paired}
    targets = {item.seed: item.train_seconds for item in each.time_to_target.seeds}
    return [
        [
            each.variant,
            str(run.seed),
            f"{run.test_correct:,} of {run.test_count:,}",
            _points(differences[run.seed]) if run.seed in differences else DASH,
            _number(run.samples_per_second, ""),
            _number(run.step_p50_ms, "ms"),
            _bytes(run.peak_memory_bytes),
            _number(run.train_seconds, "s"),
            "not reached" if (time := targets[run.seed]) is None else _number(time, "s"),
            run.model_sha256[:12],
        ]
        for run in each.runs
    ]


# Data for DVC


def accuracy_csv(comparison: Comparison, histories: Histories) -> str:
    """One row an evaluation, all variants and seeds; no blank field."""
    return _csv(
        ("variant", "seed", "epoch", "step", "train_seconds", "test_accuracy"),
        (
            (each.variant, row.seed, row.epoch, row.step, row.train_seconds, row.test_accuracy)
            for each in comparison.variants
            for row in histories[each.variant]
            if row.test_accuracy is not None
        ),
    )


def loss_csv(comparison: Comparison, histories: Histories) -> str:
    """One row of training loss for each row of history, all variants and seeds; no blank field."""
    return _csv(
        ("variant", "seed", "epoch", "step", "train_seconds", "train_loss"),
        (
            (each.variant, row.seed, row.epoch, row.step, row.train_seconds, row.train_loss)
            for each in comparison.variants
            for row in histories[each.variant]
        ),
    )


def _csv(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(rows)
    return text.getvalue()


# Pictures


class Scheme(NamedTuple):
    """Colours of one rendering. The hues are Okabe and Ito's, told apart with any colour vision, made darker or
    lighter for contrast; lines and markers differ too."""

    ink: str
    faint: str
    variants: tuple[str, ...]


LIGHT = Scheme("#1f2430", "#d5d8de", ("#4a4f5c", "#0067a8", "#c24e00", "#007d5c", "#a8478a", "#8a6d00"))
DARK = Scheme("#e8eaf0", "#3c4252", ("#b9bfcc", "#5ab9f0", "#ff9248", "#26c79a", "#ee9fd0", "#f0dc50"))
LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

RENDERING: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "comparison",  # otherwise ids in the file are random
    "text.parse_math": False,  # a dollar sign in a variant's name is a dollar sign
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class Style(NamedTuple):
    light: str
    dark: str
    line: Any
    marker: str


def _style(index: int) -> Style:
    colour = index % len(LIGHT.variants)
    return Style(
        LIGHT.variants[colour], DARK.variants[colour], LINES[index % len(LINES)], MARKERS[index % len(MARKERS)]
    )


class Picture(NamedTuple):
    title: str
    alt: str
    light: str
    """The picture as a data: address, for light schemes and paper."""
    dark: str
    width: int
    """CSS pixels at which its text has the size that was meant."""
    height: int


def _pictures(comparison: Comparison, histories: Histories) -> list[Picture]:
    drawn: list[tuple[str, str, Callable[[Axes, Scheme], None]]] = [
        (
            "Test accuracy against training time",
            _alt_accuracy(comparison),
            lambda axes, scheme: _draw_accuracy(axes, scheme, comparison, histories),
        ),
        (
            "Training loss",
            _alt_loss(comparison),
            lambda axes, scheme: _draw_loss(axes, scheme, comparison, histories),
        ),
    ]
    if any(each.samples_per_second and each.peak_memory_bytes for each in comparison.variants):
        drawn.append(
            (
                "Throughput and memory",
                _alt_scatter(comparison),
                lambda axes, scheme: _draw_scatter(axes, scheme, comparison),
            )
        )
    names = [_short(each.variant) for each in comparison.variants]
    across = max(1, min(3, 45 // (max(map(len, names)) + 5)))
    size = (3.8, 2.9 + 0.18 * math.ceil(len(names) / across))
    return [
        Picture(
            title,
            alt,
            _rendered(draw, LIGHT, size, across),
            _rendered(draw, DARK, size, across),
            *(round(96 * inches) for inches in size),
        )
        for title, alt, draw in drawn
    ]


def _rendered(draw: Callable[[Axes, Scheme], None], scheme: Scheme, size: tuple[float, float], across: int) -> str:
    """A data: address of the picture, on a transparent ground. It is as wide as a phone, so its text stays legible.

    ``size`` is in inches; ``across`` is how many names stand side by side in the legend.
    """
    colours: dict[Any, Any] = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), scheme.ink),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), scheme.faint),
    }
    with mpl.rc_context({**RENDERING, **colours}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        draw(axes, scheme)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=across, frameon=False, handlelength=2.6)
        file = io.BytesIO()
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def _draw_accuracy(axes: Axes, scheme: Scheme, comparison: Comparison, histories: Histories) -> None:
    target = comparison.target_accuracy_fraction
    axes.axhline(target, color=scheme.ink, linewidth=0.8, linestyle=(0, (1, 3)))
    axes.annotate(
        f"target {_target(comparison)}", (1, target), xycoords=("axes fraction", "data"), xytext=(0, 2),
        textcoords="offset points", ha="right", va="bottom", fontsize=8,
    )  # fmt: skip
    for index, each in enumerate(comparison.variants):
        points = [
            (row.seed, row.step, row.train_seconds, row.test_accuracy)
            for row in histories[each.variant]
            if row.test_accuracy is not None
        ]
        _draw_runs(axes, scheme, index, each, points, marked=True)
    axes.set_xlabel("training time (s), without evaluation")
    axes.set_ylabel("test accuracy")
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}{JOINED}%"))


def _draw_loss(axes: Axes, scheme: Scheme, comparison: Comparison, histories: Histories) -> None:
    for index, each in enumerate(comparison.variants):
        points = [(row.seed, row.step, row.epoch, row.train_loss) for row in histories[each.variant]]
        _draw_runs(axes, scheme, index, each, points)
    axes.set_xlabel("epochs")
    axes.set_ylabel("training loss")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _draw_runs(
    axes: Axes,
    scheme: Scheme,
    index: int,
    each: Compared,
    points: Iterable[tuple[int, int, float, float]],
    marked: bool = False,
) -> None:
    """Draw ``points`` (seed, step, x, y): a thin line a seed, and a thick one through the means at the steps that all
    seeds have."""
    style, colour = _style(index), scheme.variants[index % len(scheme.variants)]
    lines: dict[int, dict[int, tuple[float, float]]] = {run.seed: {} for run in each.runs}
    for seed, step, x, y in points:
        if seed in lines:
            lines[seed][step] = (x, y)
    for line in lines.values():
        axes.plot(*zip(*line.values(), strict=True), color=colour, linewidth=0.7, alpha=0.7)
    shared = set.intersection(*(set(line) for line in lines.values()))
    means = [
        [statistics.fmean(values) for values in zip(*(line[step] for line in lines.values()), strict=True)]
        for step in sorted(shared)
    ]
    axes.plot(
        *(zip(*means, strict=True) if means else ((), ())), color=colour, linewidth=2.2, linestyle=style.line,
        marker=style.marker if marked else "", markersize=5, markevery=math.ceil((len(means) + 1) / 10),
        label=_short(each.variant),
    )  # fmt: skip


def _draw_scatter(axes: Axes, scheme: Scheme, comparison: Comparison) -> None:
    for index, each in enumerate(comparison.variants):
        if each.samples_per_second is None or each.peak_memory_bytes is None:
            continue
        colour, marker = scheme.variants[index % len(scheme.variants)], MARKERS[index % len(MARKERS)]
        axes.plot(
            each.samples_per_second, each.peak_memory_bytes / 2**20, color=colour, marker=marker, markersize=11,
            alpha=0.5, markeredgewidth=0, linestyle="", label=_short(each.variant),
        )  # fmt: skip
        runs = [(run.samples_per_second, (run.peak_memory_bytes or 0) / 2**20) for run in each.runs]
        axes.plot(*zip(*runs, strict=True), color=colour, marker=marker, markersize=3, linestyle="")
    axes.set_xlim(0, 1.08 * axes.get_xlim()[1])
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_xlabel("throughput (samples/s)")
    axes.set_ylabel("peak memory (MiB)")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _short(name: str) -> str:
    return name if len(name) <= 28 else name[:27] + "\N{HORIZONTAL ELLIPSIS}"


def _alt_accuracy(comparison: Comparison) -> str:
    ends = "; ".join(
        f"{each.variant} ends at {_percent(each.test_accuracy_mean_fraction)} after {_number(each.train_seconds, 's')}"
        for each in comparison.variants
    )
    return f"Line chart of test accuracy against training time, one thin line a seed and a thick mean. {ends}."


def _alt_loss(comparison: Comparison) -> str:
    ends = "; ".join(
        f"{each.variant} ends at {statistics.fmean(run.train_loss for run in each.runs):.3f}"
        for each in comparison.variants
    )
    return f"Line chart of training loss against epochs, one thin line a seed and a thick mean. {ends}."


def _alt_scatter(comparison: Comparison) -> str:
    points = "; ".join(
        f"{each.variant}: {_number(each.samples_per_second, 'samples/s')} at {_bytes(each.peak_memory_bytes)}"
        for each in comparison.variants
    )
    return (
        "Scatter chart of peak memory against throughput, a small mark a seed; further right is faster, lower needs "
        f"less. {points}."
    )
