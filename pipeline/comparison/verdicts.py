"""Ratios of measured samples with intervals, a decision at a margin for each ratio, and the verdict from all decisions.

The baseline is the reference: a ratio above 1 means more samples per second, or more memory, than the baseline.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from pipeline.comparison import planning, stats
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import Decision
from pipeline.errors import count
from pipeline.results import Arm, Record, kind_of

Verdict = Literal["pays", "trades", "costs", "neutral", "undecided", "untrusted"]

HEAP_BYTES = 2**20
"""The difference that is assumed to be possible between the memory peaks of equal processes on a CPU. The rounds of one
session do not show this difference, because all processes forked from one server inherit the same free blocks in its
heap. The peaks under five servers differed by up to 0.9 MiB. Half of ``HEAP_BYTES`` is used as the 95%
half-width of such a difference (docs/measuring.md)."""

FEWEST_SEEDS = 3
"""Fewer seeds give no decision on accuracy, because the differences of two seeds say little about further seeds. If the
weights equal the baseline's, any number of seeds gives a decision."""


Outcomes = tuple[Decision, ...]
"""The possible decisions on a quantity: its decision or, if undecided, every decision that its interval allows."""

ANY: Outcomes = ("better", "same", "worse")


def verdict(quantities: Sequence[Outcomes]) -> Verdict:
    """Return the verdict on one variant from the possible decisions on its quantities.

    A variant *pays* if a quantity is better and none is worse. It *costs* if a quantity is worse and none is better. It
    *trades* if one quantity is better and another is worse. It is *neutral* if all quantities are the same. For an
    undecided quantity, every decision that its interval allows is tried; if the verdicts differ, the verdict is
    *undecided*. If a quantity is untrusted, the verdict is *untrusted*.
    """
    if ("untrusted",) in quantities:
        return "untrusted"
    found = possible(quantities)
    return found[0] if len(found) == 1 else "undecided"


def possible(quantities: Sequence[Outcomes]) -> list[Verdict]:
    """Return the verdicts that the outcomes of all quantities allow, in the order of ``Verdict``."""
    return sorted({_of_decided(way) for way in product(*quantities)}, key=get_args(Verdict).index)


def _of_decided(decisions: Sequence[str]) -> Verdict:
    if "better" in decisions:
        return "trades" if "worse" in decisions else "pays"
    return "costs" if "worse" in decisions else "neutral"


class Quantity(NamedTuple):
    """One measured number of a sample."""

    field: Literal["samples_per_second", "peak_memory_bytes", "joules_per_sample"]
    noun: str
    higher_is_better: bool


THROUGHPUT = Quantity("samples_per_second", "throughput", higher_is_better=True)
MEMORY = Quantity("peak_memory_bytes", "peak memory", higher_is_better=False)
ENERGY = Quantity("joules_per_sample", "energy a sample", higher_is_better=False)
QUANTITIES = (THROUGHPUT, MEMORY, ENERGY)


class Estimated(Record):
    """A ratio of two figures, with its interval."""

    estimate: float | None = None
    """None if no round has both figures."""
    low: float | None = None
    high: float | None = None
    """``low`` and ``high`` are None if there are too few pairs for bounds."""
    pairs: int = 0
    """Number of rounds that have both figures."""

    @property
    def interval(self) -> stats.Interval:
        """The interval; a missing bound is 0 or infinite, and a missing estimate is 1."""
        return stats.Interval(self.estimate or 1.0, self.low or 0.0, self.high or math.inf, self.pairs)


def estimated(interval: stats.Interval | None) -> dict[str, Any]:
    """Return ``interval`` as fields of ``Estimated``; no fields for None."""
    if interval is None:
        return {}
    bounds = {"low": interval.low, "high": interval.high} if interval.low > 0 else {}
    return {"estimate": interval.estimate, "pairs": interval.count, **bounds}


class SessionRatio(Estimated):
    """The ratio of one session of the bench."""

    start_utc: str
    """Start of the session's first bench."""
    trusted: bool

    @property
    def counts(self) -> bool:
        """True if the ratio is trusted and has bounds."""
        return self.trusted and self.low is not None


