"""Format numbers and comparisons as text, the same way in the Markdown, the page and the pictures."""

from __future__ import annotations

import re

from pipeline.comparison.verdicts import Accuracy, Noise, Ratio
from pipeline.errors import count as count  # the report's other modules import it from here
from pipeline.results import Unit

MINUS, TIMES, DASH, JOINED = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{NO-BREAK SPACE}"
DOT = "\N{MIDDLE DOT}"
UNKNOWN, UNTRUSTED = "unknown", "untrusted"
CODE = re.compile(r"`([\w .-]+)`")
"""Matches a command or a name in backticks within a sentence."""


def number(value: float | None, unit: str = "", digits: int = 3) -> str:
    """Return ``value`` and its unit. The number has ``digits`` digits, or more if its integer part has more."""
    if value is None:
        return UNKNOWN
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    text = f"{value:,.{max(0, digits - magnitude)}f}".replace("-", MINUS)
    return f"{text}{JOINED if unit else ''}{unit}"


def speed(samples_per_second: float | None, unit: Unit) -> str:
    """Return a throughput in the task's unit, such as "51,200 tokens/s"."""
    return number(per_second(samples_per_second, unit), f"{unit.name}/s")


def per_second(samples_per_second: float | None, unit: Unit) -> float | None:
    """Return a throughput as a number in the task's unit."""
    return samples_per_second and samples_per_second * unit.per_sample


def size(value: float | None) -> str:
    """Return ``value`` bytes as text, in the largest unit that is not larger than ``value``."""
    if value is None:
        return UNKNOWN
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return number(value / unit, name)
    return f"{value:g}{JOINED}B"


def scaled(value: float | None, unit: str) -> str:
    """Return ``value`` with the SI prefix that leaves one to three digits before the decimal point.

    >>> scaled(2.5e9, "FLOP/s").replace(JOINED, " ")
    '2.50 GFLOP/s'
    """
    if value is None:
        return UNKNOWN
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m")):
        if value >= factor:
            return number(value / factor, prefix + unit)
    return number(value, unit)


def percent(fraction: float | None, decimals: int = 2) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.{decimals}f}%"


def plain_percent(fraction: float) -> str:
    """Return a percentage from the settings without trailing zeros, such as "3%"."""
    return f"{100 * fraction:g}%"


def points(fraction: float | None) -> str:
    """Return a difference in percentage points with its sign. A difference that rounds to zero has no sign."""
    if fraction is None:
        return UNKNOWN
    text = f"{100 * fraction:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", MINUS)


def times(ratio: float | None, decimals: int = 2) -> str:
    return UNKNOWN if ratio is None else f"{_bare(ratio, decimals)}{TIMES}"


def _bare(ratio: float, decimals: int) -> str:
    return f"{ratio:.{decimals if ratio >= 0.1 else decimals + 1}f}"


def heading(text: str) -> str:
    """Return ``text`` with a capital as its first letter."""
    return f"{text[:1].upper()}{text[1:]}"


def estimate(each: Ratio | Noise | Accuracy) -> str:
    """Return a ratio, or a difference in accuracy, without its interval."""
    if isinstance(each, Accuracy):
        return f"{points(each.mean_fraction)}{JOINED}points"
    return times(each.estimate, _decimals(each))


def interval(each: Ratio | Noise | Accuracy) -> str:
    """Return the ends of the interval, or the reason why there is none."""
    if isinstance(each, Accuracy):
        if each.low_fraction is None or each.high_fraction is None:
            return f"too few seeds ({each.seeds}) for an interval"
        return _to(points(each.low_fraction), points(each.high_fraction))
    if each.low is None or each.high is None:
        return f"too few accepted rounds ({each.pairs}) for an interval"
    return ends(each.low, each.high, _decimals(each))


def ends(low: float, high: float, decimals: int = 2) -> str:
    """Return the ends of a ratio's interval."""
    return _to(_bare(low, decimals), _bare(high, decimals))


def _decimals(ratio: Ratio | Noise) -> int:
    """Return the number of decimals: 2, or 3 if the interval is so narrow that its ends could look the same with 2."""
    return 3 if ratio.low and ratio.high and ratio.high / ratio.low < 1.02 else 2


def _to(low: str, high: str) -> str:
    return f"{low}{JOINED}to{JOINED}{high}"


def lines(each: Ratio | Noise | Accuracy | None) -> tuple[str, ...]:
    """Return the lines of a table cell: the estimate and its interval, in brackets if they are untrusted. The page
    shows brackets in grey."""
    if each is None:
        return ()
    if not isinstance(each, Accuracy) and each.why_untrusted:
        return (UNTRUSTED,) if each.estimate is None else (UNTRUSTED, f"[{estimate(each)}, {interval(each)}]")
    undecided = not isinstance(each, Noise) and each.decision == "undecided"
    return f"{estimate(each)}{' undecided' if undecided else ''}", interval(each)


def text(each: Ratio | Noise | Accuracy) -> str:
    """Return the texts of ``lines`` on one line."""
    first, *others = lines(each)
    return " ".join([first, *(other if first == UNTRUSTED else f"({other})" for other in others)])
