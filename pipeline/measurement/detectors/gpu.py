"""Disturbances of a GPU: heat, a short power supply, other processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from pipeline.measurement.detectors import processes
from pipeline.measurement.detectors.base import MAX_THROTTLED_FRACTION, Detector, Refusal

GPU_SAMPLE_SECONDS = 0.1
MPS_SERVER = "nvidia-cuda-mps"
"""What the kernel keeps of nvidia-cuda-mps-server, 15 characters."""

SLOWDOWNS = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
"""Of the reasons that hold a GPU's clocks down, those that a cooler or better fed GPU of the same kind would not have.

The software power cap is not among them: it is how a GPU at full load finds its clocks, and belongs to its speed.
"""


def gpu_detectors(devices: Sequence[torch.device], root_pid: int) -> list[Detector]:
    """Those that the driver answers for each of these GPUs; a virtual GPU's, say, answers few questions."""
    import pynvml

    found: list[Detector] = []
    for device in devices:
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        except pynvml.NVMLError:
            continue
        name = "the GPU" if len(devices) == 1 else f"GPU {device.index}"
        for detector in (GpuThrottling(pynvml, handle, name), SharedGpu(pynvml, handle, root_pid, name)):
            try:
                detector.look()
            except pynvml.NVMLError:
                continue
            found.append(detector)
    return found


class GpuThrottling(Detector):
    """The GPU was too hot or short of power and slowed down.

    Asks the driver what holds the clocks down ten times a second and at a window's end, in a thread of its own; not at
    its beginning, as a GPU that was idle names a slowdown for a moment when work comes. The driver's counters of
    throttled time would miss nothing, but they do not tell these reasons apart, or have numbers and units that changed
    between drivers. As on a CPU, a moment at the limit belongs to the GPU's speed.
    """

    def __init__(self, nvml: Any, handle: Any, name: str = "the GPU") -> None:
        self._nvml, self._handle, self._name = nvml, handle, name
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
        if self.slow_looks <= MAX_THROTTLED_FRACTION * self.looks:
            return []
        return [
            Refusal(
                f"{self._name} throttled ({', '.join(sorted(self.reasons))}) in {self.slow_looks} of {self.looks} "
                f"looks at it (at most {MAX_THROTTLED_FRACTION:.0%} are allowed); see to its cooling and power supply, "
                "and measure again"
            )
        ]

    def _watch(self) -> None:
        ended = False
        while not ended:
            ended = self._stop.wait(GPU_SAMPLE_SECONDS)
            with suppress(self._nvml.NVMLError):  # what the driver does not tell now, it may tell later
                self._looks.append(self.look())


class SharedGpu(Detector):
    """Another process computes on this GPU, at the start or at the end of a window.

    The driver lists the host's process ids, whoever asks. In a container with ids of its own no process finds itself
    there; then all beyond one are taken for others', as a job has one process a GPU. Under MPS the list holds its
    server beside its clients: it works for them alone and is nobody else. Where its name cannot be read, one server is
    taken to serve all clients.
    """

    def __init__(self, nvml: Any, handle: Any, root_pid: int, name: str = "the GPU") -> None:
        self._nvml, self._handle, self._root_pid, self._name = nvml, handle, root_pid, name
        self._seen = 0
        self.others = 0
        """The most that were seen at once."""

    def look(self) -> int:
        """How many others compute on the GPU now. Raises NVMLError where the driver does not tell."""
        pids = {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        if len(pids) < 2:
            return 0
        others = {pid for pid in pids if not processes.name_of(pid).startswith(MPS_SERVER)}
        if os.getpid() in pids:
            return len(others - processes.job_ticks(self._root_pid).keys())
        hidden_server = others == pids and self._serves_clients()
        return max(0, len(others) - 1 - hidden_server)

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
            Refusal(
                f"{self.others} other process(es) held {self._name}; end them (nvidia-smi lists them) and measure again"
            )
        ]

    def _see(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._seen = max(self._seen, self.look())

    def _serves_clients(self) -> bool:
        """Whether processes reach this GPU through an MPS server."""
        with suppress(self._nvml.NVMLError):  # an old driver does not know the question
            return bool(self._nvml.nvmlDeviceGetMPSComputeRunningProcesses(self._handle))
        return False
