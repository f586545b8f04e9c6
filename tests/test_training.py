from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.distributed import WorkerError, World
from pipeline.measurement import windows
from pipeline.measurement.detectors import Detector, of_clock
from pipeline.models import ModelError
from pipeline.models.optimizers import learning_rate
from pipeline.params import Train
from pipeline.results.rejections import Rejection
from pipeline.training.loop import Training
from pipeline.training.outcomes import NonFiniteLoss
from tests.nets import ALONE, OfFirstBatch, assembly_of, conv_net, make_plan, stopped
from tests.ranks import run_ranks
from tests.trainings import TRAIN, broken, make_training, rows_of, until_broken, weights


def test_a_run_learns_and_tells_its_history(digits: Dataset) -> None:
    training = make_training(digits)
    steps = list(training.run())
    rows = [row for row in steps if row]
    per_epoch = training.batches.steps_per_epoch
    assert len(steps) == training.total_steps == 2 * per_epoch
    due = sorted({*range(5, 2 * per_epoch, 5), per_epoch, 2 * per_epoch})
    assert [row.step for row in rows] == due
    assert [row.epoch for row in rows if row.test_accuracy is not None] == [1.0, 2.0]
    assert (rows[-1].train_loss or math.nan) < 0.5 * (rows[0].train_loss or math.nan)
    assert training.score is not None
    assert rows[-1].test_accuracy == training.score.accuracy > 0.85
    seconds = [row.train_seconds for row in rows]
    assert seconds == sorted(seconds)
    last_epoch = [(row, row.step - before.step) for before, row in pairwise(rows) if row.epoch > 1]
    losses = [(row.train_loss or math.nan) * steps for row, steps in last_epoch]
    assert training.epoch_loss == pytest.approx(sum(losses) / per_epoch)
    clock = training.clock
    assert len(clock.step_seconds) == training.total_steps - TRAIN.warmup_steps
    assert clock.first_step_seconds is not None
    assert clock.first_step_seconds + clock.measured_seconds < clock.train_seconds
    assert 0 < clock.input_seconds < clock.measured_seconds
    assert not [*of_clock(clock, None, resident=True)]


