"""The tables: the numbers of each variant with their definitions, and the evidence behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeline.comparison.comparison_file import Compared, Comparison
from pipeline.comparison.verdicts import Accuracy, Ratio
from pipeline.report import formats, sentences
from pipeline.report.formats import DASH, UNKNOWN, UNTRUSTED


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


class Table(NamedTuple):
    heading: str
    columns: tuple[tuple[str, str], ...]
    """Pairs of a heading and the definition of the column's numbers."""
    rows: tuple[Row, ...]
    first: str = "Variant"
    """The heading of the rows' names."""


class Grid(NamedTuple):
    """A table of plain texts."""

    heading: str
    rows: Sequence[tuple[str, ...]]
    """The first row holds the columns' headings. The first text of each other row is the row's name."""
    words: tuple[int, ...] = ()
    """Columns of words, which the page aligns left."""


def decided_first(comparison: Comparison) -> Comparison:
    """Return ``comparison`` with its variants in this order: the baseline, those with a decided verdict, the others."""
    baseline, *others = comparison.variants
    ordered = sorted(others, key=lambda each: each.verdict in ("undecided", UNTRUSTED))
    return comparison.model_copy(update={"variants": (baseline, *ordered)})


def tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return the tables of all variants, the comparison first."""
    found = {
        "The comparison": _headline(comparison),
        "Where the time goes": _time(comparison),
        "Memory and arithmetic": _work(comparison),
    }
    return tuple(_of_variants(heading, columns, comparison) for heading, columns in found.items())


def _of_variants(heading: str, columns: Sequence[Column], comparison: Comparison) -> Table:
    rows = [
        Row(each.variant, each.verdict, sentences.techniques(each), tuple(column.cell(each) for column in columns))
        for each in comparison.variants
    ]
    return Table(heading, tuple((column.heading, column.definition) for column in columns), tuple(rows))


def _against(value: str, difference: Ratio | Accuracy | None) -> Cell:
    if isinstance(difference, Ratio) and not difference.margin and not difference.why_untrusted:  # nothing is decided
        return Cell(value, (formats.estimate(difference), formats.interval(difference)))
    return Cell(value, formats.lines(difference), difference.decision if difference else "")


def _headline(comparison: Comparison) -> tuple[Column, ...]:
    target = sentences.target(comparison)
    few = ", on these test samples" if comparison.dataset.test_count < sentences.FEW_TEST_SAMPLES else ""

    def reached(each: Compared) -> Cell:
        time, ratio = each.time_to_target, each.time_to_target_ratio
        if time.samples is None:
            if time.reached_count == len(time.seeds):
                return Cell("before the first evaluation")
            seeds = f"{time.reached_count} of {formats.count(len(time.seeds), 'seed')}"
            return Cell("not by every seed" if time.reached_count else "not reached", (seeds,))
        beside = (formats.times(ratio.estimate), formats.ends(ratio.low, ratio.high)) if ratio else ()
        return Cell(formats.number(time.train_seconds, "s"), beside)

    def alongside(each: Compared) -> Cell:
        found = each.equal_time
        if found is None:
            return Cell(DASH if each.variant == comparison.baseline else UNKNOWN)
        time = f"after {formats.number(found.train_seconds, 's')}"
        theirs = f"{comparison.baseline} {formats.percent(found.baseline_accuracy_fraction)}"
        return Cell(formats.percent(found.accuracy_fraction), (time, theirs))

    equal_times = Column(
        "At equal time",
        "Only for a variant with another model or a teacher: its score and the baseline's at the time when the faster "
        "of the two trainings ends, by the bench's throughputs, from the last evaluation up to then; mean over seeds. "
        "Known only if the ratio of the throughputs is decided. The slower training has not finished its learning-rate "
        "schedule then. To finish both in equal time, give it "
        "fewer epochs.",
        alongside,
    )
    energies = Column(
        "Energy a sample",
        "Energy of all processes' devices by their counters (NVML for GPUs, RAPL for CPU packages). It is measured in "
        "the throughput's windows and has the same statistics. It includes idle power, but not fans, power supplies or "
        "a GPU's host.",
        lambda each: _against(formats.scaled(each.joules_per_sample, "J"), each.energy),
    )
    return (
        Column(
            "Throughput",
            f"{sentences.counted(comparison)} of the global batch per wall second of the slowest process, in a window "
            "of warm steps; median over rounds. The ratio to the baseline is the median of the rounds' ratios, with a "
            "95% bootstrap interval that the A/A noise widens. Over several sessions, the ratio is the geometric mean "
            "of the sessions' ratios, with a t interval.",
            lambda each: _against(formats.speed(each.samples_per_second, comparison.unit), each.throughput),
        ),
        Column(
            "Peak memory",
            "Measured in the same rounds as the throughput (on a CPU in an earlier window), with the same statistics. "
            "On GPUs: the most bytes that PyTorch had allocated in one process. On a CPU: the peak resident set minus "
            "the resident set after the imports, summed over all processes.",
            lambda each: _against(formats.size(each.peak_memory_bytes), each.memory),
        ),
        *([energies] if comparison.noise_energy else []),
        Column(
            formats.heading(sentences.score(comparison)),
            f"{sentences.metric(comparison)} over all test samples after the last epoch, mean over seeds. The "
            "difference from the baseline is paired by seed, in percentage points. Its interval lies inside the "
            f"margins exactly if two one-sided tests at 95% show equivalence{few}.",
            lambda each: _against(formats.percent(each.test_accuracy_mean_fraction), each.accuracy),
        ),
        *(_finding(name, direction) for name, direction in comparison.directions.items()),
        Column(
            f"Time to {target}",
            f"Training time, without evaluation and start-up, to the first evaluation with at least {target} "
            f"{sentences.score(comparison)}: the samples until then (median over seeds), divided by the bench's "
            "throughput. Known only if every seed reached the target, and most seeds after their first evaluation; "
            "precise to one epoch. The ratio's interval "
            "covers only the throughput's noise.",
            reached,
        ),
        *([equal_times] if any(each.equal_time for each in comparison.variants) else []),
    )


def _finding(name: str, direction: str) -> Column:
    return Column(
        formats.heading(name.replace("_", " ")),
        f"A figure of the task, mean over seeds; {direction}. It does not count for the verdict.",
        lambda each: Cell(formats.number(each.findings.get(name))),
    )


def _time(comparison: Comparison) -> tuple[Column, ...]:
    def steps(each: Compared) -> Cell:
        parts = [formats.number(value) for value in (each.step_p50_ms, each.step_p90_ms, each.step_p99_ms)]
        return Cell(UNKNOWN if set(parts) == {UNKNOWN} else f"{' / '.join(parts)} ms")

    def training(each: Compared) -> Cell:
        beside = () if each.variant == comparison.baseline else (formats.times(each.train_time_ratio),)
        return Cell(formats.number(each.train_seconds, "s"), (*beside, *sentences.disturbed(each)))

    return (
        Column(
            "Step p50 / p90 / p99",
            "Percentiles of an optimizer step's time in the bench's windows; medians over rounds.",
            steps,
        ),
        Column(
            "Input wait",
            "Share of the window spent waiting for input, in the process that waited longest; median over rounds.",
            lambda each: Cell(formats.percent(each.input_wait_fraction, 1)),
        ),
        Column(
            "Training",
            "Wall time of all training steps, the first and the warm-up steps included, without evaluation; median "
            "over seeds. The variants were trained one after the other, so no verdict depends on the ratio.",
            training,
        ),
        Column(
            "Cold start / first step",
            "Time of the first seed from process start to the first step; time of this step, with compilation, "
            "autotuning and allocation. No throughput includes these times.",
            lambda each: Cell(
                " / ".join(formats.number(s, "s") for s in (each.startup_seconds, each.first_step_seconds))
            ),
        ),
    )


def _work(comparison: Comparison) -> tuple[Column, ...]:
    on_gpu = any(each.allocator_retries is not None for each in comparison.variants)

    def held(each: Compared) -> Cell:
        beside = (f"{each.allocator_retries:,} retried",) if each.allocator_retries else ()
        return Cell(f"{formats.size(each.peak_reserved_bytes)} / {formats.size(each.driver_memory_bytes)}", beside)

    def tensors(each: Compared) -> Cell:
        found, error = each.ledgers, each.prediction_error_fraction
        beside: tuple[str, ...] = ()
        if found and found.predicted and error is not None:
            predicted = formats.size(found.predicted.peak_bytes)
            beside = (f"predicted {predicted}, {100 * error:+.1f}%".replace("-", formats.MINUS),)
        return Cell(formats.size(found.measured.tensors_bytes if found else None), beside)

    def flops(each: Compared) -> Cell:
        if each.flops is None:
            return Cell(UNKNOWN)
        model, executed = each.flops.model_per_sample, each.flops.executed_per_sample
        beside = (f"{formats.times(executed / model)} executed",) if executed > model > 0 else ()
        return Cell(formats.scaled(model, "FLOP"), beside)

    def achieved(each: Compared) -> Cell:
        share = each.utilisation_fraction
        beside = (f"{formats.percent(share, 1)} of the peak",) if share else ()
        return Cell(formats.scaled(each.model_flops_per_second, "FLOP/s"), beside)

    each_process = Column(
        "Peak of each process",
        "Peak memory by process; medians over rounds. On a CPU the sum of the peaks counts, on GPUs the largest peak.",
        lambda each: Cell(" / ".join(map(formats.size, each.peak_memory_rank_bytes)) or UNKNOWN),
    )
    beside_the_peak = Column(
        "Reserved / driver",
        "The most GPU memory that PyTorch's allocator held, and the memory that the driver held for the process, with "
        "CUDA's context and libraries; medians over rounds. Retried: how often the allocator ran out of memory and "
        "tried again; a sample with a retry is rejected.",
        held,
    )
    return (
        *([beside_the_peak] if on_gpu else []),
        *([each_process] if any(each.world_size > 1 for each in comparison.variants) else []),
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
        Column(
            "Achieved",
            "The model's operations for one sample times the throughput, and their share of the devices' dense peak at "
            "the variant's precision (none if a peak is unknown).",
            achieved,
        ),
    )


def shares(comparison: Comparison) -> Table:
    """Return a table of the effect of each single technique in the ablated variants."""
    columns = ("Throughput, added", "Throughput, in the stack", "Memory, added", "Memory, in the stack")
    rows = []
    for each in comparison.shares:
        ratios = (each.added_throughput, each.stacked_throughput, each.added_memory, each.stacked_memory)
        lines = [*map(formats.lines, ratios), sentences.share_accuracy(each)]
        cells = tuple(Cell(found[0], found[1:]) if found else Cell(DASH) for found in lines)
        rows.append(Row(each.technique, each.verdict, f"in {each.variant}", cells))
    headings = tuple((column, "") for column in (*columns, "Accuracy, added"))
    return Table("Each technique's own share", headings, tuple(rows), "Technique")


def grids(comparison: Comparison) -> list[Grid]:
    """Return the evidence behind the tables."""
    found = [sessions(comparison)] if len(comparison.sessions) > 1 else []
    parts = (*sentences.LEDGER_PARTS, "peak")
    ledgers: list[tuple[str, ...]] = [("Variant", "Ledger", *(part.replace("_", " ") for part in parts))]
    for variant, kind, ledger in sentences.ledgers(comparison):
        ledgers.append((variant, kind, *(formats.size(getattr(ledger, f"{part}_bytes")) for part in parts)))
    setups = [("Variant", "Processes", "CPU threads each", "Data", "Techniques in effect")]
    for each in comparison.variants:
        threads, techniques = str(each.threads_per_process), sentences.techniques(each)
        setups.append((each.variant, sentences.setup(each), threads, each.placement, techniques))
    return [
        *found,
        *([Grid("The memory ledger of the largest process", ledgers, words=(1,))] if len(ledgers) > 1 else []),
        Grid("Every training run", _runs(comparison)),
        Grid("How each variant ran", setups, words=(1, 4)),
    ]


def sessions(comparison: Comparison) -> Grid:
    """Return the machine's state in each session, the baseline's speed and A/A ratio, and each variant's ratios."""
    others = comparison.variants[1:]
    speed = f"Baseline {comparison.unit.name}/s"
    headings = ("Session (UTC)", "Boot", "Load", "CPU time stolen", "Rounds", speed, "A/A")
    rows = [(*headings, *(f"{each.variant}: throughput / memory" for each in others))]
    for each in comparison.sessions:
        ratios = (
            " / ".join(_of_session(ratio, each.start_utc) for ratio in (other.throughput, other.memory))
            for other in others
        )
        rows.append(
            (
                each.start_utc[:16].replace("T", " "),
                (each.boot_id or UNKNOWN)[:8],
                f"{each.load_average:.1f}",
                formats.percent(each.steal_fraction, 1),
                str(each.rounds),
                formats.number(formats.per_second(each.baseline_samples_per_second, comparison.unit)),
                formats.text(each.noise_throughput),
                *ratios,
            )
        )
    return Grid("The sessions", rows, words=(1,))


