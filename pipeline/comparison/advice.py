"""What stands between the figures and a decision, in words, and what would help."""

from __future__ import annotations

import math

from pipeline.comparison import planning, stats
from pipeline.comparison.planning import LONGEST_MINUTES, RoundCost
from pipeline.comparison.verdicts import MEMORY, THROUGHPUT, Accuracy, Quantity, Ratio
from pipeline.results import Bench

MOST_SEEDS = 20
"""To train more of them is no advice."""


def reasons(
    throughput: Ratio, memory: Ratio, accuracy: Accuracy, bench: Bench, *, stopped: bool = False
) -> tuple[str, ...]:
    """Of one variant; ``stopped``: ``bench`` took it for settled."""
    cost = planning.cost_of(bench)
    found = [
        *ratio_reasons(throughput, THROUGHPUT, cost, stopped=stopped),
        *ratio_reasons(memory, MEMORY, cost, stopped=stopped),
        *accuracy_reasons(accuracy),
    ]
    if bench.interrupted and {throughput.decision, memory.decision} & {"undecided", "untrusted"}:
        found.append(interrupted(bench))
    return tuple(found)


def interrupted(bench: Bench) -> str:
    return f"the bench was interrupted after {bench.rounds} round(s): run `dvc repro bench`"


def ratio_reasons(ratio: Ratio, quantity: Quantity, cost: RoundCost, *, stopped: bool = False) -> list[str]:
    """Why ``ratio`` is untrusted or undecided, and what would decide it; nothing if it is decided.

    Where that would take longer than ``LONGEST_MINUTES``: at what margin it could be decided in this time.
    """
    if ratio.decision == "untrusted":
        return [ratio.why_untrusted or "unknown"]
    if ratio.decision != "undecided" or ratio.estimate is None:
        return []
    if ratio.session_count > 1:
        over = f"{quantity.noun} is undecided over {ratio.session_count} sessions"
        if ratio.more_sessions is None:
            return [
                f"{over}; how many would decide cannot be foreseen, more rounds in each may help (bench.max_minutes)"
            ]
        return [f"{over}: about {ratio.more_sessions} more would decide (make again, on other days)"]
    if stopped:
        return [f"{quantity.noun} is undecided, though its rounds lay on one side of the margin (make again)"]
    measured = ratio.pairs + ratio.refused
    if ratio.low is None or ratio.high is None:
        lost = f", and {ratio.refused} of {measured} rounds had to be rejected" if ratio.refused else ""
        remedy = cost.remedy(planning.rounds_for(stats.FEWEST_PAIRS, ratio.pairs, ratio.refused))
        return [f"{quantity.noun} is undecided: at least {stats.FEWEST_PAIRS} pairs bound it{lost} ({remedy})"]
    if ratio.more_pairs is not None:
        rounds = planning.rounds_for(ratio.pairs + ratio.more_pairs, ratio.pairs, ratio.refused)
        if rounds <= cost.affordable():
            remedy = cost.remedy(rounds)
            return [f"{quantity.noun} is undecided: about {ratio.more_pairs} more pair(s) would decide ({remedy})"]
    undecided = f"{quantity.noun} is undecided at the margin of {ratio.margin:.1%}"
    if math.isinf(cost.affordable()):
        return [f"{undecided}, and no number of pairs that would decide can be foreseen"]
    pairs = max(ratio.pairs, int(cost.affordable() * ratio.pairs / measured))
    margin = planning.margin_decided(stats.Interval(ratio.estimate, ratio.low, ratio.high, ratio.pairs), pairs)
    return [f"{undecided}; {LONGEST_MINUTES} minutes of rounds could decide at one of {margin:.1%} (compare.margins)"]


def accuracy_reasons(accuracy: Accuracy) -> list[str]:
    """Why ``accuracy`` is undecided, and what would decide it; nothing if it is decided.

    Where that would take more than ``MOST_SEEDS``: at what margin so many could decide.
    """
    if accuracy.decision != "undecided":
        return []
    if accuracy.low_fraction is None:
        return ["accuracy is undecided: one seed supports no statement (add some to train.seeds)"]
    undecided = f"accuracy is undecided with {accuracy.seeds} seeds"
    if accuracy.more_seeds is not None and accuracy.more_seeds <= MOST_SEEDS:
        return [f"{undecided}: about {accuracy.more_seeds} more would decide (add them to train.seeds)"]
    mean = accuracy.mean_fraction
    half = max(mean - accuracy.low_fraction, (accuracy.high_fraction or 0.0) - mean)  # one of them may be cut off
    margin = planning.margin_of_seeds(mean, half, accuracy.seeds, accuracy.seeds + MOST_SEEDS)
    return [
        f"{undecided} at the margin of {100 * accuracy.margin_fraction:g} percentage points; {MOST_SEEDS} more could "
        f"decide at one of {100 * margin:.2g} (compare.margins.accuracy)"
    ]
