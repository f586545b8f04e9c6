"""Format differences from the baseline: a ratio, or points of accuracy, with its interval."""

from __future__ import annotations

from pipeline.comparison.advice import percentage_points
from pipeline.comparison.stats import Difference
from pipeline.pages.formats import JOINED, UNTRUSTED, bare, between, plain_percent, points, times


def estimate(difference: Difference) -> str:
    """Return a ratio, or a difference in accuracy, without its interval."""
    if difference.unit == "fraction":
        return f"{points(difference.estimate)}{JOINED}points"
    return times(difference.estimate, _decimals(difference))


def interval(difference: Difference) -> str:
    """Return the ends of the interval, or the reason why there is none."""
    of_ratio = difference.unit == "ratio"
    if difference.low is None:
        return f"too few {'accepted rounds' if of_ratio else 'seeds'} ({difference.pairs}) for an interval"
    decimals = _decimals(difference)
    low, high = (bare(end, decimals) if of_ratio else points(end) for end in difference.bounds)
    return between(low, high)


def margin(difference: Difference) -> str:
    """Return the margin at which the difference was decided."""
    shown = plain_percent if difference.unit == "ratio" else percentage_points
    return shown(difference.margin)


def _decimals(ratio: Difference) -> int:
    """Return the number of decimals: 2, or 3 if the interval is so narrow that its ends could look the same with 2."""
    return 3 if ratio.spread < 0.02 else 2


def lines(difference: Difference | None) -> tuple[str, ...]:
    """Return the lines of a table cell: the estimate and its interval, in brackets if they are untrusted. The page
    shows brackets in grey."""
    if difference is None:
        return ()
    value, ends = estimate(difference), interval(difference)
    if difference.why_untrusted:
        return (UNTRUSTED,) if difference.estimate is None else (UNTRUSTED, f"[{value}, {ends}]")
    return f"{value}{' undecided' if difference.decision == 'undecided' else ''}", ends


def text(difference: Difference) -> str:
    """Return the texts of ``lines`` on one line."""
    value, *intervals = lines(difference)
    return " ".join([value, *(text if value == UNTRUSTED else f"({text})" for text in intervals)])
