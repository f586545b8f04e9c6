"""Train a variant in miniature, in fresh processes with its plan, and record its losses, weights and evaluation.

Each process draws its own random numbers, and BatchNorm normalises by the samples of one process. So a distributed
training differs by design from a training on a single device. To show other differences, ``make_per_sample`` removes
both reasons from the model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map, tree_map_only

from pipeline import tasks
from pipeline.data.prepared import Dataset, Split
from pipeline.distributed import forked, whole
from pipeline.errors import first_line
from pipeline.files import json_sha256
from pipeline.models import keeping
from pipeline.params import Train
from pipeline.plans import Plan
from pipeline.processes import randomness
from pipeline.step import Inputs
from pipeline.tasks.batches import evaluation_batches
from pipeline.training.assembly import DETERMINISTIC, Assembly, assembled, preload_for
from pipeline.training.loop import Training
from pipeline.training.outcomes import DeviceLosses, NonFiniteLoss, OutOfMemory, Work, is_out_of_memory


class Size(NamedTuple):
    """The size of a miniature."""

    epochs: int
    epoch_steps: int
    """Fewer if the data set is smaller."""
    test_samples: int
    """At most so many. The number used is prime, so that several processes never have equal shares."""
    test_batches: int
    """Nor more than so many batches of the training, so that an evaluation is no longer than so many steps."""


WHOLE, QUICK = Size(2, 10, 2000, 2000), Size(1, 3, 200, 3)
QUARTERS = (0.25, 0.5, 0.75)
"""Ends of the quarters that count as classes of targets that are numbers."""
TRIED_SAMPLES = 32
"""Number of samples from which a model's nature (``nature``) is found."""
STATISTICS_BATCHES = 4
"""Number of batches, of ``TRIED_SAMPLES`` each, for the statistics of a BatchNorm that is made per-sample."""
TIE = 2.0**-16
"""Two logits that differ by less than this, relative to the sample's largest logit, can change their order by
rounding."""

RATE = 2.0**20
"""Learning rate of a single step. It is so large that the weights change by far more than their rounding. It is a power
of two, so that multiplying by it does not round."""
PLAIN_SGD: dict[str, Any] = {
    "optimizer": "sgd",
    "learning_rate": RATE,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "schedule": "constant",
    "warmup_fraction": 0.0,
    "lr_warmup_steps": None,
    "lr_factors": {},
    "clip_norm": None,
    "ema_decay": None,
}


@dataclass(frozen=True)
class Trial:
    """One training from the start."""

    what: Literal["step", "run"]
    """step: a single step of plain SGD at ``RATE``, which changes the weights by the gradient times ``-RATE``. run: the
    job itself, its schedule shrunk to the miniature."""
    per_sample: bool = False
    """True if the model is made per-sample (``make_per_sample``)."""
    noise: float = 0.0
    """For a single device: the relative error (root mean square) that is added to each initial parameter and to each
    value that a layer returns. It imitates rounding in the forward pass and also in the backward pass, where these
    values are factors. Source: Parker, "Monte Carlo Arithmetic", UCLA CSD-970002, 1997."""
    draw: int = 0
    """The seed of the noise."""
    forgets: int = 0
    """For a single device: the planted fault. Each batch has this number of parts, and the gradient lacks the last
    part. 0: no fault."""
    rate: float = 1.0
    """Learning rate of a run, relative to the job's."""
    steps: int = 0
    """Number of steps after which a run ends; 0: all."""
    size: Size = WHOLE


@dataclass(frozen=True)
class Observed:
    """The results of a training, the same on every rank."""

    file: Path
    """File with the state dict after the training; its tensors are on the CPU."""
    losses: tuple[float, ...] = ()
    """Loss of each step of a run."""
    rates: tuple[float, ...] = ()
    """Learning rate of each step of a run."""
    not_finite: str = ""
    """Why the training ended early, with no usable state; empty if it did not."""
    overflowed: bool = False
    """True if a step was skipped because its scaled gradients overflowed."""
    unsteady: str = ""
    """Why the same seed may give other weights although ``train.deterministic`` is true; otherwise empty."""
    correct: float = 0.0
    """Sum of the samples' scores in the evaluation by all ranks after the last step; ``count``: samples counted."""
    count: int = 0
    expected_correct: float = 0.0
    """The same sum, computed by one process alone from the same weights; ``expected_count``: its number of samples."""
    expected_count: int = 0
    work: Work | None = None
    """The work of one step of a run: the step that left out the most samples."""
    ties: int = 0
    """Number of test samples whose score rounding may change, such as those with two almost equal largest logits."""

    @property
    def way(self) -> Path:
        """File with each floating-point tensor's change in float64: after a step, the gradient times ``-RATE``."""
        return self.file.with_suffix(".way")


