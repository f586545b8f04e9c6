"""Judge one variant: compute ratios, decisions and a verdict from its samples and the baseline's samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.comparison import advice, figures, verdicts
from pipeline.comparison.comparison_file import AccuracyDifference
from pipeline.comparison.sessions import PooledSession, arm_of, combined
from pipeline.comparison.verdicts import ENERGY, MEMORY, THROUGHPUT, Accuracy, Quantity, Ratio, Verdict
from pipeline.params import Margins
from pipeline.results import Result


class Judgement(NamedTuple):
    """A variant's verdict, and the ratios, accuracy and reasons behind it."""

    throughput: Ratio
    memory: Ratio
    energy: Ratio | None
    """None if energy was not asked for."""
    accuracy: Accuracy
    accuracy_difference: AccuracyDifference
    verdict: Verdict
    reasons: tuple[str, ...]


def judge(
    result: Result, baseline: Result, pooled: Sequence[PooledSession], own: PooledSession, margins: Margins
) -> Judgement:
    """Return the verdict on ``result``, with the figures behind it.

    For each quantity of the bench, the samples of all sessions give an interval. Each interval, and the accuracy, gives
    a decision. All decisions together give the verdict. ``own``: the session in ``pooled`` that has the present bench's
    rounds.
    """

    def ratio_over_sessions(quantity: Quantity, margin: float) -> Ratio:
        ratios = {each.start_utc: each.ratio(result.variant, baseline.variant, quantity, margin) for each in pooled}
        found = {start: ratio for start, ratio in ratios.items() if ratio}
        return combined(found, found[own.start_utc], quantity)

    arms = [arm_of(own.compared, "variant", each.variant) for each in (result, baseline)]
    at = {THROUGHPUT: margins.throughput, MEMORY: margins.memory}
    at |= {ENERGY: margins.energy or 0.0} if verdicts.tells_energy(own.compared.arms) else {}
    ratios = {quantity: ratio_over_sessions(quantity, margin) for quantity, margin in at.items()}
    difference = figures.accuracy_difference(result, baseline)
    accuracy = verdicts.accuracy(
        [each.difference_fraction for each in difference.seeds],
        margins.accuracy,
        baseline.summary.test_accuracy_mean_fraction,
        1 / (baseline.dataset.test_count * baseline.unit.per_sample),
        identical=_weights(result) == _weights(baseline),
    )
    outcomes = {
        quantity.noun: ratio.outcomes(quantity)
        for quantity, ratio in ratios.items()
        if ratio.margin and not verdicts.unmeasurable(arms, quantity)
    }
    outcomes["accuracy"] = accuracy.outcomes
    if result.skipped and result.applied == baseline.applied:
        untrusted = [each.why_untrusted for each in ratios.values() if each.why_untrusted]
        reasons = [*untrusted, "on this machine it trains exactly like the baseline, so a difference is noise"]
    else:
        advised = advice.reasons(ratios, accuracy, own.compared, stopped=arms[0].settled)
        reasons = [*advice.certain(outcomes), *advised]
    return Judgement(
        ratios[THROUGHPUT],
        ratios[MEMORY],
        ratios.get(ENERGY),
        accuracy,
        difference,
        verdicts.verdict(list(outcomes.values())),
        tuple(reasons),
    )


def _weights(result: Result) -> dict[int, str]:
    return {run.seed: run.model_sha256 for run in result.runs}
