"""Labels that are left out, and weights of classes: the parts of a batch count by their labels."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.data.prepared import LEFT_OUT, Dataset, Split, Statistics
from pipeline.distributed import World, whole
from pipeline.errors import ConfigError
from pipeline.params import Train, parse
from pipeline.tasks import TaskError
from pipeline.tasks.batches import draw_epoch
from pipeline.training.outcomes import Score, evaluate
from tests.nets import ALONE, task_of
from tests.ranks import run_ranks
from tests.trainings import ledgers, make_training

LENGTH, FEATURES, CLASSES, BATCH = 6, 4, 3, 16


def net(*, shape: tuple[int, ...], labels: int = 1, classes: int) -> nn.Sequential:
    """Return a net that every parallelism can divide; it maps features to logits, for each token alone."""
    assert (shape, labels) == ((LENGTH, FEATURES), LENGTH)
    block = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 8))
    return nn.Sequential(block, nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, classes))


def tagged(count: int, seed: int) -> Split:
    """Return sequences of random length, from 0 on, with a label for each token; labels of the padding are left out."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, LENGTH, FEATURES, generator=random)
    labels = (inputs[..., 0] > 0).long() + (inputs[..., 1] > 1).long()
    lengths = torch.randint(LENGTH + 1, (count, 1), generator=random)
    return Split({"inputs": inputs, "targets": labels.where(torch.arange(LENGTH) < lengths, LEFT_OUT)})


def sequences(seed: int = 0) -> Dataset:
    train, test = tagged(3 * BATCH, seed), tagged(37, seed + 1)
    order = draw_epoch(0, 0, len(train), (1, 1), 0).order
    train.targets[order[: BATCH // 4]] = LEFT_OUT  # a micro-batch without any label
    left_out = sum(int((split.targets == LEFT_OUT).sum()) for split in (train, test))
    counts = train.targets[train.targets != LEFT_OUT].bincount(minlength=CLASSES)
    known = {"inputs": Statistics(mean=(0.0,) * LENGTH, std=(1.0,) * LENGTH)}
    return Dataset(
        "sequences", "0" * 64, tuple("abc"), None, known, train, test, class_counts=tuple(counts.tolist()),
        left_out_count=left_out,
    )  # fmt: skip


def settings(**changes: Any) -> Train:
    plain: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "warmup_fraction": 0.0}
    return Train(model="tests.test_left_out:net", batch_size=BATCH, epochs=1, learning_rate=1.0, **plain | changes)


VARIANTS: list[dict[str, Any]] = [
    {"gradient_accumulation": 4},
    {"gradient_accumulation": 2, "loss_chunks": 3},
    {"parallelism": "ddp", "gradient_accumulation": 2},
    {"parallelism": "zero1"},
    {"parallelism": "fsdp", "gradient_accumulation": 4},
    {"parallelism": "tensor", "gradient_accumulation": 2},
    {"parallelism": "pipeline", "gradient_accumulation": 4},
]


Moved = dict[str, dict[str, Tensor]]


def _moved(joined: World, dataset: Dataset, weights: Sequence[Any]) -> Moved:
    """Return by how much a step of each of ``VARIANTS`` with each of ``weights`` changes the parameters: by its
    gradients."""
    moved: Moved = {}
    for of_class, variant in itertools.product(weights, VARIANTS):
        world, train = joined if "parallelism" in variant else ALONE, settings(class_weights=of_class)
        training = make_training(dataset, world, train=train, **variant)
        before = {name: whole(value).clone() for name, value in training.model_state.read().items()}
        next(training.run())
        after = training.model_state.read()
        moved[f"{of_class} {variant}"] = {name: value - whole(after[name]) for name, value in before.items()}
    return moved


def test_parts_of_a_batch_count_by_their_labels() -> None:
    dataset = sequences(seed=3)
    counts = torch.tensor(dataset.class_counts)
    weights = {"N": None, "b": counts.sum() / (CLASSES * counts), "[": torch.tensor([0.5, 0.0, 7.0])}
    taken = draw_epoch(0, 0, len(dataset.train), (1, 1), 0).order[:BATCH]
    moved = run_ranks(_moved, dataset, [None, "balanced", [0.5, 0.0, 7.0]])[1]
    assert len(moved) == 3 * len(VARIANTS)
    for variant, gradients in moved.items():
        torch.manual_seed(0)
        model = task_of(dataset, settings()).model()
        logits, of_class = model(dataset.train.inputs[taken]).flatten(0, 1), weights[variant[0]]
        F.cross_entropy(logits, dataset.train.targets[taken].flatten(), of_class).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                gradients[name],
                parameter.grad,
                rtol=1e-4,
                atol=1e-6,
                msg=lambda text: f"{variant} {name}: {text}",  # noqa: B023
            )


