"""Run ``python -m pipeline ...`` in processes forked from a server that has already imported torch."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path


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
