"""Claims for a person and for a program."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.tools.verification.claims import Claim

CLAIM_WIDTH = 62
_HOLDS = {True: "yes", False: "NO", None: "-"}


def heading(width: int) -> str:
    """Of the table whose first column, the variants' names, takes ``width`` characters."""
    return _line(width, "variant", "claim", "measured", "bound", "fault", "holds")


def lines(claim: Claim, width: int) -> Iterator[str]:
    """One claim of the table, and its note under it."""
    first, *rest = textwrap.wrap(claim.claim, CLAIM_WIDTH)
    yield _line(
        width, claim.variant, first, number(claim.measured, claim.unit), number(claim.bound, claim.unit),
        number(claim.fault, claim.unit), claim.undecided or _HOLDS[claim.holds],
    )  # fmt: skip
    yield from (f"{'':{width}}  {text}" for text in rest)
    for paragraph in _without_traceback(claim.note):
        yield from (f"{'':{width}}    {text}" for text in textwrap.wrap(paragraph, CLAIM_WIDTH - 2))


def summary(claims: Sequence[Claim], seconds: float) -> str:
    """The table's last line."""
    held, broken = (sum(claim.holds is answer for claim in claims) for answer in (True, False))
    rest = Counter(claim.undecided for claim in claims if claim.undecided)
    more = "".join(f"; {count} {why}" for why, count in rest.items())
    return f"{held} of {held + broken} claims hold{more}. {seconds:.0f} s"


def progress(done: int, total: int, seconds: float) -> str:
    """A line after each claim. Fewer than ``total`` may come: of what cannot be tried there is one."""
    left = max(0, total - done) * seconds / done
    return f"verify: {done} of {total} claims, {seconds:.0f} s; about {left:.0f} s more"


def number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit != "relative":
        return f"{value:,.4g}" if value else "0"
    return f"{value:.1e}"


def as_json(claims: Sequence[Claim], about: dict[str, Any]) -> str:
    """``holds``: that of all; an infinite difference is text."""

    def plain(value: Any) -> Any:
        return "infinite" if isinstance(value, float) and not math.isfinite(value) else value

    rows = [{key: plain(value) for key, value in dataclasses.asdict(claim).items()} for claim in claims]
    values = {"holds": all(claim.holds is not False for claim in claims), **about, "claims": rows}
    return json.dumps(values, indent=2, allow_nan=False)


def _without_traceback(note: str) -> list[str]:
    """The note's lines; of a traceback, the exception alone: --json has all of it."""
    found = note.splitlines()
    first = next((index for index, line in enumerate(found) if "Traceback (most recent call last)" in line), None)
    if first is None:
        return found
    last = max(index for index, line in enumerate(found) if line.startswith("  "))
    before = re.sub(r"(rank \d+: )?Traceback .*", "", found[first]).strip()
    return [*found[:first], *filter(None, [before]), *found[last + 1 :]]


def _line(width: int, variant: str, claim: str, measured: str, bound: str, fault: str, holds: str) -> str:
    return f"{variant:{width}}  {claim:{CLAIM_WIDTH}}  {measured:>9}  {bound:>9}  {fault:>9}  {holds}".rstrip()
