"""What measured samples support: ratios with intervals, a decision at a margin for each, and the verdict of all.

The baseline's figures are the reference: a ratio above 1 means more samples a second, or more memory, than it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple

from pipeline.comparison import stats
from pipeline.results import Arm, Record, kind_of

Decision = Literal["better", "worse", "same", "undecided", "untrusted"]
Verdict = Literal["pays", "trades", "costs", "neutral", "undecided", "untrusted"]


class Quantity(NamedTuple):
    """One number of a sample."""

    field: Literal["samples_per_second", "peak_memory_bytes"]
    noun: str
    higher_is_better: bool


THROUGHPUT = Quantity("samples_per_second", "throughput", higher_is_better=True)
MEMORY = Quantity("peak_memory_bytes", "peak memory", higher_is_better=False)


FEWEST_SEEDS = 3
"""Fewer decide no difference of accuracy: how far two lie apart says little about how far others would."""
LONGEST_MINUTES = 60
MOST_SEEDS = 20
"""To measure for longer, or to train more of them, is no advice."""


class Spent(NamedTuple):
    """What rounds took. What more of them would take is foreseen from it."""

    key: str
    """Of params.yaml: what ended them."""
    rounds: int
    seconds: float | None
    """Of all rounds; None: not known."""

    def affordable(self) -> float:
        """So many rounds in all are no more than ``LONGEST_MINUTES``; infinite where that is not known.

        Less one: the last must fit as well, and some take longer.
        """
        return 60 * LONGEST_MINUTES * self.rounds // self.seconds - 1 if self.seconds else math.inf

    def remedy(self, rounds: int) -> str:
        """What gives so many rounds in all: the key with its value, or what makes rounds cheaper."""
        if not self.seconds:
            return f"raise {self.key}"
        minutes = (rounds + 1) * self.seconds / self.rounds / 60
        if rounds > self.affordable():
            return (
                f"{rounds} rounds would take {minutes:.0f} minutes here; fewer variants or a smaller "
                "bench.window_seconds make them cheaper"
            )
        value = rounds if self.key.endswith("rounds") else math.ceil(2 * minutes) / 2
        return f"set {self.key}: {value:g}"


class Ratio(Record):
    """An arm's figure over the reference's: the median of the rounds' ratios, and its 95% interval."""

    estimate: float | None
    """None: no round has both."""
    low: float | None
    high: float | None
    """Both None: too few pairs to bound it."""
    pairs: int
    """Rounds in which neither figure was refused."""
    refused: int
    """Rounds in which one was."""
    margin: float
    decision: Decision
    more_pairs: int | None
    """Undecided: about how many more pairs would decide. None: decided, or it cannot be foreseen."""
    why_untrusted: str | None


class Accuracy(Record):
    """Test accuracy minus the baseline's, paired by seed, as a fraction: two one-sided tests at a margin."""

    mean_fraction: float
    low_fraction: float | None
    high_fraction: float | None
    """The interval that lies inside the margins exactly if both tests reject, cut off at accuracies of 0 and 1; None
    for a single seed, unless its weights are the baseline's."""
    seeds: int
    margin_fraction: float
    decision: Decision
    """same: neither a loss nor a gain that matters."""
    more_seeds: int | None
    """Undecided: about how many more seeds would decide. None: decided, or it cannot be foreseen."""


class Noise(Record):
    """The baseline against itself: what the machine makes of two equal arms."""

    estimate: float | None
    low: float | None
    high: float | None
    pairs: int
    max_spread: float
    """Largest relative width of the interval at which anything is believed."""
    why_untrusted: str | None


def untold(arms: Sequence[Arm], quantity: Quantity) -> bool:
    """Whether no sample holds the figure, and not because it was refused: this machine does not tell it."""
    samples = [sample for arm in arms for sample in arm.samples]
    return not any(getattr(each, quantity.field) for each in samples) and not all(each.refusals for each in samples)


