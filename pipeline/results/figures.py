"""The measured figures, each declared once.

Measurement, summaries, tables, ``dvc metrics``, MLflow and the report's definitions iterate over ``FIGURES``. A new
figure is one entry here, and the line that measures it: in ``training.measured.of_rank``, or a field of ``Run``. A
figure that decides verdicts and gates is also a field of ``params.Margins``.

This file has declarations only. It has no digest (``FOUND_AS_VALUES`` in ``environment.imports``): what is declared
here is among the settings of the stages, so that a reworded definition makes DVC repeat ``compare`` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

COMPARISON, TIME, WORK = "The comparison", "Where the time goes", "Memory and arithmetic"
"""The report's tables of figures."""


@dataclass(frozen=True)
class Figure:
    """One measured number, with its unit, the ways in which it is joined, and its texts in the report."""

    field: str
    """Its key in ``Window`` or ``Run``, in comparison.json, in ``dvc metrics`` and in MLflow. What a window measures
    must not have the name of a field that only ``Run`` has."""
    noun: str
    """Its name in sentences, such as "0.90 times the throughput"."""
    unit: Literal["samples/s", "bytes", "J", "FLOP/s", "s", "ms", "fraction", "count", "price"]
    heading: str
    """The heading of its column. Figures with equal headings share a column."""
    definition: str = ""
    """What the column shows. ``{counted}`` stands for what the job's throughput counts. Empty for all figures of a
    column but the first."""
    table: str = COMPARISON
    higher_is_better: bool = False
    over_ranks: Literal["slowest", "largest", "sum", "sum on a CPU"] | None = None
    """How ``training.measured`` joins the processes' values: the slowest process's value, the largest value or the sum;
    "sum on a CPU": the largest value on GPUs. None if the figure comes from elsewhere."""
    over_rounds: Literal["median", "sum"] | None = None
    """How the bench's samples are joined. None if the bench does not measure the figure."""
    over_seeds: Literal["median", "largest", "first"] | None = None
    """How the seeds' runs are joined; "first": only the first seed starts cold. None if runs are not summarised."""
    family: str = ""
    """The compared figure (its ``margin``) with which this figure is rejected and untrusted; for a compared figure its
    own ``margin``. "": it is always shown."""
    optional: bool = False
    """True if the figure is left out of tables, metrics and MLflow while no sample has it, and always of the gate."""
    margin: str = ""
    """For a compared figure: the key of its margin in ``compare.margins``, which also names its difference in the
    records; ``margin_in`` gives its value. If that is null, the figure is compared, but no verdict and no gate uses it.
    "": not compared."""
    metric: str = ""
    """For a compared figure: the beginning of its ratio's names in ``dvc metrics``."""
    word: str = ""
    """For a compared figure: the word for it in advice, and the name of its tag in MLflow."""
    need: str = ""
    """For a compared figure: when it matters."""
    fewest_pairs: int = 6
    """For a compared figure: fewer rounds give its ratio no interval."""

    def margin_in(self, margins: object) -> float:
        """Return the figure's margin in ``compare.margins``; 0 if there is none, so that no verdict uses the figure."""
        return getattr(margins, self.margin, None) or 0.0

    @property
    def joins(self) -> tuple[str | None, ...]:
        """What the figures in the files of results and of the bench depend on."""
        return self.field, self.family, self.over_ranks, self.over_rounds, self.over_seeds

    def of(self, record: object) -> Any:
        """Return the figure's value in a ``Window`` or ``Run``; None if it is unknown."""
        return getattr(record, self.field, None)

    def taken_in(self, window: Any) -> bool:
        """False if the round of ``window`` was not meant to measure the figure: on a CPU, rounds leave out memory
        once it is known."""
        return self is not MEMORY or window.peak_memory_rank_bytes != ()

    def known(self, records: Sequence[object]) -> list[Any]:
        """Return the figure's known values, in the order of ``records``."""
        return [value for record in records if (value := self.of(record)) is not None]


