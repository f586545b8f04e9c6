"""Processor, memory, shared memory and disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from pipeline import environment
from pipeline.tools.doctor.findings import Finding
from pipeline.tools.doctor.params import Job

SHARED_MEMORY = Path("/dev/shm")

GIB = 2**30
SHARED_MEMORY_BYTES = GIB
"""NVIDIA's recommendation for NCCL in containers (--shm-size=1g)."""
PROCESS_BYTES = 2 * GIB
"""Room for a training process: torch takes most of the first GiB, model and data come on top."""
DISK_BYTES = 5 * GIB
"""Data, models and DVC's copies of both, of a small job with some room."""
LEAST_DISK_BYTES = GIB


def check_cpu(job: Job) -> Finding:
    cores, present = environment.cores(), os.cpu_count() or 1
    found = f"{cores:g} of {present} cores" if cores < present else f"{present} cores"
    if cores < job.processes:
        return Finding(
            "CPU",
            "warning",
            f"{found} for {job.processes} processes that train together: they wait for each other",
            f"give the container more (--cpus {job.processes}), or lower processes in params.yaml",
        )
    return Finding("CPU", "ok", found)


def check_memory(job: Job) -> Finding:
    import psutil

    free = psutil.virtual_memory().available
    limit = memory_limit()
    room, found = free, f"{_size(free)} free"
    if limit is not None and limit < free:
        room, found = limit, f"{_size(limit)} is the container's limit"
    need = PROCESS_BYTES * job.processes
    if room < need:
        each = "a training process" if job.processes == 1 else f"{job.processes} training processes"
        remedy = "end other programs, or lower processes in params.yaml"
        if room == limit:
            remedy = f"docker run --memory {need // GIB}g, or lower processes in params.yaml"
        return Finding("memory", "warning", f"{found}; {each} may need {_size(need)}", remedy)
    return Finding("memory", "ok", found)


def memory_limit() -> int | None:
    """Bytes that the control groups around this process allow; None without a limit."""
    limits = []
    for group in environment.control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                text = (group / name).read_text(encoding="ascii").strip()
            except OSError:
                continue
            if text != "max":
                limits.append(int(text))
    return min(limits, default=None)


def check_shared_memory(job: Job, path: Path = SHARED_MEMORY) -> Finding:
    check = "shared memory"
    remedy = "docker run --ipc=host, or --shm-size=1g; on a host: mount -o remount,size=1g /dev/shm"
    if not path.is_dir():
        if path == SHARED_MEMORY and not Path("/proc/self").exists():
            return Finding(check, "not applicable", "this system has no /dev/shm")
        return Finding(check, "problem", f"{path} is missing: worker processes cannot share locks", remedy)
    if not os.access(path, os.W_OK | os.X_OK):
        return Finding(check, "problem", f"{path} cannot be written to: worker processes cannot share locks", remedy)
    system = os.statvfs(path)
    size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    found = f"{path}: {_size(free)} of {_size(size)} free"
    if free >= SHARED_MEMORY_BYTES:
        return Finding(check, "ok", found)
    if size >= SHARED_MEMORY_BYTES:
        remedy = f"end the jobs that use it, then remove what dead ones left: rm {path}/nccl-* {path}/torch_*"
    if job.gpu_processes > 1:
        found += f"; NCCL between {job.gpu_processes} GPUs wants {_size(SHARED_MEMORY_BYTES)}"
        return Finding(check, "problem", found, remedy)
    if job.loader_workers:
        found += f"; {job.loader_workers} workers of the data loader hand their batches over there"
        return Finding(check, "problem", found, remedy)
    found += "; enough for this job here, too little for NCCL between GPUs or data loaders with workers"
    return Finding(check, "warning", found, remedy)


def check_disk(places: Iterable[Path]) -> Finding:
    """The fullest of the file systems that hold ``places``; what does not exist yet goes where its parent is."""
    free = {place: shutil.disk_usage(nearest(place)).free for place in places}
    place = min(free, key=lambda each: free[each])
    found = f"{_size(free[place])} free for {place}"
    remedy = "free some: dvc gc --workspace removes cached data of other versions; docker system prune"
    if free[place] < LEAST_DISK_BYTES:
        return Finding("disk", "problem", f"{found}; a small job needs {_size(LEAST_DISK_BYTES)}", remedy)
    if free[place] < DISK_BYTES:
        wanted = "data, models and DVC's copies of both may need more"
        return Finding("disk", "warning", f"{found}; {wanted}", remedy)
    return Finding("disk", "ok", found)


def nearest(path: Path) -> Path:
    """``path``, or the first directory above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