def noise(baseline: Arm, again: Arm, quantity: Quantity, max_spread: float, spent: Spent) -> Noise:
    """The A/A comparison of one quantity, and whether the machine was calm enough to compare anything."""
    pairs = _pairs(again, baseline, quantity)
    above, below, why_untrusted = pairs.above, pairs.below, pairs.why_untrusted
    if not above:
        return Noise(
            estimate=None, low=None, high=None, pairs=0, max_spread=max_spread, why_untrusted=why_untrusted
        )  # fmt: skip
    interval = stats.paired_ratio(above, below)
    noisy = stats.distrust(interval, stats.paired_ratio(above, below, confidence=0.99), max_spread)
    remedies = [pairs.why_refused] if pairs.why_refused else []
    if interval.low > 0 and not remedies:
        remedies = ["let nothing else run here"]
    if calm := stats.calm_pairs(interval, max_spread):
        rounds = _rounds_for(calm, interval.count, pairs.refused)
        if not remedies or rounds <= spent.affordable():
            remedies.append(spent.remedy(rounds))
    low, high = _bounds(interval)
    return Noise(
        estimate=interval.estimate,
        low=low,
        high=high,
        pairs=interval.count,
        max_spread=max_spread,
        why_untrusted=why_untrusted or (f"{quantity.noun}: {noisy}; {'; or '.join(remedies)}" if noisy else None),
    )


def ratio(arm: Arm, reference: Arm, quantity: Quantity, margin: float, machine: Noise) -> Ratio:
    """``arm`` over ``reference``. Untrusted if the machine was too noisy, or too many rounds had to be refused."""
    pairs = _pairs(arm, reference, quantity)
    interval = stats.paired_ratio(pairs.above, pairs.below) if pairs.above else None
    why_untrusted = machine.why_untrusted or pairs.why_untrusted  # what all share first: it is said once
    low, high = _bounds(interval) if interval else (None, None)
    decision: Decision = "untrusted"
    if interval and not why_untrusted:
        decision = stats.decide(interval, margin, higher_is_better=quantity.higher_is_better)
    return Ratio(
        estimate=interval.estimate if interval else None,
        low=low,
        high=high,
        pairs=interval.count if interval else 0,
        refused=pairs.refused,
        margin=margin,
        decision=decision,
        more_pairs=stats.pairs_needed(interval, margin) if interval and decision == "undecided" else None,
        why_untrusted=why_untrusted,
    )


def accuracy(
    differences: Sequence[float], margin: float, base: float, resolution: float = 0.0, *, identical: bool = False
) -> Accuracy:
    """``differences`` in test accuracy, one a seed, from a mean of ``base``; ``resolution``: of one test sample.

    ``identical``: every seed ended in the baseline's weights, bit by bit, and no number of seeds would tell more.
    Otherwise fewer than ``FEWEST_SEEDS`` are undecided.
    """
    if identical:
        return Accuracy(
            mean_fraction=0.0, low_fraction=0.0, high_fraction=0.0, seeds=len(differences), margin_fraction=margin,
            decision="same", more_seeds=None,
        )  # fmt: skip
    test = stats.equivalence(differences, margin, resolution=resolution, limits=(-base, 1 - base))
    decision: Decision = "undecided"
    more_seeds = None
    if test.count < FEWEST_SEEDS:
        needed = stats.seeds_needed(test)
        more_seeds = None if needed is None else max(needed, FEWEST_SEEDS - test.count)
    elif test.equivalent:
        decision = "same"
    elif test.inferior:
        decision = "worse"
    elif test.superior:
        decision = "better"
    else:
        more_seeds = stats.seeds_needed(test)
    return Accuracy(
        mean_fraction=test.mean,
        low_fraction=test.low if math.isfinite(test.low) else None,
        high_fraction=test.high if math.isfinite(test.high) else None,
        seeds=test.count,
        margin_fraction=margin,
        decision=decision,
        more_seeds=more_seeds,
    )


def verdict(decisions: Sequence[Decision]) -> Verdict:
    """The verdict of all decisions on one variant.

    Something better and nothing worse *pays*, the reverse *costs*, both *trades*, neither is *neutral*. What is
    undecided is taken every way it could turn out: the verdict is *undecided* unless all of them agree.
    """
    if "untrusted" in decisions:
        return "untrusted"
    ways = product(*(("better", "same", "worse") if each == "undecided" else (each,) for each in decisions))
    possible = {_of_decided(way) for way in ways}
    return possible.pop() if len(possible) == 1 else "undecided"


