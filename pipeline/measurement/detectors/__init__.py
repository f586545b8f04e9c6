"""Why measured numbers are refused: what disturbed the measured windows, and what the measurements say themselves.

A detector lives through a run's windows beside the clock: opened before the clock's window, closed after it. It reads
counters at both ends, never waits for the device and does nothing to a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.measurement.detectors.base import Detector, Refusal
from pipeline.measurement.detectors.compiler import Recompilation
from pipeline.measurement.detectors.cpu import cpu_detectors
from pipeline.measurement.detectors.figures import of_clock, of_memory, of_ranks, of_steps, of_turns
from pipeline.measurement.detectors.gpu import gpu_detectors
from pipeline.measurement.detectors.processes import children_seconds

__all__ = [
    "Detector", "Refusal", "children_seconds", "detectors", "of_clock", "of_memory", "of_ranks", "of_steps", "of_turns",
]  # fmt: skip


def detectors(devices: Sequence[torch.device], *, root_pid: int, max_foreign_load: float | None) -> list[Detector]:
    """What this machine offers to watch ``devices``, a process's own, and this host's CPU with: always the same in the
    same order.

    ``root_pid``: the process that stands for the job; it and all its descendants are the job's own. None for
    ``max_foreign_load``: nobody watches the CPU's load (of several processes of a job on one host, one does).
    """
    of_gpus = gpu_detectors(devices, root_pid) if devices[0].type == "cuda" else []
    return [Recompilation(), *cpu_detectors(root_pid, max_foreign_load), *of_gpus]
