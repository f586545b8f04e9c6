"""Format numbers as text, in the same way on every page, in pictures and in MLflow."""

from __future__ import annotations

from pipeline.errors import count as count  # templates take it from here
from pipeline.results import Unit
from pipeline.results.figures import Figure

MINUS, TIMES, DASH, JOINED = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{NO-BREAK SPACE}"
DOT = "\N{MIDDLE DOT}"
UNKNOWN, UNTRUSTED = "unknown", "untrusted"


def number(value: float | None, unit: str = "", digits: int = 3) -> str:
    """Return ``value`` and its unit. The number has ``digits`` digits, or more if its integer part has more."""
    if value is None:
        return UNKNOWN
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    text = f"{value:,.{max(0, digits - magnitude)}f}".replace("-", MINUS)
    return f"{text}{JOINED if unit else ''}{unit}"


def fixed(value: float | None, decimals: int) -> str:
    return UNKNOWN if value is None else f"{value:,.{decimals}f}".replace("-", MINUS)


def of_figure(figure: Figure, value: float | None, unit: Unit) -> str:
    """Return a figure's value with its unit. ``unit``: what throughputs count, such as in "51,200 tokens/s"."""
    if figure.unit == "samples/s":
        return number(value and value * unit.per_sample, f"{unit.name}/s")
    if figure.unit == "bytes":
        return size(value)
    if figure.unit in ("J", "FLOP/s"):
        return scaled(value, figure.unit)
    if figure.unit == "fraction":
        return percent(value, 1)
    return number(value, "" if figure.unit == "count" else figure.unit)


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
    return UNKNOWN if ratio is None else f"{bare(ratio, decimals)}{TIMES}"


def bare(ratio: float, decimals: int) -> str:
    return f"{ratio:.{decimals if ratio >= 0.1 else decimals + 1}f}"


def heading(text: str) -> str:
    """Return ``text`` with a capital as its first letter."""
    return text[:1].upper() + text[1:]


def minute(time_utc: str) -> str:
    """Return an ISO 8601 time without its seconds."""
    return time_utc[:16].replace("T", " ")


def between(low: str, high: str) -> str:
    return f"{low}{JOINED}to{JOINED}{high}"
