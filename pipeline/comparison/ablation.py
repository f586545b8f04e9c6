"""The effect of each technique of an ablated variant: added alone to the baseline, and removed from the variant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.comparison import verdicts
from pipeline.comparison.comparison_file import Share, fields_of
from pipeline.comparison.sessions import Column, SampleTable, Sitting, column
from pipeline.comparison.stats import Difference
from pipeline.params import Margins
from pipeline.results import Arm
from pipeline.results.figures import ALWAYS_MEASURED, Figure


def shares(table: SampleTable, accuracies: Mapping[str, Difference], margins: Margins) -> tuple[Share, ...]:
    """Return the effect of each technique of each ablated variant: the measured ones in the order of the bench's arms,
    then the others.

    ``accuracies``: trained variant -> accuracy against the baseline.
    """
    bench, arms = table.bench, table.arms
    pairs = [(arm.variant, arm.technique or "") for arm in bench.arms if arm.role in ("with", "without")]
    pairs += [(variant, technique) for variant, reasons in bench.not_ablated.items() for technique in reasons]
    effects = []
    for variant, technique in dict.fromkeys(pairs):
        why_not = bench.not_ablated.get(variant, {}).get(technique)
        if why_not is not None:
            effects.append(Share(variant=variant, technique=technique, why_not=why_not))
            continue
        base, alone = column(bench.baseline), arms.get(("with", variant, technique))
        added = _ratios(table.present, ("with", variant, technique), base, margins)
        stacked = _ratios(table.present, column(variant), ("without", variant, technique), margins)
        trained = _trained(arms, alone, accuracies) if alone else None
        accuracy = accuracies[trained] if trained else None
        outcomes = verdicts.outcomes(added, (alone, arms[base]), accuracy) if alone else {}
        effects.append(
            Share(
                variant=variant,
                technique=technique,
                **fields_of(added, "added_"),
                **fields_of(stacked, "stacked_"),
                accuracy=accuracy,
                accuracy_from=trained,
                verdict=verdicts.verdict([*outcomes.values()]) if alone else None,
                interaction=_interaction(added, stacked),
            )
        )
    return tuple(effects)


def _ratios(present: Sitting, above: Column, below: Column, margins: Margins) -> dict[Figure, Difference]:
    """Return the ratios, with the noise of the rounds in which both arms took part; none without such rounds."""
    if not (rounds := present.rounds(above, below)):
        return {}
    return {figure: rounds.ratio(above, below, figure, figure.margin_in(margins)) for figure in ALWAYS_MEASURED}


def _trained(arms: Mapping[Column, Arm], arm: Arm, accuracies: Mapping[str, Difference]) -> str | None:
    """Return the trained variant that applies the same techniques as ``arm`` in the same number of processes; None if
    there is no such variant."""

    def conditions(arm: Arm) -> tuple[dict[str, Any], int]:  # "processes" may be "auto", so world sizes are compared
        return {key: value for key, value in arm.applied.items() if key != "processes"}, arm.world_size

    trained = (arms.get(column(variant)) for variant in accuracies)
    return next((arm_of.variant for arm_of in trained if arm_of and conditions(arm_of) == conditions(arm)), None)


def _interaction(added: Mapping[Figure, Difference], stacked: Mapping[Figure, Difference]) -> str | None:
    """Return a sentence for each quantity on which the technique acts differently in combination with other techniques.

    The technique acts differently if the quantity's added and stacked ratios differ by more than the margin and their
    intervals do not overlap. Unknown and untrusted ratios are left out. Return None if there is no such figure.
    """
    sentences = []
    for figure in (figure for figure in added if figure in stacked):
        alone, combined = added[figure], stacked[figure]
        if alone.why_untrusted or combined.why_untrusted:
            continue
        (low, high), (least, most) = alone.bounds, combined.bounds
        apart = high < least or most < low
        if apart and abs(math.log((alone.estimate or 1.0) / (combined.estimate or 1.0))) > math.log1p(alone.margin):
            sentences.append(f"The effect on {figure.noun} is different in combination with the other techniques.")
    return " ".join(sentences) or None
