"""The figures of one variant, from the bench and from the training runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.comparison.comparison_file import (
    AccuracyDifference,
    EqualTime,
    SeedDifference,
    SeedTarget,
    TimeRatio,
    TimeToTarget,
)
from pipeline.comparison.verdicts import Ratio
from pipeline.params import Variant, techniques
from pipeline.results import Arm, Bench, HistoryRow, Result, Run


def of_bench(bench: Bench, arm: Arm, speeds: bool, memory: bool, energy: bool) -> dict[str, Any]:
    """Return the fields of Compared that the bench measured.

    ``speeds``, ``memory``, ``energy``: True if these figures are trusted; if not, they become None.

    If an arm has fewer rounds than the baseline, its figures are scaled, so that variants can be compared. The factor
    is the baseline's median over all its rounds, divided by the baseline's median over only those rounds that the arm
    has, too. Fractions, counts and the single ranks' peaks are not scaled.
    """
    base = bench.arm("variant", bench.baseline)
    same = base.model_copy(update={"samples": base.samples[: len(arm.samples)]}) if base else None
    ledgers, flops = bench.ledgers.get(arm.variant), bench.flops.get(arm.variant)

    def median(field: str, trusted: bool) -> float | None:
        value = median_of(arm, field) if trusted else None
        if value is None or base is None or same is None or field.endswith("fraction"):
            return value
        whole, part = median_of(base, field), median_of(same, field)
        return value * (whole / part) if whole and part else value

    def median_bytes(field: str) -> int | None:
        value = median(field, memory)
        return None if value is None else round(value)

    ranks = [each.peak_memory_rank_bytes for each in arm.samples if each.peak_memory_bytes is not None and memory]
    speed = median("samples_per_second", speeds)
    retries = [sample.allocator_retries for sample in arm.samples if sample.allocator_retries is not None]
    error = None
    if ledgers and ledgers.predicted:
        error = ledgers.predicted.peak_bytes / ledgers.measured.tensors_bytes - 1
    achieved = flops.model_per_sample * speed if flops and speed else None
    return {
        "samples_per_second": speed,
        "joules_per_sample": median("joules_per_sample", energy),
        **{name: median(name, speeds) for name in ("step_p50_ms", "step_p90_ms", "step_p99_ms", "input_wait_fraction")},
        **{name: median_bytes(name) for name in ("peak_memory_bytes", "peak_reserved_bytes", "driver_memory_bytes")},
        "peak_memory_rank_bytes": tuple(round(statistics.median(each)) for each in zip(*ranks, strict=True)),
        "allocator_retries": sum(retries) if retries else None,
        "rejected": sum(bool(sample.rejections) for sample in arm.samples),
        "ledgers": ledgers,
        "prediction_error_fraction": error,
        "flops": flops,
        "model_flops_per_second": achieved,
        "utilisation_fraction": _quotient(achieved, flops.peak_per_second if flops else None),
    }


def median_of(arm: Arm, field: str) -> float | None:
    """Return the median of ``field``, a field of ``Window``, over the rounds with a value; None without such rounds."""
    known = [value for sample in arm.samples if (value := getattr(sample, field)) is not None]
    return statistics.median(known) if known else None


def of_training(result: Result, baseline: Result) -> dict[str, Any]:
    """Return the fields of Compared that the training runs measured."""
    runs, summary = result.runs, result.summary
    told = [name for name in result.directions if all(name in run.findings for run in runs)]
    return {
        "techniques": tuple(techniques(Variant.model_validate(result.applied))),
        **{name: getattr(result, name) for name in _OF_RESULT},
        "test_accuracy_mean_fraction": summary.test_accuracy_mean_fraction,
        "test_accuracy_spread_fraction": summary.test_accuracy_spread_fraction,
        "test_correct_count": sum(run.test_correct for run in runs),
        "test_count": sum(run.test_count for run in runs),
        "findings": {name: statistics.fmean(run.findings[name] for run in runs) for name in told},
        "training_samples_per_second": summary.samples_per_second,
        "training_peak_memory_bytes": summary.peak_memory_bytes,
        "startup_seconds": runs[0].startup_seconds,
        "first_step_seconds": runs[0].first_step_seconds,
        "train_seconds": summary.train_seconds,
        "train_time_ratio": _quotient(summary.train_seconds, baseline.summary.train_seconds),
    }


_OF_RESULT = (
    *("skipped", "decided", "batch_size", "learning_rate", "micro_batches"),
    *("backend", "world_size", "threads_per_process", "placement", "runs"),
)
"""The fields of Compared that a result has under the same names."""


def time_to_target(
    result: Result, history: Sequence[HistoryRow], target: float, samples_per_second: float | None
) -> TimeToTarget:
    """Return each seed's steps until test accuracy ``target`` (0 to 1), and the median time at the bench's speed. The
    time is None if a seed does not reach the target, if the first evaluation shows it already, or if the speed is
    unknown."""
    evaluated = [(row.seed, row.step, row.test_accuracy) for row in history if row.test_accuracy is not None]
    reached = [(seed, step) for seed, step, accuracy in evaluated if accuracy >= target]
    seeds = tuple(
        SeedTarget(seed=run.seed, steps=min((step for seed, step in reached if seed == run.seed), default=None))
        for run in result.runs
    )
    steps = [each.steps for each in seeds if each.steps is not None]
    known = len(steps) == len(seeds) and statistics.median_low(steps) > min(step for _, step, _ in evaluated)
    samples = statistics.median(steps) * result.batch_size if known else None
    return TimeToTarget(
        seeds=seeds, reached_count=len(steps), samples=samples, train_seconds=_quotient(samples, samples_per_second)
    )


def time_ratio(time: TimeToTarget, baseline: TimeToTarget, throughput: Ratio | None) -> TimeRatio | None:
    """Return ``time`` divided by ``baseline``, both until the target accuracy is reached. Return None if one of them is
    unknown, or if the throughput's ratio is unknown, untrusted or without bounds."""
    more = _quotient(time.samples, baseline.samples)
    if more is None or not throughput or throughput.low is None or throughput.decision == "untrusted":
        return None
    speed = throughput.interval
    return TimeRatio(estimate=more / speed.estimate, low=more / speed.high, high=more / speed.low)


