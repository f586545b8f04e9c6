"""Trainings of small models on the digits, and of small jobs with each task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset, Split, Statistics
from pipeline.distributed import World
from pipeline.measurement.windows import Clock, Memory
from pipeline.params import Augment, Train
from pipeline.params.catalogue import in_effect
from pipeline.profiling import ledger, prediction
from pipeline.results import HistoryRow, Ledger, Window
from pipeline.results.figures import FOREIGN_LOAD
from pipeline.results.rejections import Rejection
from pipeline.tasks.batches import Placement, TrainBatches
from pipeline.training.checkpoints import state_sha256
from pipeline.training.loop import Training
from pipeline.training.measured import OfRank, of_rank, window_of
from pipeline.training.outcomes import DeviceLosses, NonFiniteLoss
from tests.nets import ALONE, batches_of, conv_net, make_plan, task_of, training_of
from tests.pages import ROOT, blocks

TRAIN = Train(
    epochs=2, batch_size=32, learning_rate=0.05, warmup_steps=3, history_every_steps=5, augment=Augment(crop_padding=1)
)
ADAMW = TRAIN.model_copy(update={"optimizer": "adamw", "learning_rate": 0.002})
LOW_BIT: dict[str, Any] = {"optimizer_state": "8bit"}
needs_library = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra low-bit")


def make_training(
    dataset: Dataset,
    joined: World = ALONE,
    *,
    seed: int = 0,
    model: nn.Module | None = None,
    train: Train = TRAIN,
    steady: bool = False,
    **applied: Any,
) -> Training:
    """Return the training of ``model``, by default of ``train.model`` if that is set, and otherwise of ``conv_net``.

    ``applied``: keys of the variant; several ranks train with ddp if it names no parallelism. On the digits, an epoch
    of ``TRAIN`` has 44 steps.
    """
    applied = {"parallelism": "ddp" if joined.size > 1 else "none"} | applied
    plan = make_plan(processes=joined.size, batch_size=train.batch_size, train=train, **applied)
    placement: Placement = next((entry.placement for entry in in_effect(plan.applied) if entry.placement), "resident")
    batches = batches_of(dataset, plan, joined, seed, placement)
    task = task_of(dataset, plan.train, joined.device)
    if model is None:
        torch.manual_seed(seed)
        model = task.begun() if "model" in train.model_fields_set else conv_net(seed=seed)
    return training_of(plan, model, task, batches, joined, seed, steady=steady)


def rows_of(steps: Iterator[HistoryRow | None]) -> list[HistoryRow]:
    return [row for row in steps if row]


def weights(training: Training) -> str:
    return state_sha256(training.model.state_dict())


def resumes_exactly(whole: Training, half: Training, resumed: Training) -> bool:
    """Return whether ``resumed``, which continues from the state of ``half``, ends with the weights of ``whole``."""
    whole.advance(30)
    half.advance(13)
    state = half.world.broadcast(half.state())  # a job saves the main rank's state, too
    resumed.restore({**state, "model": {name: value.clone() for name, value in state["model"].items()}})
    resumed.advance(17)
    return weights(resumed) == weights(whole)


class BreaksAt(nn.Module):
    """Calls ``net``. In training, the output of the forward pass with number ``breaks`` is NaN."""

    def __init__(self, net: nn.Module, breaks: int | None) -> None:
        super().__init__()
        self.net, self.breaks, self.seen = net, breaks, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        logits: torch.Tensor = self.net(images)
        return logits * math.nan if self.seen == self.breaks else logits


def broken(joined: World, dataset: Dataset, broken_rank: int, *, on_device: bool = True, **applied: Any) -> Training:
    """A training whose loss becomes NaN in step 8, on one rank."""
    training = make_training(
        dataset, joined, model=BreaksAt(conv_net(), 8 if joined.rank == broken_rank else None), **applied
    )
    if on_device:
        training.step.losses = DeviceLosses(joined)
    return training


def until_broken(dataset: Dataset, on_device: bool, **applied: Any) -> tuple[str, list[str], str]:
    """Return the error's message, the weights before each step, and the weights after the error."""
    training = broken(ALONE, dataset, 0, on_device=on_device, **applied)
    before = [weights(training)]
    with pytest.raises(NonFiniteLoss) as caught:
        before.extend(weights(training) for _ in training.run())
    return str(caught.value), before, weights(training)


def ledgers(training: Training) -> tuple[Ledger, Ledger]:
    """Return the measured ledger of the training, and the one that is predicted from its plan."""
    measured = ledger.measured(training, 10**12)
    assert measured is not None
    return measured, prediction.predicted(training.plan, training.task)


# Windows

MIB = 2**20


def rank(
    step_seconds: Sequence[float],
    *,
    wait: float = 0.0,
    unseen: float = 0.0,
    peak: int | None = 100 * MIB,
    retries: int | None = None,
) -> tuple[Clock, Memory]:
    """One rank's measurement: its steps, its total wait for input, its time outside steps, and its peak memory."""
    clock, memory = Clock(torch.device("cpu")), Memory(torch.device("cpu"))
    clock.step_seconds, clock.measured_seconds = list(step_seconds), sum(step_seconds) + unseen
    clock.input_seconds = wait
    memory.peak_bytes, memory.retries = peak, retries
    memory.reserved_bytes = None if retries is None else 2 * (peak or 0)
    memory.driver_bytes = None if retries is None else 3 * (peak or 0)
    return clock, memory


