"""The GPUs that CUDA shows to this process, without importing torch: from NVML, or else from CUDA itself."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.environment import cuda, software

KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
_TOLD = ("name", "compute_capability", "memory_gib")


class Shown(NamedTuple):
    gpus: list[dict[str, Any]]
    """In CUDA's order."""
    driver: str | None = None
    """The driver's version. None: there is no driver, or its version is unknown."""
    why_none: str | None = None
    """The failure that hides GPUs which may exist; None if nothing failed."""


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
        answer = cuda.ask()
        if answer.gpus:
            told = [{key: gpu.get(key) for key in (*_TOLD, "power_limit_watts")} for gpu in answer.gpus]
            return Shown(told, _kernel_driver())
        nothing = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_NotFound)
        return Shown([], None, answer.failure or (None if isinstance(error, nothing) else f"NVML says: {error}"))


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
        by_uuid = {re.sub("^GPU-|-", "", uuid): handle for uuid, handle in zip(uuids, present, strict=True)}
        found = [by_uuid.get(gpu["uuid"]) for gpu in cuda.ask().gpus]
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
    """Return the indices into ``uuids`` of the GPUs that CUDA_VISIBLE_DEVICES=``shown`` makes visible, in its order.

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


def instances(handle: Any) -> list[Any] | None:
    """Return the handles of a GPU's MIG instances; None if MIG is not enabled."""
    import pynvml

    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
    except pynvml.NVMLError:  # a GPU without MIG
        return None
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError_NotFound):
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return found


def _split(handles: list[Any]) -> list[Any]:
    """Return the handles of what CUDA shows: all GPUs or, if MIG splits a GPU, only the first MIG instance."""
    found = [made for handle in handles if (made := instances(handle)) is not None]
    return found[0][:1] if found else handles


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