@contextmanager
def observer(plan: Plan, prepared: Path, folder: Path) -> Iterator[Callable[[Trial, str], Observed]]:
    """Start the variant in fresh processes. Yields the function ``observe(trial, name)``, which runs a trial and writes
    its file to ``folder/name``."""
    preload = [__name__, *preload_for(plan)]
    with forked(_observing, (plan, prepared), plan.processes, preload=preload, on_hosts=plan.hosts) as ask:
        ask(None)
        yield lambda trial, name: ask((trial, folder / name))[0]


def _observing(plan: Plan, prepared: Path) -> Generator[Any, Any, None]:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a user's model may print; stdout is for the table
    with assembled(plan, prepared) as assembly:
        observed = None
        while request := (yield observed):
            trial, file = request
            try:
                observed = observe(trial, file, assembly)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfMemory(f"out of memory ({first_line(error)})") from None


def observe(trial: Trial, file: Path, assembly: Assembly) -> Observed:
    """Run ``trial`` on this rank of the variant's process group, and return its results. Rank 0 writes ``file``."""
    plan = assembly.plan
    dataset = miniature(assembly.task.dataset, plan.train.batch_size // plan.scale, trial.size)
    of_job = replace(assembly.task, dataset=dataset)
    small = replace(assembly, plan=plan.with_train(**_shrunk(trial, plan)), task=of_job)
    # All ranks read these losses together, so every rank sees a loss that is not finite, and none waits for another.
    options: dict[str, Any] = {"losses": DeviceLosses(assembly.world)}
    if trial.per_sample:
        statistics = torch.load(file.parent / statistics_file(plan.train), weights_only=True)
        options["change_model"] = partial(make_per_sample, kept_statistics=statistics)
    with small.training(plan.train.seeds[0], **options) as training, _spoilt(training, trial):
        before, scales = _copied(training), _loss_scales(training)
        training.counted_steps.update(range(training.total_steps))
        losses: tuple[float, ...] = ()
        rates: tuple[float, ...] = ()
        not_finite = ""
        if trial.what == "step":
            training.step(training.batches.epoch(0))  # without evaluation, because RATE may ruin the weights
        else:
            try:
                rows = [row for row in islice(training.run(), trial.steps or None) if row]
                losses = tuple(row.train_loss for row in rows if row.train_loss is not None)
                rates = tuple(row.learning_rate for row in rows)
            except NonFiniteLoss as error:
                # Without the name, because variants that train in the same way share this training.
                not_finite = str(error).removeprefix(f"variant {training.plan.name}, ")
        after = _copied(training)
        overflowed = any(now < then for then, now in zip(scales, _loss_scales(training), strict=True))
        unsteady = training.plan.decided.get(DETERMINISTIC, "")
        seen = Observed(file, losses, rates, not_finite, overflowed, unsteady, work=training.work())
        if training.world.is_main:
            torch.save(after, file)
            moved = {
                key: after[key].double() - value.double() for key, value in before.items() if value.is_floating_point()
            }
            torch.save({} if not_finite else moved, seen.way)
        score = training.score
        if score is None or not_finite or trial.per_sample or trial.steps:
            return seen
        alone = _scored_alone(training, after) if training.world.is_main else (0.0, 0, 0)
        correct, count, ties = training.world.broadcast(alone)
        return replace(
            seen, correct=score.correct, count=score.count, expected_correct=correct, expected_count=count, ties=ties
        )


def statistics_file(train: Train) -> str:
    """Return the name of the file with the statistics that make the job's model per-sample. The file is in the folder
    of the trainings' files, and all trainings of this model use it."""
    return f"statistics-{json_sha256([train.model, train.model_options, train.weights])[:16]}.pt"


def miniature(dataset: Dataset, batch_size: int, size: Size = WHOLE) -> Dataset:
    """Return the data set cut to a few batches of the training set and a part of the test set."""
    steps = min(size.epoch_steps, len(dataset.train) // batch_size)
    most = min(size.test_samples, size.test_batches * batch_size, len(dataset.test))
    tested = next((number for number in range(most, 1, -1) if _is_prime(number)), 1)
    return replace(dataset, train=_part(dataset.train, max(1, steps) * batch_size), test=_part(dataset.test, tested))


def _part(split: Split, count: int) -> Split:
    """Return ``count`` samples of ``split``: the first ones, which need no copy. But if they lack half of a class's
    share, or a whole class (the data set is sorted), return samples from all over, in random order. For targets that
    are numbers, the quarters of the first number count as classes."""
    labels = split.arrays.get("targets")
    if labels is None or (labels.ndim > 1 and not labels.is_floating_point()):  # such as windows of texts
        return split[split.drawn(count)]
    if labels.is_floating_point():
        first = labels.reshape(len(labels), -1)[:, 0].double()
        labels = torch.bucketize(first, first[:: len(first) // 10_000 + 1].quantile(first.new_tensor(QUARTERS)))
    labels = labels.clamp(min=0)  # labels that are left out
    counts = labels.bincount()
    least = (counts * count // (2 * len(split))).clamp(min=1 if count >= len(counts) else 0).minimum(counts)
    if bool((labels[:count].bincount(minlength=len(least)) >= least).all()):
        return split[:count]
    rows = split.drawn(count)
    return split[rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]]


def first_inputs(task: tasks.Task, batches: int = 1) -> list[Inputs]:
    """Return the first ``batches`` batches of ``TRIED_SAMPLES`` training samples, as the model takes them. The task
    must be on the CPU."""
    micro_batches = evaluation_batches(task.dataset.train, task, rank=0, world_size=1, batch_size=TRIED_SAMPLES)
    return [inputs for inputs, _ in islice(micro_batches, batches)]


def _shrunk(trial: Trial, plan: Plan) -> dict[str, Any]:
    """Return the settings under ``train`` that replace the job's settings in the miniature."""
    changes = {"history_every_steps": 1, "warmup_steps": 1, "epochs": trial.size.epochs, "lr_warmup_steps": None}
    if trial.what == "step":
        return changes | PLAIN_SGD | {"learning_rate": plan.scale * RATE}
    return changes | {"learning_rate": trial.rate * plan.train.learning_rate}


def _loss_scales(training: Training) -> list[float]:
    return [state["scale"] for state in (own.state() for own in training.techniques) if "scale" in state]


def _scored_alone(training: Training, state: dict[str, Tensor]) -> tuple[float, int, int]:
    """Return the sum of the scores, the number of samples and the number of ties over the test set. This process alone
    computes them, from raw inputs."""
    task = training.task
    with randomness.kept():
        model = task.model()
    model.load_state_dict(state)
    deployed = nn.Sequential(task.preprocess, model.to(task.device)).eval()
    correct, count, ties, scored, kept = 0.0, 0, 0, 0, []
    with torch.no_grad():
        for rows in zip(*(task.dataset.test.arrays[name].split(256) for name in task.arrays), strict=True):
            inputs, targets = task.raw([array_rows.to(task.device) for array_rows in rows])
            outputs = deployed(inputs).float()
            scores = task.objective.scores(outputs, targets)
            correct += scores.double().sum().item()
            count, scored = count + len(targets), scored + len(scores)
            ties += task.ties(outputs, targets, TIE)
            kept.append(task.of_labels(outputs.cpu(), targets.cpu()))
    if over_set := task.objective.over_set:
        # A single tie can change the metric of a set by any amount.
        return over_set(*map(torch.cat, zip(*kept, strict=True))) * count, count, ties * count
    return correct if scored == count else correct / max(scored, 1) * count, count, ties


def _spoilt(training: Training, trial: Trial) -> AbstractContextManager[None]:
    """Add ``trial.noise`` to the training. If ``trial.forgets`` is not 0, each batch has this number of parts, and the
    gradient lacks the last part while the returned context is open."""

    def off(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        # The noise depends on the value alone. Like rounding, it keeps equal values equal, so max pooling still
        # chooses the same value.
        return value * (1 + 2**0.5 * trial.noise * (value.detach().float() * 2.0 ** (20 + trial.draw)).cos())

    def forgetful(forward: Callable[[Inputs, Tensor], Tensor]) -> Callable[[Inputs, Tensor], Tensor]:
        def forgetting(inputs: Inputs, targets: Tensor) -> Tensor:
            kept = len(targets) * (trial.forgets - 1) // trial.forgets
            loss = forward(inputs, targets)
            first = tree_map(lambda values: values[:kept], (inputs, targets))
            part = forward(*first) * (kept / len(targets))
            return part + (loss - part).detach()  # the reported loss includes all parts

        return forgetting

    if trial.noise:
        torch.manual_seed(trial.draw)
        for module in training.model.modules():
            # A layer such as nn.MultiheadAttention has parameters of its own, and a part that it does not call.
            if not any(module.children()) or any(True for _ in module.parameters(recurse=False)):
                module.register_forward_hook(lambda _module, _inputs, outputs: tree_map_only(Tensor, off, outputs))
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(1 + trial.noise * torch.randn_like(parameter))
        if training.setup.averages:
            training.setup.averages.load(training.model_state.read())
    return training.step.instrument(**({"forward": forgetful} if trial.forgets else {}))


def _copied(training: Training) -> dict[str, Tensor]:
    state = training.weights()
    return {name: whole(value).detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}


def _is_prime(number: int) -> bool:
    return all(number % factor for factor in range(2, int(number**0.5) + 1))


_MIXED = 1e-3
"""Samples influence each other if a sample's logits differ by more than this between the whole batch and a part of
it. The value is relative to the largest logit. Rounding causes far smaller differences."""


@dataclass(frozen=True)
class Nature:
    """The reasons why a model's training depends on the number of processes."""

    stochastic: bool
    """The model draws random numbers, as dropout does."""
    batch_dependent: bool
    """A sample's logits depend on the other samples of the batch, as with BatchNorm. False if the model is stochastic,
    because random draws hide this."""

    @property
    def per_sample(self) -> bool:
        return not (self.stochastic or self.batch_dependent)


def nature(model: nn.Module, inputs: Inputs) -> Nature:
    """Return the nature of ``model``, found by running a copy, in its parts' own modes, on ``inputs`` [samples, ...].
    There must be at least four samples, in the form that the model takes. The model and the random state do not
    change."""
    with torch.no_grad(), keeping.trial(model) as tried:
        before = torch.get_rng_state()
        whole = tried(inputs)
        if not torch.equal(before, torch.get_rng_state()):
            return Nature(stochastic=True, batch_dependent=False)
        half = len(whole) // 2
        parts = torch.cat(
            [tried(tree_map(lambda values: values[rows], inputs)) for rows in (slice(half), slice(half, None))]  # noqa: B023
        )
    return Nature(stochastic=False, batch_dependent=bool((whole - parts).abs().max() > _MIXED * whole.abs().max()))


def statistics(model: nn.Module, batches: Iterable[Inputs]) -> dict[str, torch.Tensor]:
    """Return BatchNorm's running statistics, averaged over ``batches``: name in the state dict -> value.

    With its initial statistics (mean 0, variance 1) a BatchNorm would not normalise, and a deep model would diverge.
    A BatchNorm in evaluation mode is left out. The model changes, but not the random state.
    """
    norms = _norms(model)
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # the average over all batches
    with torch.no_grad(), randomness.kept():
        for batch in batches:
            model(batch)
    return {f"{name}.{key}": value.clone() for name, norm in norms.items() for key, value in norm.named_buffers()}


def make_per_sample(model: nn.Module, kept_statistics: dict[str, torch.Tensor]) -> nn.Module:
    """Switch dropout off and fix BatchNorm to the statistics ``kept_statistics``, in place, and return the model.

    The names in the state dict stay the same. Modules that draw random numbers or mix samples in other ways are not
    changed; ``nature`` detects them.
    """
    for module in model.modules():
        drops = "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth"
        for key, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in key or (drops and key == "p")):
                setattr(module, key, 0.0)
    model.load_state_dict(kept_statistics, strict=False)
    for name, norm in _norms(model).items():
        model.set_submodule(name, FixedNorm(norm))
    return model


def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, _BatchNorm) and module.track_running_stats and module.training
    }


class FixedNorm(nn.Module):
    """A BatchNorm that normalises by its running statistics even in training. It has the parameters of ``norm``."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        for name, buffer in norm.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(inputs, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
