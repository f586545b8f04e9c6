"""Print claims as a table for a person, or as JSON for a program."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.errors import count, own_place
from pipeline.tools.verification.claims import Claim

CLAIM_WIDTH = 62
_HOLDS = {True: "yes", False: "NO", None: "-"}


def heading(width: int) -> str:
    """Return the table's heading. Its first column, with the variants' names, takes ``width`` characters."""
    return _line(width, "variant", "claim", "measured", "bound", "fault", "holds")


def lines(claim: Claim, width: int) -> Iterator[str]:
    """Yield the lines of one claim in the table, and its note under them."""
    first, *rest = textwrap.wrap(claim.claim, CLAIM_WIDTH)
    numbers = [number(each, claim.unit) for each in (claim.measured, claim.bound, claim.fault)]
    yield _line(width, claim.variant, first, *numbers, claim.undecided or _HOLDS[claim.holds])
    yield from (f"{'':{width}}  {text}" for text in rest)
    for paragraph in _without_traceback(claim.note):
        yield from (f"{'':{width}}    {text}" for text in textwrap.wrap(paragraph, CLAIM_WIDTH - 2))


def summary(claims: Sequence[Claim], seconds: float) -> str:
    """Return the table's last line."""
    held, broken = (sum(claim.holds is answer for claim in claims) for answer in (True, False))
    rest = Counter(claim.undecided for claim in claims if claim.undecided)
    more = "".join(f", {number} {why}" for why, number in rest.items())
    empty = f" No claim of {', '.join(found)} was decided." if (found := _undecided(claims)) else ""
    return f"{count(len(claims), 'claim')}: {held} true, {broken} false{more}.{empty} This took {seconds:.0f} s."


def hold(claims: Sequence[Claim]) -> bool:
    """Return True if no claim is wrong and each variant has a claim that holds."""
    return not (any(claim.holds is False for claim in claims) or _undecided(claims))


def _undecided(claims: Sequence[Claim]) -> list[str]:
    decided = {claim.variant for claim in claims if claim.holds is not None}
    return [name for name in dict.fromkeys(claim.variant for claim in claims) if name not in decided]


def progress(done: int, total: int, seconds: float) -> str:
    """Return a line to print after each claim. There may be fewer claims than ``total``, because claims that could not
    be tried may be reported as one."""
    left = max(0, total - done) * seconds / done
    return f"verify: {done} of {total} claims, {seconds:.0f} s; about {left:.0f} s more"


def number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit != "relative":
        return f"{value:,.4g}" if value else "0"
    return f"{value:.1e}"


def as_json(claims: Sequence[Claim], about: dict[str, Any]) -> str:
    """Return the claims as JSON. Its key ``holds`` is the result of ``hold``. An infinite difference becomes text."""

    def plain(value: Any) -> Any:
        return "infinite" if isinstance(value, float) and not math.isfinite(value) else value

    rows = [{key: plain(value) for key, value in dataclasses.asdict(claim).items()} for claim in claims]
    values = {"holds": hold(claims), **about, "claims": rows}
    return json.dumps(values, indent=2, allow_nan=False)


def _without_traceback(note: str) -> list[str]:
    """Return the note's lines. A traceback is cut to its exception and the user's own line; --json prints it whole."""
    before, _, traceback = note.partition("Traceback (most recent call last):")
    error = traceback.rpartition("\n  ")[2].partition("\n")[2]
    place = f"in {own}" if (own := own_place(note)) else ""
    return [*before.splitlines(), place, *error.splitlines()]


def _line(width: int, variant: str, claim: str, *cells: str) -> str:
    *numbers, holds = cells
    columns = [f"{variant:{width}}", f"{claim:{CLAIM_WIDTH}}", *(f"{each:>9}" for each in numbers), holds]
    return "  ".join(columns).rstrip()
