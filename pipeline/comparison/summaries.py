"""The figures of a variant, and of a session, from the bench and from the training runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.comparison import stats, verdicts, waiting
from pipeline.comparison.comparison_file import EqualTime, SeedTarget, SessionSummary, TimeToTarget, fields_of
from pipeline.comparison.sessions import Sitting, column
from pipeline.comparison.stats import Difference
from pipeline.params import Compare, Variant, techniques
from pipeline.results import Bench, HistoryRow, Result, Run, Window, over_seeds, summarise
from pipeline.results.figures import (
    ACHIEVED,
    ALWAYS_MEASURED,
    FIGURES,
    MEMORY,
    PREDICTION_ERROR,
    PRICE,
    QUANTITIES,
    THROUGHPUT,
    UTILISATION,
    Figure,
)


def of_variant(
    result: Result, bench: Bench, history: Sequence[HistoryRow], settings: Compare, trusted: Mapping[str, bool]
) -> dict[str, Any]:
    """Return the fields of Compared that the bench and the training runs measured.

    ``trusted``: compared figure, by the key of its margin -> whether this figure
    and its family are trusted; figures that are not trusted become None.

    If an arm has fewer rounds than the baseline, its figures are scaled, so that variants can be compared. The factor
    is the baseline's median over all its rounds, divided by the baseline's median over only those rounds that the arm
    has, too. Fractions, counts and the single ranks' peaks are not scaled.
    """
    arm, base = (bench.arm("variant", name) for name in (result.variant, bench.baseline))
    assert arm is not None  # consistency.check has checked it
    assert base is not None
    samples, runs = arm.samples, result.runs

    def value_of(figure: Figure) -> Any:
        if not figure.over_rounds:
            return over_seeds(figure, runs)
        value = over_rounds(figure, samples) if trusted.get(figure.family, True) else None
        if value is None or figure.unit in ("fraction", "count"):
            return value
        whole, part = over_rounds(figure, base.samples), over_rounds(figure, base.samples[: len(samples)])
        scaled = value * (whole / part) if whole and part else value
        return round(scaled) if figure.unit == "bytes" else scaled

    values = {figure.field: value_of(figure) for figure in FIGURES if figure.over_rounds or figure.over_seeds}
    speed, flops = values[THROUGHPUT.field], bench.flops.get(result.variant)
    achieved = flops.model_per_sample * speed if flops and speed else None
    values[ACHIEVED.field] = achieved
    values[PRICE.field] = _price_of_epoch(result, speed, settings.price_on(result.device))
    values[UTILISATION.field] = _quotient(achieved, flops.peak_per_second if flops else None)
    ledgers = bench.ledgers.get(result.variant)
    if ledgers and ledgers.predicted:
        values[PREDICTION_ERROR.field] = ledgers.predicted.peak_bytes / ledgers.measured.tensors_bytes - 1
    ranks = [sample.peak_memory_rank_bytes for sample in samples if MEMORY.of(sample) is not None and trusted["memory"]]
    optional = {figure.field for figure in FIGURES if figure.optional}
    return {
        "variant": result.variant,
        "techniques": (*techniques(Variant.model_validate(result.applied)), *filter(None, [result.changed])),
        "conditions": result.conditions,
        "figures": {field: value for field, value in values.items() if value is not None or field not in optional},
        "peak_memory_rank_bytes": tuple(round(statistics.median(peaks)) for peaks in zip(*ranks, strict=True)),
        **waiting.of_ranks(arm),
        "rejected": sum(bool(sample.rejections) for sample in samples),
        "trained": summarise(runs),
        "findings": {
            name: statistics.fmean(run.findings[name] for run in runs)
            for name in result.directions
            if all(name in run.findings for run in runs)
        },
        "time_to_target": time_to_target(result, history, settings.target_accuracy, speed),
        "runs": runs,
    }


def _price_of_epoch(result: Result, speed: float | None, price: float | None) -> float | None:
    """``speed``: in samples per second. ``price``: of a device-hour."""
    devices = result.hosts if result.backend != "nccl" and result.world_size > 1 else result.world_size
    if not (speed and price and result.dataset) or result.applied.get("parallelism") == "data_parallel":
        return None  # a record does not say on how many GPUs a single process ran
    return price * devices * result.dataset.train_count / speed / 3600


def against_baseline(
    result: Result,
    baseline: Result,
    histories: Mapping[str, Sequence[HistoryRow]],
    fields: Mapping[str, Mapping[str, Any]],
    throughput: Difference | None,
) -> dict[str, Any]:
    """Return the fields of Compared that compare trainings. ``histories``: variant -> its history. ``fields``: variant
    -> ``of_variant``. ``throughput``: the ratio to the baseline; None for the baseline itself."""
    own, reference = fields[result.variant], fields[baseline.variant]
    other_model, speed = another_model(result, baseline), reference["figures"][THROUGHPUT.field]
    differs = other_model or result.applied.get("distillation")
    return {
        "time_to_target_ratio": time_ratio(own["time_to_target"], reference["time_to_target"], throughput),
        "another_model": other_model,
        "equal_time": equal_time(result, baseline, histories, speed, throughput) if differs else None,
    }


def of_session(session: Sitting, variants: Sequence[str]) -> SessionSummary:
    """Summarise a session. ``variants``: the variants to look for in its rounds."""
    rounds = session.rounds()
    assert rounds is not None  # the baseline's rounds
    samples, benches = rounds.arms[column(rounds.baseline)].samples, session.benches
    return SessionSummary(
        **benches[0].session.model_dump(),
        benches=len(benches),
        commit=benches[-1].commit,
        rounds=rounds.cost.rounds,
        baseline_figures={figure.field: over_rounds(figure, samples) for figure in ALWAYS_MEASURED},
        **fields_of({figure: rounds.noise(figure) for figure in ALWAYS_MEASURED}, "noise_"),
        variants=tuple(name for name in variants if session.rounds(column(name))),
    )


def over_rounds(figure: Figure, samples: Sequence[Window]) -> Any:
    """Join the values of ``figure`` in the rounds in which it is known. Return None if there are none, or if they are
    less than half of the rounds in which the family's compared figure is known: a round that a raised limit accepts
    later has kept its speed alone (``results.Arm.undisturbed``)."""
    known, family = figure.known(samples), [compared for compared in QUANTITIES if compared.margin == figure.family]
    if not known or any(2 * len(known) < len(compared.known(samples)) for compared in family):
        return None
    return sum(known) if figure.over_rounds == "sum" else statistics.median(known)


def time_to_target(result: Result, history: Sequence[HistoryRow], target: float, speed: float | None) -> TimeToTarget:
    """Return each seed's steps until test accuracy ``target`` (0 to 1), and the median time at the bench's speed. The
    time is None if a seed does not reach the target, if the first evaluation shows it already, or if the speed is
    unknown."""
    evaluated = [(row.seed, row.step, row.test_accuracy) for row in history if row.test_accuracy is not None]
    reached = [(seed, step) for seed, step, accuracy in evaluated if accuracy >= target]
    seeds = tuple(
        SeedTarget(seed=run.seed, steps=min((step for seed, step in reached if seed == run.seed), default=None))
        for run in result.runs
    )
    steps = [seed.steps for seed in seeds if seed.steps is not None]
    known = (
        bool(steps)
        and len(steps) == len(seeds)
        and statistics.median_low(steps) > min(step for _, step, _ in evaluated)
    )
    samples = statistics.median(steps) * result.batch_size if known else None
    return TimeToTarget(seeds=seeds, reached_count=len(steps), samples=samples, train_seconds=_quotient(samples, speed))


def time_ratio(time: TimeToTarget, baseline: TimeToTarget, throughput: Difference | None) -> Difference | None:
    """Return ``time`` divided by ``baseline``, both until the target accuracy is reached. Return None if one of them is
    unknown, or if the throughput's ratio is unknown, untrusted or without bounds."""
    more = _quotient(time.samples, baseline.samples)
    if more is None or not throughput or not throughput.counts or not throughput.estimate:
        return None
    low, high = throughput.bounds
    return Difference(estimate=more / throughput.estimate, low=more / high, high=more / low, pairs=throughput.pairs)


