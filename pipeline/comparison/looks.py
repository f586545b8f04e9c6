"""When a bench may stop measuring: what it sees when it looks, after a round, at the rounds so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pipeline.comparison import planning, stats, verdicts
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.sessions import SharedRounds, column
from pipeline.comparison.stats import Difference
from pipeline.params import Compare
from pipeline.results import Arm
from pipeline.results.figures import MEMORY, QUANTITIES, Figure


def settled(arms: Sequence[Arm], settings: Compare) -> set[str]:
    """Return the variants that need no further rounds of a bench: none of their ratios is open (``open_ratios``)."""
    compared = {arm.variant for arm in arms if arm.variant != settings.baseline}
    return compared.difference(*open_ratios(arms, settings).values())


def memory_known(arms: Sequence[Arm], settings: Compare) -> bool:
    """True if no ratio of memory needs further rounds (``open_ratios``)."""
    return not open_ratios(arms, settings).get(MEMORY)


def open_ratios(arms: Sequence[Arm], settings: Compare) -> dict[Figure, set[str]]:
    """Return figure -> the variants that need further rounds of a bench for it: the ratio of one of their arms is not
    decided by a look, and further rounds would make it narrower; or the machine is not trusted.

    ``arms``: all arms so far, an ablation's included. Figures without a margin, and those that this machine cannot
    measure, are left out.
    """
    baseline, rounds, margins = column(settings.baseline), _rounds_of(arms, settings), _margins(arms, settings)
    compared = [arm for arm in arms if arm.variant != settings.baseline]

    def is_open(arm: Arm, figure: Figure, undecided: int) -> bool:
        below = column(arm.variant) if arm.role == "without" else baseline
        confidence = stats.confidence_of(undecided, look=True)
        ratio = rounds.ratio(arm.column, below, figure, margins[figure], confidence)
        return ratio.decision == "untrusted" or (ratio.decision == "undecided" and ratio.narrows)

    def open_by(figure: Figure, undecided: int) -> set[str]:
        return {arm.variant for arm in compared if is_open(arm, figure, undecided)}

    variants = {arm.variant for arm in compared}
    return {figure: open_by(figure, stats.step_down(partial(open_by, figure), len(variants))) for figure in margins}


FEWEST_LOOKED_AT = 3
"""Fewer rounds give no interval to a look that nothing follows (``looked_at``)."""
_NEVER = 1e-9
"""With this largest spread of the A/A ratio, no machine is trusted."""


def looked_at(
    arms: Sequence[Arm], settings: Compare, cost: RoundCost, doubt: str = ""
) -> tuple[dict[str, dict[Figure, Difference]], dict[Figure, Difference]]:
    """Return variant -> its ratios to the baseline, and the A/A noises, as a look shows them that nothing follows: each
    interval has the confidence ``verdicts.SURE``, so that many such looks are hardly ever wrong.

    ``arms``: variants, the baseline and its control, with their rounds so far. ``cost``: what advice refers to. Of
    fewer rounds than a figure needs, and if there is a ``doubt``, at most the side of a ratio is told. ``more_pairs``
    is for the decision of a bench.
    """
    margins, baseline = _margins(arms, settings), column(settings.baseline)
    ratios: dict[str, dict[Figure, Difference]] = {arm.variant: {} for arm in arms if arm.column != baseline}
    ratios.pop(settings.baseline, None)
    noises = {}
    for figure, margin in margins.items():
        number = min(len(arm.samples) for arm in arms if arm.variant == settings.baseline)
        no_size = f"its size needs at least {figure.fewest_pairs} rounds" if number < figure.fewest_pairs else ""
        spread = _NEVER if no_size or doubt else settings.max_spread
        rounds = _rounds_of(arms, settings.model_copy(update={"max_spread": spread}), cost)
        early = replace(figure, fewest_pairs=FEWEST_LOOKED_AT) if figure.fewest_pairs > FEWEST_LOOKED_AT else figure
        noises[figure] = rounds.noise(early)
        for name, of_variant in ratios.items():
            ratio = rounds.ratio(column(name), baseline, early, margin, verdicts.SURE, sides=True)
            if ratio.why_untrusted and (no_size or doubt):
                ratio = ratio.model_copy(update={"why_untrusted": f"{figure.noun}: {doubt or no_size}"})
            bench = rounds.ratio(column(name), baseline, early, margin)
            more = planning.pairs_needed(bench, margin, bench.fixed) if bench.low else figure.fewest_pairs - bench.pairs
            of_variant[figure] = ratio.model_copy(update={"more_pairs": more})
    return ratios, noises


def _rounds_of(arms: Sequence[Arm], settings: Compare, cost: RoundCost | None = None) -> SharedRounds:
    by_column = {arm.column: arm for arm in arms}
    cost = cost or RoundCost("bench.max_minutes", len(by_column[column(settings.baseline)].samples), 1.0)
    return SharedRounds(by_column, settings.baseline, cost, settings.max_spread)


def _margins(arms: Sequence[Arm], settings: Compare) -> dict[Figure, float]:
    """Return the margins of the figures that have one, and that this machine can measure."""
    machine = [arm for arm in arms if arm.variant == settings.baseline and arm.technique is None]
    margins = {figure: figure.margin_in(settings.margins) for figure in QUANTITIES}
    return {figure: at for figure, at in margins.items() if at and not verdicts.unmeasurable(machine, figure)}
