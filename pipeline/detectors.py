"""Why measured numbers are refused: what disturbed the measured windows, and what the measurements say themselves.

A detector lives through a run's windows beside the clock: opened before the clock's window, closed after it. It reads
counters at both ends, never waits for the device and does nothing to a step.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeline.measurement import Clock, Memory

PROC = Path("/proc")
CPUS = Path("/sys/devices/system/cpu")

GPU_SAMPLE_SECONDS = 0.1
MAX_THROTTLED_FRACTION = 0.05
"""Of the measured windows, on a CPU."""

SLOWDOWNS = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
"""Of the reasons that hold a GPU's clocks down, those that a cooler or better fed GPU of the same kind would not have.

The software power cap is not among them: it is how a GPU at full load finds its clocks, and belongs to its speed.
"""


class Refusal(NamedTuple):
    """Why numbers of the measured windows are not to be trusted. Every refusal voids the speeds and step times."""

    reason: str
    """What happened, how much of it, and what to do."""
    voids_memory: bool = False
    """The peak memory is not to be trusted either."""


class Detector(ABC):
    """Looks for one kind of disturbance in a run's measured windows."""

    @abstractmethod
    def open(self) -> None:
        """A window starts."""

    @abstractmethod
    def close(self, *, measured: bool) -> None:
        """The window ends. Measured ones add up, others are forgotten."""

    @abstractmethod
    def refusals(self) -> list[Refusal]:
        """Why the measured windows so far are not to be trusted; empty if nothing was seen."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on counting."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def restore(self, state: dict[str, Any]) -> None:
        """Undo of ``state``."""
        vars(self).update(state)


def detectors(device: torch.device, *, root_pid: int, max_foreign_load: float | None) -> list[Detector]:
    """What this machine offers to watch ``device`` and this host's CPU with, always the same in the same order.

    ``root_pid``: the process that stands for the job; it and all its descendants are the job's own. None for
    ``max_foreign_load``: nobody watches the CPU's load (of several processes of a job on one host, one does).
    """
    found: list[Detector] = [Recompilation()]
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if max_foreign_load is not None and cores and (PROC / "stat").exists():
        found.append(ForeignLoad(cores, root_pid, max_foreign_load))
    totals = [file for core in sorted(cores) for file in CPUS.glob(f"cpu{core}/thermal_throttle/*_total_time_ms")]
    if totals:
        found.append(CpuThrottling(totals))
    if device.type == "cuda":
        found += _gpu_detectors(device, root_pid)
    return found


class Recompilation(Detector):
    """torch.compile at work after the warm-up."""

    def __init__(self) -> None:
        self._before = 0.0
        self.seconds = 0.0
        """Spent compiling in the measured windows."""

    def open(self) -> None:
        self._before = _compile_seconds()

    def close(self, *, measured: bool) -> None:
        if measured:
            now = _compile_seconds()
            self.seconds += now if now < self._before else now - self._before  # torch._dynamo.reset() starts at zero

    def refusals(self) -> list[Refusal]:
        if not self.seconds:
            return []
        return [
            Refusal(
                f"torch.compile compiled for {self.seconds:.2f} s after the warm-up; raise train.warmup_steps, or find "
                "what changes from step to step with TORCH_LOGS=recompiles"
            )
        ]


def _compile_seconds() -> float:
    """What this process has spent compiling so far, forward and backward. Does not load the compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return float(dynamo.calculate_time_spent()["total_wall_time"]) if dynamo else 0.0


class _Usage(NamedTuple):
    """Counters of the CPU at one moment, in seconds."""

    moment: float
    busy: float
    """The allowed cores at work, whoever's."""
    idle: float
    """The allowed cores with nothing to do."""
    stolen: float
    """The allowed cores wanted to work and the hypervisor gave their time to others."""
    own: float
    """The job's processes at work, with those of their children that have ended."""
    waits: dict[str, float]
    """The job's threads -> ready to work but without a core. Empty where the kernel does not tell."""


