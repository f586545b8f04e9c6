"""What one check says, and how findings are printed: as lines for a person, as JSON for a program."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

Status = Literal["ok", "warning", "problem", "not applicable"]

MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM", "not applicable": "-"}
COLOURS = {"ok": "32", "warning": "33", "problem": "1;31", "not applicable": "2"}
"""ANSI: green, yellow, bold red, dim."""

INSTALL = "make repro, which installs requirements.lock into .venv; in a container, rebuild the image"
"""The remedy where a package is missing or broken."""


class Finding(NamedTuple):
    check: str
    """Its name, in a word or two; a check leaves it to the table of checks, which knows it."""
    status: Status
    """problem: something that params.yaml or the environment asks for does not work here. warning: it works, but worse
    than it could, or not as one may think. not applicable: this job on this machine does not need it."""
    found: str
    remedy: str = ""
    """The command or setting that puts it right; empty where nothing is to be done."""


ok, not_applicable = partial(Finding, "", "ok"), partial(Finding, "", "not applicable")
warning, problem = partial(Finding, "", "warning"), partial(Finding, "", "problem")


def still_imported(why: str) -> Finding:
    remedy = "try again: a first import from a cold disk is slow, and so is a busy machine"
    return warning(f"is still being imported: {why}", remedy)


def as_text(findings: Sequence[Finding], width: int, *, colour: bool) -> str:
    """A block a finding: status, check and what was found; below it, behind an arrow, the remedy, which has more room
    so that commands stay on one line."""
    name = max(len(finding.check) for finding in findings)
    blocks = []
    for status, check, found, remedy in ((each.status, each.check, each.found, each.remedy) for each in findings):
        block = _wrapped(f"{MARKS[status]:7}  {check:{name}}  ", found, width)
        blocks.append(f"\x1b[{COLOURS[status]}m{block[:7]}\x1b[0m{block[7:]}" if colour else block)
        if remedy:
            blocks.append(_wrapped("         -> ", remedy, width))
    counts = Counter(finding.status for finding in findings)
    return "\n".join([*blocks, "", f"{counts['problem']} problem(s), {counts['warning']} warning(s)"])


def _wrapped(head: str, text: str, width: int) -> str:
    """``text`` behind ``head`` within ``width`` columns; a longer word, such as a path to be copied, is left whole."""
    wrapper = textwrap.TextWrapper(max(width, len(head) + 30), break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent = wrapper.subsequent_indent = " " * len(head)
    lines = [line for paragraph in text.splitlines() for line in wrapper.wrap(paragraph)]
    return head + "\n".join(lines)[len(head) :]


def as_json(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    checks = [finding._asdict() for finding in findings]
    return json.dumps({"problems": counts["problem"], "warnings": counts["warning"], "checks": checks}, indent=2)
