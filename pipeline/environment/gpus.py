"""The GPUs that CUDA shows to this process, as the driver tells of them, without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.environment import software


def shown() -> tuple[list[dict[str, Any]], str | None]:
    """The GPUs that CUDA shows to this process, in its order, and the driver's version; none without a driver."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if software.torch_build()["cuda"] is None or shown == "":
        return [], None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], None
    try:
        if shown is not None and shown.startswith("MIG-"):
            handles = [pynvml.nvmlDeviceGetHandleByUUID(shown.split(",")[0].strip())]
        else:
            present = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            chosen = visible(shown, [pynvml.nvmlDeviceGetUUID(handle) for handle in present])
            handles = _split([present[index] for index in chosen])
        return [_gpu(handle) for handle in handles], pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError_NotFound:  # an instance of a GPU that does not exist: CUDA shows nothing
        return [], None
    finally:
        pynvml.nvmlShutdown()


def visible(shown: str | None, uuids: Sequence[str]) -> list[int]:
    """The indices into ``uuids`` that CUDA_VISIBLE_DEVICES=``shown`` leaves visible, in its order.

    CUDA's rules: the list ends at the first entry that names no GPU, and a GPU named twice leaves none. An entry is a
    number or the beginning of a UUID that fits one GPU.
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


def _split(handles: Sequence[Any]) -> list[Any]:
    """``handles`` as CUDA sees them where a GPU is split into instances (MIG): the first instance, and nothing else."""
    import pynvml

    for handle in handles:
        try:
            if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
                continue
        except pynvml.NVMLError:  # a GPU that cannot be split
            continue
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                return [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)]
            except pynvml.NVMLError_NotFound:
                continue
        return []
    return list(handles)


def _gpu(handle: Any) -> dict[str, Any]:
    import pynvml

    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:  # an instance of a GPU has its parent's
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(
            pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        )

    def rounded(read: Callable[[], float]) -> int | None:
        try:
            return round(read())
        except pynvml.NVMLError:  # not told, as the memory of a GPU that shares the host's
            return None

    return {
        "name": pynvml.nvmlDeviceGetName(handle),
        "compute_capability": f"{major}.{minor}",
        "memory_gib": rounded(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30),
        "power_limit_watts": rounded(lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000),
    }
