"""The CPU, how much of it this process may use, and the GPUs that CUDA shows to this process.

NVML, or else CUDA, is asked for the GPUs. torch is not imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.environment import software

CPUINFO = Path("/proc/cpuinfo")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")

KERNEL_FLAGS = (
    *("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_bf16", "amx_fp16", "amx_int8", "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)
"""The instruction sets that decide which CPU kernels are used."""

NATIVE_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def cpu_facts() -> dict[str, str]:
    """Return the first processor's entry in /proc/cpuinfo; empty if there is no such file.

    The entry is not cached. Call this rarely, because Linux generates the file for all processors on each read.
    """
    try:
        first = CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_model(facts: Mapping[str, str]) -> str:
    arm = [facts[key] for key in ("CPU implementer", "CPU part") if key in facts]
    return facts.get("model name") or " ".join(arm) or platform.processor() or platform.machine()


def cpu_flags(facts: Mapping[str, str]) -> set[str]:
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


KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
CUDA_LIBRARY = "libcuda.so.1"
CUDA_SECONDS = 60.0
"""Longest wait for CUDA's answer. The driver needs some seconds to wake many GPUs. If it hangs, this limit ends the
wait."""
_QUERY = """
import json
import torch

torch.cuda.init()
found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(json.dumps([(str(gpu.uuid), gpu.name, f"{gpu.major}.{gpu.minor}", gpu.total_memory) for gpu in found]))
"""
"""A program that prints each GPU's UUID, name, compute capability and bytes of memory. It runs in a separate process,
because a process that has initialised CUDA cannot fork."""

_NO_GPUS = "Found no NVIDIA driver", "No CUDA GPUs are available"
"""Parts of torch's messages on a machine that has CUDA's library but no GPU."""


class GPUs(NamedTuple):
    gpus: list[dict[str, Any]]
    """In CUDA's order."""
    driver: str | None = None
    """The driver's version. None: there is no driver, or its version is unknown."""
    why_none: str | None = None
    """The failure that hides GPUs which may exist; None if there is no such failure."""


def visible_gpus() -> GPUs:
    """Return the GPUs that CUDA shows to this process.

    NVML is queried first, because it reports more than CUDA and does not initialise CUDA. CUDA is queried if NVML fails
    or is missing, for example in a container without the driver's capability ``utility``.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if software.torch_build()["cuda"] is None or shown == "":
        return GPUs([])
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return GPUs([_gpu(handle) for handle in _handles(shown)], pynvml.nvmlSystemGetDriverVersion())
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        gpus, failure = ask_cuda()
        if gpus:
            return GPUs([{**gpu, "power_limit_watts": None} for gpu in gpus.values()], _kernel_driver())
        nothing = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_NotFound)
        return GPUs([], None, failure or (None if isinstance(error, nothing) else f"NVML says: {error}"))


@cache
def ask_cuda() -> tuple[dict[str, dict[str, Any]], str | None]:
    """Return UUID -> facts of the GPUs that CUDA shows, in CUDA's order, and the failure, if any. A missing CUDA
    library means no GPUs, and is no failure. CUDA is asked once, because the answer takes seconds."""
    try:
        ctypes.CDLL(CUDA_LIBRARY)  # does not initialise CUDA
        done = subprocess.run([sys.executable, "-c", _QUERY], capture_output=True, text=True, timeout=CUDA_SECONDS)
    except OSError:
        return {}, None
    except subprocess.TimeoutExpired:
        return {}, f"CUDA did not answer within {CUDA_SECONDS:g} s"
    if any(sign in done.stderr for sign in _NO_GPUS):
        return {}, None
    if done.returncode:
        reason = [f"the process ended with {done.returncode}", *done.stderr.strip().splitlines()][-1]
        return {}, f"CUDA cannot be used: {reason}"
    return {
        uuid.removeprefix("GPU-"): {"name": name, "compute_capability": capability, "memory_gib": round(memory / 2**30)}
        for uuid, name, capability, memory in json.loads(done.stdout.splitlines()[-1])
    }, None


def _handles(shown: str | None) -> list[Any]:
    """Return the handles of the GPUs that CUDA_VISIBLE_DEVICES=``shown`` leaves visible, in CUDA's order.

    Raises NVMLError."""
    import pynvml

    if shown is not None and shown.strip().startswith("MIG-"):
        return [pynvml.nvmlDeviceGetHandleByUUID(shown.split(",")[0].strip())]
    present = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in present]
    # NVML orders GPUs by their place on the bus. CUDA begins with the fastest GPU by default.
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len(set(map(pynvml.nvmlDeviceGetName, present))) > 1:
        by_uuid = {uuid.removeprefix("GPU-"): handle for uuid, handle in zip(uuids, present, strict=True)}
        gpus = [by_uuid.get(uuid) for uuid in ask_cuda()[0]]
        if gpus and None not in gpus:
            return gpus
    return _split([present[index] for index in indices_of(shown, uuids)])


def _kernel_driver() -> str | None:
    """Return the driver's version from its kernel module; None if it is unknown."""
    try:
        version = re.search(r"\b\d+\.\d+(\.\d+)?\b", KERNEL_DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return version[0] if version else None


def indices_of(shown: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the indices into ``uuids`` of the GPUs that CUDA_VISIBLE_DEVICES=``shown`` shows, in the variable's order.

    CUDA's rules: the list ends at the first entry that names no GPU; if a GPU is named twice, no GPU is visible. An
    entry is a number or the beginning of the UUID of exactly one GPU.
    """
    if shown is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in map(str.strip, shown.split(",")):
        if entry.startswith("GPU-"):
            fitting = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        else:
            number = re.match(r"\d+", entry)
            fitting = [int(number[0])] if number and int(number[0]) < len(uuids) else []
        if len(fitting) != 1:
            break
        chosen += fitting
    return chosen if len(set(chosen)) == len(chosen) else []


def _split(handles: list[Any]) -> list[Any]:
    """Return the handles of what CUDA shows: all GPUs or, if MIG splits a GPU, only its first MIG instance."""
    import pynvml

    for handle in handles:
        try:
            is_split = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        except pynvml.NVMLError:  # a GPU without MIG
            continue
        if is_split:
            for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with suppress(pynvml.NVMLError_NotFound):
                    return [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)]
            return []
    return handles


def _gpu(handle: Any) -> dict[str, Any]:
    import pynvml

    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:  # a MIG instance does not report a capability, but its GPU does
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(
            pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        )

    def rounded(read: Callable[[], float]) -> int | None:
        try:
            return round(read())
        except pynvml.NVMLError:  # unknown, such as the memory of a GPU that shares the host's memory
            return None

    return {
        "name": pynvml.nvmlDeviceGetName(handle),
        "compute_capability": f"{major}.{minor}",
        "memory_gib": rounded(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30),
        "power_limit_watts": rounded(lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000),
    }
