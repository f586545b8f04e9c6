"""Decide when a variant is settled. Later rounds leave out settled variants, so the others get more rounds.

Verdicts do not depend on whether a variant is settled: ``comparison`` decides by the intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipeline.benchmark.server import ArmSpec
from pipeline.results import Window

SETTLED_ROUNDS = 10
"""A ratio is settled if it lies on the same side of each margin in this many rounds in a row. If the true median lies
on a margin and the rounds are independent, one check settles the ratio with a probability of at most 2 / 2^10.
``benchmarks.simulations`` computes the probability over all checks of a bench."""
NEGLIGIBLE = 0.001
"""Equal to ``stats.NEGLIGIBLE``: a bias up to this size between equal arms disturbs no comparison of speed or energy.
Memory peaks of equal arms may differ by up to the margin, because the heaps of equal arms differ."""


def unsettled(
    arms: Sequence[ArmSpec],
    rounds: Sequence[Mapping[str, Window]],
    margins: Mapping[str, float],
    max_spread: float = math.inf,
) -> list[ArmSpec]:
    """Return the ``arms`` that the next round must measure.

    These are the baseline, its control, and all arms of each variant that is not settled. A variant is settled if the
    ratios of all its arms, including those of its ablation, are ``settled``. If baseline and control are not
    ``equal``, all arms are returned.

    An arm is compared with both the baseline and the control, because noise between these two must not settle a ratio.
    In an ablation, the arm without a technique is compared with its variant. An arm is not settled if, in the last
    ``SETTLED_ROUNDS`` rounds, a sample of this arm or of an arm with which it is compared was rejected. A figure that
    this machine cannot measure counts as settled.
    """
    baseline, control = next((arm.variant, arm.name) for arm in arms if arm.role == "aa_control")
    equals = [arm.name for arm in arms if arm.variant == baseline]
    whole = {arm.variant: arm.name for arm in arms if arm.role == "variant"}
    recent = rounds[-SETTLED_ROUNDS:]
    for field, margin in margins.items():
        pairs = [(getattr(each[control], field), getattr(each[whole[baseline]], field)) for each in recent]
        found = [one / other for one, other in pairs if one and other]
        if found and not equal(found, margin if field == "peak_memory_bytes" else NEGLIGIBLE, max_spread):
            return list(arms)

    def is_settled(arm: ArmSpec) -> bool:
        references = [whole[arm.variant]] if arm.role == "without" else equals
        if any(each[name].rejections for each in recent for name in (arm.name, *references)):
            return False
        for field, margin in margins.items():
            told = [
                [above / below for name in references
                 if (above := getattr(each[arm.name], field)) and (below := getattr(each[name], field))]
                for each in recent
            ]  # fmt: skip
            if any(told) and not (all(len(each) == len(references) for each in told) and settled(told, margin)):
                return False
        return len(recent) == SETTLED_ROUNDS

    open_ = {arm.variant for arm in arms if arm.variant == baseline or not is_settled(arm)}
    return [arm for arm in arms if arm.variant in open_]


def settled(rounds: Sequence[Sequence[float]], margin: float, count: int = SETTLED_ROUNDS) -> bool:
    """True if the ratios of the last ``count`` rounds all lie above 1 + margin, all below 1 / (1 + margin), or all
    between these two bounds. False with fewer rounds."""
    bound = 1 + margin
    sides = {(ratio > bound) - (ratio < 1 / bound) for each in rounds[-count:] for ratio in each}
    return len(rounds) >= count and len(sides) == 1


def equal(ratios: Sequence[float], tolerance: float, max_spread: float, count: int = SETTLED_ROUNDS) -> bool:
    """True if the last ``count`` ratios look like ratios of equal arms; False with fewer ratios.

    The interval from the second smallest to the second largest ratio must contain a value within ``tolerance`` of 1.
    Its relative width must be at most ``max_spread``. For ten ratios, it is a 97.9% interval of the median by the sign
    test: at most one ratio lies below the median with probability 11 / 2^10, and at most one above it with the same
    probability, so 1 - 2 * 11 / 2^10 remains.
    """
    if len(ratios) < count:
        return False
    _, low, *_, high, _ = sorted(ratios[-count:])
    return low <= 1 + tolerance and high >= 1 / (1 + tolerance) and high / low - 1 <= max_spread
