"""Whole jobs with each form of sharding give the results of a job on a single device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline import models, results
from pipeline.params import Machine, parse
from pipeline.results import Result
from pipeline.training import job
from pipeline.training.checkpoints import state_sha256
from tests.test_job import PARAMS, workspace  # noqa: F401
from tests.workspaces import PREPARED

ROOT = Path(__file__).parent.parent.parent
CPU = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True)
VARIANTS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "variants" / "sharded.yaml").read_text(encoding="utf-8"))


def train(name: str) -> Result:
    short = PARAMS["train"] | {"seeds": [3], "epochs": 1}
    config = parse(PARAMS | {"train": short, "variants": {"baseline": {}} | VARIANTS})
    job.run(config, name, CPU, PREPARED)
    return results.read(results.result_file(name), config)


@functools.cache
def baseline() -> Result:
    """Return the single-device result that all tests share."""
    return train("baseline")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("fsdp", "tensor") else pytest.mark.slow)
        for name, values in VARIANTS.items()
        if "cpu_offload" not in values
    ],
)
@pytest.mark.usefixtures("workspace")
def test_each_ready_made_variant_trains_as_the_baseline_does(name: str) -> None:
    plain_result, result = baseline(), train(name)
    assert (result.backend, result.world_size) == ("gloo", 4 if name.endswith("replicas") else 2)
    assert result.skipped == {}
    assert result.applied["parallelism"] == name.partition("-")[0]
    assert result.parameter_count == plain_result.parameter_count
    (run,), (plain,) = result.runs, plain_result.runs
    assert run.steps == plain.steps
    assert run.train_loss == pytest.approx(plain.train_loss, rel=0.05 if "bf16" in name else 0.02)
    assert abs(run.test_correct - plain.test_correct) <= (8 if "bf16" in name else 3)
    assert len(run.peak_memory_rank_bytes) == result.world_size
    model = models.small_cnn(channels=1, height=8, width=8, classes=10)
    model.load_state_dict(torch.load(results.model_file(name, 3), weights_only=True))
    assert state_sha256(model.state_dict()) == run.model_sha256