class Ratio(Estimated):
    """An arm's figure divided by the reference's figure, with a confidence interval.

    In one session, the ratio is the median of the rounds' ratios, and the A/A noise widens its interval, except in
    ``pipeline.gate``. Over several sessions, it is the geometric mean of the sessions' ratios (``sessions.combined``).
    """

    rejected: int = 0
    """Number of rounds in which a figure is missing or was rejected."""
    margin: float
    decision: Decision
    more_pairs: int | None = None
    """About how many more pairs a decision from one session needs. None if there is a decision, or no forecast."""
    why_untrusted: str | None = None
    fixed: float = 0.0
    """The part of the interval's half-width, on the logarithmic scale, that more rounds do not reduce."""
    more_sessions: int | None = None
    """About how many more sessions a decision over several sessions needs. None if there is a decision or no
    forecast."""
    sessions: tuple[SessionRatio, ...] = ()
    """This ratio as measured in each single session, the oldest first. For a champion with a runner-up: the ratio of
    the variant that each session chose. Empty in the gate and in ablations."""

    def outcomes(self, quantity: Quantity) -> Outcomes:
        """Return the possible decisions on ``quantity``, which must be the quantity of this ratio."""
        if self.decision != "undecided":
            return (self.decision,)
        low, high, bound = self.interval.low, self.interval.high, 1 + self.margin
        return stats.outcomes(low, high, 1 / bound, bound, higher_is_better=quantity.higher_is_better)

    @property
    def session_count(self) -> int:
        """Number of sessions from which the ratio comes."""
        return max(1, sum(each.counts for each in self.sessions))


class Accuracy(Record):
    """Test accuracy minus the baseline's, paired by seed, as a fraction, with two one-sided tests at a margin."""

    mean_fraction: float
    low_fraction: float | None
    high_fraction: float | None
    """The 90% interval of the mean difference, cut off where the variant's accuracy would be below 0 or above 1. Before
    the cut, it lies inside the margins exactly when both tests reject. None if there is only one seed, unless the
    variant's weights equal the baseline's."""
    seeds: int
    margin_fraction: float
    decision: Decision
    """*same* means that the accuracy differs from the baseline's by less than the margin."""
    more_seeds: int | None
    """About how many more seeds a decision needs. None if the accuracy is decided or there is no forecast."""

    @property
    def outcomes(self) -> Outcomes:
        """The possible decisions on the accuracy: all, if it is undecided and has fewer than ``FEWEST_SEEDS`` seeds."""
        if self.decision != "undecided":
            return (self.decision,)
        if self.seeds < FEWEST_SEEDS or self.low_fraction is None or self.high_fraction is None:
            return ANY
        return stats.outcomes(self.low_fraction, self.high_fraction, -self.margin_fraction, self.margin_fraction)


class Noise(Estimated):
    """The baseline measured against itself: the difference that the machine produces between two equal arms."""

    max_spread: float
    """Largest accepted relative width of the interval. If the interval is wider, the machine is not trusted."""
    why_untrusted: str | None

    @property
    def doubt(self) -> float:
        """How far equal arms may differ: half the interval's width and the estimate's distance from 0, added in
        quadrature, on the logarithmic scale. The width alone is not enough, because an undetected bias shifts the
        estimate. 0 if the estimate or a bound is unknown."""
        if not (self.estimate and self.low and self.high):
            return 0.0
        return math.hypot(math.log(self.high / self.low) / 2, math.log(self.estimate))


def ratio(
    arm: Arm,
    reference: Arm,
    quantity: Quantity,
    margin: float,
    noise: Noise,
    confidence: float = 0.95,
    *,
    widen: bool = False,
) -> Ratio:
    """Return the ratio of ``arm`` to ``reference``.

    The ratio is untrusted if the machine was too noisy, or if too many rounds were rejected. ``widen``: add the
    result of ``doubt_of`` to each side of the interval, in quadrature on the logarithmic scale.
    """
    pairs = _pairs(arm, reference, quantity)
    doubt = doubt_of(noise, quantity, arm, reference) if widen else 0.0
    fixed = _heap_doubt(quantity, arm, reference) if widen else 0.0
    interval = None
    if pairs.above:
        interval = stats.widened(stats.paired_ratio(pairs.above, pairs.below, confidence=confidence), doubt)
    # The machine's noise takes precedence over rejected rounds, because the noise concerns all arms.
    why_untrusted = noise.why_untrusted or pairs.why_untrusted
    decision: Decision = "untrusted"
    if interval and not why_untrusted:
        decision = stats.decide(interval, margin, higher_is_better=quantity.higher_is_better)
    return Ratio(
        **estimated(interval),
        rejected=pairs.rejected,
        margin=margin,
        decision=decision,
        more_pairs=planning.pairs_needed(interval, margin, fixed) if interval and decision == "undecided" else None,
        why_untrusted=why_untrusted,
        fixed=fixed,
    )


