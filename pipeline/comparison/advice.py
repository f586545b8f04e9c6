"""Explain why figures do not lead to a decision, and what would help."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from pipeline.comparison import planning, stats, verdicts
from pipeline.comparison.planning import LONGEST_MINUTES, RoundCost
from pipeline.comparison.stats import Difference, Outcomes
from pipeline.errors import count
from pipeline.results import Bench
from pipeline.results.figures import QUANTITIES, THROUGHPUT, Figure

MOST_SEEDS = 20
"""Largest number of further seeds that is advised."""

ODDS = "more likely than not"
"""The chance that the forecast number suffices. In simulations with many forecasts, the forecast number of pairs led to
a decision in 53 to 85% of the cases, and twice this number in 70 to 94% (``benchmarks.simulations.forecasts``)."""
FULL_ROUNDS = 8
"""From this many rounds on, another session is advised first. More rounds would narrow the interval, but say nothing
about differences between sessions."""
TOLD_WIDENING = 2.0
"""If correlated rounds make an interval at least so many times as wide, the report says so."""

_CERTAIN: dict[str, dict[Outcomes, str]] = {
    **{
        figure.noun: {("better",): f"saves {figure.word}", ("worse",): f"needs more {figure.word}"}
        for figure in QUANTITIES
    },
    THROUGHPUT.noun: {("better",): "faster", ("worse",): "slower"},
    "accuracy": {("better",): "more accurate", ("worse",): "less accurate"},
}


def certain(quantities: Mapping[str, Outcomes]) -> list[str]:
    """Return, in a list, a text on the quantities that are better or worse although the verdict is undecided or
    untrusted.

    For an undecided verdict, the text ends with the possible verdicts. The list is empty if no quantity is better or
    worse, or if the verdict is decided.

    >>> certain({"throughput": ("better", "same", "worse"), "accuracy": ("same",), "peak memory": ("better",)})
    ['saves memory; pays or trades']
    >>> certain({"throughput": ("untrusted",), "accuracy": ("same", "worse"), "peak memory": ("better",)})
    ['decided nevertheless: saves memory']
    """
    effects = [_CERTAIN[noun][outcomes] for noun, outcomes in quantities.items() if outcomes in _CERTAIN[noun]]
    verdict = verdicts.verdict(list(quantities.values()))
    if not effects or verdict not in ("undecided", "untrusted"):
        return []
    if verdict == "untrusted":
        return [f"decided nevertheless: {', '.join(effects)}"]
    return [f"{', '.join(effects)}; {' or '.join(verdicts.possible(list(quantities.values())))}"]


def of_variant(
    outcomes: Mapping[str, Outcomes],
    ratios: Mapping[Figure, Difference],
    accuracy: Difference | None,
    bench: Bench,
    of_machine: Collection[Figure],
    *,
    stopped: bool,
    as_baseline: bool,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the reasons of one variant, and those that it shares with all variants (``Compared.shared_reasons``).

    ``outcomes``: the quantities that count for the verdict. ``of_machine``: the quantities that the machine's noise
    makes untrusted for all variants. ``stopped``: True if the bench stopped measuring the variant early, because it
    found the variant's ratios settled. ``as_baseline``: True if the variant's techniques are skipped, so that it trains
    like the baseline.
    """
    shared = [ratios[figure].why_untrusted or "" for figure in of_machine]
    others = {figure: ratio for figure, ratio in ratios.items() if figure not in of_machine}
    if as_baseline:
        untrusted = [ratio.why_untrusted for ratio in others.values() if ratio.why_untrusted]
        return (*untrusted, "on this machine it trains exactly like the baseline, so a difference is noise"), (*shared,)
    cost = planning.cost_of(bench, bench.rounds, bench.seconds)
    of_ratios = (ratio_reasons(ratio, figure, cost, stopped=stopped) for figure, ratio in others.items())
    correlated = (correlation_reasons(ratio, figure) for figure, ratio in others.items())
    reasons = (*certain(outcomes), *chain(*of_ratios, *correlated), *accuracy_reasons(accuracy))
    shared += [interrupted(bench)] if bench.interrupted and any(map(is_open, ratios.values())) else []
    return reasons, (*shared,)


def is_open(ratio: Difference) -> bool:
    """True if ``ratio`` is untrusted or, at its margin, undecided."""
    return bool(ratio.why_untrusted) or (ratio.decision == "undecided" and bool(ratio.margin))


def interrupted(bench: Bench) -> str:
    return f"the bench was interrupted after {count(bench.rounds, 'round')}: run `dvc repro bench`"


