"""Disturbances of a GPU: heat, a short power supply, other processes."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

import torch

from pipeline.detectors.base import Detector, Refusal
from pipeline.detectors.processes import job_ticks

GPU_SAMPLE_SECONDS = 0.1

SLOWDOWNS = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
"""Of the reasons that hold a GPU's clocks down, those that a cooler or better fed GPU of the same kind would not have.

The software power cap is not among them: it is how a GPU at full load finds its clocks, and belongs to its speed.
"""


def gpu_detectors(device: torch.device, root_pid: int) -> list[Detector]:
    """Those that the driver answers for this GPU; a virtual GPU's, say, answers few questions."""
    import pynvml

    found: list[Detector] = []
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return found
    candidates = (GpuThrottling(pynvml, handle), SharedGpu(pynvml, handle, root_pid))
    for detector in candidates:
        try:
            detector.look()
        except pynvml.NVMLError:
            continue
        found.append(detector)
    return found


class GpuThrottling(Detector):
    """The GPU was too hot or short of power and slowed down.

    Asks the driver what holds the clocks down at both ends of a window and ten times a second in between, in a thread
    of its own. The driver's counters of throttled time would miss nothing, but they do not tell these reasons apart, or
    have numbers and units that changed between drivers.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._slowdowns = {getattr(nvml, constant): reason for constant, reason in SLOWDOWNS.items()}
        self._looks: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.looks = 0
        """How often the driver was asked in measured windows."""
        self.slow_looks = 0
        """How often it named a slowdown."""
        self.reasons: dict[str, int] = {}
        """Slowdown -> how often it was named."""

    def look(self) -> int:
        """The bits of what holds the clocks down now. Raises NVMLError where the driver does not tell."""
        return int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))

    def open(self) -> None:
        self._looks = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-throttling", daemon=True)
        self._thread.start()

    def close(self, *, measured: bool) -> None:
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        if not measured:
            return
        for bits in self._looks:
            seen = [reason for bit, reason in self._slowdowns.items() if bits & bit]
            self.looks += 1
            self.slow_looks += bool(seen)
            for reason in seen:
                self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def refusals(self) -> list[Refusal]:
        if not self.slow_looks:
            return []
        return [
            Refusal(
                f"the GPU throttled ({', '.join(sorted(self.reasons))}) in {self.slow_looks} of {self.looks} looks at "
                "it; see to its cooling and power supply, and measure again"
            )
        ]

    def _watch(self) -> None:
        more = True
        while more:
            with suppress(self._nvml.NVMLError):  # what the driver does not tell now, it may tell later
                self._looks.append(self.look())
            more = not self._stop.wait(GPU_SAMPLE_SECONDS)


class SharedGpu(Detector):
    """Another process computes on this GPU, at the start or at the end of a window.

    A container with process ids of its own does not find itself in the driver's list, which holds the host's. Then all
    processes beyond one are taken for others': a job has one process a GPU.
    """

    def __init__(self, nvml: Any, handle: Any, root_pid: int) -> None:
        self._nvml, self._handle, self._root_pid = nvml, handle, root_pid
        self._seen = 0
        self.others = 0
        """The most that were seen at once."""

    def look(self) -> int:
        """How many others compute on the GPU now. Raises NVMLError where the driver does not tell."""
        pids = {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        if os.getpid() in pids:
            return len(pids - job_ticks(self._root_pid).keys()) if len(pids) > 1 else 0
        return max(0, len(pids) - 1)

    def open(self) -> None:
        self._seen = 0
        self._see()

    def close(self, *, measured: bool) -> None:
        if measured:
            self._see()
            self.others = max(self.others, self._seen)

    def refusals(self) -> list[Refusal]:
        if not self.others:
            return []
        return [
            Refusal(f"{self.others} other process(es) held the GPU; end them (nvidia-smi lists them) and measure again")
        ]

    def _see(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._seen = max(self._seen, self.look())
