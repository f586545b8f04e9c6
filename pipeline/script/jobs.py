"""The processes of a script's command, which take optimizer steps on request.

A job starts the command in a scratch copy of the working directory; ``hook`` connects the command's processes to it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from pipeline.benchmark.server import BenchError
from pipeline.errors import count, say
from pipeline.measurement.detectors import job_ticks
from pipeline.params import Command
from pipeline.processes import malloc, terminate_with_parent
from pipeline.script import hook

LAST_LINES = 60
LARGEST_OUTPUT = 1 << 26
END_SECONDS = 10.0
"""Longest wait for the end of a command whose ranks have ended."""
LARGEST_COPY = 1 << 30
"""Largest working directory, in bytes, of which each arm gets a copy."""


class Job(AbstractContextManager["Job"]):
    """The processes of one arm, or of one training to its end.

    ``timeout``: the longest wait, in seconds, for an answer of the ranks. ``left_out``: files and directories that
    are not copied. ``optimizer``: as in ``hook.OPTIMIZER``. ``watched``: record the files that the processes open
    (``opened``), which slows them down a little. ``source``: what is copied; by default the working directory. Every
    error ends all processes of the arm.
    """

    def __init__(
        self,
        name: str,
        command: Command,
        *,
        in_place: bool,
        left_out: Sequence[Path],
        timeout: float,
        optimizer: int,
        watched: bool = False,
        source: Path | None = None,
    ) -> None:
        self.name, self.command, self.timeout, self.steps = name, command, timeout, 0
        self._hints = "" if in_place else " It ran in a copy of this directory (--in-place runs it here)."
        self._awaited = (
            f"the first step of optimizer {optimizer} (--optimizer)" if optimizer else "its first optimizer step"
        )
        self.to_the_end, self._shown = False, 0
        self.folder = Path(tempfile.mkdtemp(prefix="arm-", dir="/tmp"))  # a socket's path must be short
        self.ranks: list[dict[str, Any]] = []
        """What each rank said about itself, by rank."""
        self._streams: list[Any] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / "socket"))
        self._listener.listen(128)
        shutil.copy(hook.__file__, self.folder / "sitecustomize.py")
        shutil.copy(malloc.__file__, self.folder / "malloc.py")
        if watched:
            (self.folder / hook.OPENED).touch()
        variables = {**os.environ, **command.variables}
        self._hints += other_python(command.words[0], variables.get("PATH"))
        paths = os.pathsep.join([str(self.folder), *filter(None, [variables.get("PYTHONPATH")])])
        variables |= {hook.FOLDER: str(self.folder), hook.OPTIMIZER: str(optimizer), "PYTHONPATH": paths}
        try:
            self.work = Path.cwd() if in_place else scratch_copy(source or Path.cwd(), self.folder / "work", left_out)
            with (self.folder / "output").open("ab") as output:
                self.process = subprocess.Popen(
                    command.words, cwd=self.work, env=variables | {"PWD": str(self.work)}, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output, start_new_session=True, preexec_fn=terminate_with_parent,
                )  # fmt: skip
        except (OSError, BenchError) as error:
            self._listener.close()
            shutil.rmtree(self.folder)
            raise BenchError(f"{name}: {' '.join(command.words)!r} cannot be started: {error}") from None

    def meet(self) -> None:
        """Wait until all ranks are at their first optimizer step."""
        met: list[tuple[dict[str, Any], Any]] = []
        while not met or len(met) < met[0][0]["world_size"]:
            self._read({self._listener: lambda: None})
            with self._listener.accept()[0] as connection:
                stream = connection.makefile("rwb", buffering=0)
            self._streams.append(stream)
            met.append((self._read({stream: stream.readline})[stream], stream))
        met.sort(key=lambda rank: int(rank[0]["rank"]))
        self.ranks, self._streams = map(list, zip(*met, strict=True))
        if [about["rank"] for about in self.ranks] != [*range(len(met))]:
            raise self.failure("its processes that take optimizer steps are not the ranks of one process group")

    def take(self, steps: int, *, keep: bool = True, examine: bool = False) -> list[dict[str, Any]]:
        """Let each rank take ``steps`` steps, and return the ranks' answers. ``keep``: with ``keep_freed_memory``."""
        malloc = "keep_freed_memory" if keep else "return_freed_memory"
        answers = self._ask({"steps": steps, "malloc": malloc, "examine": examine})
        self.steps += steps
        if (output := self.folder / "output").stat().st_size > LARGEST_OUTPUT:
            os.truncate(output, 0)
        return answers

    def _ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a request to each rank; return their answers, with the updates of examined steps."""
        for stream in self._streams:
            with suppress(OSError):  # reading reports a rank that has ended
                stream.write(json.dumps(request).encode() + b"\n")
        answered = self._read({stream: stream.readline for stream in self._streams})
        answers = [answered[stream] for stream in self._streams]
        for answer in answers if request["examine"] and request["steps"] else ():
            answer["update"] = torch.load(answer["update"], weights_only=True)
        return answers

    def train(self) -> list[dict[str, Any]]:
        """Let the ranks train to their end, which may take any time, and show the output. Return their answers, after
        the command has ended. Raises BenchError if it fails."""
        self.to_the_end, patience, self.timeout = True, self.timeout, float("inf")
        request = {"steps": None, "malloc": "keep_freed_memory", "examine": True}
        answers = self._ask(request)
        self.steps = answers[0]["steps"]
        latest = time.monotonic() + patience
        while self.process.poll() is None:
            self._check_alone(0.2)
            if time.monotonic() > latest:
                raise self.failure(f"its ranks ended, but not the command, for {patience:.0f} s")
        if self.process.returncode:
            raise self.failure(None)
        self._show()
        return answers

    def _check_alone(self, seconds: float = 0.0) -> None:
        """Raise BenchError if, within ``seconds``, a process that is none of the ranks takes an optimizer step."""
        if select.select([self._listener], [], [], seconds)[0]:
            raise self.failure("a second process takes optimizer steps: one command, one training")

    def output(self) -> str:
        """Return what the processes printed."""
        return (self.folder / "output").read_text(encoding="utf-8", errors="replace")

    def opened(self) -> Iterator[tuple[bool, Path]]:
        """Yield whether a file was written, and its path, in the order in which the processes opened them. Files of the
        scratch copy have their paths in the working directory."""
        for line in (self.folder / hook.OPENED).read_text(encoding="utf-8").splitlines():
            how, name = json.loads(line)
            copied = Path(name).is_relative_to(self.work)
            yield how == "w", Path.cwd() / Path(name).relative_to(self.work) if copied else Path(name)

    def has_workers(self) -> bool:
        """Return whether there are processes besides the ranks and their launcher."""
        launcher = int(self.process.pid != self.ranks[0]["pid"])
        return len(job_ticks(self.process.pid)) > len(self.ranks) + launcher

    def _show(self) -> None:
        """Print what the processes have printed since the last call."""
        with (self.folder / "output").open("rb") as output:
            output.seek(self._shown)
            text = output.read()
        self._shown += len(text)
        if text:
            say(text.decode(errors="replace").replace("\r", "\n"), end="")

    def _read(self, readers: dict[Any, Any]) -> dict[Any, Any]:
        """Wait for a line on each stream; return stream -> its values. Raises BenchError if a process ends, or if there
        is nothing to read for too long."""
        lines: dict[Any, Any] = {}
        started = time.monotonic()
        while len(lines) < len(readers):
            ended = self.process.poll() is not None
            if self.to_the_end:
                self._show()
                self._check_alone()
            readable, _, _ = select.select([stream for stream in readers if stream not in lines], [], [], 0.2)
            for stream in readable:
                line = readers[stream]()
                if line == b"":
                    raise self.failure(None)
                lines[stream] = json.loads(line) if line else None
            if ended and not readable:
                raise self.failure(None)
            if time.monotonic() - started > self.timeout:
                raise self.failure(f"it was silent for {self.timeout:.0f} s (--timeout allows more)")
        return lines

    def failure(self, why: str | None) -> BenchError:
        """End the arm; return the error, with the last lines of the output. ``why``: None if the command has ended."""
        where = f"after {count(self.steps, 'step')}" if self.steps else "in its first steps"
        where = where if self.ranks else f"before {self._awaited}"
        last = self._last_lines()  # of a rank, before its launcher says much about its end
        if why is None:
            with suppress(subprocess.TimeoutExpired):  # a launcher reports the end of a rank
                self.process.wait(END_SECONDS)
            code = self.process.poll()
            why = f"the command ended ({'still running' if code is None else _ending(code)})"
            if code == 0 and self.to_the_end:
                why += "; its steps are unknown, because Python's handlers of the exit did not run (os._exit)"
            elif code == 0 and self.ranks:
                why += "; let it train longer, such as for more epochs, or lower bench.window_seconds (--set)"
            elif code == 0:
                why += (
                    "; no Python process of it took a step of a torch.optim optimizer (a Python with -I or -E, or of "
                    "another container, cannot be measured)"
                )
        last = last if self.ranks and last else self._last_lines()
        self.end(patience=0)
        doing, hints = "trained" if self.to_the_end else "measured", "" if self.ranks else self._hints
        return BenchError(
            f"{self.name} cannot be {doing}: {where}, {why}. It has no input and no terminal.{hints}{self.said(last)}"
        )

    def said(self, last: Sequence[str] | None = None) -> str:
        """Return the ``last`` lines of the output, for a message."""
        lines = self._last_lines() if last is None else last
        return "".join(f"\n  | {line}" for line in lines) or " It printed nothing."

    def _last_lines(self) -> list[str]:
        with (self.folder / "output").open("rb") as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - (1 << 14)))
            return output.read().decode(errors="replace").replace("\r", "\n").splitlines()[-LAST_LINES:]

    def end(self, patience: float = END_SECONDS) -> None:
        """Let the ranks end at their boundary, wait for the command's end, then kill whatever still runs."""
        for stream in (*self._streams, self._listener):
            with suppress(OSError):
                stream.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        while running := [*self._running()]:
            for process in running:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(running, END_SECONDS)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _running(self) -> Iterator[psutil.Process]:
        """Yield the living processes of the arm: those that descend from the command, or have its variables."""
        tree = job_ticks(self.process.pid) if self.process.poll() is None else {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # another user's process, or one that has just ended
                ours = process.pid in tree or process.environ().get(hook.FOLDER) == str(self.folder)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def __exit__(self, *_: object) -> None:
        if self.folder.exists():
            self.end()


def other_python(program: str, path: str | None) -> str:
    """Return a sentence if ``program`` is a script of another Python than the one on ``path``; else an empty text."""
    found, python = (shutil.which(name, path=path) for name in (program, "python"))
    if not (found and python):
        return ""
    with Path(found).open("rb") as file:
        words = file.readline(1 << 10).decode(errors="replace").removeprefix("#!").split()
    own = words[0] if words and Path(words[0]).name.startswith("python") else python
    same = Path(own).parent.resolve() == Path(python).parent.resolve()
    return "" if same else f" {program} runs {own}, whose packages can differ from those of {python}."


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def scratch_copy(source: Path, target: Path, left_out: Sequence[Path]) -> Path:
    """Copy the working directory, without ``left_out``, .git and .dvc, and return ``target``. Links stay links, and an
    environment of Python becomes a link. Raises BenchError if the files take more than ``LARGEST_COPY``."""
    size = 0
    for folder, names, files in os.walk(source):
        copied = target / Path(folder).relative_to(source)
        copied.mkdir()
        for name in [*names]:
            path = Path(folder, name)
            is_environment = (path / "pyvenv.cfg").exists()
            left = path in left_out or name in (".git", ".dvc")
            if left or path.is_symlink() or is_environment:
                names.remove(name)
            if not left and (path.is_symlink() or is_environment):
                (copied / name).symlink_to(path.resolve())
        for name in files:
            path = Path(folder, name)
            if path in left_out:
                continue
            if path.is_symlink():
                (copied / name).symlink_to(path.resolve())
            elif path.is_file():
                size += path.stat().st_size
                if size > LARGEST_COPY:
                    raise BenchError(
                        f"{source}: found more than {LARGEST_COPY >> 30} GiB, too much to copy for each arm; run with "
                        "--in-place (script.in_place: true), or in a directory with the script alone (links are not "
                        "followed)."
                    )
                shutil.copy2(path, copied)
    return target


@contextmanager
def one_source(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield these options of ``Job`` with one copy of the working directory as the source of all jobs, so that what is
    edited meanwhile is in none of them."""
    if options["in_place"]:
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="source-") as folder:
        copy = scratch_copy(Path.cwd(), Path(folder, "work"), options["left_out"])
        yield options | {"source": copy}
