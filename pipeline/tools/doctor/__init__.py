"""Find what this machine or container lacks for the job of params.yaml, and how to fix it.

``doctor`` works even if much is broken: each fault becomes a line of its output. It stops probes that hang, and changes
nothing. A check is a function that takes the ``Facts`` and returns one or more findings; ``CHECKS`` lists all checks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from pipeline import environment
from pipeline.environment.gpus import KERNEL_DRIVER
from pipeline.errors import count
from pipeline.tools.doctor import findings
from pipeline.tools.doctor.facts import LATE, Facts, Unanswered, look, nearest
from pipeline.tools.doctor.findings import USE_CPU, Finding, enough, not_applicable, ok, problem, warning

PCI = Path("/sys/bus/pci/devices")
"""Directory of the PCI devices, which containers see too. Vendor 0x10de is NVIDIA; classes that begin with 0x03 are
display controllers, which include GPUs."""

OURS = (
    *(".", ".dvc", ".dvc/tmp", ".dvc/cache", "data", "models", "reports", "results"),
    *("dvc.lock", "environment.json", "bench.json", "mlflow.db"),
)
SHARED_MEMORY = Path("/dev/shm")

GIB = 2**30
SHARED_MEMORY_BYTES = GIB
"""NVIDIA's recommendation for NCCL in containers (--shm-size=1g)."""
PROCESS_BYTES = 2 * GIB
"""Memory that a training process may need: torch takes most of the first GiB, model and data take the rest."""
DISK_BYTES = 5 * GIB
"""Free space that data, models and DVC's copies of both need for a small job, with a reserve; doctor warns of less."""
LEAST_DISK_BYTES = GIB
"""With less free space, doctor reports a problem."""


def params_file(facts: Facts) -> Iterator[Finding]:
    job = facts.job
    if job.mistakes:
        yield problem(job.mistakes)
    for reason in dict.fromkeys(job.refused.values()):
        yield problem(f"cannot run here: {reason}", "follow the message, or use a machine that can run this variant")
    skipped = [(name, *each) for name, plan in job.plans.items() for each in plan.skipped.items()]
    for name, technique, reason in skipped:
        yield warning(f"{name}: {technique} is skipped: {reason}")
    if job.plans and not job.refused and not skipped:
        kinds = {"cuda": "GPU", "cpu": "CPU process"}
        placed = [f"{name} on {count(plan.processes, kinds[plan.device])}" for name, plan in job.plans.items()]
        yield ok(f"all variants run here as requested: {', '.join(placed)}")


def parts(facts: Facts) -> Finding:
    """Judge whether the model, the loss, the metric, the task and the data of the job can be made, as training makes
    them."""
    if facts.job.mistakes:
        return not_applicable("not checked; see above")
    model = facts.parts.told("model")
    if facts.parts.failure:
        return problem(facts.parts.failure)
    if "data" not in facts.parts.found:
        return not_applicable(f"{model} was found, but building it needs the prepared data", "dvc repro prepare")
    return ok(f"{model} has {facts.parts.found['parameters']:,} parameters on {facts.parts.found['data']}")


def torch(facts: Facts) -> Finding:
    version, cuda = facts.torch.told("version"), facts.torch.told("cuda")
    device, gpus = facts.job.device, facts.driver.found.get("gpus")
    if cuda is None and (device == "cuda" or (device == "auto" and gpus)):
        found = f"{version} is a CPU build" + (f", but this machine has {count(len(gpus), 'GPU')}" if gpus else "")
        return (problem if device == "cuda" else warning)(found, f"install a CUDA build of torch, {USE_CPU}")
    return ok(f"{version}, for {f'CUDA {cuda}' if cuda else 'CPUs'}")


def driver(facts: Facts) -> Finding:
    failure, device = facts.driver.failure, facts.job.device
    if device == "cpu":
        return not_applicable("train.device is cpu")
    if failure and facts.computes:
        return warning(f"NVML fails ({failure}): CUDA works, but throttling and other processes are not detected")
    if not failure:
        return ok(f"{facts.driver.found['version']}, for CUDA up to {facts.driver.found['cuda']}")
    if "LibraryNotFound" not in failure:
        return problem(f"does not answer: {failure}")
    devices = [[(each / name).read_text() for name in ("vendor", "class")] for each in PCI.glob("*")]
    if KERNEL_DRIVER.exists() or any(made.startswith("0x10de") and kind.startswith("0x03") for made, kind in devices):
        return problem("there is an NVIDIA GPU, but the driver's library libnvidia-ml.so.1 is missing")
    if device == "cuda":
        return problem("train.device is cuda, but there is no NVIDIA GPU")
    return not_applicable("no NVIDIA GPU here: the job runs on the CPU")