class ForeignLoad(Detector):
    """Other processes, or other virtual machines, on the CPU while the job needs it.

    Load on cores that the job leaves idle takes nothing from it. So of what others worked on the allowed cores, only as
    much counts as the job's own threads stood ready and had to wait for a core; where the kernel does not tell
    (/proc/<pid>/task/<tid>/schedstat is missing), as much as cannot have fallen into the cores' idle time. To it comes
    what the hypervisor took from these cores, by the job's share in their work. The sum is held against the CPU time
    that the job would have had without all that, and at least one core's: a job that waits for its GPU does not suffer
    from losing half of very little.

    It does not see what neighbours do to shared caches, memory and clocks while they leave the job its cores; the
    baseline measured against itself tells how noisy the machine is.
    """

    def __init__(self, cores: set[int], root_pid: int, limit: float) -> None:
        self._cores = {f"cpu{core}" for core in cores}
        self._root_pid, self._limit = root_pid, limit
        self._before: _Usage | None = None
        self.window_seconds = 0.0
        """The measured windows' length."""
        self.own_seconds = 0.0
        """CPU time of the job in them, as the next three are of the allowed cores."""
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0
        self.stolen_seconds = 0.0
        self.waited_seconds: float | None = None
        """The job's threads stood ready without a core; None where the kernel does not tell."""

    def open(self) -> None:
        self._before = self._usage()

    def close(self, *, measured: bool) -> None:
        before = self._before
        if not measured or before is None:
            return
        now = self._usage()
        self.window_seconds += now.moment - before.moment
        self.own_seconds += now.own - before.own
        self.busy_seconds += now.busy - before.busy
        self.idle_seconds += now.idle - before.idle
        self.stolen_seconds += now.stolen - before.stolen
        if now.waits:
            waited = sum(max(0.0, wait - before.waits.get(thread, 0.0)) for thread, wait in now.waits.items())
            self.waited_seconds = (self.waited_seconds or 0.0) + waited

    @property
    def taken_seconds(self) -> float:
        """CPU time that others took from the job.

        Of all windows together: the counters tick in hundredths of a second, more than a short window lasts, and what
        ticks too early in one ticks too late in another.
        """
        own, foreign = self.own_seconds, max(0.0, self.busy_seconds - self.own_seconds)
        harm = self.waited_seconds
        if harm is None:
            harm = max(0.0, foreign - self.idle_seconds)
        stolen = self.stolen_seconds * own / (own + foreign) if own > 0 else 0.0
        return min(foreign, harm) + stolen

    def refusals(self) -> list[Refusal]:
        due = max(self.window_seconds, self.own_seconds + self.taken_seconds)
        if not due or self.taken_seconds / due <= self._limit:
            return []
        return [
            Refusal(
                f"other processes took {self.taken_seconds:.2f} of the {due:.2f} s of CPU time that the job would have "
                f"had ({self.taken_seconds / due:.0%}; at most {self._limit:.0%} is allowed); stop what else runs on "
                "this machine and measure again"
            )
        ]

    def _usage(self) -> _Usage:
        tick = os.sysconf("SC_CLK_TCK")
        busy = idle = stolen = 0
        for line in (PROC / "stat").read_text(encoding="ascii").splitlines():
            core, *ticks = line.split()
            if core in self._cores:  # user nice system idle iowait irq softirq steal; guests are in user and nice
                times = [int(each) for each in ticks[:8]]
                idle += times[3] + times[4]
                stolen += times[7]
                busy += sum(times) - times[3] - times[4] - times[7]
        job = _job(self._root_pid)
        waits = {thread: wait for pid in job for thread, wait in _waits(pid)}
        return _Usage(time.monotonic(), busy / tick, idle / tick, stolen / tick, sum(job.values()) / tick, waits)


