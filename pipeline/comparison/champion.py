"""Choose the best of the variants that pay, and estimate its gain without bias; find the variants that none beats.

A variant that is chosen for its measured gain seems better than it is: of ten variants that all gain 6%, the best seems
to gain about 8%. So the gain comes from other measurements than the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.comparison import stats, verdicts
from pipeline.comparison.comparison_file import Champion
from pipeline.comparison.sessions import SampleTable, SharedRounds, column, combined
from pipeline.comparison.stats import Difference
from pipeline.results.figures import QUANTITIES, Figure


def champion_of(paying: Mapping[str, Mapping[Figure, Difference]], table: SampleTable) -> Champion | None:
    """Return the champion: among the variants that pay, the variant with the largest gain in speed.

    If no variant gains speed, memory decides, then energy. If all variants pay by accuracy alone, return the first.
    Return None if no variant pays.

    ``paying``: variant -> its ratios. A gain without a margin, or an undecided one, does not count. A gain whose
    size is uncertain counts only if no other does.
    """
    for quantity in QUANTITIES:
        known = {variant: ratios[quantity] for variant, ratios in paying.items() if quantity in ratios}
        gains = {variant: ratio for variant, ratio in known.items() if ratio.margin and ratio.decision == "better"}
        gains = {variant: ratio for variant, ratio in gains.items() if not ratio.why_untrusted} or gains
        if gains:
            first, *others = sorted(
                gains, key=lambda name: gains[name].estimate or 1.0, reverse=quantity.higher_is_better
            )
            second = others[0] if others else None
            return Champion(
                variant=first,
                quantity=quantity.noun,
                among=len(gains),
                ratio=_gain(first, gains, table, quantity) if second or gains[first].why_untrusted else gains[first],
                runner_up=second,
                head_to_head=_head_to_head(first, second, gains, table, quantity) if second else None,
            )
    if not paying:
        return None
    # These variants pay only because they are more accurate.
    return Champion(variant=next(iter(paying)), among=len(paying))


def choices(gains: np.ndarray[Any, np.dtype[np.float64]], *, middle: Any = np.mean) -> list[int]:
    """Return, for each part of a measurement, the index of the best candidate by the ``middle`` of all *other* parts.

    A part is a session or a round. ``gains``: [candidates, parts], at least two parts, higher is better. ``middle``:
    the mean or the median. The gains in a part have no influence on the choice for this part, so luck does not inflate
    them.
    """
    parts = range(gains.shape[1])
    return [int(middle(np.delete(gains, part, axis=1), axis=1).argmax()) for part in parts]


def no_narrower(gain: Difference, own: Difference) -> Difference:
    """Widen the interval of ``gain``, on each side, to at least the relative width of the interval of ``own``, the best
    variant's ratio.

    Each part of a measurement influences the choices for the other parts (``choices``), so the parts are not
    independent. Without widening, the interval would be too narrow.
    """
    (low, high), (own_low, own_high) = gain.bounds, own.bounds
    estimate, own_estimate = gain.estimate or 1.0, own.estimate or 1.0
    return gain.model_copy(
        update={
            "low": estimate * min(low / estimate, own_low / own_estimate),
            "high": estimate * max(high / estimate, own_high / own_estimate),
        }
    )


def _gain(first: str, ratios: Mapping[str, Difference], table: SampleTable, quantity: Figure) -> Difference | None:
    """Return the gain of choosing the best variant, from the sessions that have all variants in ``ratios``.

    With a single such session, the gain comes from its rounds. Return None if there is no such session, or if too few
    rounds of the single session have all variants.
    """
    starts = _shared(ratios)
    margin, sign = next(iter(ratios.values())).margin, 1 if quantity.higher_is_better else -1
    if not starts:
        return None
    if len(starts) > 1:
        by_session = [[ratio.parts[start] for start in starts] for ratio in ratios.values()]
        chosen = choices(sign * np.log([[part.estimate or 1.0 for part in of_variant] for of_variant in by_session]))
        parts = {start: by_session[best][index] for index, (start, best) in enumerate(zip(starts, chosen, strict=True))}
        gain = stats.over_sessions(list(parts.values()))
    else:
        parts = {starts[0]: ratios[first].parts[starts[0]]}
        session = next(session for session in table.sessions if session.start_utc in starts)
        rounds = session.rounds(*map(column, ratios))
        figures = _figures(rounds, list(ratios), quantity) if rounds else None
        if rounds is None or figures is None or figures.shape[1] < quantity.fewest_pairs:
            return None
        reference, candidates = figures[0], figures[1:]
        chosen = choices(sign * np.log(candidates / reference), middle=np.median)
        above = [candidates[best, index] for index, best in enumerate(chosen)]
        noise, heap = rounds.noise(quantity), verdicts.heap_doubt(quantity, *rounds.arms.values())
        pairs = list(zip(above, reference, strict=True))
        gain = verdicts.of_rounds(pairs, noise, fixed=heap, fewest=quantity.fewest_pairs)
    gain = no_narrower(gain, ratios[first])
    decision = stats.decide(gain, margin, higher_is_better=quantity.higher_is_better)
    return gain.model_copy(update={"margin": margin, "decision": decision, "parts": parts})


def _head_to_head(
    first: str, second: str, ratios: Mapping[str, Difference], table: SampleTable, quantity: Figure
) -> Difference | None:
    """Return the ratio of ``first`` to ``second``, from the rounds that have both; None if no session counts for
    both."""
    shared = _shared({name: ratios[name] for name in (first, second)})
    of_sessions = table.ratios(first, second, quantity, ratios[first].margin)
    parts = {start: ratio for start, ratio in of_sessions.items() if start in shared}
    return combined(parts, [*parts.values()][-1], quantity) if parts else None


def _shared(ratios: Mapping[str, Difference]) -> list[str]:
    """Return the start times of the sessions that count for all ``ratios``."""
    counting = ({start for start, part in ratio.parts.items() if part.counts} for ratio in ratios.values())
    return sorted(set.intersection(*counting))


def _figures(rounds: SharedRounds, names: Sequence[str], quantity: Figure) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the figures of the baseline and ``names``, [1 + names, rounds], from the rounds that have all of them. The
    baseline's are the geometric means of its own and its control's."""
    arms = [rounds.arms[name] for name in (*rounds.equal_to(column(rounds.baseline)), *map(column, names))]
    rows = zip(*(map(quantity.of, arm.samples) for arm in arms), strict=True)
    figures = np.array([row for row in rows if all(row)], dtype=np.float64).reshape(-1, len(arms)).T
    return np.concatenate([np.sqrt(figures[:1] * figures[1:2]), figures[2:]])


