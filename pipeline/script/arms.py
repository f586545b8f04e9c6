"""The server of a script's arms. An arm is the script's command in fresh processes, which take steps on request.

The server answers the requests of ``benchmark.rounds``: open, turn and close. It starts the command in a scratch copy
of the working directory, and ``hook`` connects the command's processes to it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from pipeline.benchmark.arm import FEWEST_WARMUP_STEPS, MEMORY_STEPS, Measured
from pipeline.benchmark.server import BenchError
from pipeline.environment import hardware
from pipeline.errors import count, say
from pipeline.measurement.detectors import (
    Detector,
    cpu_detectors,
    gpu_detectors,
    job_ticks,
    of_clock,
    of_memory,
    of_turns,
)
from pipeline.measurement.windows import Clock, Memory
from pipeline.params import Bench as BenchSettings
from pipeline.params import Command
from pipeline.processes import malloc, terminate_with_parent
from pipeline.results import RunConditions
from pipeline.results.figures import OUTSIDE
from pipeline.results.rejections import rejection
from pipeline.script import hook
from pipeline.training.measured import OfRank, joined, of_rank

EXAMINED_STEPS = 4
"""The first steps of each process. After them, an examined arm's parameters are compared with the baseline's."""
MOST_WARMUPS = 10
STEADY = 1.25
"""An arm is warm if nothing is compiled any more, and its steps did not get faster by more than this factor."""
LONG_STEP = 3.0
"""A step that takes longer than this many medians contains work that is not the step's, such as an evaluation or a
checkpoint. Its time beyond the median does not count as time of steps."""
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


class Scripts(AbstractContextManager["Scripts"]):
    """The server of all arms of one script."""

    requests = ("open", "turn", "close")

    def __init__(self, settings: BenchSettings, **options: Any) -> None:
        """``options``: those of ``Job``."""
        self._settings, self._options = settings, options
        self._open: dict[str, OpenArm] = {}
        self._source = ExitStack()

    def open(self, name: str, plan: dict[str, Any], steps: int, *, ledgers: bool = False) -> None:
        """Start an arm and warm it up. ``plan``: the fields of a ``Command``. ``ledgers``: also examine the arm."""
        job = Job(name, Command(**plan), **self._options)
        opened = self._open[name] = OpenArm(job, Command(**plan), steps)
        job.meet()
        opened.examined = job.take(EXAMINED_STEPS, keep=False, examine=ledgers)
        if ledgers and opened.command.samples is None:
            opened.command = opened.command._replace(samples=samples_of(opened.examined))
        on_cpu = not job.ranks[0]["gpu"]
        before = opened.memory = job.take(MEMORY_STEPS[1], keep=not on_cpu)
        for _ in range(MOST_WARMUPS):
            warm = job.take(FEWEST_WARMUP_STEPS)
            steady = median_step(before) < STEADY * median_step(warm)
            if steady and not any(answer["compile_seconds"] for answer in warm):
                break
            before = warm
        opened.memory = opened.memory if on_cpu else []
        uuids = [about["uuid"] for about in job.ranks if about["uuid"]]
        pid = job.process.pid
        opened.detectors = [*cpu_detectors(pid, self._settings.max_foreign_load), *gpu_detectors(uuids, pid)]

    def turn(self, name: str, steps: int) -> None:
        """Let an open arm take ``steps`` steps."""
        opened = self._open[name]
        opened.waited()
        for detector in opened.detectors:
            detector.open()
        opened.turns.append(opened.job.take(steps))
        for detector in opened.detectors:
            detector.close(measured=True)
        opened.waits = time.monotonic(), opened.ticks()

    def close(self, name: str) -> dict[str, Any]:
        """End an open arm; return its ``Measured`` as plain values and, as ``examined``, what each rank said of its
        first steps. ``workers``: whether the arm has processes besides its ranks and their launcher."""
        opened = self._open.pop(name)
        with opened.job as job:
            workers, values = job.has_workers(), opened.measured().model_dump(mode="json")
            return values | {"ranks": job.ranks, "examined": opened.examined, "workers": workers}

    def __enter__(self) -> Scripts:
        self._on_sigterm = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self._options = self._source.enter_context(one_source(self._options))
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        for opened in self._open.values():
            with suppress(FileNotFoundError):
                opened.job.end(patience=0)
        self._source.close()


class OpenArm:
    """An open arm, with what was measured of it."""

    def __init__(self, job: Job, command: Command, steps: int) -> None:
        self.job, self.command, self.requested = job, command, steps
        self.examined: list[dict[str, Any]] = []
        self.memory: list[dict[str, Any]] = []
        self.turns: list[list[dict[str, Any]]] = []
        self.detectors: list[Detector] = []
        self.waits: tuple[float, float] | None = None
        self.aside = self.waited_seconds = 0.0

    def ticks(self) -> float:
        """Return the CPU seconds so far of the ranks and their own children."""
        ticks = sum(sum(job_ticks(about["pid"]).values()) for about in self.job.ranks)
        return ticks / os.sysconf("SC_CLK_TCK")

    def waited(self) -> None:
        """Count the CPU time since the last turn."""
        if self.waits:
            since, before = self.waits
            self.waited_seconds += time.monotonic() - since
            self.aside += max(0.0, self.ticks() - before)

    def measured(self) -> Measured:
        first = self.job.ranks[0]
        ranks = [self._of_rank(number) for number in range(len(self.job.ranks))]
        ranks[0].rejections.extend(rejection for detector in self.detectors for rejection in detector.rejections())
        conditions = RunConditions(
            applied={},
            skipped={},
            decided={},
            changed=self.command.changed,
            batch_size=self.command.samples or 1,
            learning_rate=first["learning_rate"],
            micro_batches=None,
            device=first["gpu"] or hardware.cpu_model(hardware.cpu_facts()),
            backend=first["backend"],
            world_size=len(ranks),
            threads_per_process=first["threads"],
            placement=None,
            parameter_count=first["parameters"],
        )
        window = joined(ranks, requested_steps=self.requested, warmup=0, on_cpu=not first["gpu"])
        return Measured(**dict(conditions), window=window)

    def _of_rank(self, number: int) -> OfRank:
        turns = [answers[number] for answers in self.turns]
        seconds = [step for turn in turns for step in turn["seconds"]]
        median = statistics.median(seconds)
        clock, memory = Clock(torch.device("cpu")), Memory(torch.device("cpu"))
        clock.step_seconds = [median if step > LONG_STEP * median else step for step in seconds]
        wall = sum(turn["wall"] for turn in turns)
        outside = sum(seconds) - sum(clock.step_seconds)
        clock.measured_seconds = wall - outside
        measured_memory = [answers[number] for answers in [self.memory] if answers] or turns
        memory.peak_bytes = _largest(turn["peak"] for turn in measured_memory)
        memory.reserved_bytes = _largest(turn["reserved"] for turn in turns)
        retries = [turn["retries"] for turn in turns]
        memory.retries = None if None in retries else sum(retries)
        rejections = [*of_clock(clock, None, resident=True), *of_memory(memory)]
        if compiled := sum(turn["compile_seconds"] for turn in turns):
            rejections.append(rejection("recompiled", seconds=compiled))
        if not number:
            rejections += of_turns(self.aside, self.waited_seconds, clock)
        figures = of_rank(clock, memory, self.command.samples or 1)
        figures |= {OUTSIDE.field: outside / wall, "input_wait_fraction": None}  # nothing shows where a script waits
        return OfRank(figures, len(seconds), clock.measured_seconds, rejections)


def samples_of(examined: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the samples of one step over all ranks, from the ranks' answers on examined steps; None if unknown."""
    counts = [statistics.median_low(answer["samples"]) for answer in examined if answer["samples"]]
    return (len(counts) == len(examined) and sum(counts)) or None


def median_step(answers: list[dict[str, Any]]) -> float:
    """Return the median step of the slowest rank, in seconds."""
    return max(float(statistics.median(answer["seconds"])) for answer in answers)


def _largest(values: Iterator[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)
