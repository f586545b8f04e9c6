"""Results of all variants and the bench -> one comparison with the baseline. A pure function of files.

Throughput, memory and the verdicts rest on the bench, which measured all variants side by side; accuracy and the time
to reach it rest on the training runs. ``None`` means unknown: a figure that no file holds is not estimated here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.comparison import ablation, consistency, stats, verdicts
from pipeline.comparison.comparison_file import (
    AccuracyDifference,
    Compared,
    Comparison,
    SeedDifference,
    SeedTarget,
    TimeToTarget,
)
from pipeline.comparison.consistency import ComparisonError, read_all, techniques
from pipeline.comparison.verdicts import MEMORY, THROUGHPUT, Accuracy, Noise, Ratio, Spent, Verdict
from pipeline.environment import without_stages
from pipeline.params import Compare
from pipeline.results import Arm, Bench, HistoryRow, Result

__all__ = [
    "AccuracyDifference",
    "Compared",
    "Comparison",
    "ComparisonError",
    "accuracy_difference",
    "compare",
    "interrupted",
    "read_all",
    "spent_by",
    "techniques",
    "time_to_target",
]


def compare(
    measured: Sequence[Result],
    histories: Mapping[str, Sequence[HistoryRow]],
    bench: Bench,
    settings: Compare,
    environment: Mapping[str, Any],
) -> Comparison:
    """Compare every result with the baseline's.

    On the Pareto front is what nothing beats in throughput, memory and accuracy against the baseline's; a difference
    from the baseline that was not shown to matter counts as none, and one that is not trusted has no place there.

    Raises ComparisonError if the results and the bench are not those of one job in one environment: ``environment`` is
    the content of environment.json.
    """
    baseline = next((result for result in measured if result.variant == settings.baseline), None)
    if baseline is None:
        there = ", ".join(result.variant for result in measured) or "none"
        raise ComparisonError(
            f"compare.baseline: there is no result of variant {settings.baseline!r}; results: {there}. "
            "Name one of them as the baseline, or run `dvc repro`."
        )
    consistency.check(measured, baseline, histories, bench, environment)

    margins, reference = settings.margins, _arm(bench, "variant", baseline.variant)
    again = _arm(bench, "again", baseline.variant)
    spent = spent_by(bench)
    noise_throughput = verdicts.noise(reference, again, THROUGHPUT, settings.max_spread, spent)
    noise_memory = verdicts.noise(reference, again, MEMORY, settings.max_spread, spent)

    def judged(result: Result) -> _Judged:
        arm, difference = _arm(bench, "variant", result.variant), accuracy_difference(result, baseline)
        throughput = verdicts.ratio(arm, reference, THROUGHPUT, margins.throughput, noise_throughput)
        memory = verdicts.ratio(arm, reference, MEMORY, margins.memory, noise_memory)
        weights = [{run.seed: run.model_sha256 for run in each.runs} for each in (result, baseline)]
        accuracy = verdicts.accuracy(
            [each.difference_fraction for each in difference.seeds],
            margins.accuracy,
            baseline.summary.test_accuracy_mean_fraction,
            1 / baseline.dataset.test_count,
            identical=weights[0] == weights[1],
        )
        known = [throughput.decision, accuracy.decision]
        known += [] if verdicts.untold((arm, reference), MEMORY) else [memory.decision]
        reasons = _reasons(throughput, memory, accuracy, bench, spent)
        return _Judged(throughput, memory, accuracy, difference, verdicts.verdict(known), reasons)

    def trusted(result: Result) -> tuple[bool, bool]:
        """Whether the variant's speeds and its peak memory may be shown."""
        if result is baseline:
            return not noise_throughput.why_untrusted, not noise_memory.why_untrusted
        judgement = judgements[result.variant]
        return judgement.throughput.decision != "untrusted", judgement.memory.decision != "untrusted"

    others = [result for result in measured if result is not baseline]
    judgements = {result.variant: judged(result) for result in others}
    front = _front(baseline.variant, judgements, noise_throughput, noise_memory)
    target = settings.target_accuracy
    time = time_to_target(baseline, histories[baseline.variant], target)
    return Comparison(
        baseline=baseline.variant,
        target_accuracy_fraction=target,
        margins=margins,
        environment=without_stages(environment),
        device=baseline.device,
        dataset=baseline.dataset,
        train=baseline.config["train"],
        parameter_count=baseline.parameter_count,
        seeds=tuple(run.seed for run in baseline.runs),
        noise_throughput=noise_throughput,
        noise_memory=noise_memory,
        variants=tuple(
            Compared(
                variant=result.variant,
                on_front=result.variant in front,
                **(_REFERENCE if result is baseline else judgements[result.variant]._asdict()),
                **_from_bench(bench, result.variant, *trusted(result)),
                **_from_training(result, baseline, time_to_target(result, histories[result.variant], target), time),
            )
            for result in (baseline, *others)
        ),
        shares=ablation.shares(
            bench,
            {variant: judgement.accuracy for variant, judgement in judgements.items()},
            margins,
            (noise_throughput, noise_memory),
        ),
        bench=bench,
    )


