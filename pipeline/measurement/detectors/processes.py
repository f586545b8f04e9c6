"""What /proc tells of processes: who belongs to a job, how long they worked and how long they waited for a core."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import psutil

PROC = Path("/proc")


def job_ticks(root_pid: int) -> dict[int, int]:
    """The processes of a job, ``root_pid`` and all its descendants -> clock ticks of CPU time each.

    Those of children that have ended count for their parents.
    """
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


def children_seconds(root_pid: int) -> float:
    """CPU time so far of all descendants of a process that live; 0 where there is no /proc."""
    if not (PROC / "stat").exists():
        return 0.0
    ticks = job_ticks(root_pid)
    return (sum(ticks.values()) - ticks[root_pid]) / os.sysconf("SC_CLK_TCK")


def name_of(pid: int) -> str:
    """Empty where there is no such process, in this namespace of process ids."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


def thread_waits(pid: int) -> list[tuple[str, float]]:
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
