"""Arms of known times and figures, with a simulated clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from pipeline.benchmark.server import BenchError, OutOfTime, Server
from pipeline.benchmark.stage import Job
from tests.factories import foreign_load, make_arm, make_flops, make_session, make_window


@dataclass
class Known:
    """What is known of an arm of the variant."""

    opening: float = 2.0
    """Seconds."""
    step: float = 0.05
    """Seconds."""
    memory: float = 1.0
    """In relation to the baseline's."""
    scatter: float = 0.01
    fails: bool = False
    loads: Sequence[float] = ()
    """Shares of the CPU that others take in its windows, in turn; these are above the limit."""


class Timed(Server):
    """A server whose arms take known times, by the clock ``now``."""

    def __init__(self, arms: dict[str, Known]) -> None:
        super().__init__()
        self.arms, self.now, self.restarts, self.interrupt_at = arms, 1000.0, 0, math.inf
        self.steps: dict[str, int] = {}
        self.slows_at, self.slower = math.inf, 1.0
        """From this time on, all takes longer, by this factor."""
        self.numbers = itertools.count()

    def __enter__(self) -> Timed:
        return self

    def __exit__(self, *_: object) -> None:
        self.now += 0.5

    def restart(self) -> None:
        self.restarts += 1
        self.now += 5

    def describe(self) -> dict[str, Any]:
        return {"requests": ()}

    def plan(self, name: str, values: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return values

    def known(self, name: str) -> Known:
        return self.arms[name.partition(",")[0]]

    def takes(self, seconds: float, name: str, do: str) -> None:
        seconds *= self.slower if self.now >= self.slows_at else 1.0
        latest = min(self.deadline, self.now + self.limit)
        if self.now + seconds > latest:
            self.now = latest
            raise OutOfTime(f"{name} cannot be measured: it took too long to {do}", name)
        self.now += seconds
        if self.now >= self.interrupt_at:
            raise KeyboardInterrupt

    def open(self, name: str, plan: dict[str, Any], steps: int, *, ledgers: bool = False, memory: bool = True) -> None:  # noqa: ARG002
        if self.known(name).fails:
            raise BenchError(f"{name} cannot be measured: it has no such layer.", name)
        self.takes(self.known(name).opening, name, "open")
        self.steps[name] = 0

    def turn(self, name: str, steps: int) -> None:
        self.takes(self.known(name).step * steps, name, "turn")
        self.steps[name] += steps

    def close(self, name: str) -> dict[str, Any]:
        about, number = self.known(name), next(self.numbers)
        noise = about.scatter * math.sin(7.7 * number)
        speed = 256 / about.step * math.exp(noise)
        disturbed: dict[str, Any] = {}
        if about.loads:
            load = about.loads[number % len(about.loads)]
            rejections = (foreign_load(load, min(1.0, math.ceil(15 * load) / 10)),)
            disturbed = {"rejections": rejections, "disturbed_samples_per_second": speed}
        window = make_window(
            **disturbed,
            samples_per_second=speed,
            peak_memory_bytes=round(2**30 * about.memory * math.exp(noise / 10)),
            measured_steps=self.steps.pop(name),
        )
        beside = {"ledgers": None, "flops": make_flops({}).model_dump()}
        return make_arm().model_dump() | beside | {"window": window.model_dump()}


def play(monkeypatch: pytest.MonkeyPatch, module: ModuleType, job: Job, start: str = "2026-11-20T08:00") -> None:
    """Let a command in ``module`` measure ``job`` on its ``Timed`` server and by its clock, in a session of this
    start."""
    server: Any = job.server

    @contextmanager
    def served(*_: object) -> Iterator[Job]:
        with server:
            yield job

    def started() -> Any:
        server.deadline = math.inf
        return server

    monkeypatch.setattr(module, "served", served)
    monkeypatch.setattr(module, "Server", started)
    monkeypatch.setattr(module, "begin_session", lambda: lambda: make_session(start))
    monkeypatch.setattr("time.monotonic", lambda: server.now)
    monkeypatch.setattr("pipeline.processes.age_seconds", lambda: 3.0)