def accuracy_difference(result: Result, baseline: Result) -> AccuracyDifference:
    """Per-seed differences of test accuracy, from the exact counts; 0 where both ended in the same weights.

    Both must hold the same seeds and test set.
    """
    theirs = {run.seed: run for run in baseline.runs}
    differences = [
        SeedDifference(
            seed=run.seed,
            difference_fraction=(
                0.0
                if run.model_sha256 == theirs[run.seed].model_sha256
                else (run.test_correct - theirs[run.seed].test_correct) / run.test_count
            ),
        )
        for run in result.runs
    ]
    values = [each.difference_fraction for each in differences]
    return AccuracyDifference(
        seeds=tuple(differences),
        mean_fraction=statistics.fmean(values),
        spread_fraction=statistics.stdev(values) if len(values) > 1 else None,
        min_fraction=min(values),
        max_fraction=max(values),
    )


def time_to_target(result: Result, history: Sequence[HistoryRow], target: float) -> TimeToTarget:
    """When each seed of ``result`` first showed at least ``target`` test accuracy (0 to 1), in training seconds."""
    times = [
        min(
            (
                row.train_seconds
                for row in history
                if row.seed == run.seed and row.test_accuracy is not None and row.test_accuracy >= target
            ),
            default=None,
        )
        for run in result.runs
    ]
    reached = [time for time in times if time is not None]
    return TimeToTarget(
        seeds=tuple(
            SeedTarget(seed=run.seed, train_seconds=time) for run, time in zip(result.runs, times, strict=True)
        ),
        reached_count=len(reached),
        train_seconds=statistics.median(reached) if len(reached) == len(times) else None,
    )


class _Judged(NamedTuple):
    """What a variant's verdict says and rests on."""

    throughput: Ratio
    memory: Ratio
    accuracy: Accuracy
    accuracy_difference: AccuracyDifference
    verdict: Verdict
    reasons: tuple[str, ...]


_REFERENCE: dict[str, Any] = {**dict.fromkeys(_Judged._fields), "reasons": ()}
"""The baseline is not judged."""


def spent_by(bench: Bench) -> Spent:
    """What the bench's rounds took, and what ended them."""
    rounds, limit = len(bench.arms[0].samples), bench.config["bench"]["max_rounds"]
    return Spent("bench.max_minutes" if limit is None or rounds < limit else "bench.max_rounds", rounds, bench.seconds)


def _reasons(throughput: Ratio, memory: Ratio, accuracy: Accuracy, bench: Bench, spent: Spent) -> tuple[str, ...]:
    """What stands between the figures and a decision."""
    reasons = [
        *verdicts.ratio_reasons(throughput, THROUGHPUT, spent),
        *verdicts.ratio_reasons(memory, MEMORY, spent),
        *verdicts.accuracy_reasons(accuracy),
    ]
    if bench.interrupted and {throughput.decision, memory.decision} & {"undecided", "untrusted"}:
        reasons.append(interrupted(bench))
    return tuple(reasons)


def interrupted(bench: Bench) -> str:
    return f"the bench was interrupted after {len(bench.arms[0].samples)} round(s): run `dvc repro bench`"


_DECIDED = ("better", "worse")


