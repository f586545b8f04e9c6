"""Where figures are kept, and under which machine's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parent / "figures"


def name_of(fingerprint: Mapping[str, Any]) -> str:
    """Its GPUs, its CPU and its cores, in words."""
    hardware = fingerprint["hardware"]
    cpu = hardware["cpu"]
    return " ".join([*(gpu["name"] for gpu in hardware["gpus"]), cpu["model"], f"{cpu['cores']:g} cores"])


def stem(machine: str) -> str:
    """A machine's name as the stem of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