def another_model(result: Result, baseline: Result) -> str | None:
    """Return a description of the model that the variant trained; None if the baseline trained the same model."""
    jobs = (run.applied if run.applied.get("model") else run.config["train"] for run in (result, baseline))
    model, baseline_model = ((job.get("model", ""), job.get("model_options", {})) for job in jobs)
    if model == baseline_model:
        return None
    name, options = model
    described = f" ({', '.join(f'{key} {value}' for key, value in options.items())})" if options else ""
    return f"{name}{described}, {result.parameter_count:,} parameters"


def equal_time(
    result: Result,
    baseline: Result,
    histories: Mapping[str, Sequence[HistoryRow]],
    speed: float | None,
    throughput: Difference | None,
) -> EqualTime | None:
    """Return the test accuracies of ``result`` and ``baseline`` at the time when the faster training ends.

    Return None if the baseline's ``speed`` is unknown, if the ratio ``throughput`` is untrusted or without bounds, or
    if a seed was not evaluated by this time, also at one end of the ratio's interval. If the ratio is the *same*, both
    speeds are taken as equal: otherwise, the noise of the ratio would decide whether the last evaluation counts.
    ``histories``: variant -> its history.
    """
    if not speed or not throughput or not throughput.counts:
        return None
    ratios = (1.0,) if throughput.decision == "same" else (throughput.estimate or 1.0, *throughput.bounds)
    at_ratios = [_at_ratio(result, baseline, histories, speed, ratio) for ratio in ratios]
    known = [at for at in at_ratios if at]
    if len(known) < len(ratios):
        return None
    differences = [at.accuracy_fraction - at.baseline_accuracy_fraction for at in known]
    ends = {"difference_low_fraction": min(differences), "difference_high_fraction": max(differences)}
    return known[0].model_copy(update=ends)