class Sparse(nn.Module):
    """A model whose gradients are sparse, which no fused optimizer takes."""

    def __init__(self, classes: int, **_: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding((images.flatten(1) > 0).long(), self.weight, sparse=True).sum(1)


def test_a_failing_plain_step_says_so(digits: Dataset) -> None:
    of_model = assembly_of(make_plan(train=Train(model=f"{__name__}:Sparse", batch_size=32)), ALONE, digits)
    says = rf"^train\.model: {__name__}:Sparse fails in a step of 6 samples: .*sparse"
    with pytest.raises(ModelError, match=says), of_model.training(0) as training:
        training.advance(1)
    sound = assembly_of(make_plan(train=Train(model="small_cnn", batch_size=32)), ALONE, digits)
    with pytest.raises(ZeroDivisionError), sound.training(0):
        raise ZeroDivisionError


def test_each_step_takes_the_learning_rate_of_its_number(digits: Dataset) -> None:
    training, taken = make_training(digits), []
    training.optimizer.register_step_pre_hook(lambda optimizer, *_: taken.append(optimizer.param_groups[0]["lr"]))
    training.advance(5)
    assert taken == [learning_rate(training.train, step, training.total_steps) for step in range(5)]
    assert len(set(taken)) == 5


def test_a_seed_repeats_exactly_and_another_does_not(digits: Dataset) -> None:
    first, again, reseeded = (make_training(digits, seed=seed) for seed in (0, 0, 1))
    for training in (first, again, reseeded):
        list(training.run())
    assert weights(first) == weights(again) != weights(reseeded)


def own_state_net() -> nn.Module:
    """Return a net with a frozen part in evaluation mode, and with state and draws that no state dict has."""
    torch.manual_seed(0)
    frozen = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)).requires_grad_(False).eval()
    return nn.Sequential(
        frozen, Drawing(), OfFirstBatch(), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


class Drawing(nn.Module):
    """Adds noise from numpy, Python and a generator of its own, to images [N, 4, 8, 8]; returns [N, 8, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return torch.cat([images, images], 1)
        noise = torch.rand(1, generator=self.generator).item() + random.random() + np.random.rand()
        return torch.cat([images, images + 0.1 * noise], 1)


@pytest.mark.parametrize("stop_after", [13, 44])  # 44 steps are an epoch
def test_a_model_with_own_state_resumes_exactly(digits: Dataset, stop_after: int) -> None:
    def after(steps: int) -> Training:
        training = make_training(digits, model=own_state_net())
        training.advance(steps)
        return training

    whole = after(60)
    state = copy.deepcopy(after(stop_after).state())
    resumed = after(0)
    np.random.seed(5)
    random.seed(5)
    resumed.restore(state)
    resumed.advance(60 - stop_after)
    assert weights(resumed) == weights(whole)
    frozen = whole.model.get_submodule("0.1")
    assert not frozen.training
    assert frozen.get_buffer("running_mean").tolist() == [0.0] * 4
    first, last = (vars(training.model.get_submodule("2")) for training in (whole, resumed))
    assert torch.equal(first["spread"], last["spread"])
    assert first["calls"] == last["calls"]


def _draws(joined: World) -> tuple[float, float]:  # noqa: ARG001
    return np.random.rand(), random.random()


def test_each_process_starts_with_generators_of_its_own() -> None:
    first, second = run_ranks(_draws)
    assert first[0] != second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("stop_after", [7, 20, 27])  # 20 steps are an epoch
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_run_ends_with_the_same_weights(digits: Dataset, stop_after: int, precision: str) -> None:
    model = {"norm": True, "dropout": True}
    few = replace(digits, train=digits.train[: 20 * TRAIN.batch_size])
    whole = make_training(few, model=conv_net(**model), precision=precision)
    rows = rows_of(whole.run())

    interrupted = make_training(few, model=conv_net(**model), precision=precision)
    steps = interrupted.run()
    before = rows_of(next(steps) for _ in range(stop_after))
    with interrupted.paused():
        state = interrupted.state()
    state = {**state, "model": {name: value.clone() for name, value in state["model"].items()}}

    resumed = make_training(few, model=conv_net(**model, seed=5), precision=precision)
    torch.manual_seed(12345)
    resumed.restore(state)
    after = rows_of(resumed.run())
    assert weights(resumed) == weights(whole)
    assert [row.train_loss for row in before + after] == [row.train_loss for row in rows]
    assert resumed.epoch_loss == whole.epoch_loss
    # The new process's warm-up steps are not measured.
    assert len(resumed.clock.step_seconds) == whole.total_steps - 2 * TRAIN.warmup_steps


def _speed_after_resuming(joined: World, digits: Dataset) -> float:
    half = make_training(digits, joined)
    half.clock.train_seconds = 0.0 if joined.rank else 100.0
    state = stopped(half, TRAIN.history_every_steps)
    resumed = make_training(digits, joined)
    resumed.restore(state)
    steps = resumed.run()
    (row,) = rows_of(next(steps) for _ in range(TRAIN.history_every_steps))
    assert row.samples_per_second is not None
    return row.samples_per_second


def test_each_rank_goes_on_from_its_own_clock(digits: Dataset) -> None:
    assert min(run_ranks(_speed_after_resuming, digits)) > 0


def test_a_non_finite_loss_stops_before_the_update(digits: Dataset) -> None:
    message, before, after = until_broken(digits, False)
    assert message.startswith("variant tried, seed 0, epoch 1, step 8: the loss became nan, and the optimizer ")
    assert after == before[7]


@pytest.mark.parametrize("applied", [{}, {"precision": "fp16"}, {"optimizer_kernel": "foreach"}])
def test_on_the_device_it_stops_when_read(digits: Dataset, applied: dict[str, Any]) -> None:
    message, before, _ = until_broken(digits, True, **applied)
    assert message.startswith("variant tried, seed 0, epoch 1, step 8: the loss became nan, which was noticed after 3 ")
    assert len(before) == 10  # in step 10 a row of history is due


def _checkpointed_when_broken(joined: World, dataset: Dataset) -> str:
    training = broken(joined, dataset, 1)
    training.advance(9)
    with pytest.raises(NonFiniteLoss) as caught, training.paused():
        training.state()
    return str(caught.value)


def test_no_checkpoint_is_made_of_non_finite_losses(digits: Dataset) -> None:
    for message in run_ranks(_checkpointed_when_broken, digits):
        assert message.startswith(
            "variant tried, seed 0, epoch 1, step 8: the loss became nan, which was noticed after 2 steps"
        )


def test_no_rank_takes_a_step_without_another(digits: Dataset, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"rank 1: (?s:.*)step 8: the loss became nan"):
        run_ranks(_note_until_broken, digits, str(tmp_path))
    for rank in (0, 1):
        assert (tmp_path / str(rank)).read_text().count("\n") == 7


def _note_until_broken(joined: World, dataset: Dataset, directory: str) -> None:
    training = broken(joined, dataset, 1, on_device=False)
    with Path(directory, str(joined.rank)).open("w") as file:
        try:
            for _ in training.run():
                print(weights(training), file=file, flush=True)
        except NonFiniteLoss:
            time.sleep(1.0)  # time in which the other rank could take the step and note it
            raise


def test_paused_time_is_not_training_time(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training(digits)
    steps = training.run()
    for _ in range(10):
        next(steps)
    real, offset = time.perf_counter, [0.0]
    monkeypatch.setattr(windows, "perf_counter", lambda: real() + offset[0])
    with training.paused():
        offset[0] = 1000.0
    list(steps)
    assert training.clock.train_seconds < 500.0
    assert sum(training.clock.step_seconds) < 500.0


class _Counts(Detector):
    """Counts the windows; ``watched`` counts the measured ones."""

    def __init__(self) -> None:
        self.opened = self.closed = self.watched = 0

    def open(self) -> None:
        self.opened += 1

    def close(self, *, measured: bool) -> None:
        self.closed += 1
        self.watched += measured

    def rejections(self) -> Iterator[Rejection]:
        return iter(())


def test_advancing_in_parts_measures_the_last_part(digits: Dataset) -> None:
    straight, parted, counts = make_training(digits), make_training(digits), _Counts()
    straight.advance(30)
    parted.restart_measuring(2)
    parted.advance(10)
    assert len(parted.clock.step_seconds) == 8
    parted.restart_measuring(TRAIN.warmup_steps)
    parted.detectors = (counts,)
    parted.advance(20)
    assert weights(parted) == weights(straight)
    assert len(parted.clock.step_seconds) == 20 - TRAIN.warmup_steps
    assert parted.clock.measured_seconds < parted.clock.train_seconds
    assert (counts.opened, counts.closed, counts.watched) == (2, 2, 1)  # the second warm-up, and the rest


def _late(joined: World, dataset: Dataset) -> float:
    """Return this rank's training time in a run in which rank 0 opens its windows late."""

    class Slow(_Counts):
        def open(self) -> None:
            time.sleep(1.0)

    training = make_training(dataset, joined)
    training.detectors = (Slow(),) if joined.is_main else ()
    training.advance(10)
    return training.clock.train_seconds


def test_detectors_take_no_rank_s_training_time(digits: Dataset) -> None:
    assert all(seconds < 2.0 for seconds in run_ranks(_late, digits))  # rank 0 opens three windows, each 1 s late
