"""PyTorch, the NVIDIA driver, the GPUs that it shows, and NCCL between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import environment
from pipeline.tools.doctor.findings import INSTALL, Finding, Status
from pipeline.tools.doctor.params import Job
from pipeline.tools.doctor.probes import Answer

PCI = Path("/sys/bus/pci/devices")
KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))

LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the oldest driver that runs all of its minor versions (NVIDIA's table of minor version
compatibility)."""

ADD_GPUS = "docker run --gpus all ... (the host needs the NVIDIA Container Toolkit)"
USE_CPU = "or set train.device: cpu"


class Gpu(NamedTuple):
    uuid: str
    name: str
    instances: list[str] | None
    """UUIDs of its instances (MIG); None: it is not split."""
    pids: list[int]
    """Processes that compute on it, by the host's process ids."""


class Driver(NamedTuple):
    """What the driver's library (NVML) says."""

    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA version that it knows."""
    gpus: tuple[Gpu, ...] = ()
    failure: str = ""
    """Why it says nothing; "missing" without the library."""


def in_container() -> bool:
    return any(mark.exists() for mark in CONTAINER_MARKS) or "KUBERNETES_SERVICE_HOST" in os.environ


def ask_driver() -> Driver:
    """Call it before anything of ours computes on a GPU: that would be taken for another's."""
    try:
        import pynvml
    except ImportError as error:
        return Driver(failure=f"nvidia-ml-py cannot be imported ({error})")
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_FunctionNotFound):
        return Driver(failure="missing")
    except pynvml.NVMLError as error:
        return Driver(failure=str(error))
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return Driver(
            version=pynvml.nvmlSystemGetDriverVersion(),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            gpus=tuple(_gpu(handle) for handle in handles),
        )
    except pynvml.NVMLError as error:
        return Driver(failure=str(error))
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: Any) -> Gpu:
    import pynvml

    try:
        pids = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except pynvml.NVMLError:  # a virtual GPU may not tell
        pids = []
    instances: list[str] | None = None
    try:
        split = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # a GPU that cannot be split
        split = False
    if split:
        instances = []
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                instances.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
            except pynvml.NVMLError_NotFound:
                continue
    return Gpu(pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle), instances, pids)


def check_torch(job: Job, torch: Answer, driver: Driver) -> Finding:
    version = torch.found.get("version")
    if not version:
        if torch.late:
            remedy = "try again: a first import from a cold disk is slow, and so is a busy machine"
            return Finding("torch", "warning", f"is still being imported: {torch.failure}", remedy)
        return Finding("torch", "problem", f"cannot be imported: {torch.failure}", INSTALL)
    cuda = torch.found["cuda"]
    if cuda is None and (job.device == "cuda" or (job.device == "auto" and driver.gpus)):
        status: Status = "problem" if job.device == "cuda" else "warning"
        found = f"{version} is a CPU build" + (f", but there are {len(driver.gpus)} GPU(s)" if driver.gpus else "")
        return Finding("torch", status, found, f"install a CUDA build of torch, {USE_CPU}")
    return Finding("torch", "ok", f"{version}, for {f'CUDA {cuda}' if cuda else 'CPUs'}")