THROUGHPUT = Figure(
    "samples_per_second", "throughput", "samples/s", "Throughput",
    "{counted} of the global batch per wall second of the slowest process, in a window of warm steps; median over "
    "rounds. The ratio to the baseline is paired by round, with a t interval that correlated rounds and an A/A "
    "difference widen. Over several sessions, it is the geometric mean of the sessions' ratios, with a t interval.",
    higher_is_better=True, over_ranks="slowest", over_rounds="median", over_seeds="median", family="throughput",
    margin="throughput", metric="throughput", word="speed", need="speed counts most",
)  # fmt: skip
MEMORY = Figure(
    "peak_memory_bytes", "peak memory", "bytes", "Peak memory",
    "Measured as the throughput is (on a CPU in an earlier window, until known), with the same statistics. On GPUs: "
    "the most bytes that PyTorch allocated in a process. On a CPU: the peak resident set minus that after the "
    "imports, summed over a host's processes.",
    over_ranks="sum on a CPU", over_rounds="median", over_seeds="largest", family="memory",
    margin="memory", metric="peak_memory", word="memory", need="memory is short", fewest_pairs=3,
)  # fmt: skip
ENERGY = Figure(
    "joules_per_sample", "energy a sample", "J", "Energy a sample",
    "Energy of all processes' devices by their counters (NVML for GPUs, RAPL for CPU packages). It is measured in the "
    "throughput's windows and has the same statistics. It includes idle power, but not fans, power supplies or a GPU's "
    "host.",
    over_rounds="median", family="energy", optional=True,
    margin="energy", metric="energy", word="energy", need="energy counts most",
)  # fmt: skip
STEP_P50 = Figure(
    "step_p50_ms", "median step", "ms", "Step p50 / p90 / p99",
    "Percentiles of an optimizer step's time in the bench's windows; medians over rounds.",
    TIME, over_ranks="slowest", over_rounds="median", over_seeds="median", family="throughput",
)  # fmt: skip
STEP_P90 = Figure(
    "step_p90_ms", "90th percentile of the steps", "ms", STEP_P50.heading, "",
    TIME, over_ranks="slowest", over_rounds="median", family="throughput",
)  # fmt: skip
STEP_P99 = Figure(
    "step_p99_ms", "99th percentile of the steps", "ms", STEP_P50.heading, "",
    TIME, over_ranks="slowest", over_rounds="median", family="throughput",
)  # fmt: skip
INPUT_WAIT = Figure(
    "input_wait_fraction", "wait for input", "fraction", "Input wait",
    "Share of the window spent waiting for input, in the process that waited longest; median over rounds.",
    TIME, over_ranks="largest", over_rounds="median", family="throughput",
)  # fmt: skip
ARITHMETIC = Figure(
    "arithmetic_ms", "arithmetic of a step", "ms", "Arithmetic / exchange / wait",
    "Time in which the slowest process computes a step, without input and exchange, measured in some steps after each "
    "window; the share of the mean step that neither arithmetic nor input explains, so that processes exchange "
    "gradients or contend; the share for which the fastest process waits for the slowest. Medians over rounds. Known "
    "where processes exchange nothing but gradients (ddp, zero1).",
    TIME, over_ranks="largest", over_rounds="median", family="throughput", optional=True,
)  # fmt: skip
EXCHANGE = Figure(
    "exchange_fraction", "exposed communication", "fraction", ARITHMETIC.heading, "",
    TIME, over_rounds="median", family="throughput", optional=True,
)  # fmt: skip
RANK_WAIT = Figure(
    "rank_wait_fraction", "wait for the slowest process", "fraction", ARITHMETIC.heading, "",
    TIME, over_rounds="median", family="throughput", optional=True,
)  # fmt: skip
FOREIGN_LOAD = Figure(
    "foreign_load_fraction", "foreign load", "fraction", "Foreign load",
    "Share of the CPU time that the variant would have had, which other processes took in its windows, on the host "
    "where they took most; median over rounds.",
    TIME, over_rounds="median", optional=True,
)  # fmt: skip
OUTSIDE = Figure(
    "outside_fraction", "time outside of steps", "fraction", "Outside of steps",
    "Share of the window spent on work between two steps, such as an evaluation or a checkpoint: what a step takes "
    "beyond the median, if it takes longer than three medians. No throughput and no step time includes it.",
    TIME, over_ranks="largest", over_rounds="median", family="throughput", optional=True,
)  # fmt: skip
TRAINING = Figure(
    "train_seconds", "training", "s", "Training",
    "Wall time of all training steps, the first and the warm-up steps included, without evaluation; median over seeds. "
    "The variants were trained one after the other, so no verdict depends on the ratio.",
    TIME, over_seeds="median",
)  # fmt: skip
START = Figure(
    "startup_seconds", "cold start", "s", "Cold start / first step",
    "Time of the first seed from process start to the first step; time of this step, with compilation, autotuning and "
    "allocation. No throughput includes these times.",
    TIME, over_seeds="first",
)  # fmt: skip
FIRST_STEP = Figure("first_step_seconds", "first step", "s", START.heading, "", TIME, over_seeds="first")
PRICE = Figure(
    "epoch_price", "price of an epoch", "price", "Price of an epoch",
    "The hours of an epoch's steps at the measured throughput, times the GPUs or, without GPUs, the hosts, times "
    "compare.price_per_device_hour.",
    TIME, optional=True,
)  # fmt: skip
RESERVED = Figure(
    "peak_reserved_bytes", "reserved memory", "bytes", "Reserved / driver",
    "The most GPU memory that PyTorch's allocator held, and the memory that the driver held for the process, with "
    "CUDA's context and libraries; medians over rounds. Retried: how often the allocator ran out of memory and tried "
    "again; a sample with a retry is rejected.",
    WORK, over_ranks="largest", over_rounds="median", family="memory", optional=True,
)  # fmt: skip
DRIVER = Figure(
    "driver_memory_bytes", "the driver's memory", "bytes", RESERVED.heading, "",
    WORK, over_ranks="largest", over_rounds="median", family="memory", optional=True,
)  # fmt: skip
RETRIES = Figure(
    "allocator_retries", "retries of the allocator", "count", "", "",
    WORK, over_ranks="sum", over_rounds="sum", optional=True,
)  # fmt: skip
ACHIEVED = Figure(
    "model_flops_per_second", "achieved arithmetic", "FLOP/s", "Achieved",
    "The model's operations for one sample times the throughput, and their share of the devices' dense peak at the "
    "variant's precision (none if a peak is unknown).",
    WORK, higher_is_better=True,
)  # fmt: skip
UTILISATION = Figure("utilisation_fraction", "utilisation", "fraction", "", "", WORK, higher_is_better=True)
PREDICTION_ERROR = Figure("memory_prediction_error_fraction", "error of the predicted memory", "fraction", "", "", WORK)
"""The predicted ledger's peak divided by the measured ledger's ``tensors_bytes``, minus 1."""

FIGURES: Sequence[Figure] = (
    *(THROUGHPUT, MEMORY, ENERGY, STEP_P50, STEP_P90, STEP_P99, INPUT_WAIT, ARITHMETIC, EXCHANGE, RANK_WAIT),
    *(FOREIGN_LOAD, OUTSIDE, TRAINING, START, FIRST_STEP, PRICE, RESERVED, DRIVER, RETRIES),
    *(ACHIEVED, UTILISATION, PREDICTION_ERROR),
)
"""All figures, in the order of their columns."""
QUANTITIES = tuple(figure for figure in FIGURES if figure.margin)
"""The figures that are compared with the baseline's; another quantity of verdicts is the accuracy."""
ALWAYS_MEASURED = tuple(figure for figure in QUANTITIES if not figure.optional)
"""The compared figures that every bench measures. The gate decides on those that have a margin."""