def _job(root_pid: int) -> dict[int, int]:
    """The processes of a job, ``root_pid`` and all its descendants -> clock ticks of CPU time each, with those of
    children that have ended."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for directory in PROC.iterdir():
        if directory.name.isdigit():
            try:
                status = (directory / "stat").read_bytes()
            except OSError:  # it has just ended
                continue
            fields = status.rpartition(b")")[2].split()  # after the name, which may hold anything
            pid = int(directory.name)
            children[int(fields[1])].append(pid)
            ticks[pid] = sum(int(field) for field in fields[11:15])  # utime stime cutime cstime
    job: dict[int, int] = {}
    found = [root_pid]
    for pid in found:
        job[pid] = ticks.get(pid, 0)
        found += children[pid]
    return job


def _waits(pid: int) -> list[tuple[str, float]]:
    """Each thread of a process, and the seconds it was ready to work but waited for a core."""
    waits = []
    try:
        for thread in (PROC / str(pid) / "task").iterdir():
            _, wait, turns = (thread / "schedstat").read_bytes().split()
            if turns != b"0":  # a kernel that does not count says so of a thread that has run, too
                waits.append((thread.name, int(wait) / 1e9))
    except OSError:  # it has just ended, or the kernel does not tell
        pass
    return waits


class CpuThrottling(Detector):
    """The CPU got too hot and slowed down. ``totals``: files that each hold the milliseconds of that so far.

    A core at full load often touches its limit for a moment; that belongs to its speed, as a GPU's power cap does.
    """

    def __init__(self, totals: Sequence[Path]) -> None:
        self._totals = totals
        self._before: list[int] = []
        self._opened = 0.0
        self.window_seconds = 0.0
        self.throttled_seconds = 0.0
        """The core or package that was throttled longest."""

    def open(self) -> None:
        self._before, self._opened = self._read(), time.monotonic()

    def close(self, *, measured: bool) -> None:
        if measured:
            self.window_seconds += time.monotonic() - self._opened
            longest = max(now - before for now, before in zip(self._read(), self._before, strict=True))
            self.throttled_seconds += longest / 1e3

    def refusals(self) -> list[Refusal]:
        if self.throttled_seconds <= MAX_THROTTLED_FRACTION * self.window_seconds:
            return []
        return [
            Refusal(
                f"the CPU got too hot and was throttled for {self.throttled_seconds:.2f} of {self.window_seconds:.2f} "
                "s; cool it better or limit its clock, and measure again"
            )
        ]

    def _read(self) -> list[int]:
        return [int(file.read_text(encoding="ascii")) for file in self._totals]


def _gpu_detectors(device: torch.device, root_pid: int) -> list[Detector]:
    """Those that the driver answers for this GPU; a virtual GPU's, say, answers few questions."""
    import pynvml

    found: list[Detector] = []
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return found
    candidates = (GpuThrottling(pynvml, handle), SharedGpu(pynvml, handle, root_pid))
    for detector in candidates:
        try:
            detector.look()
        except pynvml.NVMLError:
            continue
        found.append(detector)
    return found