def another_model(result: Result, baseline: Result) -> str | None:
    """Return a description of the model that the variant trained; None if the baseline trained the same model."""
    named = (each.applied if each.applied.get("model") else each.config["train"] for each in (result, baseline))
    (name, options), theirs = ((each.get("model", ""), each.get("model_options", {})) for each in named)
    said = f" ({', '.join(f'{key} {value}' for key, value in options.items())})" if options else ""
    return None if (name, options) == theirs else f"{name}{said}, {result.parameter_count:,} parameters"


def equal_time(
    result: Result,
    baseline: Result,
    histories: Mapping[str, Sequence[HistoryRow]],
    speed: float | None,
    throughput: Ratio | None,
) -> EqualTime | None:
    """Return the test accuracies of ``result`` and ``baseline`` at the time when the faster training ends.

    Return None if the baseline's ``speed`` is unknown, if the ratio ``throughput`` is not decided, or if a seed was not
    evaluated by this time. If the ratio is the *same*, both speeds are taken as equal: otherwise, the noise of the
    ratio would decide whether the last evaluation counts. ``histories``: variant -> its history.
    """
    if not speed or not throughput or throughput.decision in ("undecided", "untrusted"):
        return None
    ours = speed * (1.0 if throughput.decision == "same" else throughput.interval.estimate)
    rates = ours / result.batch_size, speed / baseline.batch_size  # steps a second
    seconds = min(each.runs[0].steps / rate for each, rate in zip((result, baseline), rates, strict=True))
    accuracies = []
    for each, rate in zip((result, baseline), rates, strict=True):
        rows = [row for row in histories[each.variant] if row.step <= seconds * rate * (1 + 1e-9)]
        last = {row.seed: row.test_accuracy for row in rows if row.test_accuracy is not None}
        if len(last) < len(each.runs):
            return None
        accuracies.append(statistics.fmean(last.values()))
    ours, theirs = accuracies
    return EqualTime(train_seconds=seconds, accuracy_fraction=ours, baseline_accuracy_fraction=theirs)


def accuracy_difference(result: Result, baseline: Result) -> AccuracyDifference:
    """Return each seed's difference in test accuracy, from exact counts.

    It is 0 for a seed with equal weights in both results. The results must have the same seeds and the same test set.
    """
    theirs = {run.seed: run for run in baseline.runs}

    def difference(run: Run) -> float:
        other = theirs[run.seed]
        same = run.model_sha256 == other.model_sha256
        return 0.0 if same else (run.test_correct - other.test_correct) / run.test_count

    found = {run.seed: difference(run) for run in result.runs}
    values = list(found.values())
    return AccuracyDifference(
        seeds=tuple(SeedDifference(seed=seed, difference_fraction=value) for seed, value in found.items()),
        mean_fraction=statistics.fmean(values),
        spread_fraction=statistics.stdev(values) if len(values) > 1 else None,
        min_fraction=min(values),
        max_fraction=max(values),
    )


def _quotient(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