def _at_ratio(
    result: Result, baseline: Result, histories: Mapping[str, Sequence[HistoryRow]], speed: float, ratio: float
) -> EqualTime | None:
    """Return ``equal_time`` at one ratio of the throughputs."""
    trainings = (result, ratio * speed / result.batch_size), (baseline, speed / baseline.batch_size)  # steps a second
    seconds = min(trained.runs[0].steps / rate for trained, rate in trainings)
    accuracies = []
    for trained, rate in trainings:
        rows = [row for row in histories[trained.variant] if row.step <= seconds * rate * (1 + 1e-9)]
        last = {row.seed: row.test_accuracy for row in rows if row.test_accuracy is not None}
        if len(last) < len(trained.runs):
            return None
        accuracies.append(statistics.fmean(last.values()))
    accuracy, baseline_accuracy = accuracies
    return EqualTime(train_seconds=seconds, accuracy_fraction=accuracy, baseline_accuracy_fraction=baseline_accuracy)


def accuracies(
    results: Sequence[Result], baseline: Result, margin: float, *, look: bool = False
) -> dict[str, Difference]:
    """Return variant -> its difference in test accuracy from the baseline, decided together (``stats.step_down``).
    Variants that were not trained to the end are left out."""
    if not baseline.runs:
        return {}
    trained = [result for result in results if result.runs]
    mean = statistics.fmean(run.test_accuracy for run in baseline.runs)
    weights = {run.seed: run.model_sha256 for run in baseline.runs}
    test_count = baseline.dataset.test_count if baseline.dataset else None
    resolution = 1 / (test_count * baseline.unit.per_sample) if test_count else 0.0

    def accuracy(result: Result, confidence: float) -> Difference:
        identical = {run.seed: run.model_sha256 for run in result.runs} == weights
        differences = accuracy_differences(result, baseline)
        return verdicts.accuracy(differences, margin, mean, resolution, confidence, identical=identical)

    def judged(undecided: int) -> dict[str, Difference]:
        confidence = stats.confidence_of_tests(undecided, look=look)
        return {result.variant: accuracy(result, confidence) for result in trained}

    return stats.decided_together(judged, len(trained))


def learnt_nothing(baseline: Result) -> str:
    """Return why comparisons of accuracy may say nothing: the baseline's score exceeds that of a constant answer by no
    more than twice the standard error of so many samples. Empty if nothing shows it."""
    scores, train = [run.test_accuracy for run in baseline.runs], baseline.config["train"]
    if not scores:
        return ""
    constant = (baseline.dataset and baseline.dataset.most_frequent_fraction) or 0.0
    mean, error = statistics.fmean(scores), math.sqrt(constant * (1 - constant) / baseline.runs[0].test_count)
    if constant and train.get("metric") == "accuracy" and mean <= constant + 2 * error + 1e-9:
        return (
            f"comparisons of accuracy say nothing: the accuracy of `{baseline.variant}`, {mean:.2%}, hardly exceeds "
            f"that of a constant answer, {constant:.2%} (the share of the most frequent class)"
        )
    if train.get("metric_over") == "test_set" and len(scores) > 1 and max(scores) == min(scores) < 1:
        return (
            f"comparisons of accuracy may say nothing: all seeds of `{baseline.variant}` have the same score, "
            f"{scores[0]:.2%}, as a model has that always gives the same answer"
        )
    return ""


def accuracy_differences(result: Result, baseline: Result) -> dict[int, float]:
    """Return seed -> the difference in test accuracy, from exact counts.

    It is 0 for a seed with equal weights in both results. The results must have the same seeds and the same test set.
    """
    baseline_runs = {run.seed: run for run in baseline.runs}

    def difference(run: Run, baseline_run: Run) -> float:
        same = run.model_sha256 == baseline_run.model_sha256
        return 0.0 if same else (run.test_correct - baseline_run.test_correct) / run.test_count

    return {run.seed: difference(run, baseline_runs[run.seed]) for run in result.runs}


def _quotient(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
