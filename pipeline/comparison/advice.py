"""Explain why figures do not lead to a decision, and what would help."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipeline.comparison import planning, stats, verdicts
from pipeline.comparison.planning import LONGEST_MINUTES, RoundCost
from pipeline.comparison.verdicts import Accuracy, Outcomes, Quantity, Ratio
from pipeline.errors import count
from pipeline.results import Bench

MOST_SEEDS = 20
"""Largest number of further seeds that is advised."""

ODDS = "more likely than not"
"""The chance that the forecast number suffices. In simulations with many forecasts, the forecast number of pairs led to
a decision in 53 to 85% of the cases, and twice this number in 70 to 94% (``benchmarks.simulations.forecasts``)."""
FULL_ROUNDS = 8
"""From this many rounds on, another session is advised first. More rounds would narrow the interval, but say nothing
about differences between sessions."""

_CERTAIN: dict[str, dict[Outcomes, str]] = {
    "throughput": {("better",): "faster", ("worse",): "slower"},
    "peak memory": {("better",): "saves memory", ("worse",): "needs more memory"},
    "energy a sample": {("better",): "saves energy", ("worse",): "needs more energy"},
    "accuracy": {("better",): "more accurate", ("worse",): "less accurate"},
}


def certain(quantities: Mapping[str, Outcomes]) -> list[str]:
    """Return, in a list, a text on the quantities that are better or worse although the verdict is undecided or
    untrusted.

    For an undecided verdict, the text ends with the possible verdicts. The list is empty if no quantity is better or
    worse, or if the verdict is decided.

    >>> certain({"throughput": ("better", "same", "worse"), "accuracy": ("same",), "peak memory": ("better",)})
    ['saves memory; pays or trades']
    >>> certain({"throughput": ("untrusted",), "accuracy": ("same", "worse"), "peak memory": ("better",)})
    ['decided nevertheless: saves memory']
    """
    said = [_CERTAIN[noun][each] for noun, each in quantities.items() if each in _CERTAIN[noun]]
    verdict = verdicts.verdict(list(quantities.values()))
    if not said or verdict not in ("undecided", "untrusted"):
        return []
    if verdict == "untrusted":
        return [f"decided nevertheless: {', '.join(said)}"]
    return [f"{', '.join(said)}; {' or '.join(verdicts.possible(list(quantities.values())))}"]


def reasons(
    ratios: Mapping[Quantity, Ratio], accuracy: Accuracy, bench: Bench, *, stopped: bool = False
) -> tuple[str, ...]:
    """Return why quantities of one variant are untrusted or undecided, and what would help.

    ``stopped``: True if the bench stopped measuring the variant early, because it found the variant's ratios settled.
    """
    cost = planning.cost_of(bench)
    found = [
        reason for quantity, ratio in ratios.items() for reason in ratio_reasons(ratio, quantity, cost, stopped=stopped)
    ]
    if bench.interrupted and found:
        found.append(interrupted(bench))
    return (*found, *accuracy_reasons(accuracy))


def interrupted(bench: Bench) -> str:
    return f"the bench was interrupted after {count(bench.rounds, 'round')}: run `dvc repro bench`"


def ratio_reasons(ratio: Ratio, quantity: Quantity, cost: RoundCost, *, stopped: bool = False) -> list[str]:
    """Return why ``ratio`` is untrusted or undecided, and what would help; an empty list if the ratio is decided, or if
    there is no margin to decide at.

    If a decision from a single session would take longer than ``LONGEST_MINUTES``, or cannot be forecast, the advice
    names a margin for which ``LONGEST_MINUTES`` suffice.
    """
    if ratio.decision == "untrusted":
        return [ratio.why_untrusted or "unknown"]
    if ratio.decision != "undecided" or not ratio.margin:
        return []
    said = f"{quantity.noun} is undecided"
    if ratio.session_count > 1:
        over = f"{said} over {ratio.session_count} sessions"
        if ratio.more_sessions is None:
            return [f"{over}, and no forecast is possible; more rounds in each may help (bench.max_minutes)"]
        more = count(ratio.more_sessions, "more session")
        return [f"{over}: about {more} will suffice, {ODDS} (bench --again, on other days)"]
    another = "another session helps most (bench --again)"
    if stopped:
        return [f"{said}: {another}"]
    measured = ratio.pairs + ratio.rejected
    if ratio.low is None:
        lost = f", but {ratio.rejected} of {count(measured, 'round')} had to be rejected" if ratio.rejected else ""
        remedy = cost.remedy(planning.rounds_for(stats.FEWEST_PAIRS, ratio.pairs, ratio.rejected))
        return [f"{said}: at least {stats.FEWEST_PAIRS} accepted rounds are needed{lost} ({remedy})"]
    first = f"{another}; " if measured >= FULL_ROUNDS else ""
    if ratio.more_pairs is not None:
        rounds = planning.rounds_for(ratio.pairs + ratio.more_pairs, ratio.pairs, ratio.rejected)
        if rounds <= cost.affordable():
            enough = f"about {cost.minutes_of(rounds):g} min of rounds in all will suffice, {ODDS}"
            return [f"{said}: {first}{enough} ({cost.remedy(rounds)})"]
    pairs = max(ratio.pairs, int(cost.affordable() * ratio.pairs / measured))
    margin = planning.margin_decided(ratio.interval, pairs, ratio.fixed)
    return [
        f"{said} at the margin of {ratio.margin:.1%}; {first}with {LONGEST_MINUTES} minutes of rounds, a margin of "
        f"{margin:.1%} allows a decision (compare.margins)"
    ]


def accuracy_reasons(accuracy: Accuracy) -> list[str]:
    """Return why ``accuracy`` is undecided, and what would help; an empty list if the accuracy is decided.

    If more than ``MOST_SEEDS`` further seeds would be needed, or if no forecast is possible, the advice names a margin
    for which ``MOST_SEEDS`` further seeds suffice.
    """
    if accuracy.decision != "undecided":
        return []
    if accuracy.low_fraction is None:
        return ["accuracy is undecided: one seed shows no variation between seeds (add seeds to train.seeds)"]
    undecided = f"accuracy is undecided with {accuracy.seeds} seeds"
    if accuracy.more_seeds is not None and accuracy.more_seeds <= MOST_SEEDS:
        return [f"{undecided}: about {count(accuracy.more_seeds, 'more seed')} will suffice, {ODDS} (train.seeds)"]
    mean = accuracy.mean_fraction
    # One side of the interval may be cut off, at an accuracy of 0 or 1.
    half = max(mean - accuracy.low_fraction, (accuracy.high_fraction or 0.0) - mean)
    margin = planning.margin_of_seeds(mean, half, accuracy.seeds, accuracy.seeds + MOST_SEEDS)
    return [
        f"{undecided} at the margin of {percentage_points(accuracy.margin_fraction)}; with {MOST_SEEDS} more seeds, a "
        f"margin of {math.ceil(1e4 * margin) / 100:g} points allows a decision (compare.margins.accuracy)"
    ]


def percentage_points(fraction: float) -> str:
    """Return "1 percentage point" for 0.01."""
    shown = f"{100 * fraction:g}"
    return f"{shown} percentage point{'' if shown == '1' else 's'}"
