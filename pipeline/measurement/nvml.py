"""NVML handles of torch's devices."""

from __future__ import annotations

from typing import Any

import torch


def handle_of(device: torch.device) -> Any:
    """Return NVML's handle of torch's ``device``, found by UUID, because NVML's indices ignore CUDA_VISIBLE_DEVICES.

    Raises NVMLError.
    """
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
