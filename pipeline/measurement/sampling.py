"""Record the use of processor, memory and GPUs while a job trains, for people to look at. No result uses the data."""

from __future__ import annotations

import csv
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import psutil
import pynvml
import torch

from pipeline.errors import say
from pipeline.measurement.windows import answer, handle_of


class SystemSampler(AbstractContextManager["SystemSampler"]):
    """Writes the use of the host's processor and memory, and of the job's GPUs, to a CSV file once a second.

    A column that is one of MLflow's system metrics has MLflow's name. A separate thread takes the samples. Each sample
    takes well under a millisecond.
    """

    def __init__(self, path: Path, devices: Iterable[torch.device], interval_seconds: float = 1.0) -> None:
        self._path = path
        self._interval = interval_seconds
        process = psutil.Process()
        self._columns: dict[str, Callable[[], float | None]] = {
            "seed": lambda: self.seed,
            "seconds": lambda: round(time.time(), 3),
            "cpu_utilization_percentage": psutil.cpu_percent,
            "system_memory_usage_megabytes": lambda: round(psutil.virtual_memory().used / 1e6, 1),
            "process_resident_megabytes": lambda: round(process.memory_info().rss / 1e6, 1),
        }
        for device in devices:
            if device.type == "cuda":
                self._columns |= _gpu_columns(device)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-sampler", daemon=True)
        self.seed = 0
        """The seed that is being trained; written with each sample."""

    def __enter__(self) -> SystemSampler:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        psutil.cpu_percent()  # the first call returns 0; each later call covers the time since the call before
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(self._columns)
                stopped = False
                while not stopped:
                    stopped = self._stop.wait(self._interval)
                    writer.writerow([read() for read in self._columns.values()])
                    file.flush()
        except OSError as error:  # the training continues without this file
            said = f"{self._path} gets no more rows, because it could not be written: {error.strerror}"
            say(said, file=sys.stderr)


def _gpu_columns(device: torch.device) -> dict[str, Callable[[], float | None]]:
    """Return column -> function that reads a figure of the GPU from NVML; a figure that is missing later is None.

    A figure that the driver does not provide at the start, for example for a MIG instance or a virtual GPU, has no
    column.
    """
    handle = answer(handle_of, device)
    if handle is None:
        return {}
    name = f"gpu_{device.index or 0}"
    readings: dict[str, Callable[[], float]] = {
        f"{name}_utilization_percentage": lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        f"{name}_memory_usage_megabytes": lambda: round(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) / 1e6, 1),
        f"{name}_power_usage_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    }
    return {column: partial(answer, read) for column, read in readings.items() if answer(read) is not None}
