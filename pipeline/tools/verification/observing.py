"""A variant's training in miniature, and what is to be seen of it; each in fresh processes, as the plan says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeline import models
from pipeline.data.batches import evaluation_batches
from pipeline.data.prepared import Dataset, Split
from pipeline.distributed import forked
from pipeline.errors import first_line
from pipeline.plans import Plan
from pipeline.tools.verification.natures import keep_still
from pipeline.training.assembly import DETERMINISTIC, Assembly, assembled
from pipeline.training.counting import Work
from pipeline.training.failures import OutOfMemory, is_out_of_memory
from pipeline.training.loop import Training
from pipeline.training.losses import DeviceLosses, NonFiniteLoss

EPOCHS, EPOCH_STEPS = 2, 10
"""Of the miniature; fewer steps where the data set has fewer."""
TEST_SAMPLES = 2000
"""At most so many, and a prime number of them, so that no number of processes divides it."""
TRIED_SAMPLES = 32
"""On which a model's nature is tried."""
STATISTICS_BATCHES = 4
"""Of so many samples each: from them come the statistics of a BatchNorm that is kept still."""
STATISTICS = "statistics.pt"
"""In the folder of the trainings' files, for a model that is kept still: the same for all of them."""
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

PRELOAD = ("pipeline.tools.verification.observing", "torch._dynamo")
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
    """For a single device: by how much each initial parameter, and each value that a layer returns, is off; relative,
    root mean square. As rounding does, forwards and, through the same products, backwards; see Parker, "Monte Carlo
    Arithmetic", UCLA CSD-970002, 1997."""
    draw: int = 0
    """Which of the noises."""
    forgets: int = 0
    """For a single device: the gradient lacks the last one of so many parts of each batch. 0: it lacks nothing."""
    rate: float = 1.0
    """Of a run: the learning rate, relative to the job's."""
    steps: int = 0
    """After which a run ends; 0: all."""


@dataclass(frozen=True)
class Observed:
    """What was seen of a training, the same on every rank."""

    file: Path
    """The state dict after it, by name, on the CPU."""
    losses: tuple[float, ...] = ()
    """Of each step of a run."""
    not_finite: str = ""
    """Why it ended early, with no state worth keeping."""
    left_out: bool = False
    """A step was not taken, because its scaled gradients overflowed."""
    unsteady: str = ""
    """Why the same seed need not give the same weights, where ``train.deterministic`` cannot be had."""
    correct: float = 0.0
    """The sum of the samples' scores by the evaluation of all ranks after the last step; and how many it counted."""
    count: int = 0
    expected_correct: float = 0.0
    """The same as one process finds it alone, from the same weights."""
    expected_count: int = 0
    work: Work | None = None
    """What the first step of a run took."""
    ties: int = 0
    """Test samples whose two largest logits are closer than rounding."""

    @property
    def way(self) -> Path:
        """How far each tensor has come, float64, by name: after a step, the gradient times ``-RATE``."""
        return self.file.with_suffix(".way")


@contextmanager
def observer(plan: Plan, prepared: Path, folder: Path) -> Iterator[Callable[[Task, str], Observed]]:
    """The variant in fresh processes: ``observe(task, name)``, which writes its file to ``folder/name``."""
    with forked(_observing, (plan, prepared), plan.processes, preload=PRELOAD) as ask:
        ask(None)
        yield lambda task, name: ask((task, folder / name))[0]


def _observing(plan: Plan, prepared: Path) -> Generator[Any, Any, None]:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a user's model prints is no part of the table
    with assembled(plan, prepared) as assembly:
        found = None
        while request := (yield found):
            task, file = request
            try:
                found = observe(task, file, assembly)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfMemory(f"out of memory ({first_line(error)})") from None


