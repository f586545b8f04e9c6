"""The checkout, where it lies, what it is to run on, and where runs are tracked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline import environment
from pipeline.tools.doctor.facts import Facts, nearest
from pipeline.tools.doctor.findings import Finding, not_applicable, ok, problem, remedy_for, unanswered, warning

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

OWN = 'sudo chown -R "$(id -u):$(id -g)" . ; then run containers with --user "$(id -u):$(id -g)"'


def params_file(facts: Facts) -> Finding:
    config, mistakes = facts.job.config, facts.job.mistakes
    if config:
        return ok(f"{len(config.variants)} variants: {', '.join(config.variants)}")
    return problem(mistakes, remedy_for(mistakes, "correct params.yaml; params.schema.json lists all keys"))


def variants(facts: Facts) -> Iterator[Finding]:
    job = facts.job
    for reason in dict.fromkeys(job.refused.values()):
        yield problem(f"cannot run here: {reason}", "follow the message, or use a machine that has it")
    skipped = [(name, *each) for name, plan in job.plans.items() for each in plan.skipped.items()]
    for name, technique, reason in skipped:
        found = f"{name}: {technique} is skipped: {reason}"
        yield warning(found, remedy_for(found, "none needed if that is known: the report says so"))
    if job.plans and not job.refused and not skipped:
        kinds = {"cuda": "GPU", "cpu": "CPU process"}
        placed = [f"{name} on {plan.processes} {kinds[plan.device]}(s)" for name, plan in job.plans.items()]
        yield ok(f"all run here as asked: {', '.join(placed)}")


def names(facts: Facts) -> Iterator[Finding]:
    """Whether the model, the loss and the metric are there; without params.yaml or torch, that is said already."""
    if (config := facts.job.config) and "version" in facts.torch.found:
        train, wrong = config.train, facts.names.failure
        found = ok(f"{train.model}, with {train.loss} and {train.metric}")
        yield unanswered(facts.names, wrong, "correct params.yaml, or the module that it names") if wrong else found


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
    more = "end other programs" if room == free else f"docker run --memory {need // GIB}g"
    found = f"{found}; {processes} training process(es) may need {_size(need)}"
    return warning(found, f"{more}, or lower processes in params.yaml")


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
        return problem(f"{path} is missing, or cannot be written to: worker processes cannot share locks", remedy)
    size, _, free = shutil.disk_usage(path)
    found = f"{path}: {_size(free)} of {_size(size)} free"
    if free >= SHARED_MEMORY_BYTES:
        return ok(found)
    if size >= SHARED_MEMORY_BYTES:
        remedy = f"end the jobs that use it, then remove what dead ones left: rm {path}/nccl-* {path}/torch_*"
    if (gpus := job.processes("cuda")) > 1:
        return problem(f"{found}; NCCL between {gpus} GPUs wants {_size(SHARED_MEMORY_BYTES)}", remedy)
    loading = [plan.applied for plan in job.plans.values() if plan.applied.data_loading == "dataloader"]
    if any(variant.loader_workers for variant in loading):
        return problem(f"{found}; the data loader's workers hand their batches over there", remedy)
    enough = "enough for this job here, too little for NCCL between GPUs or data loaders with workers"
    return warning(f"{found}; {enough}", remedy)


def work_tree(facts: Facts) -> Finding:
    root, place = facts.root, facts.root.resolve()
    if shut := [name for name in OURS if (root / name).exists() and not os.access(root / name, os.W_OK)]:
        found = f"user {os.getuid()} cannot write to {', '.join(shut)} in {place}"
        return problem(found, "mount it without :ro" if os.statvfs(root).f_flag & os.ST_RDONLY else OWN)
    if facts.container and file_system(place) == "overlay":
        found = f"{place} lies in the container's own layer: what is made here is lost with the container"
        return warning(found, f'docker run -v "$PWD:{place}" ... from a checkout on the host')
    return ok(f"{place} can be written to")


def file_system(path: Path) -> str:
    """Its type, such as ext4, nfs4 or, of a container's own layer, overlay."""
    types = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((types[each] for each in (path, *path.parents) if each in types), "unknown")


