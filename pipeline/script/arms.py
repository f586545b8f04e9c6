"""The server of a script's arms. An arm is the script's command in fresh processes, which take steps on request.

The server answers the requests of ``benchmark.rounds``: open, turn and close.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch

from pipeline.benchmark.arm import FEWEST_WARMUP_STEPS, MEMORY_STEPS, Measured
from pipeline.environment import hardware
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
from pipeline.results import RunConditions
from pipeline.results.figures import OUTSIDE
from pipeline.results.rejections import rejection
from pipeline.script.jobs import Job, one_source
from pipeline.training.measured import OfRank, joined, of_rank

EXAMINED_STEPS = 4
"""The first steps of each process. After them, an examined arm's parameters are compared with the baseline's."""
MOST_WARMUPS = 10
STEADY = 1.25
"""An arm is warm if nothing is compiled any more, and its steps did not get faster by more than this factor."""
LONG_STEP = 3.0
"""A step that takes longer than this many medians contains work that is not the step's, such as an evaluation or a
checkpoint. Its time beyond the median does not count as time of steps."""


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
        for detector in self.detectors:
            ranks[0].rejections.extend(detector.rejections())
            ranks[0].figures.update(detector.figures())
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