def gpus(facts: Facts) -> Iterator[Finding]:
    torch, driver, planned = facts.torch, facts.driver, facts.planned_gpus
    shown, there = os.environ.get("CUDA_VISIBLE_DEVICES"), driver.found.get("gpus", [])
    seen = torch.found.get("gpus", 0)
    if facts.job.device == "cpu" or torch.found.get("cuda") is None or (driver.failure and not facts.computes):
        yield not_applicable("there is no GPU that torch could use; see above")
    elif there and shown is not None and not planned:
        found = f"CUDA_VISIBLE_DEVICES={shown!r} hides all {len(there)} GPUs"
        yield (problem if facts.job.device == "cuda" else warning)(found, "unset CUDA_VISIBLE_DEVICES")
    else:
        yield from _split(there, shown or "")
        if seen == planned and not torch.failure and seen:
            part = f" ({seen} of {len(there)}: CUDA_VISIBLE_DEVICES={shown})" if shown is not None and there else ""
            yield ok(f"torch computes on {seen} x {', '.join(dict.fromkeys(torch.found['names']))}{part}")
        elif planned or not any(isinstance(each, list) for each in there):
            found = f"the driver shows {len(there)} GPUs, the plans use {planned}, torch sees {seen}: {torch.failure}"
            yield problem(found.removesuffix(": "))


def _split(there: list[list[str] | None], shown: str) -> Iterator[Finding]:
    for index, instances in enumerate(there):
        if instances == []:
            remedy = (
                f"nvidia-smi -i {index} -mig 0 (ends the split), or nvidia-smi mig -i {index} -cgi ... -C (makes an "
                "instance)"
            )
            yield problem(f"GPU {index} is split (MIG) but has no instance, so CUDA cannot use it", remedy)
        elif instances and not shown.startswith("MIG-"):
            found = f"GPU {index} is split (MIG): CUDA shows only one instance to a process, so ddp has one GPU"
            remedy = (
                f"export CUDA_VISIBLE_DEVICES={instances[0]} to choose an instance; nvidia-smi -mig 0 ends the split"
            )
            yield warning(found, remedy)


def cpu(facts: Facts) -> Finding:
    cores, present, processes = environment.cores(), os.cpu_count() or 1, facts.job.processes("cpu", "cuda")
    found = f"{cores:g} of {present} cores" if cores < present else f"{present} cores"
    wants = f"{processes} processes that train together would wait for each other"
    remedy = f"give the container more CPUs (--cpus {processes}), or lower processes in params.yaml"
    return enough(cores >= processes, found, wants, remedy)


def load(_: Facts) -> Finding:
    busy, cores = psutil.getloadavg()[0], os.cpu_count() or 1
    found = f"{busy:.1f} threads used or awaited the {count(cores, 'core')} in the last minute"
    wants = "other programs may take the cores from the bench, which then rejects its samples"
    return enough(busy <= cores / 2, found, wants, "end other programs before the bench (`top` lists them)")


def memory(facts: Facts) -> Finding:
    free, processes = psutil.virtual_memory().available, facts.job.processes("cpu", "cuda")
    room, need = min([free, *environment.memory_limits()]), PROCESS_BYTES * processes
    found = f"{_size(free)} free" if room == free else f"{_size(room)} is the container's limit"
    wants = f"{count(processes, 'training process')} may need {_size(need)}"
    remedy = (
        f"end other programs, or lower processes in params.yaml; in a container: docker run --memory {need // GIB}g"
    )
    return enough(room >= need, found, wants, remedy)


def shared_memory(facts: Facts) -> Finding:
    path = SHARED_MEMORY
    remedy = "docker run --shm-size=1g, or --ipc=host; on a host: mount -o remount,size=1g /dev/shm; "
    remedy += f"to remove files of ended jobs: rm {path}/nccl-* {path}/torch_*"
    if not psutil.LINUX:
        return not_applicable("this system has no /dev/shm")
    if not os.access(path, os.W_OK | os.X_OK):
        return problem(f"{path} is missing, or cannot be written to: worker processes cannot share locks", remedy)
    size, _, free = shutil.disk_usage(path)
    found = f"{path}: {_size(free)} of {_size(size)} free"
    wants = f"NCCL between GPUs, and a data loader's workers, need {_size(SHARED_MEMORY_BYTES)}"
    variants = [plan.applied for plan in facts.job.plans.values()]
    loading = any(variant.data_loading == "dataloader" and variant.loader_workers for variant in variants)
    relies = loading or facts.job.processes("cuda") > 1
    return enough(free >= SHARED_MEMORY_BYTES, found, wants, remedy, problem if relies else warning)


