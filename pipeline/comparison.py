"""Results of all variants -> one comparison with the baseline. A pure function of files.

Ratios are the variant's figure over the baseline's. ``None`` means unknown: a figure that a result does
not hold is not estimated here, and a ratio with an unknown side is unknown.

The numbers describe single runs, made one variant after the other; they do not say whether a difference
would show again. ``verdict`` is the place for that statement.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline import results
from pipeline.config import Compare, PipelineError, Variant
from pipeline.environment import ENVIRONMENT_FILE
from pipeline.results import RESULTS, Dataset, HistoryRow, Record, Result, Run


class ComparisonError(PipelineError, ValueError):
    """The results do not make a comparison. The message names each file or variant, why, and what to do."""


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
    train_seconds: float | None
    """Training wall time, without evaluation, at the first evaluation at or above the target; None: not reached."""


class TimeToTarget(Record):
    """Training time until an evaluation shows the target accuracy."""

    seeds: tuple[SeedTarget, ...]
    reached_count: int
    """How many seeds reached it."""
    train_seconds: float | None
    """Median over seeds. None unless every seed reached the target: the others have no time."""


class Compared(Record):
    """One variant beside the baseline. The baseline is compared too: its ratios are 1."""

    variant: str
    techniques: tuple[str, ...]
    """What was in effect, by name."""
    left_out: dict[str, str]
    """Technique that was asked for -> why this machine left it out."""
    backend: str | None
    world_size: int
    threads_per_process: int
    placement: str

    test_accuracy_mean_fraction: float
    test_accuracy_spread_fraction: float | None
    test_correct_count: int
    """Over all seeds."""
    test_count: int
    """Test samples evaluated, over all seeds."""
    accuracy_difference: AccuracyDifference | None
    """None for the baseline itself."""

    samples_per_second: float | None
    """Median over seeds."""
    samples_per_second_min: float | None
    samples_per_second_max: float | None
    throughput_ratio: float | None
    step_p50_ms: float | None
    """Step times and input wait: medians over seeds."""
    step_p90_ms: float | None
    step_p99_ms: float | None
    input_wait_fraction: float | None
    startup_seconds: float | None
    """Cold times: of the first seed, the only one that starts cold."""
    first_step_seconds: float | None
    train_seconds: float
    """Median over seeds."""
    train_time_ratio: float | None

    peak_memory_bytes: int | None
    """The largest rank's, largest over seeds."""
    peak_memory_ratio: float | None

    time_to_target: TimeToTarget
    time_to_target_ratio: float | None

    verdict: None = None
    """No statistics stand behind these ratios yet, hence no verdict."""
    runs: tuple[Run, ...]


class Comparison(Record):
    """``reports/comparison.json``."""

    schema_: Literal[1] = 1
    baseline: str
    target_accuracy_fraction: float
    environment: dict[str, Any]
    """The content of environment.json, its hash included."""
    device: str
    dataset: Dataset
    train: dict[str, Any]
    """The job that every variant trained, as ``train`` in params.yaml asked for it."""
    parameter_count: int
    seeds: tuple[int, ...]
    variants: tuple[Compared, ...]
    """The baseline first, the others in the order of params.yaml."""

    def to_json(self) -> str:
        values = self.model_dump(mode="json")
        ordered = {"schema": values.pop("schema_"), **values}
        return json.dumps(ordered, indent=2, allow_nan=False) + "\n"


def read_all(variants: Iterable[str], root: Path = RESULTS) -> tuple[list[Result], dict[str, list[HistoryRow]]]:
    """Results, in the order of ``variants``, and histories by variant.

    Raises ComparisonError, listing every file that is missing, cannot be read or is another variant's.
    """
    found: list[Result] = []
    histories: dict[str, list[HistoryRow]] = {}
    problems = []
    for variant in variants:
        result_file, history_file = results.result_file(variant, root), results.history_file(variant, root)
        again = f"run `dvc repro`, or `dvc repro train@{variant}` for this variant alone."
        try:
            result = results.read(result_file)
            found.append(result)
            if result.variant != variant:
                problems.append(f"{result_file} holds the result of variant {result.variant!r}: {again}")
        except FileNotFoundError:
            problems.append(f"{result_file} is missing, so variant {variant!r} cannot be compared: {again}")
        except ValueError as error:
            problems.append(str(error))  # names the file
        try:
            histories[variant] = results.read_history(history_file)
        except FileNotFoundError:
            problems.append(f"{history_file} is missing, so variant {variant!r} cannot be compared: {again}")
        except ValueError as error:
            problems.append(f"{history_file} is not a history that this version can read: {again} ({error})")
    if problems:
        raise ComparisonError("\n".join(problems))
    return found, histories