def ratio_reasons(ratio: Ratio, quantity: Quantity, spent: Spent) -> list[str]:
    """Why ``ratio`` is untrusted or undecided, and what would decide it; nothing if it is decided.

    Where that would take longer than ``LONGEST_MINUTES``: at what margin it could be decided in this time.
    """
    if ratio.decision == "untrusted":
        return [ratio.why_untrusted or "unknown"]
    if ratio.decision != "undecided" or ratio.estimate is None:
        return []
    if ratio.low is None or ratio.high is None:
        lost = f", and {_lost(ratio.refused, ratio.pairs + ratio.refused)}" if ratio.refused else ""
        remedy = spent.remedy(_rounds_for(stats.FEWEST_PAIRS, ratio.pairs, ratio.refused))
        return [f"{quantity.noun} is undecided: at least {stats.FEWEST_PAIRS} pairs bound it{lost} ({remedy})"]
    if ratio.more_pairs is not None:
        rounds = _rounds_for(ratio.pairs + ratio.more_pairs, ratio.pairs, ratio.refused)
        if rounds <= spent.affordable():
            remedy = spent.remedy(rounds)
            return [f"{quantity.noun} is undecided: about {ratio.more_pairs} more pair(s) would decide ({remedy})"]
    undecided = f"{quantity.noun} is undecided at the margin of {ratio.margin:.1%}"
    if math.isinf(spent.affordable()):
        return [f"{undecided}, and no number of pairs that would decide can be foreseen"]
    pairs = max(ratio.pairs, int(spent.affordable() * ratio.pairs / (ratio.pairs + ratio.refused)))
    margin = stats.margin_decided(stats.Interval(ratio.estimate, ratio.low, ratio.high, ratio.pairs), pairs)
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
    margin = stats.margin_of_seeds(mean, half, accuracy.seeds, accuracy.seeds + MOST_SEEDS)
    return [
        f"{undecided} at the margin of {100 * accuracy.margin_fraction:g} percentage points; {MOST_SEEDS} more could "
        f"decide at one of {100 * margin:.2g} (compare.margins.accuracy)"
    ]


def _of_decided(decisions: Sequence[str]) -> Verdict:
    if "better" in decisions:
        return "trades" if "worse" in decisions else "pays"
    return "costs" if "worse" in decisions else "neutral"


def _rounds_for(wanted: int, pairs: int, refused: int) -> int:
    """Rounds in all for so many pairs, if as many are refused as so far."""
    return math.ceil(wanted * (pairs + refused) / pairs)


def _lost(refused: int, rounds: int) -> str:
    return f"{refused} of {rounds} rounds had to be refused"


class _Pairs(NamedTuple):
    above: list[float]
    below: list[float]
    """The figures of the rounds in which neither was refused."""
    refused: int
    """The other rounds."""
    why_refused: str | None
    """How many they are, and the most common reason."""
    why_untrusted: str | None
    """They are the most."""


def _pairs(arm: Arm, reference: Arm, quantity: Quantity) -> _Pairs:
    rounds = list(zip(arm.samples, reference.samples, strict=True))
    figures = [(getattr(sample, quantity.field), getattr(other, quantity.field)) for sample, other in rounds]
    known = [(a, b) for a, b in figures if a and b]
    refused = len(rounds) - len(known)
    why_refused = why_untrusted = None
    if refused:
        lacking = [each for pair in rounds for each in pair if not getattr(each, quantity.field)]
        why = _most_common([reason for each in lacking for reason in each.refusals]) or "this machine does not tell"
        why_refused = f"{_lost(refused, len(rounds))}, most often because {why}"
    if refused > len(known):
        why_untrusted = f"{quantity.noun}: {why_refused}"
    elif not rounds:
        why_untrusted = f"{quantity.noun}: no round was measured"
    return _Pairs([a for a, _ in known], [b for _, b in known], refused, why_refused, why_untrusted)


def _most_common(reasons: Sequence[str]) -> str | None:
    """The first reason of the most common kind."""
    kinds = [kind_of(reason) for reason in reasons]
    return reasons[kinds.index(Counter(kinds).most_common(1)[0][0])] if reasons else None


def _bounds(interval: stats.Interval) -> tuple[float | None, float | None]:
    return (interval.low, interval.high) if interval.low > 0 else (None, None)
