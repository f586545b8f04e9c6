"""The content of ``reports/comparison.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.comparison.ablation import Share
from pipeline.comparison.verdicts import Accuracy, Noise, Ratio, Verdict
from pipeline.params import Margins, VariantName
from pipeline.results import Bench, Dataset, Document, Flops, Ledgers, Record, Run, Session


class SeedDifference(Record):
    """One seed's test accuracy minus the baseline's of the same seed."""

    seed: int
    difference_fraction: float


class AccuracyDifference(Record):
    """Test accuracy minus the baseline's, paired by seed. Positive: more accurate than the baseline."""

    seeds: tuple[SeedDifference, ...]
    mean_fraction: float
    spread_fraction: float | None
    """Sample standard deviation of the per-seed differences; None for a single seed."""
    min_fraction: float
    max_fraction: float


class SeedTarget(Record):
    """When one seed's run reached the target."""

    seed: int
    steps: int | None
    """Optimizer steps at the first evaluation at or above the target; None: not reached."""


class TimeRatio(Record):
    """Of the samples to the target over that of the throughputs: its interval is that of the throughput alone, for how
    far seeds differ in steps is coarser than evaluations tell."""

    estimate: float
    low: float
    high: float


class TimeToTarget(Record):
    """Training time until an evaluation shows the target accuracy: steps of the trainings at the speed of the bench,
    which measured all variants side by side. Evaluation, start-up and the first step are not in it."""

    seeds: tuple[SeedTarget, ...]
    reached_count: int
    """How many seeds reached it."""
    samples: float | None
    """Median over seeds of their steps, times the global batch. None unless every seed reached the target."""
    train_seconds: float | None
    """None also where the throughput is not trusted."""


class Compared(Record):
    """One variant beside the baseline. The baseline is one too: what compares it with itself is None."""

    variant: VariantName
    techniques: tuple[str, ...]
    """What was in effect, by name."""
    left_out: dict[str, str]
    """Technique that was requested -> why this machine skipped it."""
    decided: dict[str, str]
    """Technique -> what it decided by itself on this machine, and why."""
    batch_size: int
    """Global, as it was trained; like the next, the job's unless scaling is weak."""
    learning_rate: float
    """The peak."""
    micro_batches: int
    backend: str | None
    world_size: int
    threads_per_process: int
    placement: str

    verdict: Verdict | None
    """None for the baseline, like throughput, memory and accuracy."""
    reasons: tuple[str, ...]
    """Why something is untrusted or undecided, and about how many more pairs or seeds would decide."""
    throughput: Ratio | None
    memory: Ratio | None
    accuracy: Accuracy | None
    on_front: bool
    """On the Pareto front of throughput, memory and accuracy; see ``compare``. False if one of them is not known."""

    samples_per_second: float | None
    """This and the next five: medians over the bench's samples, without those that were rejected."""
    step_p50_ms: float | None
    step_p90_ms: float | None
    step_p99_ms: float | None
    input_wait_fraction: float | None
    peak_memory_bytes: int | None
    """What counts of the ranks': see ``results.Window``."""
    peak_memory_rank_bytes: tuple[int, ...] = ()
    """Of each rank, the median over the bench's samples that tell it. Empty where no peak is known or trusted."""
    peak_reserved_bytes: int | None = None
    """This and the next, on a GPU: medians of what its allocator and its driver held, of the rank with most."""
    driver_memory_bytes: int | None = None
    allocator_retries: int | None = None
    """Of all samples; a sample with one is rejected. None on a CPU."""
    refused: int
    """How many of the bench's samples of this variant were rejected, in part or whole."""

    ledgers: Ledgers | None
    prediction_error_fraction: float | None
    """The predicted ledger's peak over what the tensors of the measured one take, minus 1."""
    flops: Flops | None
    model_flops_per_second: float | None
    utilisation_fraction: float | None
    """model_flops_per_second over the devices' dense peak; None for an unknown device."""

    test_accuracy_mean_fraction: float
    test_accuracy_spread_fraction: float | None
    test_correct_count: int | float
    """Over all seeds."""
    test_count: int
    """Test samples evaluated, over all seeds."""
    accuracy_difference: AccuracyDifference | None
    """None for the baseline itself."""

    training_samples_per_second: float | None
    """Of the training runs: median over seeds."""
    training_peak_memory_bytes: int | None
    """Of the training runs: as in ``results.Window``, largest over seeds."""
    startup_seconds: float | None
    """Cold times: of the first seed, the only one that starts cold."""
    first_step_seconds: float | None
    train_seconds: float
    """Median over seeds."""
    train_time_ratio: float | None
    time_to_target: TimeToTarget
    time_to_target_ratio: TimeRatio | None
    """To the baseline's. None: of the baseline itself, and where either has none, or the throughput no interval."""
    runs: tuple[Run, ...]


class Champion(Record):
    """The best of the variants that pay."""

    variant: VariantName
    quantity: str | None
    """By which it was chosen; None: it pays by its accuracy alone, as the next two are then."""
    among: int
    """So many pay by it."""
    ratio: Ratio | None
    """To the baseline, told by other sessions than those that chose the best, or other rounds of a single one
    (``champion``). None also where no session has enough rounds of all."""
    runner_up: VariantName | None
    """The next best."""
    head_to_head: Ratio | None
    """The champion over the runner-up, from the same rounds. None without one, and where no session has both."""


class SessionSummary(Session):
    """One session of the bench, in short."""

    commit: str | None
    rounds: int
    baseline_samples_per_second: float | None
    """Median over its rounds."""
    noise_throughput: Noise
    noise_memory: Noise
    variants: tuple[str, ...]
    """For which it counts, as far as it is trusted: it measured them and the baseline as they are now."""


class Comparison(Document):
    """``reports/comparison.json``."""

    baseline: VariantName
    target_accuracy_fraction: float
    margins: Margins
    environment: dict[str, Any]
    """The content of environment.json, its hash included."""
    device: str
    dataset: Dataset
    train: dict[str, Any]
    """The job that every variant trained, as ``train`` in params.yaml has it."""
    parameter_count: int
    seeds: tuple[int, ...]
    noise_throughput: Noise
    noise_memory: Noise
    variants: tuple[Compared, ...]
    """The baseline first, the others in the order of params.yaml."""
    champion: Champion | None = None
    """None: nothing pays."""
    sessions: tuple[SessionSummary, ...] = ()
    """Those that measured the baseline as ``bench`` did, the oldest first. Figures but ratios are of ``bench``."""
    sessions_set_aside: int = 0
    """Others, of other code, settings, data or another environment."""
    shares: tuple[Share, ...]
    """Of the techniques of ablated variants, in the bench's order."""
    bench: Bench
    """Whole, raw samples included."""
    made_of: Mapping[str, str] = {}
    """File -> SHA-256, of the results, histories, bench and sessions. Empty in one from before that was told."""

    def problems(self) -> list[str]:
        return self.bench.problems()
