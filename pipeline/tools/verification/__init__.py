"""The command ``verify``: train every variant in miniature, with the user's own model and data, and verify the claims
on which a comparison rests."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
import textwrap
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from pipeline import params, tasks
from pipeline.data.prepared import check_batch
from pipeline.data.prepared import read as read_dataset
from pipeline.errors import count, own_place, say
from pipeline.params import Config, Machine
from pipeline.plans import Plan
from pipeline.tools.verification.claims import UNTRIED, Claim
from pipeline.tools.verification.verifier import LEFT_OUT, Verifier, said
from pipeline.training.assembly import planned

__all__ = ["Claim", "Verifier", "run"]


QUICK_SECONDS = 100.0
"""With ``quick``, no claims begin that are expected to end later."""
PRIME = " (a prime number, so that processes never have equal shares)"


def run(
    config: Config, machine: Machine, variants: Sequence[str], prepared: Path, *, as_json: bool, quick: bool = False
) -> int:
    """Print the claims of ``variants`` (empty: of all). Return 0 if ``hold`` is true for the claims, else 1.

    ``quick``: leave out what takes long (``verifier.LEFT_OUT``), and end within two minutes if a training step takes a
    second. The claims that need a reference come after those of all variants that need none. Raises PipelineError.
    """
    names = list(variants) or list(config.variants)
    plans = [planned(config, name, machine, prepared) for name in names]
    started = time.monotonic()
    claims: list[Claim] = []
    width = max(map(len, [*names, "variant"]))
    shared = Path.cwd() if machine.hosts > 1 else None  # a directory that all hosts see
    with tempfile.TemporaryDirectory(dir=shared, prefix="verify-") as folder:
        with redirect_stdout(sys.stderr):  # a user's model may print; stdout is for the table
            task = tasks.of_job(config.train, read_dataset(prepared))
            check_batch(config.train.batch_size, task.dataset.name, len(task.dataset.train))
            task.check()
            task.try_step(task.model())
            verifier = Verifier(config, machine, prepared, task, Path(folder), quick=quick)
        about = {
            "model": config.train.model,
            "dataset": task.dataset.name,
            "seed": config.train.seeds[0],
            "steps": verifier.steps,
            "stochastic": verifier.nature.stochastic,
            "batch_dependent": verifier.nature.batch_dependent,
        }
        if not as_json:
            say(
                f"{about['model']} on {about['dataset']}, seed {about['seed']}: {about['steps']} steps of "
                f"{config.train.batch_size} samples, and {verifier.tested:,} of {len(task.dataset.test):,} test "
                f"samples{PRIME if verifier.tested < len(task.dataset.test) else ''}. The model "
                f"{said(verifier.nature)}.\n{f'--quick leaves out: {LEFT_OUT}.' if quick else ''}\n"
            )
            say(heading(width))
        total, costs = sum(map(verifier.count, plans)), [cost(plan, quick=quick) for plan in plans]
        say(f"verify: {total} claims; from the second variant on, the remaining time is estimated", file=sys.stderr)
        todo = deque(zip(names, map(verifier.claims, plans), [1.0] * len(plans) if quick else costs, strict=True))
        left, limit, spent = sum(costs), QUICK_SECONDS if quick else math.inf, list[tuple[float, float]]()
        while todo:
            (name, claimed, part), began = todo.popleft(), time.monotonic()
            late = began - started + remaining(spent, part) > limit
            unseen = Claim(name, "further claims", note="the time of --quick is over", undecided=UNTRIED)
            for claim in (unseen,) if late else claimed:
                claims.append(claim)
                if not as_json:
                    say("\n".join(claim_lines(claim, width)))
            todo.extend((name, against, ROUNDED - 1) for against in verifier.put_off)
            verifier.put_off.clear()
            left -= part
            spent += [] if late else [(part, time.monotonic() - began)]
            seconds = time.monotonic() - started
            more = min(remaining(spent, left), limit - seconds) if todo else 0.0
            say(progress(len(claims), total, seconds, more), file=sys.stderr)
    seconds = time.monotonic() - started
    say(claims_as_json(claims, about | {"seconds": round(seconds, 1)}) if as_json else summary(claims, seconds))
    if false := {claim.variant for claim in claims if claim.holds is False}:
        whole = f", or --quick took too few samples: run `python -m pipeline verify {' '.join(sorted(false))}`"
        say(f"verify: NO: the variant trains otherwise than promised{whole if quick else ''}", file=sys.stderr)
    return int(not hold(claims))


COMPILED, ROUNDED = 4.0, 3.0
"""How many times as long the claims of a variant take, about, if it compiles, and if its rounding is compared."""


def cost(plan: Plan, *, quick: bool = False) -> float:
    """Return how long the claims of a variant take, about, in relation to those of a variant without techniques."""
    entries = [entry for entry in params.requested(plan.applied) if not quick or entry.layer != "compiler"]
    compiled = any(entry.layer == "compiler" for entry in entries)
    return COMPILED**compiled * ROUNDED ** any(entry.changes == "rounding" for entry in entries)


CLAIM_WIDTH = 62
_HOLDS = {True: "yes", False: "NO", None: "-"}


def heading(width: int) -> str:
    """Return the table's heading. Its first column, with the variants' names, takes ``width`` characters."""
    return _line(width, "variant", "claim", "measured", "bound", "fault", "holds")


def claim_lines(claim: Claim, width: int) -> Iterator[str]:
    """Yield the lines of one claim in the table, and its note under them."""
    first, *rest = textwrap.wrap(claim.claim, CLAIM_WIDTH)
    numbers = [_number(value, claim.unit) for value in (claim.measured, claim.bound, claim.fault)]
    yield _line(width, claim.variant, first, *numbers, claim.undecided or _HOLDS[claim.holds])
    yield from (f"{'':{width}}  {text}" for text in rest)
    for paragraph in _without_traceback(claim.note):
        yield from (f"{'':{width}}    {text}" for text in textwrap.wrap(paragraph, CLAIM_WIDTH - 2))


def summary(claims: Sequence[Claim], seconds: float) -> str:
    """Return the table's last line."""
    held, broken = (sum(claim.holds is answer for claim in claims) for answer in (True, False))
    rest = Counter(claim.undecided for claim in claims if claim.undecided)
    more = "".join(f", {number} {why}" for why, number in rest.items())
    empty = f" No claim of {', '.join(undecided)} was decided." if (undecided := _undecided(claims)) else ""
    return f"{count(len(claims), 'claim')}: {held} true, {broken} false{more}.{empty} This took {seconds:.0f} s."