def window(
    *ranks: tuple[Clock, Memory],
    seen: Sequence[Rejection] = (),
    asked: int = 4,
    batch_size: int = 256,
    max_input_wait: float | None = None,
    placement: str = "resident",
    hosts: Sequence[str] = (),
    arithmetic: Sequence[float | None] = (),
    loads: Sequence[float] = (),
) -> Window:
    """The first rank's record of all ranks. ``seen``: the findings of its detectors; the other ranks have none.
    ``hosts``: the host of each rank; empty if all are on one host. ``arithmetic``: each rank's ``arithmetic_seconds``;
    empty if unknown. ``loads``: what the first ranks' detectors say of foreign load."""
    hosts, arithmetic = hosts or [""] * len(ranks), arithmetic or [None] * len(ranks)

    def of(measured: tuple[Clock, Memory], host: str, alone: float | None) -> Any:
        clock = measured[0]
        return OfRank(of_rank(*measured, batch_size, alone), len(clock.step_seconds), clock.measured_seconds, [], host)

    others = [*map(of, ranks[1:], hosts[1:], arithmetic[1:])]
    figures: list[dict[str, float]] = [{FOREIGN_LOAD.field: load} for load in loads] or [{}]
    for other, seen_by_it in zip(others, figures[1:], strict=False):
        other.figures.update(seen_by_it)
    training: Any = SimpleNamespace(
        clock=ranks[0][0],
        memory=ranks[0][1],
        detectors=[SimpleNamespace(rejections=lambda: list(seen), figures=lambda: figures[0])],
        world=SimpleNamespace(gather=lambda mine: [mine, *others], host=hosts[0]),
        plan=SimpleNamespace(hosts=len(set(hosts))),
        train=SimpleNamespace(warmup_steps=10, batch_size=batch_size),
        batches=SimpleNamespace(placement=placement),
        work=lambda: None,
    )
    return window_of(
        cast(Training, training),
        requested_steps=asked,
        max_input_wait=max_input_wait,
        arithmetic_seconds=arithmetic[0],
    )


# Batches

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
EVERYTHING = Augment(crop_padding=2, flip=True, cutout=3)


def make_batches(dataset: Dataset, **changes: Any) -> TrainBatches:
    """Return the batches of 96 samples that one process reads. ``changes``: arguments of ``TrainBatches``."""
    alone: dict[str, Any] = {"batch_size": 96, "micro_batches": 1, "rank": 0, "world_size": 1, "seed": 0}
    task = task_of(dataset, device=changes.pop("device", ALONE.device))
    return TrainBatches(task, **alone | {"augment": Augment(), "placement": "resident"} | changes)


def same(
    made: Iterable[tuple[torch.Tensor, torch.Tensor]], expected: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Assert that the batches have equal values, whatever their devices, and contiguous inputs."""
    for (inputs, targets), (others, other_targets) in zip(made, expected, strict=True):
        assert torch.equal(inputs.cpu(), others.cpu())
        assert torch.equal(targets.cpu(), other_targets.cpu())
        assert inputs.is_contiguous()


# A job of each task

LENGTH, VOCABULARY, FEATURES = 12, 32, 5
OWN = next(code for code in blocks(ROOT / "docs" / "your-job.md", "python") if "Autoencoding" in code)


exec(OWN)  # the docs' task and its model, by the names of this module


OWN_TASK = "tests.trainings:Autoencoding"


OF_TASK: dict[str, dict[str, Any]] = {
    "language_model": {"model": "gpt", "model_options": {"width": 16, "depth": 2, "heads": 2}, "optimizer": "adamw"},
    "regression": {"model": "mlp", "model_options": {"width": 8}, "learning_rate": 0.1},
    OWN_TASK: {"model": "tests.trainings:net", "optimizer": "adamw"},
}


def tokens(count: int) -> Split:
    """Return windows that start at random tokens; each further token is its predecessor plus one."""
    start = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(count))
    return Split({"inputs": ((start + torch.arange(LENGTH + 1)) % VOCABULARY).to(torch.uint16)})


def table(count: int) -> Split:
    """Return random rows of a table. The targets are a linear function of the rows, with a mean of about 100."""
    inputs = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(count))
    return Split({"inputs": inputs, "targets": 100 + 3 * inputs.sum(1)})


def images(count: int) -> Split:
    """Return images without targets. All pixels of an image are equal."""
    shades = torch.randint(256, (count, 1, 1, 1), generator=torch.Generator().manual_seed(count))
    return Split({"inputs": shades.expand(-1, 1, 16, 16).to(torch.uint8)})


KNOWN = Statistics(mean=(0.0,) * FEATURES, std=(1.0,) * FEATURES)


DATA = {
    "language_model": Dataset("steps", "0" * 64, (), VOCABULARY, {}, tokens(200), tokens(37)),
    "regression": Dataset(
        "table", "0" * 64, (), None, {"inputs": KNOWN, "targets": Statistics(mean=(100.0,), std=(6.7,))}, table(200),
        table(37),
    ),
    OWN_TASK: Dataset(
        "shades", "0" * 64, (), None, {"inputs": Statistics(mean=(0.5,), std=(0.3,))}, images(200), images(37)
    ),
}  # fmt: skip


def settings_of(name: str, **changes: Any) -> Train:
    own: dict[str, Any] = {"task": name, "batch_size": 16, "epochs": 2, "learning_rate": 0.01, "seeds": [0]}
    return Train(**own | OF_TASK[name] | changes)


def training_on(name: str, joined: World = ALONE, **applied: Any) -> Training:
    """Return the training of a small job with the task ``name``."""
    return make_training(DATA[name], joined, train=settings_of(name), **applied)


def learned(training: Training) -> tuple[list[float], float]:
    """Run the training; return the losses in its history, and that of the test."""
    losses = [row.train_loss or math.nan for row in rows_of(training.run())]
    assert training.score is not None
    return losses, training.score.loss
