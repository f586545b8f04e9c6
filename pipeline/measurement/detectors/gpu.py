"""Detect disturbances of a GPU: heat, too little power, other processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pynvml
import torch

from pipeline.errors import count
from pipeline.measurement.detectors import processes
from pipeline.measurement.detectors.base import MAX_THROTTLED_FRACTION, Detector, Rejection
from pipeline.measurement.nvml import answer, handle_of

GPU_SAMPLE_SECONDS = 0.1
MPS_SERVER = "nvidia-cuda-mps"
"""The process name nvidia-cuda-mps-server as the kernel shows it: the kernel shortens names to 15 characters."""

SLOWDOWNS = {
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal slowdown",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "software thermal slowdown",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
}
"""The reasons for reduced GPU clocks that better cooling or a better power supply would remove.

The software power cap is left out: it limits the clocks of every GPU at full load, so it is part of normal speed.
"""


def gpu_detectors(devices: Sequence[torch.device], root_pid: int) -> list[Detector]:
    """Return the detectors that the driver supports for each of these GPUs; a virtual GPU's driver supports few."""
    found: list[Detector] = []
    for device in devices:
        handle = answer(handle_of, device)
        if handle is not None:
            name = "the GPU" if len(devices) == 1 else f"GPU {device.index}"
            both = GpuThrottling(handle, name), SharedGpu(handle, root_pid, name)
            found += [each for each in both if answer(each.look) is not None]
    return found


class GpuThrottling(Detector):
    """Detects that the GPU slowed down because it was too hot or short of power.

    A separate thread asks the driver for the reasons of reduced clocks ten times a second and at a window's end. It
    does not ask at a window's beginning, because an idle GPU reports a slowdown for a moment when work arrives.

    The driver's counters of throttled time are not used: some do not separate the reasons, and the field
    numbers and units of others differ between drivers. As on a CPU, short throttling belongs to normal speed.
    """

    def __init__(self, handle: Any, name: str = "the GPU") -> None:
        self._handle, self._name = handle, name
        self._looks: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.looks = 0
        """How often the driver was asked in measured windows."""
        self.slow_looks = 0
        """How often the driver reported a slowdown."""
        self.reasons: dict[str, bool] = {}
        """The slowdowns that the driver reported, as keys."""

    def look(self) -> int:
        """Return the current reasons for reduced clocks, as bits. Raises NVMLError if the driver cannot report them."""
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))

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
        self.looks += len(self._looks)
        for bits in self._looks:
            seen = [reason for bit, reason in SLOWDOWNS.items() if bits & bit]
            self.slow_looks += bool(seen)
            self.reasons |= dict.fromkeys(seen, True)

    def rejections(self) -> Iterator[Rejection]:
        if self.slow_looks > MAX_THROTTLED_FRACTION * self.looks:
            yield Rejection(
                f"{self._name} throttled ({', '.join(sorted(self.reasons))}) in {self.slow_looks} of {self.looks} "
                f"queries (at most {MAX_THROTTLED_FRACTION:.0%} are allowed); improve its cooling and power supply, "
                "and measure again"
            )

    def _watch(self) -> None:
        ended = False
        while not ended:
            ended = self._stop.wait(GPU_SAMPLE_SECONDS)
            bits = answer(self.look)
            if bits is not None:  # a failed query is skipped, because the next one may succeed
                self._looks.append(bits)


class SharedGpu(Detector):
    """Detects that another process uses this GPU at the start or at the end of a measured window.

    The driver always lists the host's process ids. In a container with its own ids, a process does not find its own
    id in the list. Then all listed processes except one count as foreign, because a job has one process per GPU.

    Under MPS the list also contains the MPS server. The server works only for its clients, so it does not count as
    foreign. If MPS clients run, but no listed process has the server's name, one of the listed processes is assumed to
    be the server.
    """

    def __init__(self, handle: Any, root_pid: int, name: str = "the GPU") -> None:
        self._handle, self._root_pid, self._name = handle, root_pid, name
        self._before = 0
        self.others = 0
        """The largest number of foreign processes that were seen at the same time."""

    def look(self) -> int:
        """Return the number of foreign processes on the GPU now. Raises NVMLError if the driver does not report it."""
        pids = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        if len(pids) < 2:
            return 0
        others = {pid for pid in pids if not processes.name_of(pid).startswith(MPS_SERVER)}
        if os.getpid() in pids:
            return len(others - processes.job_ticks(self._root_pid).keys())
        clients = answer(pynvml.nvmlDeviceGetMPSComputeRunningProcesses, self._handle)  # unknown to an old driver
        hidden_server = others == pids and bool(clients)
        return max(0, len(others) - 1 - hidden_server)

    def open(self) -> None:
        self._before = answer(self.look) or 0

    def close(self, *, measured: bool) -> None:
        if measured:
            self.others = max(self.others, self._before, answer(self.look) or 0)

    def rejections(self) -> Iterator[Rejection]:
        if self.others:
            yield Rejection(
                f"{count(self.others, 'other process')} used {self._name}; end all other processes (nvidia-smi lists "
                "them) and measure again"
            )
