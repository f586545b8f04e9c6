"""Temporary copies of a commit and of this work tree, in which DVC and the stages run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pipeline.environment import code
from pipeline.errors import say
from pipeline.gate.decision import GateError
from pipeline.gate.environments import pythons


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
    here = Path.cwd()
    cache = output([sys.executable, "-m", "dvc", "cache", "dir"], "this is not a DVC repository")
    top, prefix = _git("rev-parse", "--show-toplevel"), _git("rev-parse", "--show-prefix")
    scratch = here / ".dvc" / "tmp"
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
            settings = f'[core]\n    no_scm = true\n[cache]\n    dir = "{here / cache}"\n'
            (root / ".dvc" / "config.local").write_text(settings, encoding="utf-8")
            (root / code.GATE_COPY).write_text(f"{copy}\n{Path(top).resolve()}\n", encoding="utf-8")
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
    say(f"gate: dvc {' '.join(arguments)} in {root.relative_to(Path.cwd())}", file=sys.stderr)
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
