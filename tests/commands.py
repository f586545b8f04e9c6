"""``python -m pipeline ...`` as a process of its own that needs no seconds to import torch: forked from a server."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path


class Command:
    """The command in the current directory, as the leader of a session, with what it says in ``output``.

    Like a ``subprocess.Popen`` as far as these tests ask; ``variables`` are its whole environment.
    """

    def __init__(self, *arguments: str, variables: dict[str, str]) -> None:
        handle, name = tempfile.mkstemp()
        os.close(handle)
        self._file = Path(name)
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run, args=(arguments, variables, name))
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float | None = None) -> str:
        """Wait for its end; what it said, standard error included."""
        self._process.join(timeout)
        assert self.returncode is not None, f"still at work after {timeout} s"
        output = self._file.read_text(encoding="utf-8")
        self._file.unlink()
        return output


def _run(arguments: tuple[str, ...], variables: dict[str, str], output: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    with open(output, "wb") as file:  # noqa: PTH123
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if Path("sitecustomize.py").exists():  # which an interpreter of its own would have run
        runpy.run_path("sitecustomize.py")
    sys.argv = ["pipeline", *arguments]
    runpy.run_module("pipeline", run_name="__main__", alter_sys=True)