class GpuThrottling(Detector):
    """The GPU was too hot or short of power and slowed down.

    Asks the driver what holds the clocks down at both ends of a window and ten times a second in between, in a thread
    of its own. The driver's counters of throttled time would miss nothing, but they do not tell these reasons apart, or
    have numbers and units that changed between drivers.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._slowdowns = {getattr(nvml, constant): reason for constant, reason in SLOWDOWNS.items()}
        self._looks: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.looks = 0
        """How often the driver was asked in measured windows."""
        self.slow_looks = 0
        """How often it named a slowdown."""
        self.reasons: dict[str, int] = {}
        """Slowdown -> how often it was named."""

    def look(self) -> int:
        """The bits of what holds the clocks down now. Raises NVMLError where the driver does not tell."""
        return int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))

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
        for bits in self._looks:
            seen = [reason for bit, reason in self._slowdowns.items() if bits & bit]
            self.looks += 1
            self.slow_looks += bool(seen)
            for reason in seen:
                self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def refusals(self) -> list[Refusal]:
        if not self.slow_looks:
            return []
        return [
            Refusal(
                f"the GPU throttled ({', '.join(sorted(self.reasons))}) in {self.slow_looks} of {self.looks} looks at "
                "it; see to its cooling and power supply, and measure again"
            )
        ]

    def _watch(self) -> None:
        more = True
        while more:
            with suppress(self._nvml.NVMLError):  # what the driver does not tell now, it may tell later
                self._looks.append(self.look())
            more = not self._stop.wait(GPU_SAMPLE_SECONDS)


class SharedGpu(Detector):
    """Another process computes on this GPU, at the start or at the end of a window.

    A container with process ids of its own does not find itself in the driver's list, which holds the host's. Then all
    processes beyond one are taken for others': a job has one process a GPU.
    """

    def __init__(self, nvml: Any, handle: Any, root_pid: int) -> None:
        self._nvml, self._handle, self._root_pid = nvml, handle, root_pid
        self._seen = 0
        self.others = 0
        """The most that were seen at once."""

    def look(self) -> int:
        """How many others compute on the GPU now. Raises NVMLError where the driver does not tell."""
        pids = {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        if os.getpid() in pids:
            return len(pids - _job(self._root_pid).keys()) if len(pids) > 1 else 0
        return max(0, len(pids) - 1)

    def open(self) -> None:
        self._seen = 0
        self._see()

    def close(self, *, measured: bool) -> None:
        if measured:
            self._see()
            self.others = max(self.others, self._seen)

    def refusals(self) -> list[Refusal]:
        if not self.others:
            return []
        return [
            Refusal(f"{self.others} other process(es) held the GPU; end them (nvidia-smi lists them) and measure again")
        ]

    def _see(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._seen = max(self._seen, self.look())


def of_clock(clock: Clock, max_input_wait: float | None) -> list[Refusal]:
    """What the step times of one rank say against themselves. None for ``max_input_wait``: any wait for input goes."""
    found = []
    disagreement = clock.disagreement()
    if disagreement:
        found.append(Refusal(disagreement))
    if max_input_wait is not None and clock.input_seconds > max_input_wait * clock.measured_seconds:
        found.append(
            Refusal(
                f"the steps waited for input {clock.input_seconds / clock.measured_seconds:.0%} of the time (at most "
                f"{max_input_wait:.0%} is allowed): this measures the input, not the technique; set train.placement to "
                "'resident', lighten train.augment, or raise bench.max_input_wait"
            )
        )
    return found


def of_memory(memory: Memory) -> list[Refusal]:
    """What the memory of one rank says against speeds and peak."""
    if not memory.retries:
        return []
    return [
        Refusal(
            f"the allocator ran out of memory and flushed its cache {memory.retries} time(s); lower train.batch_size "
            "or apply a technique that saves memory",
            voids_memory=True,
        )
    ]


def of_steps(measured: Sequence[int], *, asked: int, warmup: int) -> list[Refusal]:
    """``measured``: steps in the measured windows, one figure a rank; ``asked``: how many there should be at least."""
    fewest = min(measured)
    if not fewest:
        return [
            Refusal(
                f"no step was measured: the run ended within the {warmup} steps of its warm-up; raise train.epochs or "
                "lower train.warmup_steps"
            )
        ]
    found = []
    if len(set(measured)) > 1:
        found.append(Refusal(f"the ranks measured different numbers of steps: {sorted(set(measured))}"))
    if fewest < asked:
        found.append(Refusal(f"{fewest} of {asked} steps were measured: the run ended early; raise train.epochs"))
    return found


def of_ranks(ranks: Sequence[Sequence[Refusal]]) -> list[Refusal]:
    """The refusals of all ranks in one list; where there are several ranks, each reason names its own."""
    if len(ranks) == 1:
        return list(ranks[0])
    return [
        refusal._replace(reason=f"rank {rank}: {refusal.reason}")
        for rank, refusals in enumerate(ranks)
        for refusal in refusals
    ]
