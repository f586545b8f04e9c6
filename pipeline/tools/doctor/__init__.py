"""What is missing on this machine, or in this container, for the job of params.yaml, and how to put it right.

It works where things are broken: each fault is a line. What may hang is cut off; nothing is changed. A check is a
function of the ``Facts`` that gives one finding, or several; it stands in ``CHECKS``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pipeline.tools.doctor import checks, findings
from pipeline.tools.doctor.facts import LATE, Facts, Unanswered, look
from pipeline.tools.doctor.findings import Finding, problem, warning

CHECKS: dict[str, Callable[[Facts], Finding | Iterable[Finding]]] = {
    "params.yaml": checks.params_file,
    "torch": checks.torch,
    "NVIDIA driver": checks.driver,
    "GPUs": checks.gpus,
    "CPU": checks.cpu,
    "memory": checks.memory,
    "shared memory": checks.shared_memory,
    "work tree": checks.work_tree,
    "git": checks.git,
    "DVC cache": checks.cache,
    "DVC remote": checks.remote,
    "disk": checks.disk,
    "tracking": checks.tracking,
}
"""In the order in which a person would put things right."""


def run(*, as_json: bool) -> int:
    """Print what was found; return 1 if there is a problem, else 0."""
    found = list(examine(look(Path())))
    print(findings.as_json(found) if as_json else findings.as_text(found, shutil.get_terminal_size().columns))
    return int(any(finding.status == "problem" for finding in found))


def examine(facts: Facts) -> Iterator[Finding]:
    """What all checks find, without secrets; what none of them foresaw is a finding too, so that the others follow."""
    for check, judge in CHECKS.items():
        try:
            found = judge(facts)
            judged = [found] if isinstance(found, Finding) else [*found]
        except Unanswered as error:
            judged = [(warning if str(error).startswith(LATE) else problem)(str(error))]  # it may yet answer
        except Exception as error:
            reason = f"could not be looked at: {type(error).__name__}: {error}"
            judged = [warning(reason, "look yourself, and report this: it is a fault of doctor")]
        yield from (each.of(check) for each in judged)
