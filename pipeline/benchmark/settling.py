"""Decide when a variant is settled: later rounds then leave it out, and its minutes go to the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipeline.benchmark.server import ArmSpec
from pipeline.results import Window

SETTLED_ROUNDS = 10
"""This many rounds in a row on one side of a margin settle a ratio. If the median lies on the margin, one look settles
the ratio with a probability of 2 / 2^10, whatever the noise; ``benchmarks.simulations`` has that of all looks."""
NEGLIGIBLE = 0.001
"""Equals ``stats.NEGLIGIBLE``, for the same reason: a bias up to this between equal arms' speeds disturbs nothing. The
peaks of equal arms may differ by the margin, because their heaps differ."""


def unsettled(
    arms: Sequence[ArmSpec],
    rounds: Sequence[Mapping[str, Window]],
    margins: Mapping[str, float],
    max_spread: float = math.inf,
) -> list[ArmSpec]:
    """Return the ``arms`` that the next round must measure: the baseline, its control, and each variant with a ratio
    that is not ``settled``, with the arms of its ablation. Unless baseline and control are ``equal``, return all arms.

    An arm is compared with both the baseline and its control, so that a difference between equal arms settles nothing;
    an arm without one technique is compared with its variant. A rejected sample settles nothing. A figure that this
    machine cannot measure counts as settled.
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
    between the two. False with fewer rounds."""
    bound = 1 + margin
    sides = {(ratio > bound) - (ratio < 1 / bound) for each in rounds[-count:] for ratio in each}
    return len(rounds) >= count and len(sides) == 1


def equal(ratios: Sequence[float], tolerance: float, max_spread: float, count: int = SETTLED_ROUNDS) -> bool:
    """True if the last ``count`` ratios look like those of equal arms. The interval from the second smallest to the
    second largest (of ten ratios a 97.9% interval of the median) must hold a value within ``tolerance`` of 1, and be no
    wider than ``max_spread``, a relative width. False with fewer ratios.

    Source of the interval: the sign test; two binomial tails of at most one in ten, 1 - 2 * 11 / 2^10.
    """
    if len(ratios) < count:
        return False
    _, low, *_, high, _ = sorted(ratios[-count:])
    return low <= 1 + tolerance and high >= 1 / (1 + tolerance) and high / low - 1 <= max_spread
