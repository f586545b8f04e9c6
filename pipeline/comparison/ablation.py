"""The effect of each technique of an ablated variant: added alone to the baseline, and removed from the variant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.comparison import verdicts
from pipeline.comparison.verdicts import MEMORY, THROUGHPUT, Accuracy, Noise, Quantity, Ratio, Verdict
from pipeline.params import Margins
from pipeline.results import Arm, Bench, Record


class Share(Record):
    """The effect of one technique of an ablated variant, alone and combined with the variant's other techniques."""

    variant: str
    technique: str
    added_throughput: Ratio | None = None
    """The baseline plus the technique, divided by the baseline. A ratio that was not measured is None."""
    added_memory: Ratio | None = None
    stacked_throughput: Ratio | None = None
    """The variant divided by the variant without the technique."""
    stacked_memory: Ratio | None = None
    accuracy: Accuracy | None = None
    """Accuracy of a trained variant that adds only this technique to the baseline, compared with the baseline. None if
    there is no such variant."""
    accuracy_from: str | None = None
    """Name of the variant that has this accuracy."""
    verdict: Verdict | None = None
    """Verdict on the technique added alone to the baseline. Accuracy and memory count only if they are known. None if
    the technique was not measured alone."""
    interaction: str | None = None
    """One sentence for each quantity whose added and stacked ratios disagree; None if none does."""
    why_not: str | None = None
    """Reason why the technique was not measured. With a reason, all other fields except the two names are None."""


def shares(
    bench: Bench, accuracies: Mapping[str, Accuracy], margins: Margins, noise: Callable[[Quantity, int], Noise]
) -> tuple[Share, ...]:
    """Return the effect of each technique of each ablated variant: the measured ones in the order of the bench's arms,
    then the others.

    ``accuracies``: trained variant -> accuracy against the baseline. ``noise``: returns, for a quantity and a number n,
    the A/A noise of the quantity in the first n rounds.
    """
    pairs = [(arm.variant, arm.technique or "") for arm in bench.arms if arm.role in ("with", "without")]
    pairs += [(variant, technique) for variant, reasons in bench.not_ablated.items() for technique in reasons]
    found = []
    for variant, technique in dict.fromkeys(pairs):
        why_not = bench.not_ablated.get(variant, {}).get(technique)
        if why_not is not None:
            found.append(Share(variant=variant, technique=technique, why_not=why_not))
            continue
        alone, base = bench.arm("with", variant, technique), bench.arm("variant", bench.baseline)
        whole, reduced = bench.arm("variant", variant), bench.arm("without", variant, technique)
        added, stacked = _ratios(alone, base, margins, noise), _ratios(whole, reduced, margins, noise)
        trained = _trained(bench, alone, accuracies) if alone else None
        accuracy = accuracies[trained] if trained else None
        unmeasurable = verdicts.unmeasurable([arm for arm in (alone, base) if arm], MEMORY)
        judged = [accuracy.outcomes] if accuracy else []
        judged += [added[0].outcomes(THROUGHPUT)] if added[0] else []
        judged += [added[1].outcomes(MEMORY)] if added[1] and not unmeasurable else []
        found.append(
            Share(
                variant=variant,
                technique=technique,
                added_throughput=added[0],
                added_memory=added[1],
                stacked_throughput=stacked[0],
                stacked_memory=stacked[1],
                accuracy=accuracy,
                accuracy_from=trained,
                verdict=verdicts.verdict(judged) if alone else None,
                interaction=_interaction(added, stacked),
            )
        )
    return tuple(found)


def _ratios(
    arm: Arm | None, reference: Arm | None, margins: Margins, noise: Callable[[Quantity, int], Noise]
) -> tuple[Ratio | None, Ratio | None]:
    if not (arm and reference):
        return None, None
    one, other = (
        verdicts.ratio(arm, reference, quantity, margin, noise(quantity, len(arm.samples)), widen=True)
        for quantity, margin in ((THROUGHPUT, margins.throughput), (MEMORY, margins.memory))
    )
    return one, other


def _trained(bench: Bench, arm: Arm, accuracies: Mapping[str, Accuracy]) -> str | None:
    """Return the trained variant that applies the same techniques as ``arm`` in the same number of processes; None if
    there is no such variant."""

    def how(one: Arm) -> tuple[dict[str, Any], int]:  # "processes" may be "auto", so the world sizes are compared
        return {key: value for key, value in one.applied.items() if key != "processes"}, one.world_size

    others = (bench.arm("variant", variant) for variant in accuracies)
    return next((other.variant for other in others if other and how(other) == how(arm)), None)


def _interaction(added: tuple[Ratio | None, ...], stacked: tuple[Ratio | None, ...]) -> str | None:
    """Return a sentence for each quantity on which the technique acts differently in combination with other techniques.

    The technique acts differently if the quantity's added and stacked ratios differ by more than the margin and their
    intervals do not overlap. Unknown and untrusted ratios are left out. Return None if there is no such quantity.
    """
    sentences = []
    for quantity, alone, beside in zip((THROUGHPUT, MEMORY), added, stacked, strict=True):
        if alone is None or beside is None or "untrusted" in (alone.decision, beside.decision):
            continue
        one, other = alone.interval, beside.interval
        overlap = one.low <= other.high and other.low <= one.high
        if not overlap and abs(math.log(one.estimate / other.estimate)) > math.log1p(alone.margin):
            sentences.append(f"The effect on {quantity.noun} is different in combination with the other techniques.")
    return " ".join(sentences) or None
