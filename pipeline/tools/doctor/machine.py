"""Processor, memory, shared memory and disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline import environment
from pipeline.tools.doctor.facts import Facts
from pipeline.tools.doctor.findings import Finding, not_applicable, ok, problem, warning
from pipeline.tools.doctor.probes import nearest

SHARED_MEMORY = Path("/dev/shm")

GIB = 2**30
SHARED_MEMORY_BYTES = GIB
"""NVIDIA's recommendation for NCCL in containers (--shm-size=1g)."""
PROCESS_BYTES = 2 * GIB
"""Room for a training process: torch takes most of the first GiB, model and data come on top."""
DISK_BYTES = 5 * GIB
"""Data, models and DVC's copies of both, of a small job with some room."""
LEAST_DISK_BYTES = GIB


def cpu(facts: Facts) -> Finding:
    cores, present, processes = environment.cores(), os.cpu_count() or 1, facts.job.processes
    found = f"{cores:g} of {present} cores" if cores < present else f"{present} cores"
    if cores >= processes:
        return ok(found)
    return warning(
        f"{found} for {processes} processes that train together: they wait for each other",
        f"give the container more (--cpus {processes}), or lower processes in params.yaml",
    )


def memory(facts: Facts) -> Finding:
    free, processes = psutil.virtual_memory().available, facts.job.processes
    room, need = min([free, *_memory_limits()]), PROCESS_BYTES * processes
    found = f"{_size(free)} free" if room == free else f"{_size(room)} is the container's limit"
    if room >= need:
        return ok(found)
    each = "a training process" if processes == 1 else f"{processes} training processes"
    more = "end other programs" if room == free else f"docker run --memory {need // GIB}g"
    return warning(f"{found}; {each} may need {_size(need)}", f"{more}, or lower processes in params.yaml")


def _memory_limits() -> Iterator[int]:
    """Bytes that each of the control groups around this process allows."""
    for group in environment.control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # it is not there, or "max"
                yield int((group / name).read_text(encoding="ascii"))


def shared_memory(facts: Facts) -> Finding:
    path, job = SHARED_MEMORY, facts.job
    remedy = "docker run --shm-size=1g, or --ipc=host; on a host: mount -o remount,size=1g /dev/shm"
    if not psutil.LINUX:
        return not_applicable("this system has no /dev/shm")
    if not os.access(path, os.W_OK | os.X_OK):
        state = "cannot be written to" if path.exists() else "is missing"
        return problem(f"{path} {state}: worker processes cannot share locks", remedy)
    size, _, free = shutil.disk_usage(path)
    found = f"{path}: {_size(free)} of {_size(size)} free"
    if free >= SHARED_MEMORY_BYTES:
        return ok(found)
    if size >= SHARED_MEMORY_BYTES:
        remedy = f"end the jobs that use it, then remove what dead ones left: rm {path}/nccl-* {path}/torch_*"
    if job.gpu_processes > 1:
        return problem(f"{found}; NCCL between {job.gpu_processes} GPUs wants {_size(SHARED_MEMORY_BYTES)}", remedy)
    readers = [plan for plan in job.plans.values() if plan.applied.data_loading == "dataloader"]
    if workers := max((plan.processes * plan.applied.loader_workers for plan in readers), default=0):
        return problem(f"{found}; {workers} workers of the data loader hand their batches over there", remedy)
    enough = "enough for this job here, too little for NCCL between GPUs or data loaders with workers"
    return warning(f"{found}; {enough}", remedy)


def disk(facts: Facts) -> Finding:
    """The fullest of the file systems that will hold something; what does not exist yet goes where its parent is."""
    root, cache = facts.root.resolve(), facts.dvc.found.get("cache")
    places = [root, root / "data", root / "models", *([Path(cache)] if cache else [])]
    usage = {place: shutil.disk_usage(nearest(place)).free for place in places}
    place, free = min(usage.items(), key=lambda each: each[1])
    found = f"{_size(free)} free for {place}"
    remedy = "free some: dvc gc --workspace removes cached data of other versions; docker system prune"
    if free < LEAST_DISK_BYTES:
        return problem(f"{found}; a small job needs {_size(LEAST_DISK_BYTES)}", remedy)
    if free < DISK_BYTES:
        return warning(f"{found}; data, models and DVC's copies of both may need more", remedy)
    return ok(found)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