def observe(task: Task, file: Path, assembly: Assembly) -> Observed:
    """Train as ``task`` says, on this rank of the variant's world."""
    plan = assembly.plan
    dataset = miniature(assembly.dataset, plan.train.batch_size // plan.scale)
    small = replace(assembly, plan=plan.with_train(**_shrunk(task, plan)), dataset=dataset)
    with small.training(plan.train.seeds[0], change_model=_change(task, file.parent)) as training:
        _spoil(training, task)
        # Read by all ranks together, so all of them hear of a loss that is not finite, and none waits for another.
        training.take_step.losses = DeviceLosses(training.world)
        before, scales = _copied(training), _loss_scales(training)
        losses: tuple[float, ...] = ()
        not_finite = ""
        if task.what == "step":
            training.take_step(training.batches.epoch(0))  # no more: at RATE there may be nothing left to evaluate
        else:
            try:
                losses = tuple(row.train_loss for row in islice(training.run(), task.steps or None) if row)
            except NonFiniteLoss as error:
                not_finite = str(error)
        after = _copied(training)
        left_out = any(now < then for then, now in zip(scales, _loss_scales(training), strict=True))
        unsteady = training.plan.decided.get(DETERMINISTIC, "")
        seen = Observed(file, losses, not_finite, left_out, unsteady, work=training.work())
        if training.world.is_main:
            torch.save(after, file)
            moved = {
                key: after[key].double() - value.double() for key, value in before.items() if value.is_floating_point()
            }
            torch.save({} if not_finite else moved, seen.way)
        score = training.score
        if score is None or not_finite or task.still or task.steps:
            return seen
        alone = _scored_alone(training, after) if training.world.is_main else (0.0, 0, 0)
        correct, count, ties = training.world.broadcast(alone)
        return replace(
            seen, correct=score.correct, count=score.count, expected_correct=correct, expected_count=count, ties=ties
        )


def _change(task: Task, folder: Path) -> Callable[[nn.Module], nn.Module]:
    if not task.still:
        return lambda model: model
    return partial(keep_still, found=torch.load(folder / STATISTICS, weights_only=True))


def miniature(dataset: Dataset, batch_size: int) -> Dataset:
    """A few batches of the training set, and a part of the test set."""
    steps = min(EPOCH_STEPS, len(dataset.train) // batch_size)
    tested = next((n for n in range(min(TEST_SAMPLES, len(dataset.test)), 1, -1) if _is_prime(n)), 1)

    def first(split: Split, count: int) -> Split:
        return Split(split.images[:count], split.labels[:count])

    return replace(dataset, train=first(dataset.train, max(1, steps) * batch_size), test=first(dataset.test, tested))


def first_images(dataset: Dataset, batches: int = 1) -> list[Tensor]:
    """Some batches of training images as the model sees them, on the CPU."""
    found = evaluation_batches(
        dataset.train, dataset, rank=0, world_size=1, batch_size=TRIED_SAMPLES, device=torch.device("cpu")
    )
    return [images for images, _ in islice(found, batches)]


def _shrunk(task: Task, plan: Plan) -> dict[str, Any]:
    """What the miniature has under ``train`` instead of the job's."""
    changes = {"history_every_steps": 1, "warmup_steps": 1, "epochs": EPOCHS}
    if task.what == "step":
        return changes | PLAIN_SGD | {"learning_rate": plan.scale * RATE}
    return changes | {"learning_rate": task.rate * plan.train.learning_rate}


def _loss_scales(training: Training) -> list[float]:
    return [state["scale"] for state in (each.state() for each in training.techniques) if "scale" in state]


def _scored_alone(training: Training, state: dict[str, Tensor]) -> tuple[float, int, int]:
    """Score, count and ties over the test set, image by image from the raw pixels, with nothing shared out."""
    dataset, device = training.dataset, training.world.device
    with torch.random.fork_rng(devices=[]):
        model = models.of_job(training.train, dataset.shape, len(dataset.classes))
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


def _spoil(training: Training, task: Task) -> None:
    """Let it be off by ``task.noise``, and forget a part as ``task.forgets`` says."""
    step, forward = training.take_step, training.take_step.forward

    def off(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and output.is_floating_point():
            # A function of the value: rounding too leaves equal what is equal, and so, of max pooling, the place.
            return output * (1 + 2**0.5 * task.noise * (output.detach().float() * 2.0 ** (20 + task.draw)).cos())
        return output

    def forgetful(images: Tensor, labels: Tensor) -> Tensor:
        kept = len(images) * (task.forgets - 1) // task.forgets
        loss = forward(images, labels)
        part = forward(images[:kept], labels[:kept]) * (kept / len(images))
        return part + (loss - part).detach()  # nothing is forgotten in the loss that is shown

    if task.noise:
        torch.manual_seed(task.draw)
        for module in training.model.modules():
            if not any(module.children()):
                module.register_forward_hook(off)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(1 + task.noise * torch.randn_like(parameter))
    if task.forgets:
        step.forward = forgetful


def _copied(training: Training) -> dict[str, Tensor]:
    state = training.model_state.read()
    return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}


def _is_prime(number: int) -> bool:
    return all(number % factor for factor in range(2, int(number**0.5) + 1))