def _front(baseline: str, judgements: Mapping[str, _Judged], *noises: Noise) -> set[str]:
    """The variants that no other one beats, by their ratios and differences to the baseline; see ``compare``."""
    if any(noise.why_untrusted for noise in noises):
        return set()
    points = {baseline: (1.0, 1.0, 0.0)}
    for variant, judgement in judgements.items():
        throughput, memory, accuracy = judgement.throughput, judgement.memory, judgement.accuracy
        if judgement.verdict != "untrusted" and throughput.estimate is not None and memory.estimate is not None:
            points[variant] = (
                throughput.estimate if throughput.decision in _DECIDED else 1.0,
                memory.estimate if memory.decision in _DECIDED else 1.0,
                accuracy.mean_fraction if accuracy.decision in _DECIDED else 0.0,
            )
    names = list(points)
    return {names[index] for index in stats.pareto_front(list(points.values()), [True, False, True])}


def _from_bench(bench: Bench, variant: str, speeds: bool, memory: bool) -> dict[str, Any]:
    """The fields of Compared that the bench measured; ``speeds``, ``memory``: whether these are trusted."""
    arm, ledgers, flops = _arm(bench, "variant", variant), bench.ledgers.get(variant), bench.flops.get(variant)

    def median(field: str, trusted: bool) -> float | None:
        known = [value for sample in arm.samples if (value := getattr(sample, field)) is not None]
        return statistics.median(known) if known and trusted else None

    def median_bytes(field: str) -> int | None:
        value = median(field, memory)
        return None if value is None else round(value)

    ranks = [each.peak_memory_rank_bytes for each in arm.samples if each.peak_memory_bytes is not None and memory]
    speed = median("samples_per_second", speeds)
    retries = [sample.allocator_retries for sample in arm.samples if sample.allocator_retries is not None]
    predicted = ledgers.predicted if ledgers else None
    achieved = flops.model_per_sample * speed if flops and speed else None
    return {
        "samples_per_second": speed,
        **{name: median(name, speeds) for name in ("step_p50_ms", "step_p90_ms", "step_p99_ms", "input_wait_fraction")},
        **{name: median_bytes(name) for name in ("peak_memory_bytes", "peak_reserved_bytes", "driver_memory_bytes")},
        "peak_memory_rank_bytes": tuple(round(statistics.median(each)) for each in zip(*ranks, strict=True)),
        "allocator_retries": sum(retries) if retries else None,
        "refused": sum(bool(sample.refusals) for sample in arm.samples),
        "ledgers": ledgers,
        "prediction_error_fraction": (
            predicted.peak_bytes / ledgers.measured.tensors_bytes - 1 if ledgers and predicted else None
        ),
        "flops": flops,
        "model_flops_per_second": achieved,
        "utilisation_fraction": _quotient(achieved, flops.peak_per_second if flops else None),
    }


def _from_training(result: Result, baseline: Result, time: TimeToTarget, reference: TimeToTarget) -> dict[str, Any]:
    """The fields of Compared that the training runs measured."""
    runs, summary = result.runs, result.summary
    return {
        "techniques": techniques(result.applied),
        "left_out": result.left_out,
        "decided": result.decided,
        "batch_size": result.batch_size,
        "learning_rate": result.learning_rate,
        "micro_batches": result.micro_batches,
        "backend": result.backend,
        "world_size": result.world_size,
        "threads_per_process": result.threads_per_process,
        "placement": result.placement,
        "test_accuracy_mean_fraction": summary.test_accuracy_mean_fraction,
        "test_accuracy_spread_fraction": summary.test_accuracy_spread_fraction,
        "test_correct_count": sum(run.test_correct for run in runs),
        "test_count": sum(run.test_count for run in runs),
        "training_samples_per_second": summary.samples_per_second,
        "training_peak_memory_bytes": summary.peak_memory_bytes,
        "startup_seconds": runs[0].startup_seconds,
        "first_step_seconds": runs[0].first_step_seconds,
        "train_seconds": summary.train_seconds,
        "train_time_ratio": _quotient(summary.train_seconds, baseline.summary.train_seconds),
        "time_to_target": time,
        "time_to_target_ratio": _quotient(time.train_seconds, reference.train_seconds),
        "runs": runs,
    }


def _arm(bench: Bench, role: str, variant: str) -> Arm:
    arm = bench.arm(role, variant)
    assert arm is not None  # _bench_problems
    return arm


def _quotient(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
