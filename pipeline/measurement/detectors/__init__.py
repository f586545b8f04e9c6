"""Find reasons to reject measured numbers: disturbances of the measured windows, and contradictory figures.

A detector is opened before each window of the clock and closed after it. Most detectors read counters at both moments.
No detector waits for the device or changes the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.measurement.detectors.base import Detector
from pipeline.measurement.detectors.compiler import Recompilation
from pipeline.measurement.detectors.cpu import cpu_detectors
from pipeline.measurement.detectors.gpu import gpu_detectors


def detectors(devices: Sequence[torch.device], *, root_pid: int, max_foreign_load: float | None) -> list[Detector]:
    """Return the detector of compilation, and those that this machine supports for its CPU and for ``devices``.

    Repeated calls return the same kinds of detectors in the same order. ``devices``: the calling process's own
    devices. ``root_pid``: the job's root process, which forms the job together with all its descendants. If
    ``max_foreign_load`` is None, there is no detector of foreign load on the CPU.
    """
    of_gpus = gpu_detectors(devices, root_pid) if devices[0].type == "cuda" else []
    return [Recompilation(), *cpu_detectors(root_pid, max_foreign_load), *of_gpus]
