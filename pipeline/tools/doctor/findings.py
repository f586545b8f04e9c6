"""What one check says."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["ok", "warning", "problem", "not applicable"]

INSTALL = "make repro, which installs requirements.lock into .venv; in a container, rebuild the image"
"""The remedy where a package is missing or broken."""


class Finding(NamedTuple):
    check: str
    """Its name, in a word or two."""
    status: Status
    """problem: something that params.yaml or the environment asks for does not work here. warning: it works, but worse
    than it could, or not as one may think. not applicable: this job on this machine does not need it."""
    found: str
    remedy: str = ""
    """The command or setting that puts it right; empty where nothing is to be done."""
