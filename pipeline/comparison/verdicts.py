"""What measured samples support: ratios with intervals, a decision at a margin for each, and the verdict of all.

The baseline's figures are the reference: a ratio above 1 means more samples a second, or more memory, than it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple

from pipeline.comparison import planning, stats
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import Decision
from pipeline.results import Arm, Record, kind_of, session_starts

Verdict = Literal["pays", "trades", "costs", "neutral", "undecided", "untrusted"]

HEAP_BYTES = 2**20
"""So far apart can the peaks of equal processes on a CPU be: all that are forked from one server find the same free
blocks in its heap, so the rounds of one sitting do not show it. Those of five servers differed by up to 0.9 MiB."""

FEWEST_SEEDS = 3
"""Fewer decide no difference of accuracy: how far two lie apart says little about how far others would."""


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


def _of_decided(decisions: Sequence[str]) -> Verdict:
    if "better" in decisions:
        return "trades" if "worse" in decisions else "pays"
    return "costs" if "worse" in decisions else "neutral"


class Quantity(NamedTuple):
    """One number of a sample."""

    field: Literal["samples_per_second", "peak_memory_bytes"]
    noun: str
    higher_is_better: bool


THROUGHPUT = Quantity("samples_per_second", "throughput", higher_is_better=True)
MEMORY = Quantity("peak_memory_bytes", "peak memory", higher_is_better=False)


class SessionRatio(Record):
    """What one bench gave."""

    start_utc: str
    estimate: float | None
    low: float | None
    high: float | None
    pairs: int
    trusted: bool

    @property
    def counts(self) -> bool:
        """Not if it is untrusted, nor if too few pairs bound it."""
        return self.trusted and self.low is not None


class Ratio(Record):
    """An arm's figure over the reference's: the median of the rounds' ratios, with its 95% interval, widened by how far
    the baseline may be from itself; or the mean of what several sessions gave (``sessions.combined``)."""

    estimate: float | None
    """None: no round has both."""
    low: float | None
    high: float | None
    """Both None: too few pairs to bound it."""
    pairs: int
    """Rounds in which neither figure was rejected."""
    refused: int
    """Rounds in which one was."""
    margin: float
    decision: Decision
    more_pairs: int | None
    """Undecided in one session: about how many more pairs would decide. None: decided, or it cannot be foreseen."""
    why_untrusted: str | None
    more_sessions: int | None = None
    """Undecided over several: about how many more would decide."""
    sessions: tuple[SessionRatio, ...] = ()
    """Of a variant: those of the same pair, the oldest first."""

    @property
    def session_count(self) -> int:
        """On how many sessions it rests."""
        return max(1, len(session_starts(each.start_utc for each in self.sessions if each.counts)))


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

    @property
    def doubt(self) -> float:
        """How far equal arms may lie apart, on the logarithmic scale: half the interval's width, and its middle's
        distance from 1, in quadrature. The width alone would not do: a bias that stays unseen moves the middle.
        """
        if not (self.estimate and self.low and self.high):
            return 0.0
        return math.hypot(math.log(self.high / self.low) / 2, math.log(self.estimate))


def ratio(
    arm: Arm,
    reference: Arm,
    quantity: Quantity,
    margin: float,
    machine: Noise,
    confidence: float = 0.95,
    *,
    doubt: float = 0.0,
) -> Ratio:
    """``arm`` over ``reference``. Untrusted if the machine was too noisy, or too many rounds had to be rejected.

    ``doubt``: by so much, on the logarithmic scale, is the interval widened on each side (``Noise.doubt``).
    """
    pairs = _pairs(arm, reference, quantity)
    interval = None
    if pairs.above:
        interval = stats.widened(stats.paired_ratio(pairs.above, pairs.below, confidence=confidence), doubt)
    why_untrusted = machine.why_untrusted or pairs.why_untrusted  # what all share first: it is said once
    decision: Decision = "untrusted"
    if interval and not why_untrusted:
        decision = stats.decide(interval, margin, higher_is_better=quantity.higher_is_better)
    low, high = _bounds(interval)
    return Ratio(
        estimate=interval.estimate if interval else None,
        low=low,
        high=high,
        pairs=len(pairs.above),
        refused=pairs.rejected,
        margin=margin,
        decision=decision,
        more_pairs=planning.pairs_needed(interval, margin) if interval and decision == "undecided" else None,
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
    more_seeds = planning.seeds_needed(test)
    if test.count < FEWEST_SEEDS and more_seeds is not None:
        more_seeds = max(more_seeds, FEWEST_SEEDS - test.count)
    return Accuracy(
        mean_fraction=test.mean,
        low_fraction=test.low if math.isfinite(test.low) else None,
        high_fraction=test.high if math.isfinite(test.high) else None,
        seeds=test.count,
        margin_fraction=margin,
        decision=test.decision if test.count >= FEWEST_SEEDS else "undecided",
        more_seeds=more_seeds or None,
    )


def noise(baseline: Arm, control: Arm, quantity: Quantity, max_spread: float, cost: RoundCost) -> Noise:
    """The A/A comparison of one quantity, and whether the machine was calm enough to compare anything."""
    pairs = _pairs(control, baseline, quantity)
    interval = stats.paired_ratio(pairs.above, pairs.below) if pairs.above else None
    why_untrusted = pairs.why_untrusted
    if interval and not why_untrusted:
        wide = stats.paired_ratio(pairs.above, pairs.below, confidence=0.99)
        negligible = max(stats.NEGLIGIBLE, resolution(baseline)) if quantity is MEMORY else stats.NEGLIGIBLE
        if noisy := stats.distrust(interval, wide, max_spread, negligible):
            remedies = planning.remedies(interval, max_spread, pairs.rejected, pairs.why_rejected, cost)
            why_untrusted = f"{quantity.noun}: {noisy}; {remedies}"
    low, high = _bounds(interval)
    return Noise(
        estimate=interval.estimate if interval else None,
        low=low,
        high=high,
        pairs=len(pairs.above),
        max_spread=max_spread,
        why_untrusted=why_untrusted,
    )


def resolution(arm: Arm) -> float:
    """The share of ``arm``'s peak memory that says nothing: on a CPU ``HEAP_BYTES`` a process."""
    peaks = [sample.peak_memory_bytes for sample in arm.samples if sample.peak_memory_bytes]
    on_gpu = any(sample.peak_reserved_bytes is not None for sample in arm.samples)
    return 0.0 if on_gpu or not peaks else HEAP_BYTES * arm.world_size / statistics.median(peaks)


