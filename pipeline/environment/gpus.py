"""Find the GPUs that CUDA shows to this process. The process asks NVML, or else CUDA, and does not import torch."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.environment import software

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


class Shown(NamedTuple):
    gpus: list[dict[str, Any]]
    """In CUDA's order."""
    driver: str | None = None
    """The driver's version. None: there is no driver, or its version is unknown."""
    why_none: str | None = None
    """The failure that hides GPUs which may exist; None if there is no such failure."""


def shown() -> Shown:
    """Return the GPUs that CUDA shows to this process.

    NVML is queried first, because it reports more than CUDA and does not initialise CUDA. CUDA is queried if NVML fails
    or is missing, for example in a container without the driver's capability ``utility``.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if software.torch_build()["cuda"] is None or shown == "":
        return Shown([])
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return Shown([_gpu(handle) for handle in _handles(shown)], pynvml.nvmlSystemGetDriverVersion())
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        gpus, failure = ask_cuda()
        if gpus:
            return Shown([{**gpu, "power_limit_watts": None} for gpu in gpus.values()], _kernel_driver())
        nothing = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_NotFound)
        return Shown([], None, failure or (None if isinstance(error, nothing) else f"NVML says: {error}"))


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
        found = [by_uuid.get(uuid) for uuid in ask_cuda()[0]]
        if found and None not in found:
            return found
    return _split([present[index] for index in visible(shown, uuids)])


def _kernel_driver() -> str | None:
    """Return the driver's version from its kernel module; None if it is unknown."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", KERNEL_DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[0] if found else None


def visible(shown: str | None, uuids: Sequence[str]) -> list[int]:
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
