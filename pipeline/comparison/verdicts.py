"""Ratios of measured samples with intervals, a decision at a margin for each ratio, and the verdict from all decisions.

The baseline is the reference: a ratio above 1 means more samples per second, or more memory, than the baseline.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple, get_args

from pipeline.comparison import planning, stats
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import FEWEST_SEEDS, Decision, Difference, Outcomes, Verdict
from pipeline.errors import count
from pipeline.results import Arm, Window
from pipeline.results.bench_file import FEWEST_PAIRS, NEGLIGIBLE
from pipeline.results.figures import ENERGY, MEMORY, OUTSIDE, THROUGHPUT, Figure
from pipeline.results.rejections import Rejection, most_common

HEAP_BYTES = 2**20
"""The difference that is assumed to be possible between the memory peaks of equal processes on a CPU. The rounds of one
session do not show this difference, because all processes forked from one server inherit the same free blocks in its
heap. The peaks under five servers differed by up to 0.9 MiB. Half of ``HEAP_BYTES`` is used as the 95%
half-width of such a difference (docs/measuring.md)."""

SURE = 0.999
"""Confidence of the interval from which a side is told although its size is uncertain (``side_of``), and of a look that
nothing follows (``looks.looked_at``)."""
MOST_OUTSIDE = 0.1
"""Up to this share of the baseline's whole time, an arm may take more time outside of steps than the baseline. Beyond
it, the speed of its steps says nothing about whole time."""


def outcomes(
    ratios: Mapping[Figure, Difference], arms: Sequence[Arm], accuracy: Difference | None
) -> dict[str, Outcomes]:
    """Return noun -> the possible decisions on each ratio of ``arms`` that has a margin and that this machine can
    measure, and on the accuracy if it is compared."""
    of_accuracy = {"accuracy": accuracy.outcomes()} if accuracy else {}
    return {
        figure.noun: ratio.outcomes(higher_is_better=figure.higher_is_better)
        for figure, ratio in ratios.items()
        if ratio.margin and not unmeasurable(arms, figure)
    } | of_accuracy


def verdict(quantities: Sequence[Outcomes]) -> Verdict:
    """Return the verdict on one variant from the possible decisions on its quantities.

    A variant *pays* if a quantity is better and none is worse. It *costs* if a quantity is worse and none is better. It
    *trades* if one quantity is better and another is worse. It is *neutral* if all quantities are the same. For an
    undecided quantity, every decision that its interval allows is tried; if the verdicts differ, the verdict is
    *undecided*. If a quantity is untrusted, the verdict is *untrusted*.
    """
    if ("untrusted",) in quantities:
        return "untrusted"
    verdicts = possible(quantities)
    return verdicts[0] if len(verdicts) == 1 else "undecided"


def possible(quantities: Sequence[Outcomes]) -> list[Verdict]:
    """Return the verdicts that the outcomes of all quantities allow, in the order of ``Verdict``."""
    return sorted({_of_decided(decisions) for decisions in product(*quantities)}, key=get_args(Verdict).index)


def _of_decided(decisions: Sequence[str]) -> Verdict:
    if "better" in decisions:
        return "trades" if "worse" in decisions else "pays"
    return "costs" if "worse" in decisions else "neutral"


def ratio(
    arm: Arm,
    references: Sequence[Arm],
    figure: Figure,
    margin: float,
    noise: Difference,
    confidence: float = 0.95,
    *,
    heaps_differ: bool = True,
    sides: bool = False,
) -> Difference:
    """Return the ratio of ``arm`` to the geometric mean of ``references``, which are equal arms.

    The ratio is untrusted if the machine was too noisy, if too many rounds were rejected, or if the rounds drifted and
    do not all support one decision. A speed that is not worse is untrusted if ``arm`` takes more time outside of steps
    (``MOST_OUTSIDE``). With ``heaps_differ``, the interval allows for the difference of equal arms' heaps
    (``HEAP_BYTES``). With ``sides``, a ratio that the machine's noise makes untrusted is nevertheless *better* or
    *worse* if it lies far beyond this noise (``side_of``); ``why_untrusted`` then says why its size is uncertain.
    """
    pairs = _pairs(arm, references, figure)
    fixed = heap_doubt(figure, arm, *references) if heaps_differ else 0.0
    measured = of_rounds(pairs.figures, noise, confidence, fixed, figure.fewest_pairs)
    # The machine's noise takes precedence over rejected rounds, because the noise concerns all arms.
    why_untrusted = noise.why_untrusted or pairs.why_untrusted
    decision = stats.decide(measured, margin, higher_is_better=figure.higher_is_better)
    if measured.drifts and decision == "undecided" and not why_untrusted:
        why_untrusted = (
            f"the ratio drifted between {measured.low:.2f} and {measured.high:.2f} over {measured.pairs} rounds, more "
            f"than their scatter explains (drift {measured.drift:.1f}; 1 is none, {stats.LARGEST_DRIFT} is allowed): "
            "let nothing else run here, and bench --again"
        )
    if figure.field == THROUGHPUT.field and decision != "worse":
        why_untrusted = why_untrusted or _why_not_whole(arm, references)
    if why_untrusted:
        side = None
        if sides and margin and not pairs.why_untrusted and not measured.drifts:
            sure = of_rounds(pairs.figures, noise, SURE, fixed, figure.fewest_pairs)
            side = side_of(sure, noise, margin, higher_is_better=figure.higher_is_better)
            if side == "better" and figure.field == THROUGHPUT.field and _why_not_whole(arm, references):
                side = None
        decision, why_untrusted = side or "untrusted", f"{figure.noun}: {why_untrusted}"
    return measured.model_copy(
        update={
            "rejected": pairs.rejected,
            "margin": margin,
            "decision": decision,
            "more_pairs": planning.pairs_needed(measured, margin, fixed) if decision == "undecided" else None,
            "why_untrusted": why_untrusted,
        }
    )


def side_of(sure: Difference, noise: Difference, margin: float, *, higher_is_better: bool) -> Decision | None:
    """Return *better* or *worse* if a ratio is so large that it lies there even on this noisy machine; else None.

    ``sure``: the ratio with the confidence ``SURE``. On both sides, its interval is moved further by as much as the
    interval of the ``noise`` reaches from 1, and must still lie beyond the ``margin``. If the interval of the noise
    excludes 1, the machine treated equal arms unequally, and nothing shows by how much it did so to another arm; then
    no side is known. In 1,000 simulated noisy benches, no side was wrong (``benchmarks.simulations.sides``).
    """
    (low, high), (least, most) = noise.bounds, sure.bounds
    if noise.low is None or sure.low is None or not low <= 1 <= high:
        return None
    reach = max(high, 1 / low)
    moved = sure.model_copy(update={"low": least / reach, "high": most * reach})
    decision = stats.decide(moved, margin, higher_is_better=higher_is_better)
    return decision if decision in ("better", "worse") else None


def _why_not_whole(arm: Arm, references: Sequence[Arm]) -> str | None:
    """Return why the speed of ``arm`` says nothing about whole time: it takes more time a sample outside of steps than
    the ``references``, by more than ``MOST_OUTSIDE`` and more than twice what these differ by. Times are compared
    instead of shares, because the share of equal work grows if steps get faster."""
    shares, seconds, wholes = [], [], []
    for measured in (arm, *references):
        of_windows, speeds = OUTSIDE.known(measured.samples), THROUGHPUT.known(measured.samples)
        if not (of_windows and speeds):
            return None
        shares.append(min(statistics.median(of_windows), 0.999))
        wholes.append(1 / statistics.median(speeds) / (1 - shares[-1]))
        seconds.append(shares[-1] * wholes[-1])
    more, control = seconds[0] - statistics.fmean(seconds[1:]), max(seconds[1:]) - min(seconds[1:])
    if more <= max(MOST_OUTSIDE * statistics.fmean(wholes[1:]), 2 * control):
        return None
    share, of_base = shares[0], statistics.fmean(shares[1:])
    return (
        f"{share:.0%} of its window is outside of steps, the base's {of_base:.0%}: the speed of its steps says nothing "
        "about whole time; find what it does or waits for between steps, such as an evaluation, a checkpoint or its "
        "input, and make that equal"
    )


def accuracy(
    differences: Mapping[int, float],
    margin: float,
    base: float,
    resolution: float = 0.0,
    confidence: float = 0.95,
    *,
    identical: bool = False,
) -> Difference:
    """Judge ``differences`` in test accuracy from the baseline: seed -> fraction.

    ``base``: the baseline's mean accuracy. ``resolution``: the accuracy that one test sample (or one token of the test
    samples) contributes. ``identical``: True if every seed has exactly the baseline's weights; then the decision is
    *same* for any number of seeds. Otherwise fewer than ``FEWEST_SEEDS`` seeds leave the accuracy undecided.
    """
    mean = stats.equivalence(
        list(differences.values()), margin, confidence=confidence, resolution=resolution, limits=(-base, 1 - base)
    )
    by_seed = {str(seed): Difference(unit="fraction", estimate=value, pairs=1) for seed, value in differences.items()}
    if identical:
        return mean.model_copy(update={"low": 0.0, "high": 0.0, "decision": "same", "parts": by_seed})
    more_seeds = planning.seeds_needed(mean)
    if mean.pairs < FEWEST_SEEDS and more_seeds is not None:
        more_seeds = max(more_seeds, FEWEST_SEEDS - mean.pairs)
    decision = mean.decision if mean.pairs >= FEWEST_SEEDS else "undecided"
    return mean.model_copy(update={"decision": decision, "more_pairs": more_seeds or None, "parts": by_seed})


def noise_between(baseline: Arm, control: Arm, figure: Figure, max_spread: float, cost: RoundCost) -> Difference:
    """Return the A/A comparison of one figure. ``why_untrusted`` is set if the machine was too noisy to compare."""
    pairs = _pairs(control, [baseline], figure)
    measured, wide = (of_rounds(pairs.figures, confidence=level, fewest=figure.fewest_pairs) for level in (0.95, 0.99))
    why_untrusted = pairs.why_untrusted
    if not why_untrusted:
        negligible = max(NEGLIGIBLE, heap_share(baseline)) if figure is MEMORY else NEGLIGIBLE
        if noisy := stats.distrust(measured, wide, max_spread, negligible, figure.fewest_pairs):
            why_rejected, fewest = pairs.why_rejected, figure.fewest_pairs
            remedies = planning.remedies(measured, max_spread, pairs.rejected, why_rejected, cost, fewest)
            why_untrusted = f"{noisy}; {remedies}"
    decision: Decision = "untrusted" if why_untrusted else "same"
    return measured.model_copy(update={"margin": max_spread, "decision": decision, "why_untrusted": why_untrusted})


def heap_doubt(figure: Figure, *arms: Arm) -> float:
    """Return how far the peak memories of equal ``arms`` may differ under different servers (``HEAP_BYTES``), on the
    logarithmic scale; 0 for other figures."""
    return max(math.log1p(heap_share(arm) / 2) for arm in arms) if figure is MEMORY else 0.0


def heap_share(arm: Arm) -> float:
    """Return the share of ``arm``'s median peak memory that may be noise: on a CPU ``HEAP_BYTES`` per process. Return 0
    on a GPU, or if no peak is known."""
    peaks = [peak for peak in MEMORY.known(arm.samples) if peak]
    on_gpu = any(sample.peak_reserved_bytes is not None for sample in arm.samples)
    return 0.0 if on_gpu or not peaks else HEAP_BYTES * arm.world_size / arm.hosts / statistics.median(peaks)


def unmeasurable(arms: Sequence[Arm], figure: Figure) -> bool:
    """True if this machine cannot measure the figure: no sample has it, although not all samples were rejected."""
    samples = [sample for arm in arms for sample in arm.samples]
    return not any(map(figure.of, samples)) and not all(sample.rejections for sample in samples)


def asked_for(figure: Figure, arms: Sequence[Arm]) -> bool:
    """True unless the figure is optional and no sample has it, or the reason why it is unknown."""
    samples = (sample for arm in arms for sample in arm.samples)
    return not figure.optional or any(figure.of(sample) or _why_unknown(sample, figure) for sample in samples)


def _why_unknown(sample: Window, figure: Figure) -> Rejection | None:
    return sample.why_no_energy if figure.field == ENERGY.field else None


class _Pairs(NamedTuple):
    figures: list[tuple[float, float]]
    """The figures of the arm and of its references in each round that has both."""
    rejected: int
    """Number of rounds in which a figure is missing or was rejected, although it was to be measured."""
    why_rejected: str | None
    """How many rounds were rejected, and the most common reason."""
    why_untrusted: str | None
    """Set if most rounds were rejected, or none was measured."""


def of_rounds(
    figures: Sequence[tuple[float, float]],
    noise: Difference | None = None,
    confidence: float = 0.95,
    fixed: float = 0.0,
    fewest: int = FEWEST_PAIRS,
) -> Difference:
    """Return the ratio of the ``figures`` of two arms, a pair for each round.

    With ``noise``, the interval allows for correlated rounds, and has the ratio of every round if they drift. A few
    rounds tell little about a correlation or a drift, so the mean of the pairs' own and of the noise's is used. The
    bias of equal arms and ``fixed`` are added to each side of the interval, in quadrature on the logarithmic scale.
    """
    if not figures:
        return Difference()
    above, below = zip(*figures, strict=True)
    correlation, drift = stats.autocorrelation(above, below), stats.drift_of(above, below)
    if not noise:
        ratio = stats.paired_ratio(above, below, confidence=confidence, fewest=fewest)
        return ratio.model_copy(update={"correlation": correlation, "drift": drift})
    correlation, drift = (correlation + noise.correlation) / 2, (drift + noise.drift) / 2
    ratio = stats.paired_ratio(above, below, confidence=confidence, correlation=correlation, fewest=fewest)
    ratio = ratio.model_copy(update={"correlation": correlation, "drift": drift, "fixed": fixed})
    if ratio.drifts:
        ratio = stats.spanning(ratio, above, below)
    return stats.widened(ratio, math.hypot(noise.bias, fixed))


def _pairs(arm: Arm, references: Sequence[Arm], figure: Figure) -> _Pairs:
    """Return the figures of the rounds that count: those with a figure of ``arm`` and of at least one reference. The
    references' figures are joined to their geometric mean."""
    # An arm that was settled early has fewer samples.
    rows = zip(arm.samples, *(reference.samples for reference in references), strict=False)
    rounds = [row for row in rows if all(map(figure.taken_in, row))]
    known: list[tuple[float, float]] = []
    for sample, *reference_samples in rounds:
        own, of_references = figure.of(sample), [value for value in map(figure.of, reference_samples) if value]
        if own and of_references:
            known.append((own, math.prod(of_references) ** (1 / len(of_references))))
    rejected = len(rounds) - len(known)
    why_rejected = why_untrusted = None
    if rejected:
        lacking = [sample for samples in rounds for sample in samples if not figure.of(sample)]
        unknown = [why for sample in lacking if (why := _why_unknown(sample, figure))]
        cause = most_common([*(rejection for sample in lacking for rejection in sample.rejections), *unknown])
        because = cause.text if cause else "this machine does not report the figure"
        why_rejected = f"{rejected} of {count(len(rounds), 'round')} had to be rejected, most often because {because}"
    if rejected > len(known):
        why_untrusted = why_rejected
    elif not rounds:
        why_untrusted = "no round was measured"
    return _Pairs(known, rejected, why_rejected, why_untrusted)
