"""Findings as lines for a person, and as JSON for a program."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence

from pipeline.tools.doctor.findings import Finding

MARKS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM", "not applicable": "-"}
COLOURS = {"ok": "32", "warning": "33", "problem": "1;31", "not applicable": "2"}
"""ANSI: green, yellow, bold red, dim."""


def lines(findings: Sequence[Finding], width: int, *, colour: bool) -> list[str]:
    """A block a finding: status, check and what was found; below it, behind an arrow, the remedy, which has more room
    so that commands stay on one line."""
    mark = max(map(len, MARKS.values()))
    name = max(len(finding.check) for finding in findings)
    indent = " " * (mark + name + 4)
    written: list[str] = []
    for finding in findings:
        head = f"{MARKS[finding.status]:{mark}}  {finding.check:{name}}  "
        block = _wrapped(finding.found, indent, width)
        block[0] = head + block[0].removeprefix(indent)
        if colour:
            block[0] = f"\x1b[{COLOURS[finding.status]}m{block[0][:mark]}\x1b[0m{block[0][mark:]}"
        written += block
        if finding.remedy:
            remedy = _wrapped(finding.remedy, " " * (mark + 5), width)
            remedy[0] = f"{' ' * mark}  -> {remedy[0].lstrip()}"
            written += remedy
    counts = Counter(finding.status for finding in findings)
    return [*written, "", f"{counts['problem']} problem(s), {counts['warning']} warning(s)"]


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    """``text`` within ``width`` columns; a word that is longer, such as a path to be copied, is left whole."""
    return [
        line
        for paragraph in text.splitlines() or [""]
        for line in textwrap.wrap(
            paragraph,
            max(width, len(indent) + 30),
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        or [indent]
    ]


def as_json(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    content = {
        "problems": counts["problem"],
        "warnings": counts["warning"],
        "checks": [finding._asdict() for finding in findings],
    }
    return json.dumps(content, indent=2)