def on_front(
    baseline: str,
    differences: Mapping[str, tuple[Difference, Difference, Difference | None]],
    noises: Sequence[Difference],
) -> set[str]:
    """Return the variants, the baseline included, that no other variant beats in throughput, memory and accuracy.

    ``differences``: each variant's ratios and accuracy relative to the baseline. A difference counts only if it is
    decided as better or worse. A variant with an unknown ratio is left out. ``noises``: if there are no
    differences because one of these is untrusted, nothing is known, and nothing is on the front.
    """
    if not differences and any(noise.why_untrusted for noise in noises):
        return set()
    points = {baseline: (1.0, 1.0, 0.0)}
    for variant, (throughput, memory, accuracy) in differences.items():
        if throughput.estimate is not None and memory.estimate is not None:
            points[variant] = (
                throughput.estimate if throughput.decision in _DECIDED else 1.0,
                memory.estimate if memory.decision in _DECIDED else 1.0,
                (accuracy.estimate or 0.0) if accuracy and accuracy.decision in _DECIDED else 0.0,
            )
    names = list(points)
    return {names[index] for index in pareto_front(list(points.values()), [True, False, True])}


_DECIDED = ("better", "worse")


def pareto_front(points: Sequence[Sequence[float]], higher_is_better: Sequence[bool]) -> list[int]:
    """Return the indices, ascending, of the points that no other point beats.

    A point beats another if it is at least as good in every coordinate and better in one, so equal points do not beat
    each other. ``higher_is_better`` has one entry per coordinate.
    """
    values = np.array(points, dtype=np.float64).reshape(len(points), len(higher_is_better))
    values *= np.where(higher_is_better, 1.0, -1.0)
    as_good = (values[:, None] >= values[None]).all(axis=2)
    better = (values[:, None] > values[None]).any(axis=2)
    return np.flatnonzero(~(as_good & better).any(axis=0)).tolist()
