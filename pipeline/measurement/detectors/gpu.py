"""Detect disturbances of a GPU: heat, too little power, other processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from pipeline.errors import count
from pipeline.measurement.detectors import processes
from pipeline.measurement.detectors.base import MAX_THROTTLED_FRACTION, Detector, Rejection
from pipeline.measurement.nvml import handle_of

GPU_SAMPLE_SECONDS = 0.1
MPS_SERVER = "nvidia-cuda-mps"
"""The process name nvidia-cuda-mps-server as the kernel shows it: the kernel shortens names to 15 characters."""

SLOWDOWNS = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
"""The reasons for reduced GPU clocks that better cooling or a better power supply would remove.

The software power cap is left out: it limits the clocks of every GPU at full load, so it is part of normal speed.
"""


def gpu_detectors(devices: Sequence[torch.device], root_pid: int) -> list[Detector]:
    """Return the detectors that the driver supports for each of these GPUs; a virtual GPU's driver supports few."""
    import pynvml

    found: list[Detector] = []
    for device in devices:
        try:
            handle = handle_of(device)
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
    """The GPU slowed down because it was too hot or short of power.

    A separate thread asks the driver for the reasons of reduced clocks ten times a second and at a window's end. It
    does not ask at a window's beginning, because an idle GPU reports a slowdown for a moment when work arrives.

    The driver's counters of throttled time are not used: some do not separate the reasons, and the field
    numbers and units of others differ between drivers. As on a CPU, short throttling belongs to normal speed.
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
        """How often the driver reported a slowdown."""
        self.reasons: dict[str, int] = {}
        """Slowdown -> how often the driver reported it."""

    def look(self) -> int:
        """Return the current reasons for reduced clocks, as bits. Raises NVMLError if the driver reports none."""
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

    def rejections(self) -> list[Rejection]:
        if self.slow_looks <= MAX_THROTTLED_FRACTION * self.looks:
            return []
        return [
            Rejection(
                f"{self._name} throttled ({', '.join(sorted(self.reasons))}) in {self.slow_looks} of {self.looks} "
                f"queries (at most {MAX_THROTTLED_FRACTION:.0%} are allowed); improve its cooling and power supply, "
                "and measure again"
            )
        ]

    def _watch(self) -> None:
        ended = False
        while not ended:
            ended = self._stop.wait(GPU_SAMPLE_SECONDS)
            with suppress(self._nvml.NVMLError):  # a failed query is skipped: the driver may answer the next
                self._looks.append(self.look())


class SharedGpu(Detector):
    """Another process uses this GPU at the start or at the end of a measured window.

    The driver always lists the host's process ids. In a container with its own ids, a process does not find its own
    id in the list. Then all listed processes except one count as foreign, because a job has one process per GPU.

    Under MPS the list also contains the MPS server. The server works only for its clients, so it does not count as
    foreign. If MPS clients run, but no listed process has the server's name, one of the listed processes is assumed to
    be the server.
    """

    def __init__(self, nvml: Any, handle: Any, root_pid: int, name: str = "the GPU") -> None:
        self._nvml, self._handle, self._root_pid, self._name = nvml, handle, root_pid, name
        self._seen = 0
        self.others = 0
        """The largest number of foreign processes that were seen at the same time."""

    def look(self) -> int:
        """Return the number of foreign processes on the GPU now. Raises NVMLError if the driver does not report it."""
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

    def rejections(self) -> list[Rejection]:
        if not self.others:
            return []
        return [
            Rejection(
                f"{count(self.others, 'other process')} used {self._name}; end all other processes (nvidia-smi lists "
                "them) and measure again"
            )
        ]

    def _see(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._seen = max(self._seen, self.look())

    def _serves_clients(self) -> bool:
        """True if processes use this GPU through an MPS server."""
        with suppress(self._nvml.NVMLError):  # an old driver does not have this query
            return bool(self._nvml.nvmlDeviceGetMPSComputeRunningProcesses(self._handle))
        return False
