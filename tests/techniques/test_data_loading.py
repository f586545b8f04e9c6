from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pipeline import results
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.params import Augment, Train, parse, techniques
from pipeline.training import job
from pipeline.training.checkpoints import checkpoint_file
from pipeline.training.loop import Training
from tests.nets import ALONE, conv_net, make_plan
from tests.ranks import run_ranks
from tests.trainings import make_training, weights
from tests.workspaces import CPU_ONLY, PARAMS, PREPARED, command

TRAIN = Train(epochs=2, batch_size=32, learning_rate=0.05, augment=Augment(crop_padding=1, flip=True, cutout=2))
CHOICES: list[dict[str, Any]] = [
    {"data_loading": "resident"},
    {"data_loading": "streamed"},
    {"data_loading": "dataloader"},
    {"data_loading": "dataloader", "loader_workers": 0},
]


def make(dataset: Dataset, joined: World, **applied: Any) -> Training:
    return make_training(dataset, joined, model=conv_net(dropout=True), train=TRAIN, **applied)


def trained(joined: World, dataset: Dataset, applied: list[dict[str, Any]], steps: int) -> list[str]:
    """Return digests of the weights after ``steps`` steps, for each of the variants ``applied``."""
    states = []
    for choice in applied:
        training = make(dataset, joined, **choice)
        training.advance(steps)
        training.batches.close()
        states.append(weights(training))
    return states


def test_all_ways_to_load_data_give_equal_weights(digits: Dataset) -> None:
    assert len(set(trained(ALONE, digits, CHOICES, 50))) == 1  # 44 steps an epoch
    # No workers here, because they would have to import torch again. The test of whole jobs below has some.
    applied = [CHOICES[index] | {"gradient_accumulation": 2} for index in (0, 3)]
    first, second = run_ranks(trained, digits, applied, 50)
    assert len({*first, *second}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("workspace")
def test_data_loading_overrides_train_placement() -> None:
    train = PARAMS["train"] | {"placement": "resident", "seeds": [0], "epochs": 1}
    variants = {
        "baseline": {},
        "streamed": {"data_loading": "streamed"},
        "loader": {"data_loading": "dataloader", "loader_workers": 1, "parallelism": "ddp"},
        "ddp": {"parallelism": "ddp"},
    }
    config = parse(PARAMS | {"train": train, "variants": variants})
    made = {}
    for name in ("streamed", "loader", "ddp"):
        job.run(config, name, CPU_ONLY, PREPARED)
        made[name] = results.read(results.result_file(name), config)
    assert [result.placement for result in made.values()] == ["streamed", "dataloader", "resident"]
    assert made["ddp"].runs[0].model_sha256 == made["loader"].runs[0].model_sha256


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_also_while_workers_read(workspace: Path) -> None:
    params = PARAMS | {
        "train": PARAMS["train"] | {"seeds": [0], "epochs": 200},
        "variants": {"loader": {"data_loading": "dataloader"}},
        "compare": {"baseline": "loader"},
    }
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    training = command("loader")
    history = workspace / "results" / "loader" / "history.csv"
    end = time.monotonic() + 60
    while not (history.exists() and len(history.read_text().splitlines()) > 2) and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(training.pid, signal.SIGINT)  # as a terminal does, so the workers receive the signal too
    output = training.communicate(timeout=60)
    assert training.returncode == 130, output
    assert "interrupted after step" in output
    assert "DataLoader" not in output
    assert checkpoint_file("loader", 0).exists()


def test_the_workers_count_as_processes_of_the_job(digits: Dataset) -> None:
    from pipeline.measurement.detectors import job_ticks

    training = make(digits, ALONE, data_loading="dataloader")
    before = {child.pid for child in psutil.Process().children()}
    training.advance(1)
    own = job_ticks(psutil.Process().pid)
    workers = {child.pid for child in psutil.Process().children()} - before
    assert len(workers) >= 2
    assert workers <= own.keys()
    training.batches.close()


def test_the_settings_of_the_loader_are_one_technique() -> None:
    variant = make_plan(data_loading="dataloader", loader_workers=3)
    assert techniques(variant.applied) == {"dataloader": ("data_loading", "loader_workers")}
