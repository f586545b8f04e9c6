"""Find reasons to reject measured numbers: disturbances of the measured windows, and contradictory figures.

A detector is opened before each window of the clock and closed after it. The detector reads counters at both moments.
It never waits for the device and does not change the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.measurement.detectors.base import Detector, Rejection
from pipeline.measurement.detectors.compiler import Recompilation
from pipeline.measurement.detectors.cpu import cpu_detectors
from pipeline.measurement.detectors.figures import of_clock, of_memory, of_ranks, of_steps, of_turns
from pipeline.measurement.detectors.gpu import gpu_detectors
from pipeline.measurement.detectors.processes import children_seconds

__all__ = [
    "Detector", "Rejection", "children_seconds", "detectors", "of_clock", "of_memory", "of_ranks", "of_steps",
    "of_turns",
]  # fmt: skip


def detectors(devices: Sequence[torch.device], *, root_pid: int, max_foreign_load: float | None) -> list[Detector]:
    """Return the detectors that this machine supports for ``devices`` (this process's own) and for the host's CPU.
    Repeated calls return the same kinds of detectors in the same order.

    ``root_pid``: the job's root process; this process and all its descendants are the job's own processes. If
    ``max_foreign_load`` is None, this process does not watch the CPU's load: one process per host and job is enough.
    """
    of_gpus = gpu_detectors(devices, root_pid) if devices[0].type == "cuda" else []
    return [Recompilation(), *cpu_detectors(root_pid, max_foreign_load), *of_gpus]
