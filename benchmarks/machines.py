"""Write figures to files, one file per machine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import environment, files

FIGURES = Path(__file__).parent / "figures"

VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
"""CPU flag in the fingerprint -> the common name of the vector extension. The widest extension comes first."""


def name_of(fingerprint: Mapping[str, Any]) -> str:
    """Return a machine's name: its GPUs, CPU model, widest vector extension and cores. The name includes the extension,
    because different CPUs in virtual machines often have the same model name."""
    hardware = fingerprint["hardware"]
    cpu = hardware["cpu"]
    vectors = [name for flag, name in VECTORS.items() if flag in cpu["flags"]][:1]
    return " ".join([*(gpu["name"] for gpu in hardware["gpus"]), cpu["model"], *vectors, f"{cpu['cores']:g} cores"])


def stem(machine: str) -> str:
    """Return a machine's name in the form of a file name without its ending."""
    return re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")


def keep(
    directory: Path, prefix: str, section: str, name: str, figure: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Write ``figure`` into this machine's file, where it replaces an older figure ``name``; return the file and its
    content.

    Machines with the same name can differ in hardware, Python, torch and settings, so each figure names its
    environment.
    """
    fingerprint = environment.fingerprint()
    machine = name_of(fingerprint)
    path = directory / f"{prefix}{stem(machine)}.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"environments": {}, section: {}}
    measured = {"measured_on": time.strftime("%Y-%m-%d"), "environment": fingerprint["hash"]}
    figures = dict(sorted((content[section] | {name: {**figure, **measured}}).items()))
    known = content["environments"] | {
        fingerprint["hash"]: {key: fingerprint[key] for key in ("hardware", "software", "settings")}
    }
    used = {figure["environment"] for figure in figures.values()}
    content = {
        "machine": machine,
        "environments": {digest: known[digest] for digest in sorted(used)},
        section: figures,
    }
    files.write_text(path, json.dumps(content, indent=1) + "\n")
    return path, content
