"""The processes of a script's command, which take optimizer steps on request.

A job starts the command in a scratch copy of the working directory; ``hook`` connects the command's processes to it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
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
    (``files_read``), which slows them down a little; and no output may be there before, from which the run could
    resume. Every error ends all processes of the arm. At the end, its outputs are deleted, as a copy is. Raises
    BenchError.
    """

    def __init__(self, name: str, command: Command, script: Script, source: Path | None, *, watched: bool) -> None:
        self.name, self.command, self.script, self.steps = name, command, script, 0
        self.timeout, self._shows = script.timeout_seconds, False
        self._exits = ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="arm-", dir="/tmp", ignore_cleanup_errors=True)
        self.folder = Path(self._exits.enter_context(folder))  # with a short path, as a socket needs
        self.ranks: list[dict[str, Any]] = []
        """What each rank said about itself, by rank."""
        self._streams: list[Any] = []
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
            if watched and (there := self._outputs()):
                raise OSError(f"script.outputs: {there[0]} is there, from which it could resume: move it away")
            self.process = subprocess.Popen(
                command.words, cwd=self.work, env=variables | ours, stdin=subprocess.DEVNULL, stdout=written,
                stderr=written, start_new_session=True, preexec_fn=terminate_with_parent,
            )  # fmt: skip
        except OSError as error:
            self._exits.close()
            raise BenchError(f"{name}: {' '.join(command.words)!r} cannot be started: {error}") from None

    def meet(self) -> None:
        """Wait until all ranks are at their first optimizer step."""
        while not self.ranks or len(self.ranks) < self.ranks[0]["conditions"]["world_size"]:
            self._await(self._listener)
            with self._listener.accept()[0] as connection:
                self._streams.append(connection.makefile("rwb", buffering=0))
            self.ranks.append(self._line(self._streams[-1]))
        self._listener.close()
        by_rank = sorted(zip(self.ranks, self._streams, strict=True), key=lambda rank: int(rank[0]["rank"]))
        self.ranks, self._streams = map(list, zip(*by_rank, strict=True))
        if (used := self.ranks[0]["torch"]) != torch.__version__:
            recorded = f"but the pipeline with {torch.__version__}, which is what it records: run both with one Python"
            raise self.failure(f"it runs with torch {used}, {recorded}")

    def take(self, steps: int | None, *, keep: bool = True, anew: bool = True, examine: bool = False) -> Answers:
        """Let each rank take ``steps`` steps, and return the ranks' answers. ``keep``: with ``keep_freed_memory``.
        Without ``anew``, the answers also count the steps of the last request."""
        request = json.dumps({"steps": steps, "keep": keep, "anew": anew, "examine": examine})
        for stream in self._streams:
            with suppress(OSError):  # reading reports a rank that has ended
                stream.write(request.encode() + b"\n")
        answers = [self._line(stream) for stream in self._streams]
        for answer in answers if examine else ():
            answer["trained"] = torch.load(answer["trained"], weights_only=True)
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

    def _line(self, stream: Any) -> Any:
        self._await(stream)
        if not (line := stream.readline()):
            raise self.failure()
        return json.loads(line)

    def _await(self, stream: Any) -> None:
        """Wait until ``stream`` can be read. Raises BenchError if the command ends, or if it is silent for too long."""
        latest, ended = time.monotonic() + self.timeout, False
        while not select.select([stream], [], [], 0.2)[0]:
            self._show()
            if ended:
                raise self.failure()
            ended = self.process.poll() is not None
            if time.monotonic() > latest:
                raise self.failure(f"it was silent for {self.timeout:.0f} s (script.timeout_seconds allows more)")

    def failure(self, why: str = "") -> BenchError:
        """End the arm; return the error, with the last lines of the output. ``why``: by default, how it ended."""
        where = f"after {count(self.steps, 'step')}" if self.steps else "before its first optimizer step"
        if not why:
            with suppress(subprocess.TimeoutExpired):  # a launcher reports the end of a rank
                self.process.wait(END_SECONDS)
            code = self.process.poll()
            killed = f"the command was killed by {signal.Signals(-code).name}" if code and code < 0 else ""
            endings = {None: "its ranks ended, but the command did not", 0: ENDED}
            why = endings.get(code, killed or f"the command ended with exit code {code}")
        why += ". It ran without input and terminal"
        why += "" if self.script.in_place else ", in a copy of this directory (with --in-place: in itself)"
        error = BenchError(f"{self.name} cannot be measured: {where}, {why}.{self.said()}")
        self.end(patience=0)
        return error

    def end(self, patience: float = END_SECONDS) -> None:
        """Let the ranks end at their boundary, wait for the command's end, then kill whatever still runs."""
        for stream in self._streams:
            with suppress(OSError):
                stream.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        while running := [process for process in psutil.process_iter(["environ"]) if self._owns(process)]:
            for process in running:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(running, END_SECONDS)
        self.process.wait()
        for path in self._outputs():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self._exits.close()

    def _owns(self, process: psutil.Process) -> bool:
        return (process.info["environ"] or {}).get(hook.FOLDER) == str(self.folder)

    def _outputs(self) -> list[Path]:
        """Return the outputs that are there; of a folder, which can be a link, its content."""
        places = [self.work / output for output in self.command.outputs]
        return [path for place in places for path in (place.iterdir() if place.is_dir() else [place]) if path.exists()]

    def __exit__(self, kind: object, *_: object) -> None:
        if self.folder.exists():
            self.end(patience=0 if kind else END_SECONDS)


@contextmanager
def one_source(config: Config) -> Iterator[Path | None]:
    """Yield one copy of the working directory, the source of all jobs, so that what is edited meanwhile is in none of
    them; None with ``script.in_place``. The copy has no outputs of earlier runs, from which a run could resume."""
    assert config.script is not None
    if config.script.in_place:
        yield None
        return
    places: list[Path | str] = [KEPT, *(MODELS / name for name in config.variants)]
    for seed in config.train.seeds:
        places += config.command_of(config.compare.baseline).seeded(seed).outputs
    with tempfile.TemporaryDirectory(prefix="source-") as folder:
        yield scratch_copy(Path.cwd(), Path(folder, "work"), {Path.cwd() / place for place in places})


def scratch_copy(source: Path, target: Path, left_out: Collection[Path]) -> Path:
    """Copy the working directory, without ``left_out``, .git and .dvc, and return ``target``. Links stay links, and an
    environment of Python becomes a link. Raises BenchError if the files take more than ``LARGEST_COPY``."""
    size = 0

    def skipped(folder: str, names: list[str]) -> list[str]:
        nonlocal size
        copied = target / Path(folder).relative_to(source)
        copied.mkdir()
        kept = []
        for path in (Path(folder, name) for name in names if name not in (".git", ".dvc")):
            if path in left_out:
                continue
            if path.is_symlink() or (path / "pyvenv.cfg").exists():
                (copied / path.name).symlink_to(path.resolve())
            elif path.is_dir() or path.is_file():
                kept.append(path.name)
                size += path.is_file() and path.stat().st_size
        if size > LARGEST_COPY:
            raise BenchError(
                f"{source}: found more than {LARGEST_COPY >> 30} GiB, too much to copy for each arm; run with "
                "--in-place (script.in_place: true), or put a link in place of what is large."
            )
        return [name for name in names if name not in kept]

    return Path(shutil.copytree(source, target, ignore=skipped, dirs_exist_ok=True))
