"""Detect disturbances of the measured windows (compilation, other work on the CPU and the GPU, heat), and find
reasons to reject a run in its own figures: time, memory, number of steps.

A detector is opened before each window of the clock and closed after it. Most detectors read counters at both moments.
No detector waits for the device or changes the steps.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml
import torch

from pipeline.measurement.windows import Clock, Memory, Resumable, answer, handle_of
from pipeline.results.figures import FOREIGN_LOAD
from pipeline.results.rejections import Rejection, rejection

PROC = Path("/proc")
CPUS = Path("/sys/devices/system/cpu")
MAX_THROTTLED_FRACTION = 0.05
"""Largest accepted throttling in the measured windows. On a CPU it is a share of the time, on a GPU of the queries."""
GPU_SAMPLE_SECONDS = 0.1
MPS_SERVER = "nvidia-cuda-mps"
"""The process name nvidia-cuda-mps-server as the kernel shows it: the kernel shortens names to 15 characters."""

SLOWDOWNS = {
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal slowdown",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "software thermal slowdown",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
}
"""The reasons for reduced GPU clocks that better cooling or a better power supply would remove.

The software power cap is left out: it limits the clocks of every GPU at full load, so it is part of normal speed.
"""


class Detector(Resumable, ABC):
    """Looks for one kind of disturbance in a run's measured windows."""

    @abstractmethod
    def open(self) -> None:
        """Start a window."""

    @abstractmethod
    def close(self, *, measured: bool) -> None:
        """End the window. Windows that are not measured are ignored."""

    @abstractmethod
    def rejections(self) -> Iterator[Rejection]:
        """Yield the reasons to reject the measured windows so far."""

    def figures(self) -> dict[str, float]:
        """Return what the detector measured, by the fields of ``FIGURES``."""
        return {}


def detectors(devices: Sequence[torch.device], *, root_pid: int, max_foreign_load: float | None) -> list[Detector]:
    """Return the detector of compilation, and those that this machine supports for its CPU and for ``devices``.

    Repeated calls return the same kinds of detectors in the same order. ``devices``: the calling process's own
    devices. ``root_pid``: the job's root process, which forms the job together with all its descendants. If
    ``max_foreign_load`` is None, there is no detector of foreign load on the CPU.
    """
    of_gpus = gpu_detectors(devices, root_pid) if devices[0].type == "cuda" else []
    return [Recompilation(), *cpu_detectors(root_pid, max_foreign_load), *of_gpus]


class Recompilation(Detector):
    """Detects that torch.compile compiles after the warm-up."""

    def __init__(self) -> None:
        self._before = 0.0
        self.seconds = 0.0
        """Compile time in the measured windows."""

    def open(self) -> None:
        self._before = _compile_seconds()

    def close(self, *, measured: bool) -> None:
        if measured:
            now = _compile_seconds()
            self.seconds += now if now < self._before else now - self._before  # torch._dynamo.reset() resets the total

    def rejections(self) -> Iterator[Rejection]:
        if self.seconds:
            yield rejection("recompiled", seconds=self.seconds)