def unmeasurable(arms: Sequence[Arm], quantity: Quantity) -> bool:
    """Whether no sample holds the figure, and not because it was rejected: this machine does not tell it."""
    samples = [sample for arm in arms for sample in arm.samples]
    return not any(getattr(each, quantity.field) for each in samples) and not all(each.refusals for each in samples)


class _Pairs(NamedTuple):
    above: list[float]
    below: list[float]
    """The figures of the rounds in which neither was rejected."""
    rejected: int
    """The other rounds."""
    why_rejected: str | None
    """How many they are, and the most common reason."""
    why_untrusted: str | None
    """They are the most."""


def _pairs(arm: Arm, reference: Arm, quantity: Quantity) -> _Pairs:
    rounds = list(zip(arm.samples, reference.samples, strict=False))  # one that was decided early has fewer
    figures = [(getattr(sample, quantity.field), getattr(other, quantity.field)) for sample, other in rounds]
    known = [(a, b) for a, b in figures if a and b]
    rejected = len(rounds) - len(known)
    why_rejected = why_untrusted = None
    if rejected:
        lacking = [each for pair in rounds for each in pair if not getattr(each, quantity.field)]
        why = _most_common([reason for each in lacking for reason in each.refusals]) or "this machine does not tell"
        why_rejected = f"{rejected} of {len(rounds)} rounds had to be rejected, most often because {why}"
    if rejected > len(known):
        why_untrusted = f"{quantity.noun}: {why_rejected}"
    elif not rounds:
        why_untrusted = f"{quantity.noun}: no round was measured"
    return _Pairs([a for a, _ in known], [b for _, b in known], rejected, why_rejected, why_untrusted)


def _most_common(reasons: Sequence[str]) -> str | None:
    """The first reason of the most common kind."""
    kinds = [kind_of(reason) for reason in reasons]
    return reasons[kinds.index(Counter(kinds).most_common(1)[0][0])] if reasons else None


def _bounds(interval: stats.Interval | None) -> tuple[float | None, float | None]:
    return (interval.low, interval.high) if interval and interval.low > 0 else (None, None)
