"""Detect disturbances of the CPU: other processes, other virtual machines, heat."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.measurement.detectors import processes
from pipeline.measurement.detectors.base import MAX_THROTTLED_FRACTION, Detector, Rejection

CPUS = Path("/sys/devices/system/cpu")


def cpu_detectors(root_pid: int, max_foreign_load: float | None) -> list[Detector]:
    """Return the CPU detectors for which this system has the counters; see ``detectors``."""
    found: list[Detector] = []
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if max_foreign_load is not None and cores and (processes.PROC / "stat").exists():
        found.append(ForeignLoad(cores, root_pid, max_foreign_load))
    totals = [file for core in sorted(cores) for file in CPUS.glob(f"cpu{core}/thermal_throttle/*_total_time_ms")]
    if totals:
        found.append(CpuThrottling(totals))
    return found


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

    def rejections(self) -> Iterator[Rejection]:
        due = max(self.seconds["window"], self.seconds["own"] + self.taken_seconds)
        if due and (share := self.taken_seconds / due) > self._limit:
            accepting = min(1.0, math.floor(10 * share + 2) / 10)  # above the share, because the load varies
            yield Rejection(
                f"other processes took {self.taken_seconds:.2f} of the {due:.2f} s of CPU time that the job would have "
                f"had ({share:.0%}; at most {self._limit:.0%} is allowed); stop other work on this machine and "
                f"measure again, or accept this load with bench.max_foreign_load: {accepting:.1f}"
            )

    def _counters(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the counters of ``seconds`` now, and thread of the job -> time in which it waited for a core."""
        job, tick = processes.job_ticks(self._root_pid), os.sysconf("SC_CLK_TCK")
        now = {"window": time.monotonic(), "own": sum(job.values()) / tick, "busy": 0.0, "idle": 0.0, "stolen": 0.0}
        for line in (processes.PROC / "stat").read_text(encoding="ascii").splitlines():
            core, *ticks = line.split()
            if core in self._cores:  # user and nice include the time of guests
                user, nice, system, idle, iowait, irq, softirq, steal = (int(each) / tick for each in ticks[:8])
                now["busy"] += user + nice + system + irq + softirq
                now["idle"] += idle + iowait
                now["stolen"] += steal
        return now, {thread: wait for pid in job for thread, wait in processes.thread_waits(pid)}


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
            yield Rejection(
                f"the CPU got too hot and was throttled for {self.throttled_seconds:.2f} of {self.window_seconds:.2f} "
                "s; cool it better or limit its clock, and measure again"
            )

    def _read(self) -> list[int]:
        return [int(file.read_text(encoding="ascii")) for file in self._totals]
