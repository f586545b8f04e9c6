"""What one check says, and how findings are printed: as lines for a person, as JSON for a program."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

from pipeline.tools.doctor.facts import Answer

Status = Literal["ok", "warning", "problem", "not applicable"]

MARKS = {"ok": ("ok", "32"), "warning": ("warning", "33"), "problem": ("PROBLEM", "1;31"), "not applicable": ("-", "2")}
"""And their colours, of ANSI: green, yellow, bold red, dim."""

INSTALL = "make repro, which installs requirements.lock into .venv; in a container, rebuild the image"
"""The remedy where a package is missing or broken."""
REMEDIES = {
    "params.yaml is missing": "cd to the top of the checkout; in a container, mount it there",
    "bf16 is skipped": "use a machine that has it, or set train.without_native: run",
    ": GPU is skipped": "see to the NVIDIA driver, below, or set train.device: cpu",
    "train.batch_size": "set train.batch_size to a multiple of the number of GPUs",
    "to be installed": "python -m pip install what it names; in a container, build it into the image",
    "ImportError": INSTALL,
    "ModuleNotFoundError": INSTALL,
    "version mismatch": "reboot the host: the driver was updated while the old one was loaded",
    "no kernel image": "install a torch that is built for this GPU's compute capability",
    "No such file or directory: 'git'": "apt-get install git",
    "dubious ownership": 'git config --global --add safe.directory "$PWD"',
    "not a git repository": "start from a clone; to a worktree belongs its main checkout, mounted at the same path",
    "NotDvcRepoError": "cd to the top of the checkout; in a container, mount it there",
}
"""What a finding says, in words of ours or of another tool -> its remedy. The first that fits counts."""


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


def remedy_for(found: str, otherwise: str) -> str:
    """That of ``REMEDIES``, or ``otherwise``."""
    return next((remedy for words, remedy in REMEDIES.items() if words in found), otherwise)


def unanswered(answer: Answer, found: str, remedy: str = INSTALL) -> Finding:
    """Of a probe that could not tell: ``found`` and its ``remedy``, or, if it was cut off, that it may yet."""
    if answer.late:
        found, remedy = answer.failure, "try again: a first import from a cold disk is slow, and so is a busy machine"
        return warning(f"is still being imported: {found}", remedy)
    return problem(found, remedy)


def as_text(findings: Sequence[Finding], width: int, *, colour: bool) -> str:
    """A block a finding: status, check and what was found; below it, behind an arrow, the remedy, which has more room
    so that commands stay on one line."""
    name = max(len(finding.check) for finding in findings)
    blocks = []
    for check, status, found, remedy in findings:
        mark, code = MARKS[status]
        block = _wrapped(f"{mark:7}  {check:{name}}  ", found, width)
        blocks.append(f"\x1b[{code}m{block[:7]}\x1b[0m{block[7:]}" if colour else block)
        if remedy:
            blocks.append(_wrapped("         -> ", remedy, width))
    counts = Counter(finding.status for finding in findings)
    return "\n".join([*blocks, "", f"{counts['problem']} problem(s), {counts['warning']} warning(s)"])


def _wrapped(head: str, text: str, width: int) -> str:
    """``text`` behind ``head`` within ``width`` columns; a longer word, such as a path to be copied, is left whole."""
    wrap = partial(textwrap.wrap, width=max(width - len(head), 30), break_long_words=False, break_on_hyphens=False)
    return head + f"\n{' ' * len(head)}".join(line for paragraph in text.splitlines() for line in wrap(paragraph))


def as_json(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    checks = [finding._asdict() for finding in findings]
    return json.dumps({"problems": counts["problem"], "warnings": counts["warning"], "checks": checks}, indent=2)
