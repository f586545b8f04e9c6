"""Jobs that people have, from arrays to a score: windows of sensors, and images with several labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score
from torch import Tensor, nn

from pipeline.data.prepared import LEFT_OUT, Dataset
from pipeline.distributed import World, whole
from pipeline.params import Train
from pipeline.tasks import TaskError
from pipeline.tasks.batches import draw_epoch
from tests.data.test_own_data import packed, saved
from tests.nets import ALONE, task_of
from tests.ranks import run_ranks
from tests.trainings import ledgers, make_training, rows_of

PLAIN: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "warmup_fraction": 0.0}


def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    return float(f1_score(targets, outputs.argmax(1), average="macro"))


def mean_average_precision(outputs: Tensor, targets: Tensor) -> float:
    return float(average_precision_score(targets, outputs, average="macro"))


def convolutions(*, shape: tuple[int, ...], classes: int) -> nn.Module:
    block = nn.Sequential(nn.Conv1d(shape[0], 8, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4))
    return nn.Sequential(block, nn.Flatten(), nn.Linear(32, classes))


class Recurrent(nn.Module):
    def __init__(self, *, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(shape[0], 16, batch_first=True), nn.Linear(16, classes)

    def forward(self, windows: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(windows.transpose(1, 2))[0][:, -1])
        return logits


def _trained(joined: World, dataset: Dataset, trains: Sequence[Train], **applied: Any) -> list[Any]:
    """Return each training's change of the weights by its first step, its score, and its model's final weights."""
    made = []
    for train in trains:
        training = make_training(dataset, joined, train=train, **applied)
        before = {name: whole(value).clone() for name, value in training.model_state.read().items()}
        steps = training.run()
        next(steps)
        after = {name: whole(value).clone() for name, value in training.model_state.read().items()}
        rows_of(steps)
        made.append((before, after, training.score, training.model.state_dict()))
    return made


def _outputs(dataset: Dataset, train: Train, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the outputs of a model with these ``weights`` for the whole test set, and the targets."""
    task = task_of(dataset, train)
    model = task.model()
    model.load_state_dict(weights)
    inputs, targets = task.batch([dataset.test.arrays[name] for name in task.arrays])
    with torch.no_grad():
        return model.eval()(inputs), targets


def test_windows_of_sensors_have_a_macro_f1_and_class_weights(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    labels = random.choice(3, 240, p=[0.8, 0.15, 0.05])
    times = np.arange(20) * (labels[:, None] + 1) / 4 + random.uniform(0, 6, (240, 1))
    windows = np.stack([np.sin(times), np.cos(times)], 1) + random.normal(size=(240, 2, 20)) / 4
    dataset = packed(tmp_path, "arrays", saved(tmp_path, "npz", inputs=windows, targets=labels))
    own: dict[str, Any] = {
        "metric": f"{__name__}:macro_f1", "metric_over": "test_set", "optimizer": "adamw", "learning_rate": 0.01,
        "batch_size": 16, "epochs": 6,
    }  # fmt: skip
    trains = [
        Train(model=f"{__name__}:{name}", class_weights=weights, **own)
        for name in ("convolutions", "Recurrent")
        for weights in (None, "balanced")
    ]
    made = run_ranks(_trained, dataset, trains)[0]
    for train, (*_, score, weights) in zip(trains, made, strict=True):
        outputs, targets = _outputs(dataset, train, weights)
        assert score.accuracy == pytest.approx(macro_f1(outputs, targets), abs=1e-9), train.model
        assert score.loss == pytest.approx(F.cross_entropy(outputs, targets).item(), rel=1e-4)
    assert made[1][2].accuracy > 0.7


def test_images_can_have_several_labels(tmp_path: Path, digits: Dataset) -> None:
    digit = digits.train.targets[:400, None]
    labels = torch.cat([digit % 2, (digit > 4).long(), (digit == 7).long()], 1)
    labels[torch.arange(0, 400, 3), torch.arange(0, 400, 3) % 3] = LEFT_OUT
    arrays = {"inputs": digits.train.inputs[:400].numpy(), "targets": labels.numpy()}
    dataset = packed(tmp_path, "arrays", saved(tmp_path, "npz", **arrays))
    dataset.test.targets.clamp_(min=0)  # average precision needs all labels
    own: dict[str, Any] = {"task": "multi_label", "model": "small_cnn", "batch_size": 32, "epochs": 4}
    metric: dict[str, Any] = {"metric": f"{__name__}:mean_average_precision", "metric_over": "test_set"}
    trains = [
        Train(**own, **metric, **PLAIN, learning_rate=0.5, class_weights=weights) for weights in (None, "balanced")
    ]
    taken = draw_epoch(0, 0, len(dataset.train), (8, 8), 0).order[:32]
    targets = dataset.train.targets[taken]
    negatives, positives = ((dataset.train.targets == value).sum(0) for value in (0, 1))
    counts = (targets != LEFT_OUT).float()
    alone = _trained(ALONE, dataset, trains, gradient_accumulation=4)
    for made in (alone, run_ranks(_trained, dataset, trains)[1]):
        for train, (before, after, score, weights) in zip(trains, made, strict=True):
            task = task_of(dataset, train)
            model = task.model()
            model.load_state_dict(before)
            inputs = task.batch([dataset.train.inputs[taken], targets])[0]
            of_label = negatives / positives if train.class_weights else None
            losses = F.binary_cross_entropy_with_logits(
                model(inputs), targets.float(), counts, pos_weight=of_label, reduction="sum"
            )
            (losses / counts.sum()).backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close((before[name] - after[name]) / 0.5, parameter.grad, rtol=1e-3, atol=1e-5)
            outputs, tested = _outputs(dataset, train, weights)
            assert score.accuracy == pytest.approx(mean_average_precision(outputs, tested), abs=1e-9)
    assert alone[0][2].accuracy > 0.7
    objective = task_of(dataset, Train(**own)).objective
    known, some = torch.tensor([[1.0, -1.0, 2.0]]), torch.tensor([[1, 1, LEFT_OUT]])
    assert objective.scores(known, some).tolist() == [True, False]
    assert objective.test_losses(known, some).item() == pytest.approx(0.3133 + 1.3133, rel=1e-3)
    training = make_training(dataset, train=Train(**own))
    measured, foreseen = ledgers(training)
    assert foreseen.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)


def test_targets_that_are_no_labels_are_refused(digits: Dataset) -> None:
    with pytest.raises(TaskError, match=r"multi_label needs targets of 0 and 1 \[N, labels\], and those of"):
        task_of(digits, Train(task="multi_label"))
