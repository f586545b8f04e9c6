"""What is missing on this machine, or in this container, for the job of params.yaml, and how to put it right.

It works where things are broken: each fault is a line. What may hang is cut off; nothing is changed. A check is a
function of the ``Facts`` that gives one finding, or several; it stands in ``CHECKS``.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pipeline.errors import redacted
from pipeline.tools.doctor import findings, gpus, machine
from pipeline.tools.doctor.facts import Facts, look
from pipeline.tools.doctor.findings import Finding

CHECKS: dict[str, Callable[[Facts], Finding | Iterable[Finding]]] = {
    "params.yaml": machine.params_file,
    "variants": machine.variants,
    "torch": gpus.torch,
    "model": machine.names,
    "NVIDIA driver": gpus.driver,
    "GPUs": gpus.gpus,
    "NCCL": gpus.nccl,
    "CPU": machine.cpu,
    "memory": machine.memory,
    "shared memory": machine.shared_memory,
    "work tree": machine.work_tree,
    "git": machine.git,
    "DVC cache": machine.cache,
    "DVC remote": machine.remote,
    "disk": machine.disk,
    "tracking": machine.tracking,
}
"""In the order in which a person would put things right."""


def run(*, as_json: bool) -> int:
    """Print what was found; return 1 if there is a problem, else 0."""
    found = list(examine(look(Path())))
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns
    print(findings.as_json(found) if as_json else findings.as_text(found, width, colour=colour))
    return int(any(finding.status == "problem" for finding in found))


def examine(facts: Facts) -> Iterator[Finding]:
    """What all checks find, without secrets; what none of them foresaw is a finding too, so that the others follow."""
    for check, judge in CHECKS.items():
        try:
            found = judge(facts)
            for each in [found] if isinstance(found, Finding) else found:
                yield Finding(each.check or check, each.status, redacted(each.found), redacted(each.remedy))
        except Exception as error:
            reason = redacted(f"could not be looked at: {type(error).__name__}: {error}")
            yield Finding(check, "warning", reason, "look yourself, and report this: it is a fault of doctor")