def _evaluated(joined: World, dataset: Dataset, train: Train) -> Score:
    torch.manual_seed(0)
    task = task_of(dataset, train)
    return evaluate(task.model(), task, joined, 5)


def test_left_out_labels_have_no_score() -> None:
    dataset = sequences()
    task, labels = task_of(dataset, settings()), dataset.test.targets.flatten()
    torch.manual_seed(0)
    logits = task.model()(dataset.test.inputs).flatten(0, 1)
    right = (logits.argmax(1) == labels)[labels != LEFT_OUT].double().mean().item()
    alone = _evaluated(ALONE, dataset, settings(class_weights="balanced"))
    for score in [*run_ranks(_evaluated, dataset, settings(), size=3), alone]:
        assert score.count == 37
        assert score.accuracy == pytest.approx(right, rel=1e-12)
        assert score.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_each_step_has_its_own_scale() -> None:
    training = make_training(sequences(), train=settings(), gradient_accumulation=2)
    batches = training.batches
    steps = [(number, batches._scale.item()) for number, _ in enumerate(batches.epoch(0))]
    resumed = [batches._scale.item() for _ in batches.epoch(0, 1)]
    assert [scale for _, scale in steps[2:]] == resumed
    assert len({scale for _, scale in steps}) == 3
    measured, predicted = ledgers(training)
    assert predicted.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)


def test_a_job_without_them_has_the_plain_step() -> None:
    plain = replace(sequences(), left_out_count=0)
    training = make_training(plain, train=settings())
    assert training.step.criterion == training.task.objective.loss


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TaskError, match="found 2 weights, but sequences has 3 classes"):
        task_of(sequences(), settings(class_weights=[1.0, 2.0]))
    with pytest.raises(ConfigError, match="class_weights: found balanced, which 'mean_squared_error' ignores"):
        parse({"train": {"task": "regression", "class_weights": "balanced"}, "variants": {"baseline": {}}})
    with pytest.raises(ConfigError, match=r"class_weights: found \[0.0, 0.0\], with which nothing is learned"):
        parse({"train": {"class_weights": [0, 0]}, "variants": {"baseline": {}}})


def test_a_task_with_weights_reaches_other_processes() -> None:
    """The bench starts the DataLoader's workers by spawning, which pickles the task."""
    task = task_of(sequences(), settings(class_weights="balanced"))
    outputs, targets = torch.randn(4, LENGTH, CLASSES), tagged(4, 0).targets
    loss = task.objective.loss(outputs, targets)
    assert pickle.loads(pickle.dumps(task)).objective.loss(outputs, targets) == loss


def test_a_teacher_does_not_teach_the_padding() -> None:
    dataset = sequences()
    train = settings()
    taught: dict[str, Any] = {"distillation": {"teacher": "t", "model": train.model, "alpha": 1.0, "temperature": 2.0}}
    training = make_training(dataset, train=train, **taught)
    (teacher,) = training.setup.kept_models
    inputs, labels = next(training.batches.epoch(0))
    ours, theirs = ((model(inputs) / 2).log_softmax(-1)[labels != LEFT_OUT] for model in (training.model, teacher))
    expected = 4 * F.kl_div(ours, theirs, reduction="sum", log_target=True) / labels.numel()
    assert training.step.forward(inputs, labels).item() == pytest.approx(expected.item(), rel=1e-5)
