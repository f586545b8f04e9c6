"""A variant's training in miniature, and what is to be seen of it; each in fresh processes, as the plan says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeline import models
from pipeline.assembly import DETERMINISTIC, Assembly, assembled
from pipeline.config import Config, Plan
from pipeline.data.batches import evaluation_batches
from pipeline.data.prepared import Dataset, Split
from pipeline.distributed import forked
from pipeline.training import Training
from pipeline.verification.natures import keep_still

EPOCHS, EPOCH_STEPS = 2, 10
"""Of the miniature; fewer steps where the data set has fewer."""
TEST_SAMPLES = 2000
"""At most so many, and a prime number of them, so that no number of processes divides it."""
TRIED_SAMPLES = 32
"""On which a model's nature is tried, and whose statistics a BatchNorm that is kept still takes."""
TIE = 2.0**-16
"""Two logits that are so close, relative to the largest of the sample, can change places by rounding."""

RATE = 2.0**20
"""So large that the weights' own rounding is lost beside the change; and a power of two, so that it rounds nothing."""
PLAIN_SGD: dict[str, Any] = {
    "optimizer": "sgd",
    "learning_rate": RATE,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "schedule": "constant",
    "warmup_fraction": 0.0,
}

PRELOAD = ("pipeline.verification.observing", "torch._dynamo")
"""What every process imports; torch imports the second with the first optimizer."""


@dataclass(frozen=True)
class Task:
    """One training from the start."""

    what: Literal["step", "run"]
    """step: a single step of plain SGD at ``RATE``, so that the weights' change is the gradient. run: the job itself,
    its schedule shrunk to the miniature."""
    still: bool = False
    """Whether the model is kept still; see ``natures``."""
    noise: float = 0.0
    """For a single device: the norm, relative to its own, of an error added to each gradient before each update."""


@dataclass(frozen=True)
class Observed:
    """What was seen of a training, the same on every rank."""

    file: Path
    """Of a step: the gradients. Of a run: the state dict. By name, on the CPU."""
    losses: tuple[float, ...] = ()
    """Of each step."""
    correct: float = 0.0
    """The sum of the samples' scores by the evaluation of all ranks after the last step; and how many it counted."""
    count: int = 0
    expected_correct: float = 0.0
    """The same as one process finds it alone, from the same weights."""
    expected_count: int = 0
    ties: int = 0
    """Test samples whose two largest logits are closer than rounding."""
    unsteady: str = ""
    """Why the same seed need not give the same weights, where ``train.deterministic`` cannot be had."""
    left_out: bool = False
    """The step was not taken, because its scaled gradients overflowed."""


@contextmanager
def observer(config: Config, plan: Plan, prepared: Path, folder: Path) -> Iterator[Callable[[Task, str], Observed]]:
    """The variant in fresh processes: ``observe(task, name)``, which writes its file to ``folder/name``."""
    with forked(_observing, (config, plan, prepared), plan.processes, preload=PRELOAD) as ask:
        ask(None)
        yield lambda task, name: ask((task, folder / name))[0]


def _observing(config: Config, plan: Plan, prepared: Path) -> Generator[Any, Any, None]:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a user's model prints is no part of the table
    with assembled(config, plan, prepared) as assembly:
        found = None
        while request := (yield found):
            task, file = request
            found = observe(task, file, assembly)


def observe(task: Task, file: Path, assembly: Assembly) -> Observed:
    """Train as ``task`` says, on this rank of the variant's world."""
    config, world = assembly.config, assembly.world
    dataset = miniature(assembly.dataset, config.train.batch_size)
    config = config.with_train(**_shrunk(task))
    change = partial(keep_still, images=first_images(dataset)) if task.still else _as_it_is
    small = replace(assembly, config=config, dataset=dataset)
    with small.training(config.train.seeds[0], change_model=change) as training:
        if task.noise:
            _disturb(training, task.noise)
        if task.what == "step":
            return _one_step(training, file)
        losses = tuple(row.train_loss for row in training.run() if row)
        state = _copied(training.model_state.read())
        score = training.score
        assert score is not None  # the last epoch ends with an evaluation
        alone = (0.0, 0, 0)
        if world.is_main:
            torch.save(state, file)
            alone = _scored_alone(training, state, _built(config, dataset, change))
        correct, count, ties = world.broadcast(alone)
        unsteady = training.plan.decided.get(DETERMINISTIC, "")
        return Observed(file, losses, score.correct, score.count, correct, count, ties, unsteady)