def git(facts: Facts) -> Finding:
    commit, failure = facts.git.found.get("commit"), facts.git.failure
    if commit:
        return ok(f"at commit {commit}")
    if "Needed a single revision" in failure:
        return warning("no commit yet; results name the commit that made them", "git commit")
    found = f"does not work in {facts.root.resolve()}; DVC and gate need it: {failure}"
    return problem(found, remedy_for(failure, "make it work here; where nothing answers, the file system may hang"))


def cache(facts: Facts) -> Finding:
    dvc, root = facts.dvc, facts.root.resolve()
    if "cache" not in dvc.found:
        found = f"DVC does not work here: {dvc.failure}"
        remedy = remedy_for(found, "see `dvc doctor`, git above, .dvc/config and .dvc/config.local")
        return unanswered(dvc, found, remedy)
    cache, link = Path(dvc.found["cache"]), dvc.found.get("link")
    shown = cache.relative_to(root) if cache.is_relative_to(root) else cache
    there = nearest(cache)
    if not os.access(there, os.W_OK | os.X_OK):
        return problem(f"user {os.getuid()} cannot write to {there}", OWN)
    if there.stat().st_dev != root.stat().st_dev:
        where = f"{shown} ({file_system(there)}) is on another file system than the work tree ({file_system(root)})"
        lost = ", and the cache is lost with the container" if file_system(there) == "overlay" else ""
        remedy = "mount the checkout with its .dvc/cache as one volume, or dvc cache dir --local PATH_ON_THE_SAME_DISK"
        return warning(f"{where}: every file is copied{lost}", remedy)
    how = "files are copied: twice the space" if link == "copy" else f"files are {link}s: no copies"
    return ok(f"{shown}, on the file system of the work tree; {how if link else 'it is not there yet'}")


def remote(facts: Facts) -> Finding:
    found = facts.dvc.found
    if "remote" not in found:
        return not_applicable("unknown, see above")
    name, others, where = found["remote"], found["remotes"], f"{found['remote']} ({found['url']})"
    if name is None:
        add = "dvc remote add --default storage s3://BUCKET/PATH (or a shared directory)"
        choose = f"dvc remote default {others[0]}" if others else add
        return not_applicable("no default one: data and results stay on this machine", choose)
    if "exists" not in found:
        remedy = f"see `dvc status --cloud --verbose`, credentials (dvc remote modify --local {name} ...) and network"
        return problem(f"{where}: {facts.dvc.failure}", remedy_for(facts.dvc.failure, remedy))
    if not found.get("writable", True):
        return problem(f"user {os.getuid()} cannot write to {where}", "change its owner; in a container, mount it")
    return ok(f"{where} answers" + ("" if found["exists"] else "; nothing is there yet (dvc push makes it)"))


def disk(facts: Facts) -> Finding:
    """The fullest of the file systems that will hold something; what does not exist yet goes where its parent is."""
    root, cache = facts.root.resolve(), facts.dvc.found.get("cache")
    places = [root, root / "data", root / "models", *([Path(cache)] if cache else [])]
    free, place = min((shutil.disk_usage(nearest(place)).free, place) for place in places)
    remedy = "free some: dvc gc --workspace removes cached data of other versions; docker system prune"
    found = f"{_size(free)} free for {place}"
    if free < LEAST_DISK_BYTES:
        return problem(f"{found}; a small job needs {_size(LEAST_DISK_BYTES)}", remedy)
    if free < DISK_BYTES:
        return warning(f"{found}; data, models and DVC's copies of both may need more", remedy)
    return ok(found)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def tracking(facts: Facts) -> Finding:
    found, failure = facts.store.found, facts.store.failure
    if facts.store.late:
        return problem(f"MLFLOW_TRACKING_URI: {failure}", "check the address and the name server")
    if not found:
        raise RuntimeError(failure)
    return {True: ok, False: problem, None: not_applicable}[found["well"]](found["found"], found["remedy"])