def ratio_reasons(ratio: Difference, figure: Figure, cost: RoundCost, *, stopped: bool = False) -> list[str]:
    """Return why ``ratio`` is untrusted or undecided, and what would help; an empty list if the ratio is decided, or if
    there is no margin to decide at.

    If no number of rounds decides, the reason says so, and names a margin for which the present rounds suffice. If a
    decision from a single session would take longer than ``LONGEST_MINUTES``, or cannot be forecast, the advice names a
    margin for which ``LONGEST_MINUTES`` suffice.
    """
    if not is_open(ratio):
        return []
    if ratio.why_untrusted:
        return [ratio.why_untrusted]
    if not planning.rounds_help(ratio):
        margin = math.ceil(1e3 * planning.margin_decided(ratio, ratio.pairs)) / 1e3
        return [
            f"{figure.noun} cannot be decided on a CPU at the margin of {ratio.margin:.1%}, however many rounds are "
            f"measured: the heaps of equal processes change this ratio by up to {math.expm1(ratio.fixed):.0%}; a "
            f"margin of {margin:.1%} allows a decision (compare.margins), and so may a job that needs more memory"
        ]
    unsure = f"{figure.noun} is undecided"
    if ratio.session_count > 1:
        over = f"{unsure} over {ratio.session_count} sessions"
        if ratio.more_sessions is None:
            return [f"{over}, and no forecast is possible; more rounds in each may help (bench.max_minutes)"]
        more = count(ratio.more_sessions, "more session")
        return [f"{over}: about {more} will suffice, {ODDS} (bench --again, on other days)"]
    another = "another session helps most (bench --again)"
    if stopped:
        return [f"{unsure}: {another}"]
    measured = ratio.pairs + ratio.rejected
    if ratio.low is None:
        lost = f", but {ratio.rejected} of {count(measured, 'round')} had to be rejected" if ratio.rejected else ""
        remedy = cost.remedy(planning.rounds_for(figure.fewest_pairs, ratio.pairs, ratio.rejected))
        return [f"{unsure}: at least {figure.fewest_pairs} accepted rounds are needed{lost} ({remedy})"]
    first = f"{another}; " if measured >= FULL_ROUNDS else ""
    if ratio.more_pairs is not None:
        rounds = planning.rounds_for(ratio.pairs + ratio.more_pairs, ratio.pairs, ratio.rejected)
        if rounds <= cost.affordable():
            enough = f"about {cost.minutes_of(rounds):g} min of rounds in all will suffice, {ODDS}"
            return [f"{unsure}: {first}{enough} ({cost.remedy(rounds)})"]
    pairs = max(ratio.pairs, int(cost.affordable() * ratio.pairs / measured))
    margin = planning.margin_decided(ratio, pairs, ratio.fixed)
    return [
        f"{unsure} at the margin of {ratio.margin:.1%}; {first}with {LONGEST_MINUTES} minutes of rounds, a margin of "
        f"{margin:.1%} allows a decision (compare.margins)"
    ]


def correlation_reasons(ratio: Difference, figure: Figure) -> list[str]:
    """Return, in a list, what correlated rounds did to the interval of an undecided ``ratio``; an empty list if they
    did little."""
    if ratio.decision != "undecided" or ratio.low is None or ratio.widening < TOLD_WIDENING:
        return []
    rounds = stats.independent(ratio.pairs, ratio.correlation)
    return [
        f"rounds resemble the round before (correlation {ratio.correlation:.2f}): {ratio.pairs} rounds count as "
        f"{rounds:.0f}, so the interval of {figure.noun} is {ratio.widening:.1f} times as wide"
    ]


def accuracy_reasons(accuracy: Difference | None) -> list[str]:
    """Return why ``accuracy`` is undecided, and what would help; an empty list if it is decided, or was not measured.

    If more than ``MOST_SEEDS`` further seeds would be needed, or if no forecast is possible, the advice names a margin
    for which ``MOST_SEEDS`` further seeds suffice.
    """
    if accuracy is None or accuracy.decision != "undecided":
        return []
    if accuracy.low is None:
        return ["accuracy is undecided: one seed shows no variation between seeds (add seeds to train.seeds)"]
    undecided = f"accuracy is undecided with {accuracy.pairs} seeds"
    if accuracy.more_pairs is not None and accuracy.more_pairs <= MOST_SEEDS:
        more = count(accuracy.more_pairs, "more seed")
        return [f"{undecided}: about {more} will suffice, {ODDS} (python -m pipeline seeds)"]
    margin = planning.margin_of_seeds(accuracy, accuracy.pairs + MOST_SEEDS)
    return [
        f"{undecided} at the margin of {percentage_points(accuracy.margin)}; with {MOST_SEEDS} more seeds, a "
        f"margin of {math.ceil(1e4 * margin) / 100:g} points allows a decision (compare.margins.accuracy)"
    ]


def confidences(differences: Iterable[Mapping[str, Difference]]) -> str:
    """Return the confidence of each quantity's intervals, such as "95%" or "95% for throughput, 99% for peak memory".

    ``differences``: for each variant, figure -> its difference; all variants have the same confidence (``stats``).
    """
    known = {noun: difference.confidence for of_variant in differences for noun, difference in of_variant.items()}
    percents = {noun: f"{100 * confidence:.3g}%" for noun, confidence in known.items()}
    if len(set(percents.values())) == 1:
        return next(iter(percents.values()))
    return ", ".join(f"{percent} for {noun}" for noun, percent in percents.items())


def seeds_outlook(seeds: int, margin: float, known: Difference | None) -> str:
    """Say, before a training, how many seeds a decision on its accuracy needs. ``known``: the variant's accuracy in the
    last report, if it has a deviation."""
    shown = f"{count(seeds, 'seed')}, margin {percentage_points(margin)}"
    if known is None or known.deviation is None:
        resolved = 100 * planning.deviation_shown(seeds, margin)
        return (
            f"accuracy: {shown}; an equal variant is shown to be the same, in about three of four cases, if its "
            f"difference from the baseline deviates from seed to seed by at most {resolved:.2f} points, which only the "
            "first report shows"
        )
    needed, deviation = planning.seeds_for(known.deviation, margin), 100 * known.deviation
    enough = f"about {count(needed, 'seed')}" if needed else "more than 1000 seeds"
    advice = "" if needed and needed <= seeds else "; python -m pipeline seeds adds seeds until all is decided"
    return (
        f"accuracy: {shown}; in the last report, the difference from the baseline deviated from seed to seed by "
        f"{deviation:.2f} points, for which {enough} would show that an equal variant is the same{advice}"
    )


def percentage_points(fraction: float) -> str:
    """Return "1 percentage point" for 0.01."""
    shown = f"{100 * fraction:g}"
    return f"{shown} percentage point{'' if shown == '1' else 's'}"
