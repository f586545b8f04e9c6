"""The tables: the numbers of each variant with their definitions, and the evidence behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

from pipeline import pages
from pipeline.comparison.comparison_file import Compared, Comparison
from pipeline.comparison.stats import Difference
from pipeline.pages import DASH, UNKNOWN, UNTRUSTED
from pipeline.report import facts
from pipeline.results import figures
from pipeline.results.figures import Figure


class Cell(NamedTuple):
    value: str
    beside: tuple[str, ...] = ()
    """Short lines that are shown with the value, such as its ratio to the baseline's value."""
    decision: str = ""
    """The decision on the difference from the baseline; empty if nothing was decided."""


class Column(NamedTuple):
    heading: str
    definition: str
    cell: Callable[[Compared], Cell]


class Row(NamedTuple):
    name: str
    verdict: str | None
    about: str
    """What the row's name stands for, in a few words."""
    cells: tuple[Cell, ...]
    badge: str | None = None
    """The text of the verdict's badge."""


class Table(NamedTuple):
    heading: str
    columns: tuple[tuple[str, str], ...]
    """Pairs of a heading and the definition of the column's numbers."""
    rows: tuple[Row, ...]
    first: str = "Variant"
    """The heading of the rows' names."""


def decided_first(comparison: Comparison) -> Comparison:
    """Return ``comparison`` with its variants in this order: the baseline, those with a decided verdict, the others."""
    baseline, *others = comparison.variants
    ordered = sorted(others, key=lambda compared: compared.verdict in ("undecided", UNTRUSTED))
    return comparison.model_copy(update={"variants": (baseline, *ordered)})


def tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return the tables of all variants, the comparison first; of the others, those in which something is known."""
    columns = {
        figures.COMPARISON: _headline(comparison),
        figures.TIME: _declared(figures.TIME, comparison),
        figures.WORK: [*_work(comparison), *_declared(figures.WORK, comparison)],
    }
    made = [_of_variants(heading, of_table, comparison) for heading, of_table in columns.items()]
    made.append(_by_host(comparison))
    return (made[0], *(known for table in made[1:] if (known := _known(table)).columns))


def _of_variants(heading: str, columns: Sequence[Column], comparison: Comparison) -> Table:
    rows = []
    for compared in comparison.variants:
        cells = tuple(column.cell(compared) for column in columns)
        rows.append(Row(compared.variant, compared.verdict, facts.techniques(compared), cells, compared.badge))
    return Table(heading, tuple((column.heading, column.definition) for column in columns), tuple(rows))


def _by_host(comparison: Comparison) -> Table:
    """Return a table with a row for each host of each variant whose processes are on several hosts."""
    columns = (
        ("Host's peak", "Peak memory of the host: on a CPU the sum of its processes' peaks, on GPUs the largest."),
        ("Host's arithmetic", "Time in which its slowest process computes a step, without input and exchange."),
        ("Host's wait", "Share of the median step for which the host waits for the slowest host."),
    )
    rows = []
    for compared in comparison.variants:
        names = facts.hosts(comparison, compared)
        together = sum if compared.conditions.backend == "gloo" else max
        arithmetic, step = compared.arithmetic_rank_ms, compared.of(figures.STEP_P50)
        for place, host in enumerate(names):
            of_host = slice(*(compared.conditions.world_size // len(names) * end for end in (place, place + 1)))
            peaks, times = compared.peak_memory_rank_bytes[of_host], arithmetic[of_host]
            texts = (
                pages.size(together(peaks)) if peaks else UNKNOWN,
                pages.number(max(times), "ms") if times else UNKNOWN,
                pages.percent((max(arithmetic) - max(times)) / step, 1) if times and step else UNKNOWN,
            )
            rows.append(Row(compared.variant, None, f"on {host}", tuple(map(Cell, texts))))
    return Table("Each host", columns, tuple(rows))


def _known(table: Table) -> Table:
    """Return ``table`` without the columns in which nothing is known of any variant."""
    cells = [*zip(*(row.cells for row in table.rows), strict=True)]
    kept = [any({value, *beside} != {UNKNOWN} for value, beside, _ in column) for column in cells]
    rows = (row._replace(cells=tuple(compress(row.cells, kept))) for row in table.rows)
    return table._replace(columns=tuple(compress(table.columns, kept)), rows=tuple(rows))


def _against(value: str, difference: Difference | None) -> Cell:
    if difference and not difference.margin and not difference.why_untrusted:  # nothing is decided
        return Cell(value, (facts.estimate(difference), facts.interval(difference)))
    return Cell(value, facts.lines(difference), difference.decision if difference else "")


def _declared(table: str, comparison: Comparison) -> list[Column]:
    """Return a column for each heading among the figures of ``table``."""
    columns: dict[str, list[Figure]] = {}
    for figure in figures.FIGURES:
        if figure.table == table and figure.heading and comparison.shown(figure):
            columns.setdefault(figure.heading, []).append(figure)
    counted = facts.counted(comparison)
    return [
        Column(heading, shown[0].definition.format(counted=counted), partial(_cell, comparison, shown))
        for heading, shown in columns.items()
    ]


def _cell(comparison: Comparison, shown: Sequence[Figure], compared: Compared) -> Cell:
    first = shown[0]
    texts = [pages.of_figure(figure, compared.of(figure), comparison.unit) for figure in shown]
    value = UNKNOWN if set(texts) == {UNKNOWN} else " / ".join(texts)
    if first.margin:
        return _against(value, compared.ratios.get(first))
    return Cell(value, _BESIDE[first](compared, comparison) if first in _BESIDE else ())


def _trained(compared: Compared, comparison: Comparison) -> tuple[str, ...]:
    ours, theirs = compared.of(figures.TRAINING), comparison.variants[0].of(figures.TRAINING)
    ratio = () if compared.variant == comparison.baseline else (pages.times(ours / theirs if theirs else None),)
    return (*ratio, *facts.disturbed(compared))


def _retried(compared: Compared, _: Comparison) -> tuple[str, ...]:
    return (f"{retries:,} retried",) if (retries := compared.of(figures.RETRIES)) else ()


def _share_of_peak(compared: Compared, _: Comparison) -> tuple[str, ...]:
    share = compared.of(figures.UTILISATION)
    return (f"{pages.percent(share, 1)} of the peak",) if share else ()


_BESIDE = {figures.TRAINING: _trained, figures.RESERVED: _retried, figures.ACHIEVED: _share_of_peak}
"""Figure -> the lines beside its value."""


def _headline(comparison: Comparison) -> tuple[Column, ...]:
    target = facts.target(comparison)
    on_samples = ", on these test samples" if facts.has_few_samples(comparison) else ""

    def reached(compared: Compared) -> Cell:
        time, ratio = compared.time_to_target, compared.time_to_target_ratio
        if time.samples is None:
            if time.reached_count == len(time.seeds):
                return Cell("before the first evaluation")
            seeds = f"{time.reached_count} of {pages.count(len(time.seeds), 'seed')}"
            return Cell("not by every seed" if time.reached_count else "not reached", (seeds,))
        beside = (facts.estimate(ratio), facts.interval(ratio)) if ratio else ()
        return Cell(pages.number(time.train_seconds, "s"), beside)

    def alongside(compared: Compared) -> Cell:
        equal_time = compared.equal_time
        if equal_time is None:
            return Cell(DASH if compared.variant == comparison.baseline else UNKNOWN)
        time = f"after {pages.number(equal_time.train_seconds, 's')}"
        theirs = f"{comparison.baseline} {pages.percent(equal_time.baseline_accuracy_fraction)}"
        ends = equal_time.difference_low_fraction, equal_time.difference_high_fraction
        points = dict.fromkeys(pages.points(end) for end in ends if end is not None)
        difference = [f"{(pages.JOINED + 'to' + pages.JOINED).join(points)}{pages.JOINED}points"] if points else []
        return Cell(pages.percent(equal_time.accuracy_fraction), (time, theirs, *difference))

    equal_times = Column(
        "At equal time",
        "Only for a variant with another model or a teacher: its score and the baseline's at the time when the faster "
        "of the two trainings ends, by the bench's throughputs, from the last evaluation up to then; mean over seeds. "
        "The difference is given at both ends of the throughputs' interval, because the noise of the speeds can add or "
        "remove an evaluation. The slower training has not finished its learning-rate schedule then. To finish both in "
        "equal time, give it fewer epochs.",
        alongside,
    )
    if not comparison.seeds:
        return (*_declared(figures.COMPARISON, comparison),)
    return (
        *_declared(figures.COMPARISON, comparison),
        Column(
            pages.heading(facts.score(comparison)),
            f"{facts.metric(comparison)} over all test samples after the last epoch, mean over seeds. The "
            "difference from the baseline is paired by seed, in percentage points. Its interval lies inside the "
            f"margins exactly if two one-sided tests show equivalence{on_samples}.",
            lambda compared: _against(facts.accuracy(compared), compared.accuracy),
        ),
        *(_finding(name, direction) for name, direction in comparison.directions.items()),
        Column(
            f"Time to {target}",
            f"Training time, without evaluation and start-up, to the first evaluation with at least {target} "
            f"{facts.score(comparison)}: the samples until then (median over seeds), divided by the bench's "
            "throughput. Known only if every seed reached the target, and most seeds after their first evaluation; "
            "precise to one epoch. The ratio's interval "
            "covers only the throughput's noise.",
            reached,
        ),
        *([equal_times] if any(compared.equal_time for compared in comparison.variants) else []),
    )


def _finding(name: str, direction: str) -> Column:
    return Column(
        pages.heading(name.replace("_", " ")),
        f"A figure of the task, mean over seeds; {direction}. It does not count for the verdict.",
        lambda compared: Cell(pages.number(compared.findings.get(name))),
    )


def _work(comparison: Comparison) -> tuple[Column, ...]:
    def tensors(compared: Compared) -> Cell:
        ledgers, error = comparison.bench.ledgers.get(compared.variant), compared.of(figures.PREDICTION_ERROR)
        beside: tuple[str, ...] = ()
        if ledgers and ledgers.predicted and error is not None:
            predicted = pages.size(ledgers.predicted.peak_bytes)
            beside = (f"predicted {predicted}, {100 * error:+.1f}%".replace("-", pages.MINUS),)
        return Cell(pages.size(ledgers.measured.tensors_bytes if ledgers else None), beside)

    def flops(compared: Compared) -> Cell:
        counted = comparison.bench.flops.get(compared.variant)
        if counted is None:
            return Cell(UNKNOWN)
        model, executed = counted.model_per_sample, counted.executed_per_sample
        beside = (f"{pages.times(executed / model)} executed",) if executed > model > 0 else ()
        return Cell(pages.scaled(model, "FLOP"), beside)

    processes = Column(
        "Peak of each process",
        "Peak memory by process; medians over rounds. On a CPU the sum of the peaks counts, on GPUs the largest peak.",
        lambda compared: Cell(" / ".join(map(pages.size, compared.peak_memory_rank_bytes)) or UNKNOWN),
    )
    return (
        *([processes] if any(compared.conditions.world_size > 1 for compared in comparison.variants) else []),
        Column(
            "Tensors",
            "Memory of the tensors at the largest process's measured peak, as the allocator counts it. On a GPU this "
            "is the peak itself; on a CPU the peak also includes free blocks that the allocator keeps. Predicted: the "
            "same memory from fake tensors, without running the job on a device.",
            tensors,
        ),
        Column(
            "Arithmetic a sample",
            "Floating-point operations of one forward and one backward pass, counted for matrix products, convolutions "
            "and attention; a multiplication and an addition count as two. Executed: including recomputation.",
            flops,
        ),
    )


def shares(comparison: Comparison) -> Table:
    """Return a table of the effect of each single technique in the ablated variants."""
    columns = ("Throughput, added", "Throughput, in the stack", "Memory, added", "Memory, in the stack")
    rows = []
    for share in comparison.shares:
        ratios = (share.added_throughput, share.stacked_throughput, share.added_memory, share.stacked_memory)
        texts = [*map(facts.lines, ratios), facts.share_accuracy(share)]
        cells = tuple(Cell(lines[0], lines[1:]) if lines else Cell(DASH) for lines in texts)
        rows.append(Row(share.technique, share.verdict, f"in {share.variant}", cells, share.verdict))
    headings = tuple((column, "") for column in (*columns, "Accuracy, added"))
    return Table("Each technique's own share", headings, tuple(rows), "Technique")
