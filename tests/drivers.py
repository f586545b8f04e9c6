"""A fake GPU driver whose answers a test sets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch


def plug(monkeypatch: pytest.MonkeyPatch, **answers: Callable[..., Any]) -> None:
    """Replace the driver by one with the GPUs a and b.

    ``answers``: name of an NVML function -> its replacement, which is called with the handle GPU-a or GPU-b.
    """
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid="ab"[gpu.index]))
    known: dict[str, Callable[..., Any]] = {"nvmlInit": lambda: None, "nvmlDeviceGetHandleByUUID": str}
    for name, answer in (known | answers).items():
        monkeypatch.setattr(pynvml, name, answer)
