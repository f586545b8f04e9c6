"""NVML handles of torch's devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pynvml
import torch

T = TypeVar("T")


def handle_of(device: torch.device) -> Any:
    """Return NVML's handle of torch's ``device``, found by UUID, because NVML's indices ignore CUDA_VISIBLE_DEVICES.

    Raises NVMLError.
    """
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def answer(ask: Callable[..., T], *arguments: Any) -> T | None:
    """Return ``ask(*arguments)``; None if it raises NVMLError, because the driver does not provide the answer."""
    try:
        return ask(*arguments)
    except pynvml.NVMLError:
        return None
