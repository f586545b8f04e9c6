"""Read from /proc which processes belong to a job, their CPU time, and how long their threads waited for a core."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import psutil

PROC = Path("/proc")


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
    found = [root_pid]
    for pid in found:
        job[pid] = ticks.get(pid, 0)
        found += children[pid]
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
