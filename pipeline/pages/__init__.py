"""The pages that people read, each a Jinja template in this folder, and the formats of numbers, which are the same on
every page, in pictures and in MLflow."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import count as count  # templates take it from here
from pipeline.results import Unit
from pipeline.results.figures import Figure

MINUS, TIMES, DASH, JOINED = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{NO-BREAK SPACE}"
DOT = "\N{MIDDLE DOT}"
UNKNOWN, UNTRUSTED = "unknown", "untrusted"
CODE = re.compile(r"`([\w .-]+)`")
"""Matches a command or a name in backticks within a sentence."""


def render(template: str, escape: Literal["html", "markdown"] | None = None, **values: Any) -> str:
    """Return the page of ``template``, a file in this folder. In all templates, ``formats`` is this module.

    ``escape``: how every value is escaped and put on one line, unless a macro made it. None: the values are from this
    project and the machine, and stand as they are.
    """
    import jinja2  # takes a while, and not every command writes a page
    from markupsafe import Markup

    def finalised(value: object) -> object:
        if hasattr(value, "__html__"):
            return value
        return on_one_line(str(value)) if escape == "html" else Markup(escaped(str(value)))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        autoescape=escape is not None,
        finalize=finalised if escape else None,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["formats"] = sys.modules[__name__]
    environment.filters["marked"] = marked
    return environment.get_template(template).render(values)


def on_one_line(text: str) -> str:
    """Return ``text`` with a space for all that ``str.splitlines`` takes for the end of a line."""
    return re.sub(r"[ \t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+", " ", text)  # a no-break space stays


def escaped(text: str) -> str:
    """Return ``text`` on one line, with Markdown and HTML escaped. Backticks around a command or a name stay."""
    shown = on_one_line(text).strip().replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(rf"({CODE.pattern})|([\\`*_{{}}\[\]|#~!])", lambda match: match[1] or f"\\{match[3]}", shown)


def marked(text: str) -> Any:
    """Return ``text`` as HTML: figures in brackets, which are untrusted, in grey, and words in backticks as code."""
    from markupsafe import Markup, escape

    coded = CODE.sub(r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\[[^]]*\]", r'<span class="unbelieved">\g<0></span>', coded))


# Numbers and times.


def number(value: float | None, unit: str = "", digits: int = 3) -> str:
    """Return ``value`` and its unit. The number has ``digits`` digits, or more if its integer part has more. Below 0.1,
    zeros behind the point are no digits, so that no value but 0 looks like 0."""
    if value is None:
        return UNKNOWN
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    if 0 < abs(value) < 0.1:
        magnitude = 2 + math.floor(math.log10(abs(value)))
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
    if figure.unit == "price":
        return price(value)
    if figure.unit == "fraction":
        return percent(value, 1)
    return number(value, "" if figure.unit == "count" else figure.unit)


def price(value: float | None) -> str:
    """Return an amount of money, in whatever currency, with three digits."""
    return UNKNOWN if value is None else f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Return ``value`` bytes as text, in the largest unit that is not larger than its absolute value."""
    if value is None:
        return UNKNOWN
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= unit:
            return number(value / unit, name)
    return f"{fixed(value, 0)}{JOINED}B"


def scaled(value: float | None, unit: str) -> str:
    """Return ``value`` with the SI prefix that leaves one to three digits before the decimal point.

    >>> scaled(2.5e9, "FLOP/s").replace(JOINED, " ")
    '2.50 GFLOP/s'
    """
    if value is None:
        return UNKNOWN
    prefixes = ("P", "T", "G", "M", "k", "", "m", "\N{MICRO SIGN}")
    for power, prefix in zip(range(15, -7, -3), prefixes, strict=True):
        factor = 10.0**power
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


def commit(sha: str | None) -> str:
    """Return the first digits of a commit; a "+" at its end stands for uncommitted changes."""
    sha = sha or UNKNOWN
    return f"{sha.rstrip('+')[:12]}{', with uncommitted changes' if sha.endswith('+') else ''}"


def minute(time_utc: str) -> str:
    """Return an ISO 8601 time without its seconds."""
    return time_utc[:16].replace("T", " ")


def between(low: str, high: str) -> str:
    return f"{low}{JOINED}to{JOINED}{high}"
