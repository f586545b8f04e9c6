"""Divide a step's time into parts, from the profiler's trace. Perfetto can show the same trace.

Each instant of the profiled window belongs to the first of these parts that fits:

1. *forward, backward, optimizer, rest*: the device works. On a GPU a kernel or a copy runs; on a CPU an operator runs
   on the thread of the step or of its backward pass, and does not wait for another rank. The work belongs to the part
   of the step that launched it.
2. *communication* (exposed): the device does not work, and a collective runs or waits for another rank. On a CPU this
   includes the step's call of the collective, because the call can wait for the thread that runs the collective.
3. *input*: the step waits for its batch, or the device only prepares the batch.
4. *idle*: no other part fits. On a GPU this is mostly launch overhead on the host, on a CPU Python and dispatch between
   operators.

Communication during part 1 is hidden: it takes no extra time, and is reported separately. Holistic Trace Analysis
(Meta) separates exposed from hidden communication in the same way, by the overlap of intervals.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from pipeline.results import Record

WORK = ("optimizer", "forward", "backward", "rest")
"""The parts in which the device works. The optimizer comes first, because a backward node's event also covers an
optimizer step that runs inside the node."""
PARTS = (*WORK, "communication", "input", "idle")
"""All parts. An instant that fits several parts belongs to the first of them."""
STEP, INPUT, ACCUMULATE, FORWARD, BACKWARD, OPTIMIZER = (
    f"step/{part}" for part in ("whole", "input", "accumulate", "forward", "backward", "optimizer")
)
"""Names of the annotations that ``annotated`` puts around the parts of a step."""

_ENGINE = "autograd::engine::evaluate_function"
"""This event surrounds each node of the backward pass and its hooks. DDP and FSDP wait in hooks, so the event
does not count as work."""
_WAITING = (_ENGINE, "c10d::", "c10d_functional", "_c10d_functional", "gloo:", "record_param_comms")
"""Prefixes of events that are no work: the event above, and operators that only send, receive or wait. DTensor calls
such operators inside other operators."""
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class StepTimes(Record):
    """The parts of one rank's mean step under the profiler. All except hidden communication add up to ``step_ms``."""

    step_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    rest_ms: float
    """Other work of the step, such as setting gradients to zero, or a CUDA graph of the whole step."""
    communication_ms: float
    """Exposed communication, during which the rank does no work."""
    input_ms: float
    idle_ms: float
    communication_hidden_ms: float
    """Communication during work, which is not added to the other parts."""

    def fraction(self, part: str) -> float:
        """Return the share of the step that one of ``PARTS`` takes."""
        value: float = getattr(self, f"{part}_ms")
        return value / self.step_ms

    @property
    def busy_ms(self) -> float:
        """Time in which the device works for this rank."""
        return self.forward_ms + self.backward_ms + self.optimizer_ms + self.rest_ms


class Operator(Record):
    """One operator's time per step on the main rank's device, without the time of the operators that it calls."""

    name: str
    calls_per_step: float
    step_ms: float


@dataclass(frozen=True)
class Event:
    """One complete event of the trace."""

    name: str
    category: str
    start: int
    end: int
    """``start`` and ``end`` are in nanoseconds, on the trace's own clock."""
    thread: Any
    arguments: dict[str, Any]

    @property
    def span(self) -> Span:
        return self.start, self.end