def work_tree(facts: Facts) -> Finding:
    root, place = facts.root, facts.root.resolve()
    if shut := [name for name in OURS if (root / name).exists() and not os.access(root / name, os.W_OK)]:
        return problem(f"user {os.getuid()} cannot write to {', '.join(shut)} in {place}")
    if file_system(place) == "overlay":
        found = f"{place} is in the container's own layer: files written here are lost with the container"
        return warning(found, f'docker run -v "$PWD:{place}" ... from a checkout on the host')
    return ok(f"{place} can be written to")


def file_system(path: Path) -> str:
    """Return the type of the file system at ``path``, such as ext4, nfs4 or, for a container's own layer, overlay."""
    types = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((types[each] for each in (path, *path.parents) if each in types), "unknown")


def git(facts: Facts) -> Finding:
    if "Needed a single revision" in facts.git.failure:
        return warning("there is no commit yet, but results name the commit of their code", "git commit")
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
    return warning(f"{shown} is on another file system than the work tree, so DVC copies every file{lost}", remedy)


def remote(facts: Facts) -> Finding:
    if "remote" not in facts.dvc.found:
        return not_applicable("not checked; see above")
    if (name := facts.dvc.found["remote"]) is None:
        add = "dvc remote add --default storage s3://BUCKET/PATH (or a shared directory)"
        return not_applicable("there is no default remote: data and results stay on this machine", add)
    where = f"{name} ({facts.dvc.found['url']})"
    if "exists" not in facts.dvc.found:
        return problem(f"{where}: {facts.dvc.failure}")
    return ok(
        f"{where} answers" + ("" if facts.dvc.found["exists"] else "; its folder is missing (dvc push creates it)")
    )


def disk(facts: Facts) -> Finding:
    """Judge the free space of the fullest file system that will hold data, models or the cache. A directory that does
    not exist yet will be on the file system of its nearest parent."""
    root, cache = facts.root.resolve(), facts.dvc.found.get("cache")
    places = [root, root / "data", root / "models", *([Path(cache)] if cache else [])]
    free, place = min((shutil.disk_usage(nearest(place)).free, place) for place in places)
    found = f"{_size(free)} free for {place}"
    wants = f"data, models and DVC's copies of both may need {_size(DISK_BYTES)}"
    remedy = "free space: dvc gc --workspace removes cached data of other versions; docker system prune"
    return enough(free >= DISK_BYTES, found, wants, remedy, warning if free >= LEAST_DISK_BYTES else problem)


def tracking(facts: Facts) -> Finding:
    judge = {True: ok, False: problem, None: not_applicable}[facts.store.told("well")]
    return judge(facts.store.found["found"], facts.store.found["remedy"])


def _size(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / 2**20:.0f} MiB"


CHECKS: dict[str, Callable[[Facts], Finding | Iterable[Finding]]] = {
    "params.yaml": params_file,
    "model, data": parts,
    "torch": torch,
    "NVIDIA driver": driver,
    "GPUs": gpus,
    "CPU": cpu,
    "load": load,
    "memory": memory,
    "shared memory": shared_memory,
    "work tree": work_tree,
    "git": git,
    "DVC cache": cache,
    "DVC remote": remote,
    "disk": disk,
    "tracking": tracking,
}
"""All checks, in the order in which a person would fix faults."""


def run(*, as_json: bool) -> int:
    """Print the findings; return 1 if one is a problem, else 0."""
    found = list(examine(look(Path())))
    print(findings.as_json(found) if as_json else findings.as_text(found, shutil.get_terminal_size().columns))
    return int(any(finding.status == "problem" for finding in found))


def examine(facts: Facts) -> Iterator[Finding]:
    """Yield the findings of all checks, without secrets. If a check raises an unexpected error, the error becomes a
    finding, and the other checks still run."""
    for check, judge in CHECKS.items():
        try:
            found = judge(facts)
            judged = [found] if isinstance(found, Finding) else [*found]
        except Unanswered as error:
            judged = [(warning if str(error).startswith(LATE) else problem)(str(error))]  # the probe may just be slow
        except Exception as error:
            reason = f"could not be checked: {type(error).__name__}: {error}"
            judged = [warning(reason, "check this yourself, and report the message: doctor has a fault")]
        yield from (each.of(check) for each in judged)
