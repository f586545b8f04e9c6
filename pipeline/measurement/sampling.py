"""Record the use of processor, memory and GPUs while a job trains, for people to look at. No result uses the data."""

from __future__ import annotations

import csv
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import psutil
import torch

from pipeline.measurement.nvml import handle_of


class SystemSampler(AbstractContextManager["SystemSampler"]):
    """Writes the use of the host's processor and memory, and of the job's GPUs, to a CSV file once a second.

    The columns have MLflow's names for system metrics. A separate thread takes the samples. Each sample takes well
    under a millisecond.
    """

    def __init__(self, path: Path, devices: Iterable[torch.device], interval_seconds: float = 1.0) -> None:
        self._path = path
        self._interval = interval_seconds
        self._process = psutil.Process()
        self._readings: dict[str, Callable[[], float]] = {}
        for device in devices:
            if device.type == "cuda":
                self._readings |= _readings(device)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-sampler", daemon=True)
        self.seed = 0
        """The seed that is being trained; written with each sample."""

    def __enter__(self) -> SystemSampler:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        psutil.cpu_percent()  # the first call returns 0; each later call covers the time since the call before
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except OSError as error:  # the training continues without this file
            print(
                f"{self._path} gets no more rows, because it could not be written: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )

    def _sample_until_stopped(self) -> None:
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer: csv.DictWriter[str] | None = None
            more = True
            while more:
                more = not self._stop.wait(self._interval)
                sample = self._sample()
                if writer is None:
                    writer = csv.DictWriter(file, list(sample))
                    writer.writeheader()
                writer.writerow(sample)
                file.flush()

    def _sample(self) -> dict[str, float | None]:
        memory = psutil.virtual_memory()
        return {
            "seed": self.seed,
            "seconds": round(time.time(), 3),
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": round(memory.used / 1e6, 1),
            "process_resident_megabytes": round(self._process.memory_info().rss / 1e6, 1),
            **{name: _answer(read) for name, read in self._readings.items()},
        }


def _readings(device: torch.device) -> dict[str, Callable[[], float]]:
    """Return column -> function that reads a figure of the GPU from NVML.

    A figure that the driver does not provide at the start, for example for a MIG instance or a virtual GPU, has no
    column.
    """
    import pynvml

    try:
        handle = handle_of(device)
    except pynvml.NVMLError:
        return {}
    name = f"gpu_{device.index or 0}"
    readings: dict[str, Callable[[], float]] = {
        f"{name}_utilization_percentage": lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        f"{name}_memory_usage_megabytes": lambda: round(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) / 1e6, 1),
        f"{name}_power_usage_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    }
    return {column: read for column, read in readings.items() if _answer(read) is not None}


def _answer(read: Callable[[], float]) -> float | None:
    """Return what ``read`` returns; None, which leaves the cell empty, if the driver does not provide the figure."""
    import pynvml

    try:
        return read()
    except pynvml.NVMLError:
        return None
