"""Results of all variants and the bench -> one comparison with the baseline. A pure function of files.

Throughput, memory and the verdicts rest on the bench, which measured all variants side by side; accuracy and the time
to reach it rest on the training runs. ``None`` means unknown: a figure that no file holds is not estimated here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipeline import ablation, results, stats, verdicts
from pipeline.ablation import Share
from pipeline.config import Compare, Margins, PipelineError, Variant
from pipeline.environment import ENVIRONMENT_FILE
from pipeline.results import RESULTS, Arm, Bench, Dataset, Flops, HistoryRow, Ledgers, Record, Result, Run
from pipeline.verdicts import MEMORY, THROUGHPUT, Accuracy, Noise, Ratio, Verdict


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
    """One variant beside the baseline. The baseline is one too: what compares it with itself is None."""

    variant: str
    techniques: tuple[str, ...]
    """What was in effect, by name."""
    left_out: dict[str, str]
    """Technique that was asked for -> why this machine left it out."""
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
    """This and the next five: medians over the bench's samples, without those that were refused."""
    step_p50_ms: float | None
    step_p90_ms: float | None
    step_p99_ms: float | None
    input_wait_fraction: float | None
    peak_memory_bytes: int | None
    """The largest rank's."""
    refused: int
    """How many of the bench's samples of this variant were refused, in part or whole."""

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
    """Of the training runs: the largest rank's, largest over seeds."""
    startup_seconds: float | None
    """Cold times: of the first seed, the only one that starts cold."""
    first_step_seconds: float | None
    train_seconds: float
    """Median over seeds."""
    train_time_ratio: float | None
    time_to_target: TimeToTarget
    time_to_target_ratio: float | None
    runs: tuple[Run, ...]


class Comparison(Record):
    """``reports/comparison.json``."""

    schema_: Literal[1] = 1
    baseline: str
    target_accuracy_fraction: float
    margins: Margins
    environment: dict[str, Any]
    """The content of environment.json, its hash included."""
    device: str
    dataset: Dataset
    train: dict[str, Any]
    """The job that every variant trained, as ``train`` in params.yaml asked for it."""
    parameter_count: int
    seeds: tuple[int, ...]
    noise_throughput: Noise
    noise_memory: Noise
    variants: tuple[Compared, ...]
    """The baseline first, the others in the order of params.yaml."""
    shares: tuple[Share, ...]
    """Of the techniques of ablated variants, in the bench's order."""
    bench: Bench
    """Whole, raw samples included."""

    def to_json(self) -> str:
        values = self.model_dump(mode="json")
        bench = values.pop("bench")
        ordered = {"schema": values.pop("schema_"), **values, "bench": {"schema": bench.pop("schema_"), **bench}}
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
    problems = [
        *(_environment_problem(result, environment) for result in measured),
        *(problem for result in measured for problem in _job_problems(result, baseline)),
        *(problem for result in measured for problem in _history_problems(result, histories)),
        *_bench_problems(bench, measured, baseline, environment),
    ]
    problems = [problem for problem in problems if problem]
    if problems:
        raise ComparisonError("\n".join(problems))

    margins, reference = settings.margins, _arm(bench, "variant", baseline.variant)
    again = _arm(bench, "again", baseline.variant)
    noise_throughput = verdicts.noise(reference, again, THROUGHPUT, settings.max_spread)
    noise_memory = verdicts.noise(reference, again, MEMORY, settings.max_spread)

    def judged(result: Result) -> _Judged:
        arm, difference = _arm(bench, "variant", result.variant), accuracy_difference(result, baseline)
        throughput = verdicts.ratio(arm, reference, THROUGHPUT, margins.throughput, noise_throughput)
        memory = verdicts.ratio(arm, reference, MEMORY, margins.memory, noise_memory)
        accuracy = verdicts.accuracy(
            [each.difference_fraction for each in difference.seeds], margins.accuracy, 1 / baseline.dataset.test_count
        )
        known = [throughput.decision, accuracy.decision]
        known += [] if verdicts.untold((arm, reference), MEMORY) else [memory.decision]
        verdict = verdicts.verdict(known)
        return _Judged(throughput, memory, accuracy, difference, verdict, _reasons(throughput, memory, accuracy, bench))

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
        environment=dict(environment),
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
    """Names of what a variant applies beyond single-device fp32, in the order of its fields."""
    return tuple(Variant.model_validate(applied).techniques())


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


