"""The CPU, and how much of it this process may use."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")

KERNEL_FLAGS = (
    *("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_bf16", "amx_fp16", "amx_int8", "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)
"""The instruction sets that decide which CPU kernels are used."""

NATIVE_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def facts() -> dict[str, str]:
    """Return the first processor's entry in /proc/cpuinfo; empty if there is no such file.

    The entry is not cached. Call this rarely, because Linux generates the file for all processors on each read.
    """
    try:
        first = CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def model(facts: Mapping[str, str]) -> str:
    arm = [facts[key] for key in ("CPU implementer", "CPU part") if key in facts]
    return facts.get("model name") or " ".join(arm) or platform.processor() or platform.machine()


def flags(facts: Mapping[str, str]) -> set[str]:
    return set((facts.get("flags") or facts.get("Features") or "").split())


def cores() -> float:
    """Return how many cores this process may use, by its affinity and the quotas of its control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([allowed, *_quotas()])


def _quotas() -> Iterator[float]:
    """Yield the CPU quotas, in cores, of the control groups around this process. Groups without one are left out."""
    for group in _control_groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # version 2 and version 1
            with suppress(OSError, ValueError):  # there is no such file, or its quota is the word "max"
                quota, period = " ".join((group / name).read_text(encoding="ascii") for name in names).split()
                if int(quota) > 0:  # -1 means no quota
                    yield round(int(quota) / int(period), 2)


def memory_limits() -> Iterator[int]:
    """Yield the memory limits, in bytes, of the control groups around this process. A group without a limit is left out
    (version 2 of control groups) or yields a huge number (version 1)."""
    for group in _control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # there is no such file, or it contains the word "max"
                yield int((group / name).read_text(encoding="ascii"))


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the paths that this process's control group and its parents may have, in version 1 or 2 of control groups.

    Not all of these paths exist. In a container, the mount may already be the process's own group, so the parents'
    paths are tried too.
    """
    lines = CGROUP_MEMBERSHIP.read_text(encoding="utf-8").splitlines() if CGROUP_MEMBERSHIP.exists() else []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            for hierarchy in (controllers, controller) if controllers else ("", "unified"):
                for level in (Path(group.lstrip("/")), *Path(group.lstrip("/")).parents):
                    yield CGROUP_MOUNT / hierarchy / level
