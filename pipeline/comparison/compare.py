"""Results of all variants and the bench -> one comparison with the baseline. A pure function of files.

Throughput, memory and the verdicts rest on the bench, which measured all variants side by side; accuracy and the time
to reach it rest on the training runs. ``None`` means unknown: a figure that no file holds is not estimated here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.comparison import ablation, advice, consistency, figures, pareto, planning, verdicts
from pipeline.comparison.comparison_file import AccuracyDifference, Compared, Comparison
from pipeline.comparison.consistency import ComparisonError
from pipeline.comparison.verdicts import MEMORY, THROUGHPUT, Accuracy, Noise, Ratio, Verdict
from pipeline.environment import without_stages
from pipeline.params import Compare, Margins
from pipeline.results import Arm, Bench, HistoryRow, Result


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

    arms = _arm(bench, "variant", baseline.variant), _arm(bench, "aa_control", baseline.variant)
    cost = planning.cost_of(bench)
    noises = (
        verdicts.noise(*arms, THROUGHPUT, settings.max_spread, cost),
        verdicts.noise(*arms, MEMORY, settings.max_spread, cost),
    )
    others = [result for result in measured if result is not baseline]
    judgements = {each.variant: _judge(each, baseline, bench, settings.margins, noises) for each in others}
    trusted = {
        name: (not each.throughput.why_untrusted, not each.memory.why_untrusted) for name, each in judgements.items()
    }
    trusted[baseline.variant] = (not noises[0].why_untrusted, not noises[1].why_untrusted)
    placed = {name: each[:3] for name, each in judgements.items() if each.verdict != "untrusted"}
    front = pareto.on_front(baseline.variant, placed) if all(trusted[baseline.variant]) else set()
    target = settings.target_accuracy
    times = {each.variant: figures.time_to_target(each, histories[each.variant], target) for each in measured}
    return Comparison(
        baseline=baseline.variant,
        target_accuracy_fraction=target,
        margins=settings.margins,
        environment=without_stages(environment),
        device=baseline.device,
        dataset=baseline.dataset,
        train=baseline.config["train"],
        parameter_count=baseline.parameter_count,
        seeds=tuple(run.seed for run in baseline.runs),
        noise_throughput=noises[0],
        noise_memory=noises[1],
        variants=tuple(
            Compared(
                variant=each.variant,
                on_front=each.variant in front,
                **(_NOT_JUDGED if each is baseline else judgements[each.variant]._asdict()),
                **figures.of_bench(bench, _arm(bench, "variant", each.variant), *trusted[each.variant]),
                **figures.of_training(each, baseline, times[each.variant], times[baseline.variant]),
            )
            for each in (baseline, *others)
        ),
        shares=ablation.shares(
            bench, {name: each.accuracy for name, each in judgements.items()}, settings.margins, noises
        ),
        bench=bench,
    )


class Judgement(NamedTuple):
    """What a variant's verdict says and rests on."""

    throughput: Ratio
    memory: Ratio
    accuracy: Accuracy
    accuracy_difference: AccuracyDifference
    verdict: Verdict
    reasons: tuple[str, ...]


_NOT_JUDGED: dict[str, Any] = {**dict.fromkeys(Judgement._fields), "reasons": ()}
"""The baseline is not."""


def _judge(result: Result, baseline: Result, bench: Bench, margins: Margins, noises: tuple[Noise, Noise]) -> Judgement:
    """Of each quantity samples -> interval -> decision at a margin; and the verdict of all decisions."""
    arms = _arm(bench, "variant", result.variant), _arm(bench, "variant", baseline.variant)
    throughput = verdicts.ratio(*arms, THROUGHPUT, margins.throughput, noises[0])
    memory = verdicts.ratio(*arms, MEMORY, margins.memory, noises[1])
    difference = figures.accuracy_difference(result, baseline)
    accuracy = verdicts.accuracy(
        [each.difference_fraction for each in difference.seeds],
        margins.accuracy,
        baseline.summary.test_accuracy_mean_fraction,
        1 / baseline.dataset.test_count,
        identical=_weights(result) == _weights(baseline),
    )
    known = [throughput.decision, accuracy.decision]
    known += [] if verdicts.unmeasurable(arms, MEMORY) else [memory.decision]
    reasons = advice.reasons(throughput, memory, accuracy, bench)
    return Judgement(throughput, memory, accuracy, difference, verdicts.verdict(known), reasons)


def _weights(result: Result) -> dict[int, str]:
    return {run.seed: run.model_sha256 for run in result.runs}


def _arm(bench: Bench, role: str, variant: str) -> Arm:
    arm = bench.arm(role, variant)
    assert arm is not None  # consistency.check
    return arm
