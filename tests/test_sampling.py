from __future__ import annotations

import csv
import time
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from pipeline.sampling import SystemSampler


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


def test_system_sampler_watches_every_gpu_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watts = {"GPU-a": 100_000, "GPU-b": 250_000}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab"[device.index]))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda _: SimpleNamespace(gpu=50))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda _: SimpleNamespace(used=2e6))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda uuid: watts[uuid])
    with SystemSampler(tmp_path / "system.csv", [torch.device("cuda", 0), torch.device("cuda", 1)]):
        pass
    with (tmp_path / "system.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["gpu_0_power_usage_watts"], row["gpu_1_power_usage_watts"]) == ("100.0", "250.0")
    assert row["gpu_1_memory_usage_megabytes"] == "2.0"