def check_driver(job: Job, torch: Answer, driver: Driver, *, container: bool) -> Finding:
    check = "NVIDIA driver"
    if job.device == "cpu":
        return Finding(check, "not applicable", "train.device is cpu")
    if driver.failure and _computes(torch):
        silent = "its library NVML is missing" if driver.failure == "missing" else f"NVML says: {driver.failure}"
        remedy = "install libnvidia-ml.so.1, which comes with the driver; in a container: --env"
        return Finding(
            check,
            "warning",
            f"{silent}: CUDA computes, but nobody sees heat and other processes, and NCCL needs it between GPUs",
            f"{remedy} NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    if driver.failure:
        return _no_driver(job, driver, container)
    built_for = str(torch.found.get("cuda") or "")
    major = int(built_for.split(".")[0]) if built_for else 0
    knows = f"{driver.version}, for CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    if driver.cuda[0] < major and not _computes(torch):  # with NVIDIA's compatibility package it does
        least = f"{LEAST_DRIVERS[major]} or newer" if major in LEAST_DRIVERS else "a newer one"
        return Finding(
            check,
            "problem",
            f"{knows}; too old for torch {torch.found['version']}, which is built for CUDA {built_for}",
            f"install driver {least} on the host, or a torch that is built for CUDA {driver.cuda[0]}",
        )
    return Finding(check, "ok", knows)


def _computes(torch: Answer) -> bool:
    return bool(torch.found.get("gpus")) and not torch.found.get("errors")


def _no_driver(job: Job, driver: Driver, container: bool) -> Finding:
    check = "NVIDIA driver"
    present = _gpus_on_the_bus()
    loaded = KERNEL_DRIVER.exists()
    if driver.failure != "missing":
        if "nvidia-ml-py" in driver.failure:
            remedy = INSTALL
        elif "mismatch" in driver.failure.lower():
            remedy = "reboot the host: the driver was updated while the old one was loaded"
        elif container:
            remedy = "start the container anew with --gpus all; if that fails too, run nvidia-smi on the host"
        else:
            remedy = "run nvidia-smi, and read what `dmesg | grep -i nvrm` says"
        return Finding(check, "problem", f"does not answer: {driver.failure}", f"{remedy}; {USE_CPU}")
    if container and (present or loaded):
        found = "the host has an NVIDIA GPU, but this container was started without it"
        return Finding(check, "problem", found, f"{ADD_GPUS}; {USE_CPU}")
    if loaded:
        remedy = (
            f"install the driver's libraries (nvidia-smi comes with them) in the kernel module's version; {USE_CPU}"
        )
        return Finding(check, "problem", f"its library libnvidia-ml.so.1 is missing; {KERNEL_DRIVER} exists", remedy)
    if present:
        remedy = f"install the NVIDIA driver, {max(LEAST_DRIVERS.values())} or newer; {USE_CPU}"
        return Finding(check, "problem", f"missing, but this machine has {present} NVIDIA GPU(s)", remedy)
    if job.device == "cuda":
        remedy = "use a machine with a GPU, or set train.device: auto"
        if container:
            remedy = f"{ADD_GPUS}; {remedy}"
        return Finding(check, "problem", "train.device is cuda, but there is no NVIDIA GPU", remedy)
    return Finding(check, "not applicable", "no NVIDIA GPU here: the job runs on the CPU")


def _gpus_on_the_bus() -> int:
    """NVIDIA's display controllers on the PCI bus, which containers see too."""
    count = 0
    for device in PCI.glob("*"):
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        except OSError:
            continue
        count += vendor == "0x10de" and kind.startswith("0x03")
    return count


def check_gpus(job: Job, torch: Answer, driver: Driver, planned: int) -> Iterator[Finding]:
    """``planned``: how many GPUs the plans count on (``environment.machine``)."""
    check = "GPUs"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    unseen = bool(driver.failure) and not _computes(torch)
    if job.device == "cpu" or unseen or "version" not in torch.found or torch.found["cuda"] is None:
        why = "train.device is cpu" if job.device == "cpu" else "none that torch could use; see above"
        yield Finding(check, "not applicable", why)
        return
    if driver.failure:
        seen = torch.found["gpus"]
        status: Status = "ok" if seen == planned else "problem"
        remedy = "" if seen == planned else "see to the NVIDIA driver above"
        yield Finding(check, status, f"torch computes on {seen}, and the plans count on {planned}", remedy)
        return
    there = len(driver.gpus)
    if not there:
        yield Finding(check, "problem", "the driver shows none", f"run nvidia-smi on the host; {ADD_GPUS}; {USE_CPU}")
        return
    if shown is not None and not planned:
        meant = shown in ("", "-1", "NoDevFiles") and job.device == "auto"
        found = f"CUDA_VISIBLE_DEVICES={shown!r} hides all {there}"
        yield Finding(check, "warning" if meant else "problem", found, "unset CUDA_VISIBLE_DEVICES")
        return
    split = [index for index, gpu in enumerate(driver.gpus) if gpu.instances is not None]
    yield from _instances(driver, split, shown)
    if split and not planned:
        return
    errors, seen = torch.found.get("errors", []), torch.found.get("gpus")
    if seen is None:
        yield Finding(
            check,
            "problem",
            f"torch does not come back from using them: {torch.failure}",
            "run nvidia-smi; a GPU that hangs needs a reset or a reboot",
        )
    elif errors or seen != planned:
        found = f"the driver shows {there}, of which {planned} should be visible; torch sees {seen}"
        found += f": {errors[0]}" if errors else ""
        no_kernel = any("no kernel image" in error for error in errors)
        remedy = (
            "install a torch that is built for this GPU's compute capability"
            if no_kernel
            else "see to the NVIDIA driver above; then: python -c 'import torch; torch.cuda.init()'"
        )
        yield Finding(check, "problem", found, f"{remedy}; {USE_CPU}")
    else:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in _visible(driver)))
        part = f" ({seen} of {there}: CUDA_VISIBLE_DEVICES={shown})" if shown is not None else ""
        yield Finding(check, "ok", f"torch computes on {seen} x {names}{part}")
    yield from _foreign(driver)