def _compile_seconds() -> float:
    """Return the seconds that this process has spent compiling forward and backward passes.

    The compiler is not imported here. If nothing else has imported it, the time is 0.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return float(dynamo.calculate_time_spent()["total_wall_time"]) if dynamo else 0.0


def cpu_detectors(root_pid: int, max_foreign_load: float | None) -> list[Detector]:
    """Return the CPU detectors for which this system has the counters; see ``detectors``."""
    detectors: list[Detector] = []
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if max_foreign_load is not None and cores and (PROC / "stat").exists():
        detectors.append(ForeignLoad(cores, root_pid, max_foreign_load))
    totals = [file for core in sorted(cores) for file in CPUS.glob(f"cpu{core}/thermal_throttle/*_total_time_ms")]
    if totals:
        detectors.append(CpuThrottling(totals))
    return detectors


class ForeignLoad(Detector):
    """Detects that other processes, or other virtual machines, use the CPU while the job needs it.

    Load on cores that the job leaves idle takes nothing from the job. So foreign CPU time on the allowed cores counts
    only up to the time in which the job's ready threads waited for a core. If the kernel does not report this waiting
    time (/proc/<pid>/task/<tid>/schedstat is missing), foreign time counts only as far as it exceeds the cores' idle
    time. Time that the hypervisor took from the cores is added, in proportion to the job's share of their busy time.

    The sum is compared with the CPU time that the job would have had without these losses, or, if longer, with the
    length of the windows. The length counts because a job that waits for its GPU uses little CPU time, and can lose
    half of this time without harm.

    Programs on other cores can still slow the job down through shared caches, memory and clocks. This detector does not
    see such effects. They appear as noise when the bench compares the baseline with itself.
    """

    def __init__(self, cores: set[int], root_pid: int, limit: float) -> None:
        self._cores = {f"cpu{core}" for core in cores}
        self._root_pid, self._limit = root_pid, limit
        self._before: tuple[dict[str, float], dict[str, float]] = {}, {}
        self.seconds = dict.fromkeys(("window", "own", "busy", "idle", "stolen"), 0.0)
        """Sums over the measured windows: their length, the CPU time of the job ("own"), and the allowed cores' times:
        busy (with any process), idle, and stolen, in which they had work but the hypervisor ran other machines."""
        self.waited_seconds: float | None = None
        """Time in which the job's threads were ready to run but had no core; None if the kernel does not report it."""

    def open(self) -> None:
        self._before = self._counters()

    def close(self, *, measured: bool) -> None:
        if not measured:
            return
        (before, waits_before), (now, waits) = self._before, self._counters()
        for name in self.seconds:
            self.seconds[name] += now[name] - before[name]
        if waits:
            waited = sum(max(0.0, wait - waits_before.get(thread, 0.0)) for thread, wait in waits.items())
            self.waited_seconds = (self.waited_seconds or 0.0) + waited

    @property
    def taken_seconds(self) -> float:
        """CPU time that other processes and virtual machines took from the job, over all measured windows.

        The counters advance in steps of 10 ms, which can be longer than a window. Rounding errors of single windows
        cancel in the sum over all windows.
        """
        own, foreign = self.seconds["own"], max(0.0, self.seconds["busy"] - self.seconds["own"])
        harm = self.waited_seconds
        if harm is None:
            harm = max(0.0, foreign - self.seconds["idle"])
        stolen = self.seconds["stolen"] * own / (own + foreign) if own > 0 else 0.0
        return min(foreign, harm) + stolen

    @property
    def due_seconds(self) -> float:
        """CPU time that the job would have had without these losses, or the length of the windows, if longer."""
        return max(self.seconds["window"], self.seconds["own"] + self.taken_seconds)

    def figures(self) -> dict[str, float]:
        return {FOREIGN_LOAD.field: self.taken_seconds / self.due_seconds} if self.due_seconds else {}

    def rejections(self) -> Iterator[Rejection]:
        share = self.figures().get(FOREIGN_LOAD.field, 0.0)
        if share > self._limit:
            # The load varies, by more where there is more of it: accept half as much again, and at least 0.1 more.
            accepting = min(10, max(math.floor(10 * share + 2), math.ceil(15 * share))) / 10
            yield rejection(
                "foreign_load",
                ("bench.max_foreign_load", accepting),
                taken_seconds=self.taken_seconds,
                due_seconds=self.due_seconds,
                share=share,
                limit=self._limit,
            )

    def _counters(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the counters of ``seconds`` now, and thread of the job -> time in which it waited for a core."""
        job, tick = job_ticks(self._root_pid), os.sysconf("SC_CLK_TCK")
        now = {"window": time.monotonic(), "own": sum(job.values()) / tick, "busy": 0.0, "idle": 0.0, "stolen": 0.0}
        for line in (PROC / "stat").read_text(encoding="ascii").splitlines():
            core, *ticks = line.split()
            if core in self._cores:  # user and nice include the time of guests
                user, nice, system, idle, iowait, irq, softirq, steal = (int(count) / tick for count in ticks[:8])
                now["busy"] += user + nice + system + irq + softirq
                now["idle"] += idle + iowait
                now["stolen"] += steal
        return now, {thread: wait for pid in job for thread, wait in thread_waits(pid)}


class CpuThrottling(Detector):
    """Detects that the CPU got too hot and slowed down. ``totals``: files with the milliseconds of throttling so far.

    A core at full load often reaches its thermal limit for a moment. Such moments are accepted, because they belong to
    the core's normal speed. A GPU's power cap is accepted for the same reason.
    """

    def __init__(self, totals: Sequence[Path]) -> None:
        self._totals = totals
        self._before: list[int] = []
        self._opened = 0.0
        self.window_seconds = 0.0
        self.throttled_seconds = 0.0
        """Throttled time. Each window adds the time of the core or package that was throttled longest in it."""

    def open(self) -> None:
        self._before, self._opened = self._read(), time.monotonic()

    def close(self, *, measured: bool) -> None:
        if measured:
            self.window_seconds += time.monotonic() - self._opened
            longest = max(now - before for now, before in zip(self._read(), self._before, strict=True))
            self.throttled_seconds += longest / 1e3

    def rejections(self) -> Iterator[Rejection]:
        if self.throttled_seconds > MAX_THROTTLED_FRACTION * self.window_seconds:
            times = {"throttled_seconds": self.throttled_seconds, "window_seconds": self.window_seconds}
            yield rejection("cpu_throttled", **times)

    def _read(self) -> list[int]:
        return [int(file.read_text(encoding="ascii")) for file in self._totals]


def gpu_detectors(devices: Sequence[torch.device | str], root_pid: int) -> list[Detector]:
    """Return the detectors that the driver supports for each of these GPUs, or UUIDs of GPUs; a virtual GPU's driver
    supports few."""
    detectors: list[Detector] = []
    for device in devices:
        handle = answer(handle_of, device)
        if handle is not None:
            number = device if isinstance(device, str) else device.index
            name = "the GPU" if len(devices) == 1 else f"GPU {number}"
            both = GpuThrottling(handle, name), SharedGpu(handle, root_pid, name)
            detectors += [detector for detector in both if answer(detector.look) is not None]
    return detectors


class GpuThrottling(Detector):
    """Detects that the GPU slowed down because it was too hot or short of power.

    A separate thread asks the driver for the reasons of reduced clocks ten times a second and at a window's end. It
    does not ask at a window's beginning, because an idle GPU reports a slowdown for a moment when work arrives.

    The driver's counters of throttled time are not used: some do not separate the reasons, and the field
    numbers and units of others differ between drivers. As on a CPU, short throttling belongs to normal speed.
    """

    def __init__(self, handle: Any, name: str = "the GPU") -> None:
        self._handle, self._name = handle, name
        self._looks: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.looks = 0
        """How often the driver was asked in measured windows."""
        self.slow_looks = 0
        """How often the driver reported a slowdown."""
        self.reasons: dict[str, bool] = {}
        """The slowdowns that the driver reported, as keys."""

    def look(self) -> int:
        """Return the current reasons for reduced clocks, as bits. Raises NVMLError if the driver cannot report them."""
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))

    def open(self) -> None:
        self._looks = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-throttling", daemon=True)
        self._thread.start()

    def close(self, *, measured: bool) -> None:
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        if not measured:
            return
        self.looks += len(self._looks)
        for bits in self._looks:
            seen = [reason for bit, reason in SLOWDOWNS.items() if bits & bit]
            self.slow_looks += bool(seen)
            self.reasons |= dict.fromkeys(seen, True)

    def rejections(self) -> Iterator[Rejection]:
        if self.slow_looks > MAX_THROTTLED_FRACTION * self.looks:
            yield rejection(
                "gpu_throttled",
                gpu=self._name,
                slowdowns=", ".join(sorted(self.reasons)),
                slow=self.slow_looks,
                queries=self.looks,
                limit=MAX_THROTTLED_FRACTION,
            )

    def _watch(self) -> None:
        ended = False
        while not ended:
            ended = self._stop.wait(GPU_SAMPLE_SECONDS)
            bits = answer(self.look)
            if bits is not None:  # a failed query is skipped, because the next one may succeed
                self._looks.append(bits)


class SharedGpu(Detector):
    """Detects that another process uses this GPU at the start or at the end of a measured window.

    The driver always lists the host's process ids. In a container with its own ids, a process does not find its own
    id in the list. Then all listed processes except one count as foreign, because a job has one process per GPU.

    Under MPS the list also contains the MPS server. The server works only for its clients, so it does not count as
    foreign. If MPS clients run, but no listed process has the server's name, one of the listed processes is assumed to
    be the server.
    """

    def __init__(self, handle: Any, root_pid: int, name: str = "the GPU") -> None:
        self._handle, self._root_pid, self._name = handle, root_pid, name
        self._before = 0
        self.others = 0
        """The largest number of foreign processes that were seen at the same time."""

    def look(self) -> int:
        """Return the number of foreign processes on the GPU now. Raises NVMLError if the driver does not report it."""
        pids = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        if len(pids) < 2:
            return 0
        others, job = {pid for pid in pids if not name_of(pid).startswith(MPS_SERVER)}, job_ticks(self._root_pid)
        if pids & job.keys():
            return len(others - job.keys())
        clients = answer(pynvml.nvmlDeviceGetMPSComputeRunningProcesses, self._handle)  # unknown to an old driver
        hidden_server = others == pids and bool(clients)
        return max(0, len(others) - 1 - hidden_server)

    def open(self) -> None:
        self._before = answer(self.look) or 0

    def close(self, *, measured: bool) -> None:
        if measured:
            self.others = max(self.others, self._before, answer(self.look) or 0)

    def rejections(self) -> Iterator[Rejection]:
        if self.others:
            yield rejection("gpu_shared", others=self.others, gpu=self._name)


def job_ticks(root_pid: int) -> dict[int, int]:
    """Return process id -> CPU time in clock ticks, for ``root_pid`` and all its descendants.

    The ticks of a child that has ended count for its parent.
    """
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for directory in PROC.iterdir():
        if directory.name.isdigit():
            try:
                status = (directory / "stat").read_bytes()
            except OSError:  # the process has just ended
                continue
            fields = status.rpartition(b")")[2].split()  # the fields after the name, which may contain any character
            pid = int(directory.name)
            children[int(fields[1])].append(pid)
            ticks[pid] = sum(int(field) for field in fields[11:15])  # utime stime cutime cstime
    job: dict[int, int] = {}
    pids = [root_pid]
    for pid in pids:
        job[pid] = ticks.get(pid, 0)
        pids += children[pid]
    return job


def children_seconds(root_pid: int) -> float:
    """Return the CPU time so far of all living descendants of a process; 0 on a system without /proc."""
    if not (PROC / "stat").exists():
        return 0.0
    ticks = job_ticks(root_pid)
    return (sum(ticks.values()) - ticks[root_pid]) / os.sysconf("SC_CLK_TCK")


def name_of(pid: int) -> str:
    """Return a process's name; empty if this namespace of process ids has no such process."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


def thread_waits(pid: int) -> list[tuple[str, float]]:
    """Return each thread of a process with the seconds in which it was ready to run but waited for a core.

    Threads that have not run yet are left out. The list is empty if the process has ended or the kernel does not report
    these times."""
    waits = []
    try:
        for thread in (PROC / str(pid) / "task").iterdir():
            _, wait, turns = (thread / "schedstat").read_bytes().split()
            if turns != b"0":  # turns are 0 before the first run, or if the kernel does not count
                waits.append((thread.name, int(wait) / 1e9))
    except OSError:  # the process has just ended, or the kernel does not report waits
        pass
    return waits


CLOCK_TOLERANCE_FRACTION = 0.05
"""Largest accepted difference between the sum of the step times and the wall time, as a share of the wall time."""
MAX_ASIDE_FRACTION = 0.05
"""Largest accepted CPU time that an arm of the bench uses between its turns, as a share of the arm's measured seconds.
Work between the turns is not measured, so the arm can seem faster by this share."""
MAX_IDLE_FRACTION = 0.01
"""This share of the seconds between the turns is accepted in addition, because gloo's idle threads take up to 0.3%."""


def of_clock(clock: Clock, max_input_wait: float | None, *, resident: bool) -> Iterator[Rejection]:
    """Yield the reasons to reject one rank's step times. If ``max_input_wait`` is None, any wait for input is allowed.

    ``resident``: the data set is on the device, so the device prepares the input.
    """
    steps, wall = sum(clock.step_seconds), clock.measured_seconds
    if abs(steps - wall) > CLOCK_TOLERANCE_FRACTION * wall:
        yield rejection("clocks_disagree", steps_seconds=steps, wall_seconds=wall, limit=CLOCK_TOLERANCE_FRACTION)
    if max_input_wait is not None and clock.input_seconds > max_input_wait * wall:
        advice = None if resident else ("train.placement", "resident")
        yield rejection("input_wait", advice, share=clock.input_seconds / wall, limit=max_input_wait)


def of_memory(memory: Memory) -> Iterator[Rejection]:
    """Yield the reason to reject a rank's speeds and peak memory, if the rank's allocator had to flush its cache."""
    if memory.retries:
        yield rejection("allocator_retried", retries=memory.retries)


def of_turns(aside_seconds: float, waited_seconds: float, clock: Clock) -> Iterator[Rejection]:
    """Yield the reason to reject an arm because of the CPU time that it used while other arms took their turns.

    ``aside_seconds``: CPU time used between the turns; ``waited_seconds``: total time between the turns."""
    if aside_seconds > MAX_ASIDE_FRACTION * clock.measured_seconds + MAX_IDLE_FRACTION * waited_seconds:
        yield rejection(
            "worked_between_turns",
            aside_seconds=aside_seconds,
            of_measured=MAX_ASIDE_FRACTION,
            measured_seconds=clock.measured_seconds,
            of_waited=MAX_IDLE_FRACTION,
            waited_seconds=waited_seconds,
        )


def of_steps(measured: Sequence[int], *, requested: int, warmup: int) -> Iterator[Rejection]:
    """Yield the reasons to reject a run whose ranks measured too few steps, or different numbers of steps.

    ``measured``: the number of measured steps of each rank; ``requested``: the smallest accepted number."""
    fewest = min(measured)
    if len(set(measured)) > 1:
        yield rejection("steps_differ", steps=", ".join(map(str, sorted(set(measured)))))
    if not fewest:
        yield rejection("no_step", warmup=warmup)
    elif fewest < requested:
        yield rejection("few_steps", measured=fewest, requested=requested)
