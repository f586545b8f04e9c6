from __future__ import annotations

import csv
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest
import torch

from pipeline.measurement.sampling import SystemSampler
from tests import drivers


def test_system_sampler_writes_samples_with_their_seed(tmp_path: Path) -> None:
    path = tmp_path / "results" / "system.csv"
    with SystemSampler(path, [torch.device("cpu")], interval_seconds=0.01) as sampler:
        sampler.seed = 3
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and (not path.exists() or path.read_text().count("\n") < 4):
            time.sleep(0.01)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 3
    assert rows[-1]["seed"] == "3"
    assert abs(float(rows[-1]["seconds"]) - time.time()) < 60
    assert float(rows[-1]["process_resident_megabytes"]) > 50


def plug(monkeypatch: pytest.MonkeyPatch, milliwatts: Callable[[str], int]) -> None:
    """Simulate a driver whose GPUs draw the power that ``milliwatts`` returns for a GPU's UUID."""
    drivers.plug(
        monkeypatch,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=50),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=2e6),
        nvmlDeviceGetPowerUsage=milliwatts,
    )


def sampled(path: Path, *gpus: int) -> dict[str, str]:
    """Sample a job that ends at once; return the file's only row."""
    with SystemSampler(path, [torch.device("cuda", index) for index in gpus]):
        pass
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    return row


def test_system_sampler_watches_every_gpu_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plug(monkeypatch, {"GPU-a": 100_000, "GPU-b": 250_000}.__getitem__)
    row = sampled(tmp_path / "system.csv", 0, 1)
    assert (row["gpu_0_power_usage_watts"], row["gpu_1_power_usage_watts"]) == ("100.0", "250.0")
    assert row["gpu_1_memory_usage_megabytes"] == "2.0"


def test_a_figure_that_the_driver_stops_reporting_is_blank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    plug(monkeypatch, Mock(side_effect=itertools.chain([100_000], itertools.repeat(error))))
    row = sampled(tmp_path / "system.csv", 0)
    assert (row["gpu_0_utilization_percentage"], row["gpu_0_power_usage_watts"]) == ("50.0", "")
