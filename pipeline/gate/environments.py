"""Choose the Python of each side. If the lock files differ, each side gets an environment with its own packages."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from pipeline.environment.software import version
from pipeline.errors import say
from pipeline.files import read_text
from pipeline.gate.decision import GateError

LOCK = "requirements.lock"
BUILD_LOCK = "requirements-build.lock"
"""Lock file of the packages that build source distributions."""
CACHE = Path(".dvc", "tmp", "gate-environments")
KEPT = 3
"""How many environments are kept: the most recently used ones. An environment with torch for CUDA takes about 6 GB."""
NAMED = 12
"""Largest number of differing packages that a message names."""


def pythons(base: Path, head: Path) -> tuple[Path, Path]:
    """Return the Python of each of the two copies.

    If the lock files are equal, or a copy has no lock file, both copies use this Python. Otherwise each copy needs the
    packages of its own lock file. If this Python has these packages, and none that only the other lock file has, the
    copy uses this Python. If not, the copy uses an environment that is created and kept in ``CACHE``. Raises GateError
    if the environment cannot be created.
    """
    here, locks = Path(sys.executable), (base / LOCK, head / LOCK)
    if not all(lock.is_file() for lock in locks) or locks[0].read_bytes() == locks[1].read_bytes():
        return here, here
    of_base, of_head = (here if _installed(lock, other) else _made(lock) for lock, other in (locks, reversed(locks)))
    return of_base, of_head


def packages(base: Path, head: Path) -> list[str]:
    """Describe how the two lock files differ. Return an empty list if they are equal, or if one is missing."""
    if not all((root / LOCK).is_file() for root in (base, head)):
        return []
    there, here = ({each.name: str(each.specifier) for each in pins(root / LOCK)} for root in (base, head))
    changed = [name for name in sorted({*there, *here}, key=_torch_first) if there.get(name) != here.get(name)]
    if not changed:
        return []
    named = [f"{name} {there.get(name, 'none')} -> {here.get(name, 'none')}" for name in changed[:NAMED]]
    more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    return [f"Each side ran with the packages of its own {LOCK}: {', '.join(named)}{more}."]


def _torch_first(name: str) -> tuple[bool, str]:
    return name not in ("torch", "torchvision"), name


def systems(base: Path, head: Path) -> list[str]:
    """Return a sentence if the Dockerfiles of the two sides differ."""
    images = [(root / "Dockerfile").read_bytes() for root in (base, head) if (root / "Dockerfile").is_file()]
    if len(set(images)) < 2:
        return []
    return ["The Dockerfiles differ, but both sides ran on one system, so this difference was not tested."]


def pins(lock: Path) -> list[Requirement]:
    """Return the lock file's requirements on this platform. Raises GateError, naming the file, if it is malformed."""
    lines = [line for line in read_text(lock).splitlines() if line and line[0] not in " #-"]
    try:
        found = [Requirement(line.partition(" --")[0].rstrip(" \\")) for line in lines]
    except InvalidRequirement as error:
        raise GateError(f"{lock}: {error}. Write the file again with `make lock`.") from None
    return [each for each in found if each.marker is None or each.marker.evaluate()]


def _installed(lock: Path, other: Path) -> bool:
    """True if this Python has all packages of ``lock``, and none that only ``other`` has."""
    requested = {each.name: each.specifier for each in pins(lock)}
    strange = [each.name for each in pins(other) if each.name not in requested]
    return all(
        found is not None and specifier.contains(found, prereleases=True)
        for found, specifier in ((version(name), each) for name, each in requested.items())
    ) and not any(map(version, strange))


def _made(lock: Path) -> Path:
    """Return the Python of an environment with the packages of ``lock``. The first call creates the environment.

    The stamp is written last, so that the next call starts an interrupted installation again.
    """
    content = lock.read_bytes() + f"{sys.version} {sys.base_prefix}".encode()
    folder = (CACHE / hashlib.sha256(content).hexdigest()[:16]).absolute()
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists():
        say(f"gate: installing {lock} into {folder}; the first time takes some minutes", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
        making = [sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder)]
        install, build = [*pip, "install", "--require-hashes"], lock.with_name(BUILD_LOCK)
        if build.is_file():  # older commits lack this file
            install += ["--no-build-isolation"]
        requested = [[*install, "--requirement", str(each)] for each in (build, lock) if each.is_file()]
        for command in (making, *requested):
            if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode:
                shutil.rmtree(folder, ignore_errors=True)
                raise GateError(f"{lock} cannot be installed; the output of pip is above.")
    stamp.touch()
    for each in sorted(CACHE.glob("*/installed"), key=os.path.getmtime, reverse=True)[KEPT:]:
        shutil.rmtree(each.parent)
    return python
