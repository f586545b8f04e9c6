"""The finding of a check, and how findings are printed: as lines for a person, as JSON for a program."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from pipeline.errors import count, redacted

Status = Literal["ok", "warning", "problem", "not applicable"]

MARKS = {"problem": "PROBLEM", "not applicable": "-"}

ADD_GPUS = "docker run --gpus all ... (the host needs the NVIDIA Container Toolkit)"
USE_CPU = "or set train.device: cpu"
NEW_DRIVER = "driver 580 or newer"
"""This driver runs every minor version of CUDA 13, and all older versions of CUDA (NVIDIA's table of minor version
compatibility)."""
INSTALL = "make repro, which installs requirements.lock into .venv; in a container, rebuild the image"
TO_THE_TOP = "cd to the top of the checkout; in a container, mount it there"

REMEDIES = {
    "params.yaml is missing": TO_THE_TOP,
    "bf16 is skipped": "use a machine with native bf16, or set train.without_native: run",
    ": GPU is skipped": "repair the NVIDIA driver (see below), or set train.device: cpu",
    "is skipped: train.batch_size": "set train.batch_size to a multiple of the number of GPUs",
    "is skipped": "do nothing if this is expected: the report names what was skipped",
    "params.yaml:": "correct params.yaml; params.schema.json lists all keys",
    "to be installed": "install the named package with pip; in a container, build it into the image",
    "model, data: no answer": "try again: a large model takes long to build",
    "Error: train.": "correct params.yaml, or your module that the message names",
    "Error: fetch.": "correct params.yaml, or the folder that the message names",
    "ImportError": INSTALL,
    "ModuleNotFoundError": INSTALL,
    "libnvidia-ml.so.1 is missing": f"install {NEW_DRIVER} with its libraries on the host; in a container: {ADD_GPUS}; "
    f"{USE_CPU}",
    "there is no NVIDIA GPU": f"use a machine with a GPU; in a container: {ADD_GPUS}; {USE_CPU}",
    "NVML fails": "install libnvidia-ml.so.1; in a container: --env NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    "version mismatch": "reboot the host: the driver was updated while the old driver was loaded",
    "no kernel image": "install a torch that is built for this GPU's compute capability",
    "does not answer": "run nvidia-smi and `dmesg | grep -i nvrm` on the host; start a new container with --gpus all",
    "system is too old": f"install {NEW_DRIVER} on the host, or a torch built for the driver's CUDA (see above)",
    "the driver shows 0": f"run nvidia-smi on the host; in a container: {ADD_GPUS}",
    "torch sees": "repair the driver (see above); run nvidia-smi: a GPU that hangs needs a reset or a reboot",
    "No such file or directory: 'git'": "apt-get install git",
    "dubious ownership": 'git config --global --add safe.directory "$PWD"',
    "not a git repository": "start from a clone; a worktree also needs its main checkout, mounted at the same path",
    "NotDvcRepoError": TO_THE_TOP,
    "cannot write to": 'sudo chown -R "$(id -u):$(id -g)" . ; run containers with --user "$(id -u):$(id -g)" and '
    "without :ro",
    "DVC remote:": "check `dvc status --cloud --verbose`, the credentials (dvc remote modify --local ...) and the "
    "network",
    "tracking: no answer": "check the address in MLFLOW_TRACKING_URI, and the name server",
    "no answer": "try again: a first import or a busy machine is slow; if it fails again, a file system may hang",
    "git:": "repair git: DVC and the gate need it",
    "DVC cache:": "see `dvc doctor`, the finding about git, .dvc/config and .dvc/config.local",
}
"""Part of a finding's text -> the remedy to print if the check names none. The text can be another tool's error
message. The first entry that occurs in "check: finding" counts."""


class Finding(NamedTuple):
    status: Status
    """problem: something that params.yaml or the environment asks for does not work here. warning: the job works, but
    worse than it could, or not as expected. not applicable: this job does not need the checked part on this machine, or
    the part could not be checked."""
    found: str
    remedy: str = ""
    """The command or setting that fixes the fault; empty if nothing is to be done, or if ``REMEDIES`` has the
    remedy."""
    check: str = ""
    """The check's name in ``CHECKS``, a word or two."""

    def of(self, check: str) -> Finding:
        """Return the finding with the name of its check and its remedy, without secrets."""
        known = (remedy for words, remedy in REMEDIES.items() if words in f"{check}: {self.found}")
        remedy = self.remedy or (next(known, "") if self.status in ("problem", "warning") else "")
        return Finding(self.status, redacted(self.found), redacted(remedy), check)


ok, not_applicable = partial(Finding, "ok"), partial(Finding, "not applicable")
warning, problem = partial(Finding, "warning"), partial(Finding, "problem")


def enough(holds: bool, found: str, wants: str, remedy: str, short: Callable[..., Finding] = warning) -> Finding:
    """Return an ok finding if the condition ``holds``; else the finding that ``short`` makes, whose text ends with
    ``wants``."""
    return ok(found) if holds else short(f"{found}; {wants}", remedy)


def as_text(findings: Sequence[Finding], width: int) -> str:
    """Return one block per finding: a line with status, check and text, and below it, after an arrow, the remedy. The
    remedy is indented less than the text, so that commands stay on one line."""
    name = max(len(finding.check) for finding in findings)
    blocks = []
    for status, found, remedy, check in findings:
        blocks.append(_wrapped(f"{MARKS.get(status, status):7}  {check:{name}}  ", found, width))
        if remedy:
            blocks.append(_wrapped("         -> ", remedy, width))
    counts = Counter(finding.status for finding in findings)
    return "\n".join([*blocks, "", f"{count(counts['problem'], 'problem')}, {count(counts['warning'], 'warning')}"])


def _wrapped(head: str, text: str, width: int) -> str:
    """Return ``head`` and ``text``, with ``text`` wrapped to ``width`` columns. A longer word, such as a path to copy,
    stays whole."""
    wrap = partial(textwrap.wrap, width=max(width - len(head), 30), break_long_words=False, break_on_hyphens=False)
    return head + f"\n{' ' * len(head)}".join(line for paragraph in text.splitlines() for line in wrap(paragraph))


def as_json(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    checks = [finding._asdict() for finding in findings]
    return json.dumps({"problems": counts["problem"], "warnings": counts["warning"], "checks": checks}, indent=2)