def miniature(dataset: Dataset, batch_size: int) -> Dataset:
    """A few batches of the training set, and a part of the test set."""
    steps = min(EPOCH_STEPS, len(dataset.train) // batch_size)
    tested = next((n for n in range(min(TEST_SAMPLES, len(dataset.test)), 1, -1) if _is_prime(n)), 1)

    def first(split: Split, count: int) -> Split:
        return Split(split.images[:count], split.labels[:count])

    return replace(dataset, train=first(dataset.train, max(1, steps) * batch_size), test=first(dataset.test, tested))


def first_images(dataset: Dataset) -> Tensor:
    """A few training images as the model sees them, on the CPU."""
    batches = evaluation_batches(
        dataset.train, dataset, rank=0, world_size=1, batch_size=TRIED_SAMPLES, device=torch.device("cpu")
    )
    return next(batches)[0]


def _shrunk(task: Task) -> dict[str, Any]:
    """What the miniature has under ``train`` instead of the job's."""
    changes = {"history_every_steps": 1, "warmup_steps": 1, "epochs": EPOCHS}
    return changes | (PLAIN_SGD if task.what == "step" else {})


def _one_step(training: Training, file: Path) -> Observed:
    """The gradients, from the weights before and after: so it is the same for every technique, whoever held them."""
    before = {name: value.double() for name, value in _copied(training.model_state.read()).items()}
    scales = _loss_scales(training)
    training.take_step(training.batches.epoch(0))  # no more: at RATE there may be nothing left to evaluate
    after = _copied(training.model_state.read())
    if training.world.is_main:
        changes = {name: (value - after[name].double()) / RATE for name, value in before.items()}
        torch.save(changes, file)
    return Observed(file, left_out=any(now < then for then, now in zip(scales, _loss_scales(training), strict=True)))


def _loss_scales(training: Training) -> list[float]:
    return [state["scale"] for state in (each.state() for each in training.techniques) if "scale" in state]


def _scored_alone(training: Training, state: dict[str, Tensor], model: nn.Module) -> tuple[float, int, int]:
    """Score, count and ties over the test set, image by image from the raw pixels, with nothing shared out."""
    dataset, device = training.dataset, training.world.device
    model.load_state_dict(state)
    classifier = models.Classifier(model, dataset.mean, dataset.std).to(device).eval()
    correct, count, ties = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in zip(
            *(part.split(256) for part in (dataset.test.images, dataset.test.labels)), strict=True
        ):
            logits = classifier(images.to(device)).float()
            correct += training.objective.scores(logits, labels.to(device)).double().sum().item()
            count += len(labels)
            if logits.shape[1] > 1:
                first, second = logits.topk(2).values.unbind(1)
                ties += int((first - second <= TIE * logits.abs().amax(1)).sum())
    return correct, count, ties


def _built(config: Config, dataset: Dataset, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return change(models.of_job(config.train, dataset.shape, len(dataset.classes)))


def _disturb(training: Training, noise: float) -> None:
    """Before each update, add to each gradient an error of ``noise`` times its norm.

    Its direction is drawn once: rounding can err to the same side in every step, and so go farther than by chance.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = list(training.model.parameters())
    errors = [torch.randn(each.shape, generator=generator).to(each.device) for each in parameters]
    update = training.take_step.update

    def disturbed() -> None:
        for parameter, error in zip(parameters, errors, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(error * (noise * parameter.grad.norm() / error.norm()))
        update()

    training.take_step.update = disturbed


def _copied(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def _is_prime(number: int) -> bool:
    return all(number % factor for factor in range(2, int(number**0.5) + 1))