def read(path: Path) -> list[Event]:
    """Return the complete events of a Chrome trace from torch's profiler. A file that ends in .gz is decompressed."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    return [
        Event(
            name=entry["name"],
            category=entry.get("cat", ""),
            start=round(entry["ts"] * 1000),
            end=round(entry["ts"] * 1000) + round(entry.get("dur", 0) * 1000),
            thread=entry.get("tid"),
            arguments=entry.get("args", {}),
        )
        for entry in content["traceEvents"]
        if entry.get("ph") == "X"
    ]


class Trace:
    """The events of one rank's window, assigned to parts. ``gpu``: the index of its GPU; None on a CPU.

    Raises ValueError if no step was annotated.
    """

    def __init__(self, events: Sequence[Event], gpu: int | None) -> None:
        annotations = [event for event in events if event.category == "user_annotation"]
        steps = [event for event in annotations if event.name == STEP]
        if not steps:
            raise ValueError("the trace holds no step")
        self.steps = len(steps)
        self.main = steps[0].thread
        self.first, self.last = min(step.start for step in steps), max(step.end for step in steps)
        marks = [event for event in annotations if event.thread == self.main]
        engine = [event for event in events if event.name.startswith(_ENGINE)]
        self._backward_threads = {event.thread for event in engine}

        def marked(*names: str) -> Spans:
            return union(event.span for event in marks if event.name.startswith(names))

        self.input = marked(INPUT)
        # An optimizer step inside the backward pass belongs to the optimizer. On a GPU, the backward pass has its own
        # thread, so the annotations of all threads are searched for optimizer steps.
        inside = [event.span for event in annotations if event.name.startswith("Optimizer.step#")]
        optimizer = union([*marked(OPTIMIZER), *inside])
        # A pipeline schedule runs the passes without annotations. Then the autograd engine's events show when the
        # backward pass runs.
        backward = union([*marked(BACKWARD), *(event.span for event in engine)])
        self._phases = {
            "input": self.input,
            "optimizer": optimizer,
            "backward": backward,
            "forward": marked(ACCUMULATE, FORWARD),
        }
        self.work: dict[str, list[Event]] = {name: [] for name in ("waits", *WORK, "input")}
        """Part -> its events; "waits": events in which the step's threads send, receive or wait, none on a GPU."""
        self.operator_of: dict[int, str] = {}
        if gpu is None:
            self._tell_operators(events)
            gloo = [event for event in events if event.name.startswith("gloo:")]
            self.communication = union(event.span for event in (*gloo, *self.work["waits"]))
        else:
            self.communication = []
            self._tell_kernels(events, gpu)

    def times(self) -> StepTimes:
        """Return the mean time of each part per step. The window begins with the first step. It ends when host and
        device have finished the last step."""
        ends = [event.end for events in self.work.values() for event in events]
        whole = (self.first, max([self.last, *ends, *(end for start, end in self.communication if start < self.last)]))
        worked = {name: [event.span for event in events] for name, events in self.work.items()}
        claims = {
            # First the waits, because an operator that waits for another rank does no work meanwhile.
            **{name: worked[name] for name in ("waits", *WORK)},
            "communication": self.communication,
            "input": [*self.input, *worked["input"]],
            "idle": [whole],
        }
        shares = partition(whole, claims)
        shares["communication"] += shares["waits"]
        hidden = covered(self.communication, whole) - shares["communication"]
        scale = 1e-6 / self.steps  # nanoseconds of the window to milliseconds of a step
        return StepTimes(
            step_ms=(whole[1] - whole[0]) * scale,
            communication_hidden_ms=hidden * scale,
            **{f"{part}_ms": shares[part] * scale for part in PARTS},
        )

    def operators(self) -> list[Operator]:
        """Return the operators by their time on the device, the longest first."""
        calls, spent = Counter[str](), Counter[str]()
        for event, own in _own_times([*chain(*self.work.values())]):
            if not event.name.startswith(_WAITING):
                name = self.operator_of.get(event.arguments.get("External id", -1), event.name)
                calls[name] += 1
                spent[name] += own
        return [
            Operator(name=name, calls_per_step=calls[name] / self.steps, step_ms=spent[name] / 1e6 / self.steps)
            for name in sorted(spent, key=lambda name: (-spent[name], name))
        ]

    def _phase(self, instant: int) -> str:
        """Return the part of the step to which work launched at ``instant`` belongs."""
        for name, spans in self._phases.items():
            index = bisect_right(spans, instant, key=itemgetter(0)) - 1
            if index >= 0 and instant < spans[index][1]:
                return name
        return "rest"

    def _tell_operators(self, events: Sequence[Event]) -> None:
        """On a CPU: assign the operators on the step's threads to parts. A thread that reads ahead is ignored."""
        threads = {self.main, *self._backward_threads}
        for event in events:
            if event.category == "cpu_op" and event.thread in threads and self.first <= event.start < self.last:
                if not event.name.startswith(_WAITING):
                    self.work[self._phase(event.start)].append(event)
                elif not event.name.startswith(_ENGINE):
                    self.work["waits"].append(event)

    def _tell_kernels(self, events: Sequence[Event], gpu: int) -> None:
        """On a GPU: assign kernels and copies to the part of the step in which the host launched them."""
        launches = {
            event.arguments["correlation"]: event
            for event in events
            if event.category in ("cuda_runtime", "cuda_driver") and "correlation" in event.arguments
        }
        self.operator_of = {
            event.arguments["External id"]: event.name
            for event in events
            if event.category == "cpu_op" and "External id" in event.arguments
        }
        communication = []
        for event in events:
            if event.category not in _ON_GPU or event.arguments.get("device", gpu) != gpu:
                continue
            launch = launches.get(event.arguments.get("correlation", -1))
            launched = launch.start if launch else event.start
            if not self.first <= launched < self.last:
                continue
            if event.name.startswith(("nccl", "ncclDevKernel")):
                communication.append(event.span)
            elif launch and launch.thread != self.main and launch.thread not in self._backward_threads:
                self.work["input"].append(event)  # launched by the thread that reads ahead
            else:
                self.work[self._phase(launched)].append(event)
        self.communication = union(communication)


def _own_times(events: Sequence[Event]) -> Iterator[tuple[Event, int]]:
    """Return each event with its own time: its duration minus the durations of the events nested directly in it on the
    same thread."""
    ordered = sorted(events, key=lambda event: (str(event.thread), event.start, -event.end))
    own = [event.end - event.start for event in ordered]
    open_: list[int] = []
    for index, event in enumerate(ordered):
        while open_ and (ordered[open_[-1]].thread != event.thread or ordered[open_[-1]].end <= event.start):
            open_.pop()
        if open_:
            own[open_[-1]] -= event.end - event.start
        open_.append(index)
    return zip(ordered, own, strict=True)


Span = tuple[int, int]
Spans = list[Span]
"""Half-open spans [start, end) in whole nanoseconds, so that parts add up exactly to their whole. The spans are sorted
and disjoint, and none is empty."""


def union(spans: Iterable[Span]) -> Spans:
    """Return the time that at least one of ``spans`` covers; they may come in any order, overlap, or be empty."""
    joined: Spans = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def covered(spans: Iterable[Span], whole: Span) -> int:
    """Return the nanoseconds of ``whole`` that at least one of ``spans`` covers."""
    return sum(end - start for start, end in union((max(a, whole[0]), min(b, whole[1])) for a, b in spans))


def partition(whole: Span, claims: Mapping[str, Iterable[Span]]) -> dict[str, int]:
    """Assign each instant of ``whole`` to the first of ``claims`` that covers it; return the nanoseconds of each."""
    claimed: Spans = []
    shares = {}
    for name, spans in claims.items():
        before = covered(claimed, whole)
        claimed = union([*claimed, *spans])
        shares[name] = covered(claimed, whole) - before
    return shares
