"""PyTorch's DataLoader with worker processes, compared with data that are resident in memory."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from pipeline.data.prepared import Dataset
from pipeline.params import Augment, Train
from pipeline.tasks import Classification, loader
from pipeline.tasks.batches import TrainBatches
from tests.pages import ROOT
from tests.trainings import EVERYTHING, make_batches, same

_OTHERS: set[int] = set()
"""Ids of child processes older than the test, such as a server that forks ranks for other tests."""


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    _OTHERS.clear()
    multiprocessing.Event()  # starts the process that tracks semaphores, which is no worker
    _OTHERS.update(worker.pid for worker in workers())
    yield
    assert workers() == []


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid not in _OTHERS]


def loaded(dataset: Dataset, count: int = 2, **changes: Any) -> TrainBatches:
    return make_batches(dataset, placement="dataloader", workers=count, augment=EVERYTHING, **changes)


@pytest.mark.parametrize("count", [0, 2])
def test_loaded_tensors_equal_resident_ones(digits: Dataset, count: int) -> None:
    for rank in (0, 1):
        share: dict[str, Any] = {"world_size": 2, "rank": rank, "micro_batches": 2, "seed": 3}
        resident = make_batches(digits, augment=EVERYTHING, **share)
        with loaded(digits, count, **share) as made:
            same(made.epoch(0), resident.epoch(0))
            same(made.epoch(1, start_step=9), resident.epoch(1, start_step=9))
            assert list(made.epoch(2, start_step=14)) == []


def test_workers_stay_until_the_batches_end(digits: Dataset) -> None:
    with loaded(digits) as made:
        assert workers() == []
        seen = []
        for epoch in (0, 1):
            next(made.epoch(epoch))
            seen.append({worker.pid for worker in workers()})
        assert len(seen[0]) == 2
        assert seen[0] == seen[1]
    assert workers() == []
    same(itertools.islice(made.epoch(0), 1), itertools.islice(make_batches(digits, augment=EVERYTHING).epoch(0), 1))
    assert len(workers()) == 2  # closed batches can be read again
    made.close()


def test_reading_draws_nothing_from_the_model_s_generator(digits: Dataset) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with loaded(digits) as made:
        for epoch in (0, 1):
            list(made.epoch(epoch))
    assert torch.equal(torch.get_rng_state(), before)


class Noisy(Classification):
    """Adds a number from each of the process's generators to the inputs."""

    def batch(self, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = super().batch(rows)
        return inputs + torch.rand(1) + np.random.rand() + random.random(), targets


def test_workers_draw_alike_after_a_restart(digits: Dataset) -> None:
    def batches(start_step: int, seed: int = 3) -> list[torch.Tensor]:
        settings: dict[str, Any] = {"batch_size": 128, "micro_batches": 1, "rank": 0, "world_size": 1, "workers": 2}
        task = Noisy(Train(), digits)
        with TrainBatches(task, seed=seed, augment=Augment(), placement="dataloader", **settings) as made:
            return [inputs for inputs, _ in made.epoch(0, start_step)]

    first = batches(0)
    assert all(map(torch.equal, first[3:], batches(3)))
    noise = {float(inputs.min()) for inputs in first}
    assert len(noise) == len(first)
    assert not {float(inputs.min()) for inputs in batches(0, seed=4)} & noise


def test_only_the_latest_epoch_can_be_read(digits: Dataset) -> None:
    with loaded(digits) as made:
        first, second = made.epoch(0), made.epoch(1)
        next(first)
        next(second)
        with pytest.raises(RuntimeError, match="a later epoch has begun"):
            next(first)
        next(second)
    with pytest.raises(RuntimeError, match="were closed"):
        next(second)


def test_workers_outlive_signals_to_the_training(digits: Dataset) -> None:
    with loaded(digits) as made:
        batches = made.epoch(0)
        next(batches)
        next(batches)  # the workers take turns, so both have started
        for worker in workers():
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(worker.pid, number)
        assert len(list(batches)) == 12


def test_held_workers_do_nothing(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    done = multiprocessing.Value("i", 0)
    real = loader._Samples.__getitem__

    def counted(self: Any, draw: Any) -> Any:
        sample = real(self, draw)
        time.sleep(0.002)
        with done.get_lock():
            done.value += 1
        return sample

    monkeypatch.setattr(loader._Samples, "__getitem__", counted)
    with loaded(digits) as made:
        batches = made.epoch(0)
        next(batches)
        made.hold()
        held = done.value
        time.sleep(0.4)  # workers that are not held would make more than a hundred samples
        assert done.value <= held + 2, "each worker may finish its current sample"
        same(batches, itertools.islice(make_batches(digits, augment=EVERYTHING).epoch(0), 1, None))
        made.hold()  # the next epoch, and the end of the block, must release held workers too
        next(made.epoch(1))
        made.hold()


@pytest.mark.slow
def test_held_workers_end_when_their_trainer_is_killed(digits_folder: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from pipeline.data import prepared\n"
        "from tests.test_loader import loaded, workers\n"
        "made = loaded(prepared.read(Path(sys.argv[1])))\n"
        "next(made.epoch(0))\n"
        "made.hold()\n"
        "print(*(worker.pid for worker in workers()), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, str(digits_folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    end = time.monotonic() + 30
    while any(map(_runs, pids)):
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
