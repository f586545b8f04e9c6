"""Choose the best of the variants that pay, and estimate its gain without bias.

A variant that is chosen for its measured gain seems better than it is: of ten variants that all gain 6%, the best seems
to gain about 8%. So the gain comes from other measurements than the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.comparison import stats, verdicts
from pipeline.comparison.comparison_file import Champion
from pipeline.comparison.sessions import PooledSession, arm_of, combined, over_sessions
from pipeline.comparison.stats import FEWEST_PAIRS, Interval
from pipeline.comparison.verdicts import QUANTITIES, Quantity, Ratio, SessionRatio
from pipeline.results import Bench


def champion_of(paying: Mapping[str, Sequence[Ratio | None]], pooled: Sequence[PooledSession]) -> Champion | None:
    """Return the champion: among the variants that pay, the variant with the largest gain in speed.

    If no variant gains speed, memory decides, then energy. If all variants pay by accuracy alone, return the first.
    Return None if no variant pays.

    ``paying``: variant -> its ratios in the order of ``QUANTITIES``. An undecided gain does not count.
    """
    for index, quantity in enumerate(QUANTITIES):
        told = {name: each[index] for name, each in paying.items()}
        ratios = {name: each for name, each in told.items() if each and each.decision == "better"}
        if ratios:
            first, *others = sorted(
                ratios, key=lambda name: ratios[name].estimate or 1.0, reverse=quantity.higher_is_better
            )
            second = others[0] if others else None
            return Champion(
                variant=first,
                quantity=quantity.noun,
                among=len(ratios),
                ratio=_gain(first, ratios, pooled, quantity) if second else ratios[first],
                runner_up=second,
                head_to_head=_head_to_head(first, second, ratios, pooled, quantity) if second else None,
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


def no_narrower(interval: Interval, own: Interval) -> Interval:
    """Widen ``interval``, on each side, to at least the relative width of ``own``, the best variant's interval.

    Each part of a measurement influences the choices for the other parts (``choices``), so the parts are not
    independent. Without widening, the interval would be too narrow.
    """
    return replace(
        interval,
        low=interval.estimate * min(interval.low / interval.estimate, own.low / own.estimate),
        high=interval.estimate * max(interval.high / interval.estimate, own.high / own.estimate),
    )


def _gain(first: str, ratios: Mapping[str, Ratio], pooled: Sequence[PooledSession], quantity: Quantity) -> Ratio | None:
    """Return the gain of choosing the best variant, from the sessions that have all variants in ``ratios``.

    With a single such session, the gain comes from its rounds. Return None if there is no such session, or if too few
    rounds of the single session have all variants.
    """
    starts = _shared(ratios)
    margin, sign = next(iter(ratios.values())).margin, 1 if quantity.higher_is_better else -1
    if not starts:
        return None
    if len(starts) > 1:
        table = [[_in(ratio, start) for start in starts] for ratio in ratios.values()]
        found = choices(sign * np.log([[each.estimate or 1.0 for each in row] for row in table]))
        told = tuple(table[chosen][part] for part, chosen in enumerate(found))
        interval = over_sessions([one.interval for one in told])
    else:
        told = (_in(ratios[first], starts[0]),)
        session = next(each for each in pooled if each.start_utc in starts)
        rounds = session.rounds_of(*ratios)
        figures = _figures(rounds, list(ratios), quantity) if rounds else None
        if rounds is None or figures is None or figures.shape[1] < FEWEST_PAIRS:
            return None
        reference, candidates = figures[0], figures[1:]
        found = choices(sign * np.log(candidates / reference), middle=np.median)
        above = [candidates[chosen, part] for part, chosen in enumerate(found)]
        doubt = verdicts.doubt_of(session.noise(quantity, *ratios), quantity, *rounds.arms)
        interval = stats.widened(stats.paired_ratio(above, reference), doubt)
    interval = no_narrower(interval, ratios[first].interval)
    decision = stats.decide(interval, margin, higher_is_better=quantity.higher_is_better)
    return Ratio(**verdicts.estimated(interval), margin=margin, decision=decision, sessions=told)


def _head_to_head(
    first: str, second: str, ratios: Mapping[str, Ratio], pooled: Sequence[PooledSession], quantity: Quantity
) -> Ratio | None:
    """Return the ratio of ``first`` to ``second``, from the rounds that have both; None if no session counts for
    both."""
    shared = set(_shared({name: ratios[name] for name in (first, second)}))
    told = {each.start_utc: each.ratio(first, second, quantity, ratios[first].margin) for each in pooled}
    found = {start: ratio for start, ratio in told.items() if ratio and start in shared}
    return combined(found, [*found.values()][-1], quantity) if found else None


def _shared(ratios: Mapping[str, Ratio]) -> list[str]:
    """Return the start times of the sessions that count for all ``ratios``."""
    return sorted(
        set.intersection(*({one.start_utc for one in each.sessions if one.counts} for each in ratios.values()))
    )


def _in(ratio: Ratio, start: str) -> SessionRatio:
    return next(each for each in ratio.sessions if each.start_utc == start)


def _figures(bench: Bench, names: Sequence[str], quantity: Quantity) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the figures of the baseline and ``names``, [1 + names, rounds], from the rounds that have all of them."""
    arms = [arm_of(bench, "variant", name) for name in (bench.baseline, *names)]
    rounds = zip(*([getattr(sample, quantity.field) for sample in arm.samples] for arm in arms), strict=False)
    return np.array([each for each in rounds if all(each)], dtype=np.float64).reshape(-1, len(arms)).T
