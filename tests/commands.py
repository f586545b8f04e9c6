"""Run ``python -m pipeline ...`` in processes forked from a server that has already imported torch; write
scripts, and bound what a block may take."""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def executable(file: Path, text: str) -> None:
    """Write a script that can be run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)


def printed(program: str, *arguments: str, cwd: Path = ROOT, **variables: str) -> str:
    """Run a program in a new Python; return what it prints. If the program fails, the test fails with its errors."""
    command, everything = [sys.executable, "-c", program, *arguments], os.environ | variables
    done = subprocess.run(command, cwd=cwd, env=everything, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


LIMIT_SECONDS = 5.0
"""The processor time within which one input has to be read or refused."""
LIMIT_BYTES = 1 << 30
"""The memory that reading may take at any moment, in addition to what the process had before."""


@contextmanager
def bounded() -> Iterator[None]:
    """Let the block fail if it takes more memory than ``LIMIT_BYTES`` or more time than ``LIMIT_SECONDS``."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    taken = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + LIMIT_BYTES, hard))
    begun = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert time.process_time() - begun < LIMIT_SECONDS


class Command:
    """A running ``python -m pipeline`` in the current directory. It leads a session of its own.

    The class has the part of ``subprocess.Popen``'s interface that these tests use. ``variables`` are all environment
    variables of the process. The process calls ``first`` and then runs the command. Its ranks are forked from it, so
    they inherit what ``first`` changed.
    """

    def __init__(self, *arguments: str, variables: dict[str, str], first: Callable[[], object] | None = None) -> None:
        handle, name = tempfile.mkstemp()
        os.close(handle)
        self._file = Path(name)
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run, args=(arguments, variables, name, first))
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float | None = None) -> str:
        """Wait until the command ends; return its output, standard error included."""
        self._process.join(timeout)
        assert self.returncode is not None, f"still at work after {timeout} s"
        output = self._file.read_text(encoding="utf-8")
        self._file.unlink()
        return output


def _run(
    arguments: tuple[str, ...], variables: dict[str, str], output: str, first: Callable[[], object] | None
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    with open(output, "wb") as file:  # noqa: PTH123
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    util.spawnv_passfds = _forked  # type: ignore[assignment]
    if first:
        first()
    sys.argv = ["pipeline", *arguments]
    runpy.run_module("pipeline", run_name="__main__", alter_sys=True)


_spawned = util.spawnv_passfds


def _forked(path: bytes, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """Start a process and return its id, as ``multiprocessing.util.spawnv_passfds`` does.

    A server that forks ranks is itself forked from this process, because this process has already imported torch.
    """
    if "multiprocessing.forkserver" not in arguments[-1]:
        return _spawned(path, arguments, kept)
    if pid := os.fork():
        return pid
    try:
        for handle in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:  # noqa: PTH208
            with suppress(OSError):
                os.close(handle)
        exec(arguments[-1])
    finally:
        os._exit(0)
