"""PyTorch, the NVIDIA driver, the GPUs that it shows, who else computes on them, and NCCL between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import environment
from pipeline.environment.gpus import KERNEL_DRIVER
from pipeline.tools.doctor.facts import Facts
from pipeline.tools.doctor.findings import Finding, not_applicable, ok, problem, remedy_for, unanswered, warning

PCI = Path("/sys/bus/pci/devices")
"""Containers see it too. 0x10de is NVIDIA, classes that begin with 0x03 are displays and what computes like them."""

NEW_DRIVER = "driver 580 or newer"
"""It runs all minor versions of CUDA 13, and all older ones (NVIDIA's table of minor version compatibility)."""

ADD_GPUS = "docker run --gpus all ... (the host needs the NVIDIA Container Toolkit)"
USE_CPU = "or set train.device: cpu"


def torch(facts: Facts) -> Finding:
    torch, device, gpus = facts.torch, facts.job.device, facts.driver.found.get("gpus")
    if "version" not in torch.found:
        return unanswered(torch, f"cannot be imported: {torch.failure}")
    version, cuda = torch.found["version"], torch.found["cuda"]
    if cuda is None and (device == "cuda" or (device == "auto" and gpus)):
        found = f"{version} is a CPU build" + (f", but there are {len(gpus)} GPU(s)" if gpus else "")
        return (problem if device == "cuda" else warning)(found, f"install a CUDA build of torch, {USE_CPU}")
    return ok(f"{version}, for {f'CUDA {cuda}' if cuda else 'CPUs'}")


def driver(facts: Facts) -> Finding:
    failure, torch = facts.driver.failure, facts.torch.found
    if facts.job.device == "cpu":
        return not_applicable("train.device is cpu")
    if failure and facts.computes:
        found = f"NVML fails ({failure}): CUDA computes, but nobody sees heat and other processes, and NCCL misses it"
        remedy = "install the driver's libnvidia-ml.so.1; in a container: --env"
        return warning(found, f"{remedy} NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    if "LibraryNotFound" in failure:
        return _missing(facts)
    if failure:
        remedy = "run nvidia-smi, on the host too, and read what `dmesg | grep -i nvrm` says there"
        remedy += "; start the container anew with --gpus all" if facts.container else ""
        return problem(f"does not answer: {failure}", f"{remedy_for(failure, remedy)}; {USE_CPU}")
    newest, built_for = facts.driver.found["cuda"], torch.get("cuda") or "0"
    knows = f"{facts.driver.found['version']}, for CUDA up to {newest[0]}.{newest[1]}"
    if newest[0] >= int(built_for.split(".")[0]) or facts.computes:  # with the compatibility package an older one does
        return ok(knows)
    found = f"{knows}; too old for torch {torch['version']}, which is built for CUDA {built_for}"
    return problem(found, f"install {NEW_DRIVER} on the host, or a torch that is built for CUDA {newest[0]}")


def _missing(facts: Facts) -> Finding:
    devices = [[(device / name).read_text() for name in ("vendor", "class")] for device in PCI.glob("*")]
    present = any(vendor.startswith("0x10de") and kind.startswith("0x03") for vendor, kind in devices)
    kernel = KERNEL_DRIVER.exists()
    if facts.container and (present or kernel):
        found, remedy = "the host has an NVIDIA GPU, but this container was started without it", ADD_GPUS
    elif kernel:
        found = f"its library libnvidia-ml.so.1 is missing; {KERNEL_DRIVER} exists"
        remedy = "install the driver's libraries (nvidia-smi comes with them) in the kernel module's version"
    elif present:
        found, remedy = "missing, but this machine has an NVIDIA GPU", f"install {NEW_DRIVER}"
    elif facts.job.device == "cuda":
        found = "train.device is cuda, but there is no NVIDIA GPU"
        remedy = ADD_GPUS if facts.container else "use a machine with a GPU"
    else:
        return not_applicable("no NVIDIA GPU here: the job runs on the CPU")
    return problem(found, f"{remedy}; {USE_CPU}")


def gpus(facts: Facts) -> Iterator[Finding]:
    shown, there = os.environ.get("CUDA_VISIBLE_DEVICES"), facts.driver.found.get("gpus", [])
    unusable = facts.torch.found.get("cuda") is None or (facts.driver.failure and not facts.computes)
    if unusable or facts.job.device == "cpu":
        yield not_applicable("none that torch could use; see above")
    elif not there and not facts.driver.failure:
        yield problem("the driver shows none", f"run nvidia-smi on the host; {ADD_GPUS}; {USE_CPU}")
    elif there and shown is not None and not facts.planned_gpus:
        meant = shown in ("", "-1", "NoDevFiles") and facts.job.device == "auto"
        found = f"CUDA_VISIBLE_DEVICES={shown!r} hides all {len(there)}"
        yield (warning if meant else problem)(found, "unset CUDA_VISIBLE_DEVICES")
    else:
        instances = {index: gpu["instances"] for index, gpu in enumerate(there) if gpu["instances"] is not None}
        yield from _split(instances, shown or "")
        if facts.planned_gpus or not instances:
            yield _computing(facts, shown)
            yield from _others(there, shown)


def _split(instances: dict[int, list[str]], shown: str) -> Iterator[Finding]:
    """``instances`` of each GPU that is split (MIG)."""
    for index in (index for index, uuids in instances.items() if not uuids):
        remedy = f"nvidia-smi -i {index} -mig 0 (whole again), or nvidia-smi mig -i {index} -cgi ... -C"
        yield problem(f"GPU {index} is split (MIG) but has no instance, so CUDA cannot use it", remedy)
    usable = [index for index, uuids in instances.items() if uuids]
    if usable and not shown.startswith("MIG-"):
        which, first = ", ".join(map(str, usable)), instances[usable[0]][0]
        found = f"GPU {which} is split (MIG): CUDA shows a process one instance, so ddp has one GPU"
        remedy = f"export CUDA_VISIBLE_DEVICES={first} to choose one; nvidia-smi -mig 0 makes GPUs whole again"
        yield warning(found, remedy)


def _computing(facts: Facts, shown: str | None) -> Finding:
    torch, planned, there = facts.torch, facts.planned_gpus, len(facts.driver.found.get("gpus", []))
    seen = torch.found.get("gpus", 0)
    if seen == planned and not torch.failure:
        part = f" ({seen} of {there}: CUDA_VISIBLE_DEVICES={shown})" if shown is not None and there else ""
        return ok(f"torch computes on {seen} x {', '.join(dict.fromkeys(torch.found['names']))}{part}")
    found = f"the driver shows {there}, the plans count on {planned}, torch sees {seen}: {torch.failure}"
    remedy = "see to the NVIDIA driver above; then: python -c 'import torch; torch.cuda.init()'"
    if torch.late:
        remedy = "run nvidia-smi; a GPU that hangs needs a reset or a reboot"
    return problem(found.removesuffix(": "), f"{remedy_for(found, remedy)}; {USE_CPU}")


def _others(there: list[dict[str, Any]], shown: str | None) -> Iterator[Finding]:
    visible = environment.visible(shown, [gpu["uuid"] for gpu in there])
    if shown is not None and shown.startswith("MIG-"):
        visible = [index for index, gpu in enumerate(there) if shown.split(",")[0].strip() in (gpu["instances"] or [])]
    for index in visible:
        if pids := ", ".join(map(str, there[index]["pids"])):
            harm = "they take its memory, and bench refuses what it measures beside them"
            remedy = "end them (nvidia-smi lists them), or choose other GPUs with CUDA_VISIBLE_DEVICES"
            yield Finding("GPU processes", "warning", f"others (pid {pids}) compute on GPU {index}: {harm}", remedy)


def nccl(facts: Facts) -> Finding:
    version, gpus = facts.torch.found.get("nccl"), facts.job.processes("cuda")
    if gpus == 1:
        return not_applicable("no variant uses several GPUs here")
    if version:
        return ok(f"{version} in torch, between {gpus} GPUs")
    remedy = f"install a CUDA build of torch for Linux, which has NCCL; {USE_CPU}"
    return problem(f"torch has none, and {gpus} GPUs should train together", remedy)
