"""The processes of a script's command, which take optimizer steps on request.

A job starts the command in a scratch copy of the working directory; ``hook`` connects the command's processes to it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch

from pipeline.benchmark.server import BenchError
from pipeline.environment import code, imports
from pipeline.errors import count, say
from pipeline.measurement.detectors import job_ticks
from pipeline.params import Command, Config, Script
from pipeline.processes import terminate_with_parent
from pipeline.results import MODELS
from pipeline.script import hook
from pipeline.training.checkpoints import CHECKPOINTS

KEPT = CHECKPOINTS / "script"
"""The folder of finished seeds."""
LAST_LINES = 80
END_SECONDS = 10.0
"""Longest wait for the end of a command whose ranks have ended."""
LARGEST_COPY = 1 << 30
"""Largest working directory, in bytes, of which each arm gets a copy."""
ENDED = (
    "the command ended; it must train for longer than is measured, such as for more epochs, with an optimizer of "
    "torch.optim, in a Python that reads PYTHONPATH (no -I or -E, no other container), and end without os._exit"
)


Answers = list[dict[str, Any]]
"""What each rank answered."""


class Job(AbstractContextManager["Job"]):
    """The processes of one arm, or of one training to its end.

    ``source``: what ``one_source`` yields. ``watched``: the files that the processes open are recorded
    (``files_read``), which slows them down a little. At the end, also after an error, no process of the arm is left,
    and its outputs are deleted, as a copy is. Raises BenchError.
    """

    def __init__(self, name: str, command: Command, script: Script, source: Path | None, *, watched: bool) -> None:
        self.name, self.command, self.script, self.steps = name, command, script, 0
        self.timeout, self._shows = script.timeout_seconds, False
        self._exits = ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="arm-", dir="/tmp", ignore_cleanup_errors=True)
        self.folder = Path(self._exits.enter_context(folder))  # with a short path, as a socket needs
        self.ranks: tuple[dict[str, Any], ...] = ()
        """What each rank said about itself, by rank."""
        self._connections: tuple[Connection, ...] = ()
        self._listener = self._exits.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(str(self.folder / "socket"))
        self._listener.listen(128)
        (self.folder / "sitecustomize.py").symlink_to(hook.__file__)
        if watched:
            (self.folder / hook.OPENED).touch()
        written, self._output = (
            self._exits.enter_context((self.folder / "output").open(mode)) for mode in ("ab", "rb")
        )
        variables = {**os.environ, **command.variables}
        paths = filter(None, [str(self.folder), variables.get("PYTHONPATH")])
        self.work = self.folder / "work" if source else Path.cwd()
        ours = {"PYTHONPATH": os.pathsep.join(paths), "PWD": str(self.work), hook.FOLDER: str(self.folder)}
        ours |= {hook.PYTHON: sys.prefix, hook.OPTIMIZER: str(script.optimizer)}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the processes, too
        try:
            if source:
                shutil.copytree(source, self.work, symlinks=True)
            self.process = subprocess.Popen(
                command.words, cwd=self.work, env=variables | ours, stdin=subprocess.DEVNULL, stdout=written,
                stderr=written, start_new_session=True, preexec_fn=terminate_with_parent,
            )  # fmt: skip
        except OSError as error:
            self._exits.close()
            raise BenchError(f"{name}: {' '.join(command.words)!r} cannot be started: {error}") from None

    def meet(self) -> None:
        """Wait until all ranks are at their first optimizer step."""
        met: list[tuple[dict[str, Any], Connection]] = []
        while not met or len(met) < met[0][0]["conditions"]["world_size"]:
            self._await(self._listener)
            connection = Connection(self._listener.accept()[0].detach())
            met.append((self._answer(connection), connection))
        self._listener.close()
        met.sort(key=lambda rank: int(rank[0]["rank"]))
        self.ranks, self._connections = zip(*met, strict=True)
        if (used := self.ranks[0]["torch"]) != torch.__version__:
            recorded = f"but the pipeline with {torch.__version__}, which is what it records: run both with one Python"
            raise self.failure(f"it runs with torch {used}, {recorded}")

    def take(self, steps: int | None, *, keep: bool = True, anew: bool = True, examine: bool = False) -> Answers:
        """Let each rank take ``steps`` steps, and return the ranks' answers. ``keep``: with ``keep_freed_memory``.
        Without ``anew``, the answers also count the steps of the last request."""
        for connection in self._connections:
            with suppress(OSError):  # reading reports a rank that has ended
                connection.send({"steps": steps, "keep": keep, "anew": anew, "examine": examine})
        answers = [self._answer(connection) for connection in self._connections]
        self.steps = answers[0]["steps"]
        return answers

    def train(self) -> Answers:
        """Let the ranks train to their end, which may take any time, and show the output. Return their answers, after
        the command has ended. Raises BenchError if it fails."""
        self.timeout, self._shows = float("inf"), True
        answers = self.take(None)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(self.script.timeout_seconds)
        if self.process.poll() != 0:
            raise self.failure()
        self._show()
        return answers

    def output(self) -> str:
        """Return what the processes printed."""
        return (self.folder / "output").read_text(encoding="utf-8", errors="replace")

    def said(self) -> str:
        """Return the last lines of the output, for a message."""
        lines = self.output()[-(1 << 14) :].replace("\r", "\n").splitlines()[-LAST_LINES:]
        return "".join(f"\n  | {line}" for line in lines) or " It printed nothing."

    def files_read(self) -> set[str]:
        """Return the files of the repository that the processes read, or that the command names, as paths from here:
        not what they wrote, their outputs, and files of tools, caches and installed packages. Of a module's bytecode,
        the module counts. Raises Unfollowed as ``imports.check_copy`` does."""
        # Of its words, because a shell reads without telling.
        named = ((False, word.partition("=")[2] or word) for word in self.command.words)
        opened = map(json.loads, (self.folder / hook.OPENED).read_text(encoding="utf-8").splitlines())
        written, read = {self.work / output for output in self.command.outputs}, set()
        for writes, name in (*opened, *named):
            path = Path(os.path.normpath(self.work / name))
            if path.suffix == ".pyc":
                with suppress(ValueError):
                    path = Path(importlib.util.source_from_cache(path))
            if writes:
                written.add(path)
            elif not written.intersection((path, *path.parents)):
                own = Path.cwd() / path.relative_to(self.work) if path.is_relative_to(self.work) else path
                if code.is_input(own):
                    read.add(os.path.relpath(own))
        imports.check_copy({name: Path(name) for name in read})
        return read

    def needs_all(self) -> bool:
        """Return whether it must be measured alone. Waiting for a turn, it would occupy a GPU's memory; its processes
        besides the ranks and their launcher would work for the next turn."""
        launcher = int(self.process.pid != self.ranks[0]["pid"])
        return bool(self.ranks[0]["gpu"]) or len(job_ticks(self.process.pid)) > len(self.ranks) + launcher

    def _show(self) -> None:
        """Print what the processes have printed since the last call."""
        if self._shows:
            say(self._output.read().decode(errors="replace").replace("\r", "\n"), end="")

    def _answer(self, connection: Connection) -> Any:
        self._await(connection)
        try:
            return connection.recv()
        except (EOFError, OSError):
            raise self.failure() from None

    def _await(self, source: Connection | socket.socket) -> None:
        """Wait until ``source`` can be read. Raises BenchError if the command ends, or if it is silent for too long."""
        latest, ended = time.monotonic() + self.timeout, False
        while not wait([source], 0.2):
            self._show()
            if ended:
                raise self.failure()
            ended = self.process.poll() is not None
            if time.monotonic() > latest:
                raise self.failure(f"it was silent for {self.timeout:.0f} s (script.timeout_seconds allows more)")

    def failure(self, why: str = "") -> BenchError:
        """Return the error, with the last lines of the output. ``why``: by default, how it ended."""
        where = f"after {count(self.steps, 'step')}" if self.steps else "before its first optimizer step"
        if not why:
            with suppress(subprocess.TimeoutExpired):  # a launcher reports the end of a rank
                self.process.wait(END_SECONDS)
            code = self.process.poll()
            killed = f"the command was killed by {signal.Signals(-code).name}" if code and code < 0 else ""
            endings = {None: "its ranks ended, but the command did not", 0: ENDED}
            why = endings.get(code, killed or f"the command ended with exit code {code}")
        how = "It ran without input and terminal, in a copy of this directory (with --in-place: in itself)"
        return BenchError(f"{self.name} cannot be measured: {where}, {why}. {how}.{self.said()}")

    def __exit__(self, kind: object = None, *_: object) -> None:
        """Let the ranks end at their boundary and wait for the command's end, unless after an error; then kill whatever
        still runs. A second call does nothing."""
        if not self.folder.exists():
            return
        for connection in self._connections:
            connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if kind else END_SECONDS)
        while running := [process for process in psutil.process_iter(["environ", "status"]) if self._owns(process)]:
            for process in running:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(running, END_SECONDS)
        self.process.wait()
        for path in present(self.work, self.command.outputs):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self._exits.close()

    def _owns(self, process: psutil.Process) -> bool:
        """Return whether the command started the process: by its variable or, as under ``env -i``, its session."""
        with suppress(OSError):  # it has just ended
            ours = (process.info["environ"] or {}).get(hook.FOLDER) == str(self.folder)
            return (ours or os.getsid(process.pid) == self.process.pid) and process.info["status"] != "zombie"
        return False


@contextmanager
def one_source(config: Config) -> Iterator[Path | None]:
    """Yield one copy of the working directory, the source of all jobs, so that what is edited meanwhile is in none of
    them; None with ``script.in_place``. The copy has no outputs of earlier runs, from which a run could resume. Raises
    BenchError if there are some in place, or behind a link."""
    assert config.script is not None
    directory, command = Path.cwd(), config.command_of(config.compare.baseline)
    outputs = [output for seed in config.train.seeds for output in command.seeded(seed).outputs]
    left_out: list[str | Path] = [*outputs, KEPT, *(MODELS / name for name in config.variants)]
    with tempfile.TemporaryDirectory(prefix="source-") as folder:
        source = None if config.script.in_place else Path(folder, "work")
        if source:
            scratch_copy(directory, source, {directory / path for path in (*left_out, os.path.realpath(folder))})
        if earlier := present(source or directory, outputs):
            raise BenchError(f"script.outputs: {earlier[0]} is there, from which it could resume: move it away.")
        yield source


def present(work: Path, outputs: Iterable[str]) -> list[Path]:
    """Return the ``outputs`` that are in ``work``; of a folder, which can be a link, its content."""
    places = [work / output for output in outputs]
    return [path for place in places for path in (place.iterdir() if place.is_dir() else [place]) if path.exists()]


def scratch_copy(source: Path, target: Path, left_out: Collection[Path], size: int = 0) -> int:
    """Copy a folder of the working directory, without ``left_out``, .git and .dvc; return its bytes beside ``size``.
    Links stay links, those between its files inside the copy, and an environment of Python becomes a link. Raises
    BenchError if ``LARGEST_COPY`` is exceeded."""
    target.mkdir()
    for path in source.iterdir():
        copy = target / path.name
        if path in left_out or path.name in (".git", ".dvc"):
            continue
        if path.is_symlink() or (path / "pyvenv.cfg").exists():
            real = os.path.realpath(path)
            inside = path.is_symlink() and not {"..", ".git", ".dvc"} & set(Path(os.path.relpath(real)).parts)
            copy.symlink_to(os.path.relpath(real, source) if inside else real)
        elif path.is_dir():
            size = scratch_copy(path, copy, left_out, size)
        elif path.is_file():  # no socket or pipe
            size += path.stat().st_size
            if size > LARGEST_COPY:
                raise BenchError(
                    f"{Path.cwd()}: found more than {LARGEST_COPY >> 30} GiB, too much to copy for each arm; run with "
                    "--in-place (script.in_place: true), or put a link in place of what is large."
                )
            shutil.copy2(path, copy)
    return size
