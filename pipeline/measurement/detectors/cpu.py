"""Disturbances of the CPU: other processes, other virtual machines, heat."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.measurement.detectors import processes
from pipeline.measurement.detectors.base import MAX_THROTTLED_FRACTION, Detector, Refusal

CPUS = Path("/sys/devices/system/cpu")


def cpu_detectors(root_pid: int, max_foreign_load: float | None) -> list[Detector]:
    """Those that this system has the counters for; see ``detectors``."""
    found: list[Detector] = []
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if max_foreign_load is not None and cores and (processes.PROC / "stat").exists():
        found.append(ForeignLoad(cores, root_pid, max_foreign_load))
    totals = [file for core in sorted(cores) for file in CPUS.glob(f"cpu{core}/thermal_throttle/*_total_time_ms")]
    if totals:
        found.append(CpuThrottling(totals))
    return found


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
        for line in (processes.PROC / "stat").read_text(encoding="ascii").splitlines():
            core, *ticks = line.split()
            if core in self._cores:  # user nice system idle iowait irq softirq steal; guests are in user and nice
                times = [int(each) for each in ticks[:8]]
                idle += times[3] + times[4]
                stolen += times[7]
                busy += sum(times) - times[3] - times[4] - times[7]
        job = processes.job_ticks(self._root_pid)
        waits = {thread: wait for pid in job for thread, wait in processes.thread_waits(pid)}
        return _Usage(time.monotonic(), busy / tick, idle / tick, stolen / tick, sum(job.values()) / tick, waits)


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