def _of_session(ratio: Ratio | None, start: str) -> str:
    found = next((each for each in ratio.sessions if each.start_utc == start), None) if ratio else None
    if found is None:
        return DASH
    return formats.times(found.estimate) if found.counts else f"[{formats.times(found.estimate)}]"


def _runs(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return one row per variant and seed."""
    reached, speed = f"Steps to {sentences.target(comparison)}", f"{formats.heading(comparison.unit.name)}/s"
    columns = ("Variant", "Seed", "Correct", f"Points against {comparison.baseline}", speed, "Step p50")
    rows: list[tuple[str, ...]] = [(*columns, "Peak memory", "Training", reached, "Model SHA-256")]
    for each in comparison.variants:
        paired = each.accuracy_difference.seeds if each.accuracy_difference else ()
        differences = {item.seed: formats.points(item.difference_fraction) for item in paired}
        steps = {item.seed: f"{item.steps:,}" if item.steps else "not reached" for item in each.time_to_target.seeds}
        rows += [
            (
                each.variant,
                str(run.seed),
                f"{run.test_correct:,.10g} of {run.test_count:,}",
                differences.get(run.seed, DASH),
                formats.number(formats.per_second(run.samples_per_second, comparison.unit)),
                formats.number(run.step_p50_ms, "ms"),
                formats.size(run.peak_memory_bytes),
                formats.number(run.train_seconds, "s"),
                steps[run.seed],
                run.model_sha256[:12],
            )
            for run in each.runs
        ]
    return rows