def _reasons(throughput: Ratio, memory: Ratio, accuracy: Accuracy, bench: Bench) -> tuple[str, ...]:
    """What stands between the figures and a decision."""
    rounds, limit = len(bench.arms[0].samples), bench.config["bench"]["max_rounds"]
    budget = "bench.max_minutes" if limit is None or rounds < limit else "bench.max_rounds"
    reasons = [
        *verdicts.ratio_reasons(throughput, THROUGHPUT, budget),
        *verdicts.ratio_reasons(memory, MEMORY, budget),
        *verdicts.accuracy_reasons(accuracy),
    ]
    if bench.interrupted and {throughput.decision, memory.decision} & {"undecided", "untrusted"}:
        reasons.append(f"the bench was interrupted after {rounds} round(s): run `dvc repro bench`")
    return tuple(reasons)


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

    speed, peak = median("samples_per_second", speeds), median("peak_memory_bytes", memory)
    predicted = ledgers.predicted if ledgers else None
    achieved = flops.model_per_sample * speed if flops and speed else None
    return {
        "samples_per_second": speed,
        **{name: median(name, speeds) for name in ("step_p50_ms", "step_p90_ms", "step_p99_ms", "input_wait_fraction")},
        "peak_memory_bytes": None if peak is None else round(peak),
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


def _bench_problems(
    bench: Bench, measured: Sequence[Result], baseline: Result, environment: Mapping[str, Any]
) -> list[str]:
    """Where the bench measured something else than what was trained."""
    again = "Run `dvc repro bench`, which measures what params.yaml says now."
    here = str(environment["hash"])
    problems = []
    if bench.environment != here:
        problems.append(
            f"the bench was measured in environment {bench.environment[:12]}, but environment.json is {here[:12]}"
        )
    if bench.baseline != baseline.variant:
        problems.append(f"the bench's baseline is {bench.baseline!r}, that of compare.baseline {baseline.variant!r}")
    elif not bench.arm("again", baseline.variant):
        problems.append(f"the bench did not measure the baseline {baseline.variant!r} against itself")
    if bench.dataset != baseline.dataset:
        problems.append(
            f"the bench trained on {_described(bench.dataset)}, the variants on {_described(baseline.dataset)}"
        )
    ours, theirs = bench.config["train"], baseline.config["train"]
    problems += [
        f"the bench trained with train.{key} {ours.get(key)!r}, the variants with {theirs.get(key)!r}"
        for key in sorted(ours.keys() | theirs.keys())
        if key != "seeds" and ours.get(key) != theirs.get(key)
    ]
    for result in measured:
        arm = bench.arm("variant", result.variant)
        if arm is None:
            problems.append(f"the bench did not measure variant {result.variant!r}")
        elif _run_of(arm) != _run_of(result):
            problems.append(
                f"the bench measured variant {result.variant!r} with {_ran(arm)}, but {_ran(result)} was trained"
            )
        elif (arm.parameter_count, arm.placement) != (result.parameter_count, result.placement):
            problems.append(
                f"the bench measured variant {result.variant!r} with {arm.parameter_count:,} parameters and the data "
                f"set {arm.placement}; trained was one with {result.parameter_count:,} and the data set "
                f"{result.placement}: the model's code has changed, or memory was short (then set train.placement)"
            )
    counts = {arm.name: len(arm.samples) for arm in bench.arms}
    if len(set(counts.values())) > 1:
        problems.append(f"the bench holds unequal numbers of samples, which do not pair: {counts}")
    return [f"bench.json: {problem}. {again}" for problem in problems]


def _run_of(one: Arm | Result) -> tuple[object, ...]:
    """What makes two runs of a variant the same."""
    return one.applied, one.world_size, one.batch_size, one.micro_batches


def _ran(one: Arm | Result) -> str:
    decided = f" and {one.micro_batches} micro-batch(es)" if one.decided else ""
    return f"{', '.join(techniques(one.applied)) or 'no technique'} in {one.world_size} process(es){decided}"


def _arm(bench: Bench, role: str, variant: str) -> Arm:
    arm = bench.arm(role, variant)
    assert arm is not None  # _bench_problems
    return arm


def _described(dataset: Dataset) -> str:
    return f"{dataset.name} ({dataset.train_count} + {dataset.test_count} samples, SHA-256 {dataset.sha256[:12]})"


def _quotient(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