def _visible(driver: Driver) -> list[Gpu]:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and shown.startswith("MIG-"):
        first = shown.split(",")[0].strip()
        return [gpu for gpu in driver.gpus if first in (gpu.instances or [])]
    return [driver.gpus[index] for index in environment.visible(shown, [gpu.uuid for gpu in driver.gpus])]


def _instances(driver: Driver, split: list[int], shown: str | None) -> Iterator[Finding]:
    empty = [index for index in split if not driver.gpus[index].instances]
    for index in empty:
        remedy = f"nvidia-smi -i {index} -mig 0 (whole again), or nvidia-smi mig -i {index} -cgi ... -C"
        yield Finding(
            "GPUs", "problem", f"GPU {index} is split (MIG) but has no instance, so CUDA cannot use it", remedy
        )
    whole = set(split) - set(empty)
    if whole and not (shown or "").startswith("MIG-"):
        first = driver.gpus[min(whole)].instances
        assert first
        yield Finding(
            "GPUs",
            "warning",
            f"GPU {', '.join(map(str, sorted(whole)))} is split (MIG): CUDA shows a process one instance, never more, "
            "so ddp has one GPU",
            f"export CUDA_VISIBLE_DEVICES={first[0]} to choose one; nvidia-smi -mig 0 makes GPUs whole again",
        )


def _foreign(driver: Driver) -> Iterator[Finding]:
    for gpu in _visible(driver):
        if gpu.pids:
            index = driver.gpus.index(gpu)
            yield Finding(
                "GPU processes",
                "warning",
                f"{len(gpu.pids)} other process(es) compute on GPU {index} (pid {', '.join(map(str, gpu.pids))}): "
                "their memory is missing, and bench refuses what it measures beside them",
                "end them (nvidia-smi lists them), or choose other GPUs with CUDA_VISIBLE_DEVICES",
            )


def check_nccl(job: Job, torch: Answer) -> Finding:
    version = torch.found.get("nccl")
    if job.gpu_processes < 2:
        why = f"{version} in torch; " if version else ""
        kind = "no variant uses several GPUs here" if job.gpu_processes else "no GPU; ddp runs over gloo"
        return Finding("NCCL", "not applicable", why + kind)
    if version is None:
        remedy = f"install a CUDA build of torch for Linux, which has NCCL; {USE_CPU}"
        return Finding("NCCL", "problem", f"torch has none, and {job.gpu_processes} GPUs should train together", remedy)
    return Finding("NCCL", "ok", f"{version} in torch, between {job.gpu_processes} GPUs")
