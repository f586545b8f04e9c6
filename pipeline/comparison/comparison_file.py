"""The content of ``reports/comparison.json``."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from pipeline.comparison.ablation import Share
from pipeline.comparison.verdicts import Accuracy, Noise, Ratio, Verdict
from pipeline.params import Compare, Margins, VariantName
from pipeline.results import Bench, Dataset, Document, Flops, Ledgers, Record, Run, Session, Unit


class SeedDifference(Record):
    """One seed's test accuracy minus the baseline's accuracy with the same seed."""

    seed: int
    difference_fraction: float


class AccuracyDifference(Record):
    """Test accuracy minus the baseline's, paired by seed. Positive values mean a higher accuracy than the baseline."""

    seeds: tuple[SeedDifference, ...]
    mean_fraction: float
    spread_fraction: float | None
    """Sample standard deviation of the per-seed differences; None for a single seed."""
    min_fraction: float
    max_fraction: float


class SeedTarget(Record):
    """The step at which one seed's run reached the target accuracy."""

    seed: int
    steps: int | None
    """Optimizer steps at the first evaluation at or above the target; None if the target was not reached."""


class TimeRatio(Record):
    """Ratio of the times to the target: the ratio of the samples divided by the ratio of the throughputs.

    The interval covers only the uncertainty of the throughputs, because evaluations are too rare to show how much the
    steps differ between seeds.
    """

    estimate: float
    low: float
    high: float


class TimeToTarget(Record):
    """Training time until an evaluation shows the target accuracy, from the training runs' steps and the bench's speed.

    The time does not include evaluation and start-up. The first step counts like every other step.
    """

    seeds: tuple[SeedTarget, ...]
    reached_count: int
    """How many seeds reached the target."""
    samples: float | None
    """Median of the seeds' steps, times the global batch. None unless every seed reached the target; also None if the
    median is the first evaluation, because then the target was reached at an unknown time before it."""
    train_seconds: float | None
    """None if ``samples`` is None, or if the throughput is unknown or not trusted."""


class EqualTime(Record):
    """Test accuracies (means over seeds) of a variant and the baseline after the same training time.

    The time ends when the faster training ends. Each accuracy is that of the last evaluation in this time.
    """

    train_seconds: float
    accuracy_fraction: float
    baseline_accuracy_fraction: float


class Compared(Record):
    """One variant compared with the baseline. The baseline has an entry, too; its comparisons are None, except
    ``train_time_ratio``."""

    variant: VariantName
    techniques: tuple[str, ...]
    """Names of the techniques that were in effect."""
    skipped: dict[str, str]
    """Technique that was skipped, or GPUs that stayed unused -> the reason."""
    decided: dict[str, str]
    """Technique -> its automatic choice on this machine, and the reason. The key ``deterministic`` holds the reason why
    a deterministic run is impossible."""
    batch_size: int
    """Global batch size in training. With weak scaling, batch size and learning rate differ from the job's."""
    learning_rate: float
    """Peak learning rate."""
    micro_batches: int
    backend: str | None
    world_size: int
    threads_per_process: int
    placement: str

    verdict: Verdict | None
    """None for the baseline, like throughput, memory, accuracy and energy."""
    reasons: tuple[str, ...]
    """What is decided although the verdict is not; why a quantity is untrusted or undecided, and what would help. If
    the variant's techniques are skipped, so that it trains like the baseline, a sentence that says so instead."""
    throughput: Ratio | None
    memory: Ratio | None
    accuracy: Accuracy | None
    energy: Ratio | None = Field(None, exclude_if=operator.not_)
    """None if energy was not asked for. The margin is 0 if energy does not count for the verdict."""
    on_front: bool
    """On the Pareto front of throughput, memory and accuracy; see ``compare``. False for a variant with an unknown
    ratio or an untrusted verdict."""

    samples_per_second: float | None
    """This field and the next five are medians over the bench's samples in which the figure is known. For a variant
    that was settled early, all except the fraction are scaled (``figures.of_bench``). None if unknown or not
    trusted."""
    step_p50_ms: float | None
    step_p90_ms: float | None
    step_p99_ms: float | None
    input_wait_fraction: float | None
    peak_memory_bytes: int | None
    """``results.Window`` describes how the peak is computed from the ranks' peaks."""
    peak_memory_rank_bytes: tuple[int, ...] = ()
    """Each rank's median over the bench's samples that have a peak. Empty if no peak is known or trusted."""
    peak_reserved_bytes: int | None = None
    """On a GPU: median of the largest number of bytes that torch's allocator reserved on one rank."""
    driver_memory_bytes: int | None = None
    """On a GPU: median of the largest number of bytes that the driver held for one process."""
    joules_per_sample: float | None = Field(None, exclude_if=operator.not_)
    """Energy as ``results.Window`` defines it: median over the bench's samples."""
    allocator_retries: int | None = None
    """Sum over all samples. Samples with a retry are rejected. None on a CPU."""
    rejected: int
    """Number of this variant's samples in the bench that were rejected, in part or as a whole."""

    ledgers: Ledgers | None
    prediction_error_fraction: float | None
    """The predicted ledger's peak divided by the measured ledger's ``tensors_bytes``, minus 1."""
    flops: Flops | None
    model_flops_per_second: float | None
    utilisation_fraction: float | None
    """``model_flops_per_second`` divided by the devices' dense peak; None if one of them is unknown."""

    test_accuracy_mean_fraction: float
    test_accuracy_spread_fraction: float | None
    test_correct_count: int | float
    """Sum over all seeds."""
    test_count: int
    """Number of evaluated test samples, summed over all seeds."""
    findings: dict[str, float] = Field({}, exclude_if=operator.not_)
    """The task's further figures of the trained models: means over the seeds."""
    accuracy_difference: AccuracyDifference | None
    """None for the baseline itself."""

    training_samples_per_second: float | None
    """Throughput of the training runs: median over seeds."""
    training_peak_memory_bytes: int | None
    """Peak memory of the training runs: as in ``results.Window``, largest over seeds."""
    startup_seconds: float | None
    """This field and the next are the first seed's times, because only the first seed starts cold."""
    first_step_seconds: float | None
    train_seconds: float
    """Median over seeds."""
    train_time_ratio: float | None
    time_to_target: TimeToTarget
    time_to_target_ratio: TimeRatio | None
    """Ratio to the baseline's time. None for the baseline itself, if a time is unknown, or if the throughput's
    ratio is untrusted or has no interval."""
    another_model: str | None = Field(None, exclude_if=operator.not_)
    """The variant's model, if it is not the baseline's."""
    equal_time: EqualTime | None = Field(None, exclude_if=operator.not_)
    """Only for a variant with another model or a teacher. None if the ratio of the throughputs is not decided, or if
    the time is too short for an evaluation."""
    runs: tuple[Run, ...]


