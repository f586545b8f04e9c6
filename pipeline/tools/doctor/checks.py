"""The checks: of the job, PyTorch and GPUs, the machine, the checkout and where runs are tracked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline import environment
from pipeline.environment.gpus import KERNEL_DRIVER
from pipeline.tools.doctor.facts import Facts, nearest
from pipeline.tools.doctor.findings import ADD_GPUS, USE_CPU, Finding, not_applicable, ok, problem, warning

PCI = Path("/sys/bus/pci/devices")
"""Containers see it too. 0x10de is NVIDIA, classes that begin with 0x03 are displays and what computes like them."""

NEW_DRIVER = "driver 580 or newer"
"""It runs all minor versions of CUDA 13, and all older ones (NVIDIA's table of minor version compatibility)."""

OURS = (
    *(".", ".dvc", ".dvc/tmp", ".dvc/cache", "data", "models", "reports", "results"),
    *("dvc.lock", "environment.json", "bench.json", "mlflow.db"),
)
SHARED_MEMORY = Path("/dev/shm")

GIB = 2**30
SHARED_MEMORY_BYTES = GIB
"""NVIDIA's recommendation for NCCL in containers (--shm-size=1g)."""
PROCESS_BYTES = 2 * GIB
"""Room for a training process: torch takes most of the first GiB, model and data come on top."""
DISK_BYTES = 5 * GIB
"""Data, models and DVC's copies of both, of a small job with some room."""
LEAST_DISK_BYTES = GIB


def params_file(facts: Facts) -> Iterator[Finding]:
    job = facts.job
    if job.mistakes:
        yield problem(job.mistakes)
    for reason in dict.fromkeys(job.refused.values()):
        yield problem(f"cannot run here: {reason}", "follow the message, or use a machine that has it")
    skipped = [(name, *each) for name, plan in job.plans.items() for each in plan.skipped.items()]
    for name, technique, reason in skipped:
        yield warning(f"{name}: {technique} is skipped: {reason}")
    if job.plans and not job.refused and not skipped:
        kinds = {"cuda": "GPU", "cpu": "CPU process"}
        placed = [f"{name} on {plan.processes} {kinds[plan.device]}(s)" for name, plan in job.plans.items()]
        yield ok(f"all variants run here as asked: {', '.join(placed)}")


def torch(facts: Facts) -> Finding:
    version, cuda = facts.torch.told("version"), facts.torch.told("cuda")
    device, gpus = facts.job.device, facts.driver.found.get("gpus")
    if cuda is None and (device == "cuda" or (device == "auto" and gpus)):
        found = f"{version} is a CPU build" + (f", but there are {len(gpus)} GPU(s)" if gpus else "")
        return (problem if device == "cuda" else warning)(found, f"install a CUDA build of torch, {USE_CPU}")
    return ok(f"{version}, for {f'CUDA {cuda}' if cuda else 'CPUs'}")


def driver(facts: Facts) -> Finding:
    failure, device = facts.driver.failure, facts.job.device
    if device == "cpu":
        return not_applicable("train.device is cpu")
    if failure and facts.computes:
        found = f"NVML fails ({failure}): CUDA computes, but nobody sees heat and other processes, and NCCL misses it"
        remedy = "install the driver's libnvidia-ml.so.1; in a container: --env"
        return warning(found, f"{remedy} NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    if "LibraryNotFound" not in failure:
        return problem(f"does not answer: {failure}") if failure else _version(facts)
    devices = [[(each / name).read_text() for name in ("vendor", "class")] for each in PCI.glob("*")]
    if KERNEL_DRIVER.exists() or any(made.startswith("0x10de") and kind.startswith("0x03") for made, kind in devices):
        remedy = f"install {NEW_DRIVER}, whole, on the host; in a container: {ADD_GPUS}; {USE_CPU}"
        return problem("there is an NVIDIA GPU, but libnvidia-ml.so.1 is missing, which comes with the driver", remedy)
    if device == "cuda":
        remedy = f"use a machine with a GPU; in a container: {ADD_GPUS}; {USE_CPU}"
        return problem("train.device is cuda, but there is no NVIDIA GPU", remedy)
    return not_applicable("no NVIDIA GPU here: the job runs on the CPU")


def _version(facts: Facts) -> Finding:
    driver, torch = facts.driver.found, facts.torch.found
    (newest, minor), built_for = driver["cuda"], torch.get("cuda") or "0"
    found = f"{driver['version']}, for CUDA up to {newest}.{minor}"
    if newest >= int(built_for.split(".")[0]) or facts.computes:  # with the compatibility package an older one does
        return ok(found)
    found += f"; too old for torch {torch['version']}, which is built for CUDA {built_for}"
    return problem(found, f"install {NEW_DRIVER} on the host, or a torch that is built for CUDA {newest}")


def gpus(facts: Facts) -> Iterator[Finding]:
    torch, driver, planned = facts.torch, facts.driver, facts.planned_gpus
    shown, there = os.environ.get("CUDA_VISIBLE_DEVICES"), driver.found.get("gpus", [])
    seen = torch.found.get("gpus", 0)
    if facts.job.device == "cpu" or torch.found.get("cuda") is None or (driver.failure and not facts.computes):
        yield not_applicable("none that torch could use; see above")
    elif there and shown is not None and not planned:
        found = f"CUDA_VISIBLE_DEVICES={shown!r} hides all {len(there)}"
        yield (problem if facts.job.device == "cuda" else warning)(found, "unset CUDA_VISIBLE_DEVICES")
    elif not there and not driver.failure:
        yield problem("the driver shows none", f"run nvidia-smi on the host; in a container: {ADD_GPUS}")
    else:
        yield from _split(there, shown or "")
        if seen == planned and not torch.failure and seen:
            part = f" ({seen} of {len(there)}: CUDA_VISIBLE_DEVICES={shown})" if shown is not None and there else ""
            yield ok(f"torch computes on {seen} x {', '.join(dict.fromkeys(torch.found['names']))}{part}")
        elif planned or not any(isinstance(each, list) for each in there):
            found = f"the driver shows {len(there)}, the plans count on {planned}, torch sees {seen}: {torch.failure}"
            yield problem(found.removesuffix(": "))


def _split(there: list[list[str] | None], shown: str) -> Iterator[Finding]:
    for index, instances in enumerate(there):
        if instances == []:
            remedy = f"nvidia-smi -i {index} -mig 0 (whole again), or nvidia-smi mig -i {index} -cgi ... -C"
            yield problem(f"GPU {index} is split (MIG) but has no instance, so CUDA cannot use it", remedy)
        elif instances and not shown.startswith("MIG-"):
            found = f"GPU {index} is split (MIG): CUDA shows a process one instance, so ddp has one GPU"
            remedy = f"export CUDA_VISIBLE_DEVICES={instances[0]} to choose one; nvidia-smi -mig 0 makes it whole again"
            yield warning(found, remedy)


def cpu(facts: Facts) -> Finding:
    cores, present, processes = environment.cores(), os.cpu_count() or 1, facts.job.processes("cpu", "cuda")
    found = f"{cores:g} of {present} cores" if cores < present else f"{present} cores"
    if cores >= processes:
        return ok(found)
    found = f"{found} for {processes} processes that train together: they wait for each other"
    return warning(found, f"give the container more (--cpus {processes}), or lower processes in params.yaml")


def memory(facts: Facts) -> Finding:
    free, processes = psutil.virtual_memory().available, facts.job.processes("cpu", "cuda")
    room, need = min([free, *_memory_limits()]), PROCESS_BYTES * processes
    found = f"{_size(free)} free" if room == free else f"{_size(room)} is the container's limit"
    if room >= need:
        return ok(found)
    found = f"{found}; {processes} training process(es) may need {_size(need)}"
    remedy = f"end other programs, or lower processes in params.yaml; a container: docker run --memory {need // GIB}g"
    return warning(found, remedy)


def _memory_limits() -> Iterator[int]:
    """Bytes that each of the control groups around this process allows."""
    for group in environment.control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # it is not there, or "max"
                yield int((group / name).read_text(encoding="ascii"))


def shared_memory(facts: Facts) -> Finding:
    path = SHARED_MEMORY
    remedy = "docker run --shm-size=1g, or --ipc=host; on a host: mount -o remount,size=1g /dev/shm; "
    remedy += f"what dead jobs left there: rm {path}/nccl-* {path}/torch_*"
    if not psutil.LINUX:
        return not_applicable("this system has no /dev/shm")
    if not os.access(path, os.W_OK | os.X_OK):
        return problem(f"{path} is missing, or cannot be written to: worker processes cannot share locks", remedy)
    size, _, free = shutil.disk_usage(path)
    found = f"{path}: {_size(free)} of {_size(size)} free"
    if free >= SHARED_MEMORY_BYTES:
        return ok(found)
    variants = [plan.applied for plan in facts.job.plans.values()]
    loading = any(variant.data_loading == "dataloader" and variant.loader_workers for variant in variants)
    found += f"; NCCL between GPUs, and a data loader's workers, want {_size(SHARED_MEMORY_BYTES)}"
    return (problem if loading or facts.job.processes("cuda") > 1 else warning)(found, remedy)


def work_tree(facts: Facts) -> Finding:
    root, place = facts.root, facts.root.resolve()
    if shut := [name for name in OURS if (root / name).exists() and not os.access(root / name, os.W_OK)]:
        return problem(f"user {os.getuid()} cannot write to {', '.join(shut)} in {place}")
    if file_system(place) == "overlay":
        found = f"{place} lies in the container's own layer: what is made here is lost with the container"
        return warning(found, f'docker run -v "$PWD:{place}" ... from a checkout on the host')
    return ok(f"{place} can be written to")


def file_system(path: Path) -> str:
    """Its type, such as ext4, nfs4 or, of a container's own layer, overlay."""
    types = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((types[each] for each in (path, *path.parents) if each in types), "unknown")


def git(facts: Facts) -> Finding:
    if "Needed a single revision" in facts.git.failure:
        return warning("no commit yet; results name the commit that made them", "git commit")
    return ok(f"at commit {facts.git.told('commit')}")


def cache(facts: Facts) -> Finding:
    cache, root = Path(facts.dvc.told("cache")), facts.root.resolve()
    shown = cache.relative_to(root) if cache.is_relative_to(root) else cache
    there = nearest(cache)
    if not os.access(there, os.W_OK | os.X_OK):
        return problem(f"user {os.getuid()} cannot write to {there}")
    if there.stat().st_dev == root.stat().st_dev:
        return ok(f"{shown}, on the file system of the work tree")
    lost = ", and the cache is lost with the container" if file_system(there) == "overlay" else ""
    remedy = "mount the checkout with its .dvc/cache as one volume, or dvc cache dir --local PATH_ON_THE_SAME_DISK"
    return warning(f"{shown} is on another file system than the work tree: every file is copied{lost}", remedy)


def remote(facts: Facts) -> Finding:
    if "remote" not in facts.dvc.found:
        return not_applicable("unknown, see above")
    if (name := facts.dvc.found["remote"]) is None:
        add = "dvc remote add --default storage s3://BUCKET/PATH (or a shared directory)"
        return not_applicable("no default one: data and results stay on this machine", add)
    where = f"{name} ({facts.dvc.found['url']})"
    if "exists" not in facts.dvc.found:
        return problem(f"{where}: {facts.dvc.failure}")
    return ok(f"{where} answers" + ("" if facts.dvc.found["exists"] else "; nothing is there yet (dvc push makes it)"))


def disk(facts: Facts) -> Finding:
    """The fullest of the file systems that will hold something; what does not exist yet goes where its parent is."""
    root, cache = facts.root.resolve(), facts.dvc.found.get("cache")
    places = [root, root / "data", root / "models", *([Path(cache)] if cache else [])]
    free, place = min((shutil.disk_usage(nearest(place)).free, place) for place in places)
    found = f"{_size(free)} free for {place}"
    if free >= DISK_BYTES:
        return ok(found)
    remedy = "free some: dvc gc --workspace removes cached data of other versions; docker system prune"
    found += f"; data, models and DVC's copies of both may need {_size(DISK_BYTES)}"
    return (warning if free >= LEAST_DISK_BYTES else problem)(found, remedy)


def tracking(facts: Facts) -> Finding:
    judge = {True: ok, False: problem, None: not_applicable}[facts.store.told("well")]
    return judge(facts.store.found["found"], facts.store.found["remedy"])


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
