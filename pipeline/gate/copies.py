"""Temporary copies of a commit and of this work tree, in which DVC and the stages run, each with a Python that has its
packages."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement

from pipeline.environment import imports
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


class Copy(NamedTuple):
    """The copy of one side: its directory, and the Python that runs it."""

    root: Path
    python: Path = Path(sys.executable)


@contextmanager
def copies(commit: str) -> Iterator[tuple[Copy, Copy]]:
    """Yield two copies of the project, without ignored files: one of ``commit``, one of this work tree.

    The work tree is copied too, so that neither side has its files on a faster disk. What runs in a copy never changes
    the work tree, the index or a branch. The copies are not git worktrees, because an interrupted gate could leave
    worktrees behind. Both copies use this checkout's DVC cache, so that DVC restores existing outputs instead of making
    them again.
    """
    checkout = Path.cwd()
    cache = output([sys.executable, "-m", "dvc", "cache", "dir"], "this is not a DVC repository")
    top, prefix = _git("rev-parse", "--show-toplevel"), _git("rev-parse", "--show-prefix")
    scratch = checkout / ".dvc" / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gate-", dir=scratch, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        index = {"GIT_INDEX_FILE": str(folder / "index")}
        _git("-C", top, "read-tree", commit, **index)
        _git("-C", top, "checkout-index", "--all", f"--prefix={folder}/base/", **index)
        copy_files(Path(top), folder / "head")
        roots = folder / "base" / prefix, folder / "head" / prefix
        for side, root in zip(("base", "head"), roots, strict=True):
            copy = folder.resolve() / side
            if not (root / ".dvc").is_dir():  # DVC would use the repository around the copy
                raise GateError(f"the {side} is not a DVC repository: git has no file under .dvc there.")
            settings = f'[core]\n    no_scm = true\n[cache]\n    dir = "{checkout / cache}"\n'
            (root / ".dvc" / "config.local").write_text(settings, encoding="utf-8")
            (root / imports.GATE_COPY).write_text(f"{copy}\n{Path(top).resolve()}\n", encoding="utf-8")
        base, head = map(Copy, roots, pythons(*roots))
        yield base, head


def copy_files(top: Path, to: Path, *only: str) -> None:
    """Copy the files of the work tree ``top``, or those under ``only``, without ignored files."""
    listing = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *only)
    for file in filter(None, dict.fromkeys(_git("-C", str(top), *listing).split("\0"))):
        source, target = top / file, to / file
        if source.is_file() or source.is_symlink():  # neither a deleted file nor a submodule
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def dvc(side: Copy, *arguments: str) -> None:
    """Run DVC in a copy. DVC and its stages write their output to stderr. Raises GateError if DVC fails."""
    root, python = side
    say(f"dvc {' '.join(arguments)} in {root.relative_to(Path.cwd())}", file=sys.stderr)
    command = [str(python), "-m", "dvc", *arguments]
    process = subprocess.Popen(command, cwd=root, env=_variables(python), stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        failed = process.wait()
    except KeyboardInterrupt:
        process.wait()  # DVC got the interrupt too: let DVC end its stage before the copy is removed
        raise
    if failed:
        raise GateError(f"`dvc {' '.join(arguments)}` failed in {root}; its output is above.")


def check_arms(side: Copy, label: str) -> None:
    """Raise GateError if the code of ``side`` is older than the gate, so that it has no command ``arms``."""
    root, python = side
    command = [str(python), "-m", "pipeline", "arms", "--help"]
    own = (root / "pipeline").is_dir() or (root / "dvc.yaml").is_file()  # else the installed package would run
    if not own or subprocess.run(command, cwd=root, env=_variables(python), capture_output=True).returncode:
        raise GateError(
            f"{label} cannot be measured: it has no `python -m pipeline arms`, so it is older than the gate. Compare "
            "this work tree with a newer commit."
        )


def commit_of(revision: str) -> str:
    """Return the full hash of ``revision``. Raises GateError if there is no repository or no such revision."""
    _git("rev-parse", "--git-dir")
    try:
        return _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except GateError:
        why = "a shallow clone lacks most revisions; run `git fetch --unshallow` to get them"
        if Path(revision).is_file():
            why = "the gate compares with a revision and not with a file, because it measures both sides side by side"
        raise GateError(f"--against: found {revision!r}, which is no revision in this repository: {why}.") from None


def _git(*arguments: str, **variables: str) -> str:
    return output(["git", *arguments], f"git {' '.join(arguments)} failed here", variables=variables)


def output(
    command: list[str], otherwise: str, *, root: Path = Path(), variables: Mapping[str, str] | None = None
) -> str:
    """Run ``command`` in ``root`` and return its output. If it fails, raise GateError with ``otherwise`` and what the
    command wrote to stderr."""
    given = {**_variables(), **(variables or {})}
    try:
        done = subprocess.run(command, cwd=root, env=given, capture_output=True, text=True)
    except FileNotFoundError:
        raise GateError(f"{command[0]} is not installed, but the gate needs it.") from None
    if done.returncode:
        raise GateError(f"{otherwise}: {done.stderr.strip()}")
    return done.stdout.removesuffix("\n")


def _variables(python: Path = Path(sys.executable)) -> dict[str, str]:
    """Return the environment variables of a copy's processes.

    The directory of ``python`` comes first in PATH. A git hook's variables are removed, so that git finds the
    repository around the copy. MLFLOW_TRACKING_URI is removed, so that MLflow uses the embedded store in the copy.
    """
    hidden = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "MLFLOW_TRACKING_URI"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


# If the lock files differ, each side gets a Python with its own packages.


def pythons(base: Path, head: Path) -> tuple[Path, Path]:
    """Return the Python of each of the two copies.

    If the lock files are equal, or a copy has no lock file, both copies use this Python. Otherwise each copy needs the
    packages of its own lock file. If this Python has these packages, and none that only the other lock file has, the
    copy uses this Python. If not, the copy uses an environment that is created and kept in ``CACHE``. Raises GateError
    if the environment cannot be created.
    """
    python, of_base, of_head = Path(sys.executable), base / LOCK, head / LOCK
    if not (of_base.is_file() and of_head.is_file()) or of_base.read_bytes() == of_head.read_bytes():
        return python, python
    return (
        python if _installed(of_base, without=of_head) else _made(of_base),
        python if _installed(of_head, without=of_base) else _made(of_head),
    )


def differing_packages(base: Path, head: Path) -> list[str]:
    """Describe how the two lock files differ. Return an empty list if they are equal, or if one is missing."""
    if not all((root / LOCK).is_file() for root in (base, head)):
        return []
    of_base, of_head = ({pin.name: str(pin.specifier) for pin in pins(root / LOCK)} for root in (base, head))
    changed = [name for name in sorted(of_base | of_head, key=_torch_first) if of_base.get(name) != of_head.get(name)]
    if not changed:
        return []
    named = [f"{name} {of_base.get(name, 'none')} -> {of_head.get(name, 'none')}" for name in changed[:NAMED]]
    more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    return [f"Each side ran with the packages of its own {LOCK}: {', '.join(named)}{more}."]


def _torch_first(name: str) -> tuple[bool, str]:
    return name not in ("torch", "torchvision"), name


def differing_systems(base: Path, head: Path) -> list[str]:
    """Return a sentence if the Dockerfiles of the two sides differ."""
    images = [(root / "Dockerfile").read_bytes() for root in (base, head) if (root / "Dockerfile").is_file()]
    if len(set(images)) < 2:
        return []
    return ["The Dockerfiles differ, but both sides ran on one system, so this difference was not tested."]


def pins(lock: Path) -> list[Requirement]:
    """Return the lock file's requirements on this platform. Raises GateError, naming the file, if it is malformed."""
    lines = [line for line in read_text(lock).splitlines() if line and line[0] not in " #-"]
    try:
        requirements = [Requirement(line.partition(" --")[0].rstrip(" \\")) for line in lines]
    except InvalidRequirement as error:
        raise GateError(f"{lock}: {error}. Write the file again with `make lock`.") from None
    return [pin for pin in requirements if pin.marker is None or pin.marker.evaluate()]


def _installed(lock: Path, *, without: Path) -> bool:
    """True if this Python has all packages of ``lock``, and none that only the lock file ``without`` has."""
    requested = {pin.name: pin.specifier for pin in pins(lock)}
    versions = {name: version(name) for name in requested}
    strange = [pin.name for pin in pins(without) if pin.name not in requested]
    return all(
        installed is not None and requested[name].contains(installed, prereleases=True)
        for name, installed in versions.items()
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
        requested = [[*install, "--requirement", str(file)] for file in (build, lock) if file.is_file()]
        for command in (making, *requested):
            if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode:
                shutil.rmtree(folder, ignore_errors=True)
                raise GateError(f"{lock} cannot be installed; the output of pip is above.")
    stamp.touch()
    for unused in sorted(CACHE.glob("*/installed"), key=os.path.getmtime, reverse=True)[KEPT:]:
        shutil.rmtree(unused.parent)
    return python