def read_environment(path: Path = ENVIRONMENT_FILE) -> dict[str, Any]:
    """Content of environment.json. Raises ComparisonError if it is missing or holds no fingerprint."""
    again = "run `dvc repro`, or `python -m pipeline environment`."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ComparisonError(f"{path} is missing, so nobody knows where the results were measured: {again}") from None
    except ValueError as error:
        raise ComparisonError(f"{path} is not JSON: {again} ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("hash"), str):
        raise ComparisonError(f"{path} holds no environment's fingerprint: {again}")
    return content


def compare(
    measured: Sequence[Result],
    histories: Mapping[str, Sequence[HistoryRow]],
    settings: Compare,
    environment: Mapping[str, Any],
) -> Comparison:
    """Compare every result with the baseline's.

    Raises ComparisonError if they are not results of one job in one environment: ``environment`` is the
    content of environment.json.
    """
    baseline = next((result for result in measured if result.variant == settings.baseline), None)
    if baseline is None:
        there = ", ".join(result.variant for result in measured) or "none"
        raise ComparisonError(
            f"compare.baseline: there is no result of variant {settings.baseline!r}; results: {there}. "
            "Name one of them as the baseline, or run `dvc repro`."
        )
    problems = [
        *(_environment_problem(result, environment) for result in measured),
        *(problem for result in measured for problem in _job_problems(result, baseline)),
        *(problem for result in measured for problem in _history_problems(result, histories)),
    ]
    problems = [problem for problem in problems if problem]
    if problems:
        raise ComparisonError("\n".join(problems))

    others = [result for result in measured if result is not baseline]
    target = settings.target_accuracy
    reference = time_to_target(baseline, histories[baseline.variant], target)
    return Comparison(
        baseline=baseline.variant,
        target_accuracy_fraction=target,
        environment=dict(environment),
        device=baseline.device,
        dataset=baseline.dataset,
        train=baseline.config["train"],
        parameter_count=baseline.parameter_count,
        seeds=tuple(run.seed for run in baseline.runs),
        variants=tuple(
            _compared(result, baseline, time_to_target(result, histories[result.variant], target), reference)
            for result in (baseline, *others)
        ),
    )


def accuracy_difference(result: Result, baseline: Result) -> AccuracyDifference:
    """Per-seed differences of test accuracy, from the exact counts. Both must hold the same seeds and test set."""
    theirs = {run.seed: run for run in baseline.runs}
    differences = [
        SeedDifference(
            seed=run.seed,
            difference_fraction=(run.test_correct - theirs[run.seed].test_correct) / run.test_count,
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


def techniques(applied: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of what a variant applies beyond single-device fp32, in the order of its fields.

    >>> techniques({"parallelism": "ddp", "channels_last": True, "gradient_accumulation": 4})
    ('ddp', 'channels_last', 'gradient_accumulation=4')
    """
    plain = Variant().model_dump()
    names = []
    for key, value in applied.items():
        if key == "processes" or value == plain.get(key):  # the world size says how many processes there were
            continue
        names.append(key if value is True else value if isinstance(value, str) else f"{key}={value}")
    return tuple(names)


def _compared(result: Result, baseline: Result, target: TimeToTarget, reference: TimeToTarget) -> Compared:
    runs, summary, base = result.runs, result.summary, baseline.summary
    speeds = _all_known([run.samples_per_second for run in runs])
    return Compared(
        variant=result.variant,
        techniques=techniques(result.applied),
        left_out=result.left_out,
        backend=result.backend,
        world_size=result.world_size,
        threads_per_process=result.threads_per_process,
        placement=result.placement,
        test_accuracy_mean_fraction=summary.test_accuracy_mean_fraction,
        test_accuracy_spread_fraction=summary.test_accuracy_spread_fraction,
        test_correct_count=sum(run.test_correct for run in runs),
        test_count=sum(run.test_count for run in runs),
        accuracy_difference=None if result is baseline else accuracy_difference(result, baseline),
        samples_per_second=summary.samples_per_second,
        samples_per_second_min=min(speeds) if speeds else None,
        samples_per_second_max=max(speeds) if speeds else None,
        throughput_ratio=_ratio(summary.samples_per_second, base.samples_per_second),
        step_p50_ms=_median([run.step_p50_ms for run in runs]),
        step_p90_ms=_median([run.step_p90_ms for run in runs]),
        step_p99_ms=_median([run.step_p99_ms for run in runs]),
        input_wait_fraction=_median([run.input_wait_fraction for run in runs]),
        startup_seconds=runs[0].startup_seconds,
        first_step_seconds=runs[0].first_step_seconds,
        train_seconds=summary.train_seconds,
        train_time_ratio=_ratio(summary.train_seconds, base.train_seconds),
        peak_memory_bytes=summary.peak_memory_bytes,
        peak_memory_ratio=_ratio(summary.peak_memory_bytes, base.peak_memory_bytes),
        time_to_target=target,
        time_to_target_ratio=_ratio(target.train_seconds, reference.train_seconds),
        runs=runs,
    )


def _environment_problem(result: Result, environment: Mapping[str, Any]) -> str:
    here = str(environment["hash"])
    if result.environment == here:
        return ""
    return (
        f"variant {result.variant!r} was measured in environment {result.environment[:12]}, but environment.json is "
        f"{here[:12]}: numbers of different machines or software are not compared. Run `dvc repro` to measure it here."
    )


def _job_problems(result: Result, baseline: Result) -> list[str]:
    """Where ``result`` did another job than the baseline."""
    name, base = f"variant {result.variant!r}", f"the baseline {baseline.variant!r}"
    again = "Run `dvc repro`, which trains every variant with what params.yaml says now."
    problems = []
    seeds, base_seeds = sorted(run.seed for run in result.runs), sorted(run.seed for run in baseline.runs)
    if seeds != base_seeds or not seeds:
        problems.append(f"{name} ran seeds {seeds}, {base} {base_seeds}: accuracy is paired by seed. {again}")
    if result.dataset != baseline.dataset:
        problems.append(
            f"{name} trained on {_described(result.dataset)}, {base} on {_described(baseline.dataset)}. {again}"
        )
    ours, theirs = result.config.get("train", {}), baseline.config.get("train", {})
    for key in sorted(ours.keys() | theirs.keys()):
        if key != "seeds" and ours.get(key) != theirs.get(key):
            problems.append(
                f"{name} trained with train.{key} {ours.get(key)!r}, {base} with {theirs.get(key)!r}. {again}"
            )
    return problems


def _history_problems(result: Result, histories: Mapping[str, Sequence[HistoryRow]]) -> list[str]:
    """Seeds without an evaluation in the history: they would wrongly count as never having reached the target."""
    evaluated = {row.seed for row in histories.get(result.variant, ()) if row.test_accuracy is not None}
    return [
        f"the history of variant {result.variant!r} has no evaluation of seed {run.seed}. "
        f"Run `dvc repro --force train@{result.variant}`."
        for run in result.runs
        if run.seed not in evaluated
    ]


def _described(dataset: Dataset) -> str:
    return f"{dataset.name} ({dataset.train_count} + {dataset.test_count} samples, SHA-256 {dataset.sha256[:12]})"


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _median(values: Sequence[float | None]) -> float | None:
    known = _all_known(values)
    return statistics.median(known) if known else None


def _all_known(values: Sequence[float | None]) -> list[float]:
    """The values, or none of them if any is unknown."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []
