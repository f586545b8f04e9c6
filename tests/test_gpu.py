"""All stages on GPUs. On a machine without one, `make rehearse` runs these tests on two simulated GPUs."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from pipeline import environment, results
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.measurement.detectors import of_clock
from pipeline.measurement.windows import Clock, Memory
from pipeline.params import parse
from pipeline.results import Result
from pipeline.training import job
from tests.trainings import make_training
from tests.workspaces import PARAMS, PREPARED, furnish

MIB = 2**20


def on_gpu() -> World:
    return World(rank=0, size=1, device=torch.device("cuda", 0), backend=None)


def train(variant: str, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Result:
    monkeypatch.chdir(directory)
    params = PARAMS | {"train": PARAMS["train"] | {"device": "cuda"}}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    if not PREPARED.exists():
        furnish(parse(params))
    job.run(parse(params), variant, environment.machine(), PREPARED)
    return results.read(results.result_file(variant), parse(params))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["baseline", "ddp", "pipeline", "memory"])
def test_each_variant_trains_and_is_measured(variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = train(variant, monkeypatch, tmp_path)
    assert result.device == torch.cuda.get_device_name(0)
    assert result.backend == ("nccl" if variant in ("ddp", "pipeline") and result.world_size > 1 else None)
    for run in result.runs:
        assert run.rejections == ()
        assert run.test_accuracy > 0.8
        assert run.samples_per_second
        assert run.peak_memory_bytes
        assert run.peak_reserved_bytes
        assert run.peak_reserved_bytes >= run.peak_memory_bytes
        assert run.driver_memory_bytes is None or run.driver_memory_bytes > run.peak_memory_bytes
        assert run.allocator_retries == 0


@pytest.mark.gpu
def test_a_seed_repeats_to_the_last_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, again = (train("baseline", monkeypatch, tmp_path) for _ in range(2))
    assert [run.model_sha256 for run in first.runs] == [run.model_sha256 for run in again.runs]


@pytest.mark.gpu
def test_steps_do_not_wait_for_the_device(digits: Dataset) -> None:
    training = make_training(digits, on_gpu())
    steps = training.run()
    for _ in range(11):  # until the warm-up and the history's row at step 10 are over
        next(steps)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):  # the history's next row is due at step 15
            assert next(steps) is None
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu("its clock")
def test_events_and_the_wall_clock_agree() -> None:
    clock = Clock(torch.device("cuda", 0))
    left = torch.randn(4096, 4096, device="cuda")
    clock.open()
    for _ in range(20):
        left = (left @ left).clamp(-1, 1)
        clock.step()
    clock.close(measured=True)
    assert len(clock.step_seconds) == 20
    assert not [*of_clock(clock, None, resident=True)]
    assert math.isclose(sum(clock.step_seconds), clock.measured_seconds, rel_tol=0.05)


@pytest.mark.gpu
def test_peak_memory_is_that_of_live_tensors() -> None:
    memory = Memory(torch.device("cuda", 0))
    before = torch.cuda.memory_allocated()
    memory.open()
    torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    memory.close(measured=True)
    assert memory.peak_bytes == before + 64 * MIB
    assert memory.retries == 0
