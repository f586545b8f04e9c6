"""PyTorch, the NVIDIA driver, the GPUs that it shows, and NCCL between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import environment
from pipeline.environment.gpus import KERNEL_DRIVER
from pipeline.tools.doctor.facts import Facts
from pipeline.tools.doctor.findings import INSTALL, Finding, not_applicable, ok, problem, still_imported, warning

PCI = Path("/sys/bus/pci/devices")
"""Containers see it too. 0x10de is NVIDIA, classes that begin with 0x03 are displays and what computes like them."""

LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the oldest driver that runs all of its minor versions (NVIDIA's table of minor version
compatibility)."""

ADD_GPUS = "docker run --gpus all ... (the host needs the NVIDIA Container Toolkit)"
USE_CPU = "or set train.device: cpu"


def torch(facts: Facts) -> Finding:
    torch, device, gpus = facts.torch, facts.job.device, facts.driver.found.get("gpus")
    version, cuda = torch.found.get("version"), torch.found.get("cuda")
    if not version and torch.late:
        return still_imported(torch.failure)
    if not version:
        return problem(f"cannot be imported: {torch.failure}", INSTALL)
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
    if failure:
        return _missing(facts) if "LibraryNotFound" in failure else _silent(failure, facts.container)
    newest, built_for = facts.driver.found["cuda"], torch.get("cuda") or "0"
    knows = f"{facts.driver.found['version']}, for CUDA up to {newest[0]}.{newest[1]}"
    major = int(built_for.split(".")[0])
    if newest[0] >= major or facts.computes:  # with NVIDIA's compatibility package an older one does
        return ok(knows)
    found = f"{knows}; too old for torch {torch['version']}, which is built for CUDA {built_for}"
    least = LEAST_DRIVERS.get(major, max(LEAST_DRIVERS.values()))
    return problem(found, f"install driver {least} or newer on the host, or a torch that is built for CUDA {newest[0]}")


def _silent(failure: str, container: bool) -> Finding:
    remedy = "run nvidia-smi, and read what `dmesg | grep -i nvrm` says"
    if "ImportError" in failure or "ModuleNotFound" in failure:
        remedy = INSTALL
    elif "mismatch" in failure.lower():
        remedy = "reboot the host: the driver was updated while the old one was loaded"
    elif container:
        remedy = "start the container anew with --gpus all; if that fails too, run nvidia-smi on the host"
    return problem(f"does not answer: {failure}", f"{remedy}; {USE_CPU}")


def _missing(facts: Facts) -> Finding:
    devices = [[(device / name).read_text() for name in ("vendor", "class")] for device in PCI.glob("*")]
    present = sum(vendor.startswith("0x10de") and kind.startswith("0x03") for vendor, kind in devices)
    if facts.container and (present or KERNEL_DRIVER.exists()):
        found, remedy = "the host has an NVIDIA GPU, but this container was started without it", ADD_GPUS
    elif KERNEL_DRIVER.exists():
        found = f"its library libnvidia-ml.so.1 is missing; {KERNEL_DRIVER} exists"
        remedy = "install the driver's libraries (nvidia-smi comes with them) in the kernel module's version"
    elif present:
        found = f"missing, but this machine has {present} NVIDIA GPU(s)"
        remedy = f"install the NVIDIA driver, {max(LEAST_DRIVERS.values())} or newer"
    elif facts.job.device == "cuda":
        remedy = ADD_GPUS if facts.container else "use a machine with a GPU"
        return problem("train.device is cuda, but there is no NVIDIA GPU", f"{remedy}, or set train.device: auto")
    else:
        return not_applicable("no NVIDIA GPU here: the job runs on the CPU")
    return problem(found, f"{remedy}; {USE_CPU}")


def gpus(facts: Facts) -> Iterator[Finding]:
    shown, there = os.environ.get("CUDA_VISIBLE_DEVICES"), facts.driver.found.get("gpus", [])
    if facts.job.device == "cpu":
        yield not_applicable("train.device is cpu")
    elif facts.torch.found.get("cuda") is None or (facts.driver.failure and not facts.computes):
        yield not_applicable("none that torch could use; see above")
    elif not there and not facts.driver.failure:
        yield problem("the driver shows none", f"run nvidia-smi on the host; {ADD_GPUS}; {USE_CPU}")
    elif there and shown is not None and not facts.planned_gpus:
        meant = shown in ("", "-1", "NoDevFiles") and facts.job.device == "auto"
        found = f"CUDA_VISIBLE_DEVICES={shown!r} hides all {len(there)}"
        yield (warning if meant else problem)(found, "unset CUDA_VISIBLE_DEVICES")
    else:
        split = {str(index): gpu["instances"] for index, gpu in enumerate(there) if gpu["instances"] is not None}
        yield from _instances(split, shown or "")
        if facts.planned_gpus or not split:
            yield _computing(facts, shown)
            yield from _others(there, shown)


def _instances(split: dict[str, list[str]], shown: str) -> Iterator[Finding]:
    """``split``: the instances (MIG) of each GPU that is split."""
    for index in (index for index, instances in split.items() if not instances):
        remedy = f"nvidia-smi -i {index} -mig 0 (whole again), or nvidia-smi mig -i {index} -cgi ... -C"
        yield problem(f"GPU {index} is split (MIG) but has no instance, so CUDA cannot use it", remedy)
    usable = {index: instances for index, instances in split.items() if instances}
    if usable and not shown.startswith("MIG-"):
        found = f"GPU {', '.join(usable)} is split (MIG): CUDA shows a process one instance, so ddp has one GPU"
        choose = f"export CUDA_VISIBLE_DEVICES={next(iter(usable.values()))[0]} to choose one"
        yield warning(found, f"{choose}; nvidia-smi -mig 0 makes GPUs whole again")


def _computing(facts: Facts, shown: str | None) -> Finding:
    torch, planned, there = facts.torch, facts.planned_gpus, len(facts.driver.found.get("gpus", []))
    seen = torch.found.get("gpus")
    if torch.late or seen is None:
        found = f"torch does not come back from using them: {torch.failure}"
        return problem(found, "run nvidia-smi; a GPU that hangs needs a reset or a reboot")
    if seen == planned and not torch.failure:
        part = f" ({seen} of {there}: CUDA_VISIBLE_DEVICES={shown})" if shown is not None and there else ""
        return ok(f"torch computes on {seen} x {', '.join(dict.fromkeys(torch.found['names']))}{part}")
    found = f"the driver shows {there}, the plans count on {planned}, torch sees {seen}: {torch.failure}"
    remedy = "see to the NVIDIA driver above; then: python -c 'import torch; torch.cuda.init()'"
    if "no kernel image" in torch.failure:
        remedy = "install a torch that is built for this GPU's compute capability"
    return problem(found.removesuffix(": "), f"{remedy}; {USE_CPU}")


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
    version, gpus = facts.torch.found.get("nccl"), facts.job.gpu_processes
    if gpus > 1 and not version:
        remedy = f"install a CUDA build of torch for Linux, which has NCCL; {USE_CPU}"
        return problem(f"torch has none, and {gpus} GPUs should train together", remedy)
    if gpus > 1:
        return ok(f"{version} in torch, between {gpus} GPUs")
    return not_applicable("no variant uses several GPUs here" if gpus else "no GPU; ddp runs over gloo")