class Champion(Record):
    """The best of the variants that pay."""

    variant: VariantName
    quantity: str | None = None
    """The quantity by which the champion was chosen. None if all variants that pay do so by accuracy alone; then the
    ratios are None."""
    among: int
    """Number of variants that pay by this quantity; without a quantity, of all variants that pay."""
    ratio: Ratio | None = None
    """Ratio to the baseline. With several candidates, it comes from other sessions than the choice or, with a
    single session, from other rounds (``champion``). None also if no session has enough rounds of all candidates."""
    runner_up: VariantName | None = None
    """The second best."""
    head_to_head: Ratio | None = None
    """Ratio of the champion to the runner-up, from the rounds that have both. None without a runner-up, or if no
    session counts for both."""


class SessionSummary(Session):
    """One session of the bench, in short."""

    benches: int
    """Number of benches in the session. ``rounds`` counts the rounds of all these benches."""
    commit: str | None
    """Commit of the last bench. The fields of ``Session`` are the first bench's."""
    rounds: int
    baseline_samples_per_second: float | None
    """Median over the session's rounds."""
    noise_throughput: Noise
    noise_memory: Noise
    variants: tuple[str, ...]
    """The variants that the session measured in their present form, even if their ratios are untrusted."""


class Comparison(Document):
    """``reports/comparison.json``."""

    baseline: VariantName
    target_accuracy_fraction: float
    margins: Margins
    environment: dict[str, Any]
    """The content of environment.json, its hash included, but without the digests of code, plans and settings."""
    device: str
    dataset: Dataset
    train: dict[str, Any]
    """The job that every variant trained: ``train`` in params.yaml."""
    parameter_count: int
    unit: Unit = Unit()
    """The unit that throughputs count in the report. In this file, throughputs count samples."""
    directions: Mapping[str, str] = {}
    """Name in ``Compared.findings`` -> which values are better."""
    seeds: tuple[int, ...]
    noise_throughput: Noise
    noise_memory: Noise
    noise_energy: Noise | None = Field(None, exclude_if=operator.not_)
    variants: tuple[Compared, ...]
    """The baseline first, the others in the order of params.yaml."""
    champion: Champion | None = None
    """None if no variant pays."""
    sessions: tuple[SessionSummary, ...] = ()
    """The sessions that measured the baseline as ``bench`` did, the oldest first. Only ratios use all sessions. The
    noise is from the session of ``bench``, and the other figures are from ``bench``."""
    sessions_set_aside: int = 0
    """Number of benches that do not count, because their code, settings, data or environment differ."""
    shares: tuple[Share, ...]
    """Effects of the techniques of ablated variants, in the bench's order."""
    bench: Bench
    """The whole bench, raw samples included."""
    made_of: Mapping[str, str] = {}
    """File -> SHA-256 of the results, histories, bench and sessions. Empty in a file older than this field."""
    settings: Compare | None = None
    """``compare`` in params.yaml when the comparison was made. None in a file older than this field."""