def hold(claims: Sequence[Claim]) -> bool:
    """Return True if no claim is wrong and each variant has a claim that holds."""
    return not (any(claim.holds is False for claim in claims) or _undecided(claims))


def _undecided(claims: Sequence[Claim]) -> list[str]:
    decided = {claim.variant for claim in claims if claim.holds is not None}
    return [name for name in dict.fromkeys(claim.variant for claim in claims) if name not in decided]


def progress(done: int, total: int, seconds: float, more: float) -> str:
    """Return a line to print after each variant. There may be fewer claims than ``total``, because claims that could
    not be tried may be reported as one. ``more``: what ``remaining`` estimates."""
    return f"verify: {done} of {total} claims, {seconds:.0f} s" + f"; about {more:.0f} s more" * (more > 0)


def remaining(spent: Sequence[tuple[float, float]], left: float) -> float:
    """Estimate how many seconds claims of the cost ``left`` take. ``spent``: cost and seconds of the claims so far. The
    first entry does not count, because it includes the start of the server that forks all processes; alone, it gives
    0."""
    return left * sum(seconds for _, seconds in spent[1:]) / (sum(part for part, _ in spent[1:]) or 1.0)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit != "relative":
        return f"{value:,.4g}" if value else "0"
    return f"{value:.1e}"


def claims_as_json(claims: Sequence[Claim], about: dict[str, Any]) -> str:
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
    columns = [f"{variant:{width}}", f"{claim:{CLAIM_WIDTH}}", *(f"{shown:>9}" for shown in numbers), holds]
    return "  ".join(columns).rstrip()
