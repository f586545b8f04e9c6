"""The GPUs that CUDA itself shows, for machines on which NVML fails or orders the GPUs differently.

CUDA is queried in a separate process, which runs this file, because a process that has initialised CUDA cannot fork.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from typing import Any, NamedTuple

LIBRARY = "libcuda.so.1"
SECONDS = 60.0
"""Longest wait for CUDA's answer. The driver needs some seconds to wake many GPUs. If it hangs, this limit ends the
wait."""

_NO_DEVICE = (34, 100)
"""CUDA_ERROR_STUB_LIBRARY and CUDA_ERROR_NO_DEVICE: there is no GPU, or CUDA_VISIBLE_DEVICES hides it."""
_CAPABILITY = (75, 76)
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""


class Answer(NamedTuple):
    gpus: list[dict[str, Any]]
    """In CUDA's order: uuid (16 bytes in hexadecimal), name, compute_capability, memory_gib."""
    failure: str | None = None
    """Why CUDA's GPUs are unknown; None if they are known. A missing CUDA library means no GPUs, and is no failure."""


def ask() -> Answer:
    """Return the GPUs that CUDA shows to a process with this process's environment variables."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__], capture_output=True, text=True, timeout=SECONDS, check=True
        )
        return Answer(**json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return Answer([], f"CUDA does not answer within {SECONDS:g} s")
    except (OSError, subprocess.CalledProcessError, ValueError, TypeError) as error:  # such as a library that crashes
        return Answer([], f"CUDA could not be queried: {error}")


def _answer() -> Answer:
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError:
        return Answer([])
    count, gpus = ctypes.c_int(), []
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code in _NO_DEVICE:
        return Answer([])
    for index in range(count.value):
        device, memory, major, minor = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
        name, uuid = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
        code = (
            code
            or cuda.cuDeviceGet(ctypes.byref(device), index)
            or cuda.cuDeviceGetName(name, len(name), device)
            or cuda.cuDeviceGetUuid_v2(uuid, device)
            or cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
            or cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY[0], device)
            or cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY[1], device)
        )
        gpus.append(
            {
                "uuid": uuid.raw.hex(),
                "name": name.value.decode(errors="replace"),
                "compute_capability": f"{major.value}.{minor.value}",
                "memory_gib": round(memory.value / 2**30),
            }
        )
    if not code:
        return Answer(gpus)
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(code, ctypes.byref(text))
    return Answer([], f"CUDA's error {code}" + (f" ({text.value.decode(errors='replace')})" if text.value else ""))


if __name__ == "__main__":
    print(json.dumps(_answer()._asdict()))