def accuracy(
    differences: Sequence[float], margin: float, base: float, resolution: float = 0.0, *, identical: bool = False
) -> Accuracy:
    """Judge ``differences`` in test accuracy from the baseline, one per seed.

    ``base``: the baseline's mean accuracy. ``resolution``: the accuracy that one test sample (or one token of the test
    samples) contributes. ``identical``: True if every seed has exactly the baseline's weights; then the decision is
    *same* for any number of seeds. Otherwise fewer than ``FEWEST_SEEDS`` seeds leave the accuracy undecided.
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


def noise_between(baseline: Arm, control: Arm, quantity: Quantity, max_spread: float, cost: RoundCost) -> Noise:
    """Return the A/A comparison of one quantity. ``why_untrusted`` is set if the machine was too noisy to compare."""
    pairs = _pairs(control, baseline, quantity)
    interval = stats.paired_ratio(pairs.above, pairs.below) if pairs.above else None
    why_untrusted = pairs.why_untrusted
    if interval and not why_untrusted:
        wide = stats.paired_ratio(pairs.above, pairs.below, confidence=0.99)
        negligible = max(stats.NEGLIGIBLE, heap_share(baseline)) if quantity is MEMORY else stats.NEGLIGIBLE
        if noisy := stats.distrust(interval, wide, max_spread, negligible):
            remedies = planning.remedies(interval, max_spread, pairs.rejected, pairs.why_rejected, cost)
            why_untrusted = f"{quantity.noun}: {noisy}; {remedies}"
    return Noise(**estimated(interval), max_spread=max_spread, why_untrusted=why_untrusted)


def doubt_of(noise: Noise, quantity: Quantity, *arms: Arm) -> float:
    """Return the uncertainty of a ratio of ``arms`` beyond the variation of its rounds, on the logarithmic scale.

    Equal arms may differ (``Noise.doubt``); for memory, equal arms under different servers may also differ
    (``HEAP_BYTES``).
    """
    return math.hypot(noise.doubt, _heap_doubt(quantity, *arms))


def _heap_doubt(quantity: Quantity, *arms: Arm) -> float:
    return max(math.log1p(heap_share(arm) / 2) for arm in arms) if quantity is MEMORY else 0.0


def heap_share(arm: Arm) -> float:
    """Return the share of ``arm``'s median peak memory that may be noise: on a CPU ``HEAP_BYTES`` per process. Return 0
    on a GPU, or if no peak is known."""
    peaks = [sample.peak_memory_bytes for sample in arm.samples if sample.peak_memory_bytes]
    on_gpu = any(sample.peak_reserved_bytes is not None for sample in arm.samples)
    return 0.0 if on_gpu or not peaks else HEAP_BYTES * arm.world_size / statistics.median(peaks)


def unmeasurable(arms: Sequence[Arm], quantity: Quantity) -> bool:
    """True if this machine cannot measure the figure: no sample has it, although not all samples were rejected."""
    samples = [sample for arm in arms for sample in arm.samples]
    return not any(getattr(each, quantity.field) for each in samples) and not all(each.rejections for each in samples)


def tells_energy(arms: Sequence[Arm]) -> bool:
    """True if a sample has its energy, or the reason why its energy is unknown. Then energy was asked for."""
    return any(each.joules_per_sample or each.why_no_energy for arm in arms for each in arm.samples)


class _Pairs(NamedTuple):
    above: list[float]
    below: list[float]
    """``above`` and ``below`` are the two arms' figures in the rounds that have both figures."""
    rejected: int
    """Number of rounds in which a figure is missing or was rejected."""
    why_rejected: str | None
    """How many rounds were rejected, and the most common reason."""
    why_untrusted: str | None
    """Set if most rounds were rejected, or none was measured."""


def _pairs(arm: Arm, reference: Arm, quantity: Quantity) -> _Pairs:
    rounds = list(zip(arm.samples, reference.samples, strict=False))  # an arm that was settled early has fewer samples
    figures = [(getattr(sample, quantity.field), getattr(other, quantity.field)) for sample, other in rounds]
    known = [(a, b) for a, b in figures if a and b]
    rejected = len(rounds) - len(known)
    why_rejected = why_untrusted = None
    if rejected:
        lacking = [each for pair in rounds for each in pair if not getattr(each, quantity.field)]
        unknown = [each.why_no_energy for each in lacking if each.why_no_energy and quantity is ENERGY]
        why = _most_common([*(reason for each in lacking for reason in each.rejections), *unknown])
        why = why or "this machine does not report the figure"
        why_rejected = f"{rejected} of {count(len(rounds), 'round')} had to be rejected, most often because {why}"
    if rejected > len(known):
        why_untrusted = f"{quantity.noun}: {why_rejected}"
    elif not rounds:
        why_untrusted = f"{quantity.noun}: no round was measured"
    return _Pairs([a for a, _ in known], [b for _, b in known], rejected, why_rejected, why_untrusted)


def _most_common(reasons: Sequence[str]) -> str | None:
    """Return the first reason of the most common kind; None if there are no reasons."""
    kinds = [kind_of(reason) for reason in reasons]
    return reasons[kinds.index(Counter(kinds).most_common(1)[0][0])] if reasons else None
