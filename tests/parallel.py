"""Observe the results of a short training on one or several ranks, to compare a parallelism with one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.distributed import World, own_part, whole
from pipeline.params import Config, Machine, Train, Variant
from pipeline.plans import plan
from pipeline.techniques import pipeline_parallel
from pipeline.training.checkpoints import state_sha256
from pipeline.training.loop import Training
from tests.nets import batches_of, stopped, task_of, training_of

CPU = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True, installed=frozenset({"bitsandbytes"}))
TRAIN = Train(epochs=1, batch_size=32, learning_rate=0.05, warmup_steps=3, history_every_steps=4)
STEPS = 12
"""Steps of a run, which is one epoch. A second run stops in the middle, and a new training resumes from its state."""


@dataclass
class Observed:
    """A rank's results. Tensors are whole, also those that ranks hold in parts."""

    gradients: dict[str, torch.Tensor]
    """After one step. A pipeline's rank has the other stages' gradients from their ranks."""
    weights: dict[str, torch.Tensor]
    """After all steps, as they are evaluated and kept."""
    losses: list[float]
    optimizer_state: dict[int, dict[str, Any]]
    parameter_bytes: int
    """Bytes of the parameters that this rank holds."""
    optimizer_bytes: int
    resumed_sha256: str
    straight_sha256: str
    resumed_optimizer_state: dict[int, dict[str, Any]]
    accuracy: float
    """On the test split."""


def make_training(
    dataset: Dataset, joined: World, net: Callable[[], nn.Module], train: Train = TRAIN, **applied: Any
) -> Training:
    """Return the training of a variant; with one rank, the variant's parallelism is left out."""
    if joined.size == 1:
        applied = {key: value for key, value in applied.items() if key not in ("parallelism", "replicas")}
    else:
        applied |= {"processes": joined.size}
    machine = CPU if joined.device.type == "cpu" else CPU.model_copy(update={"gpus": joined.size})
    made = plan(Config(train=train, variants={"tried": Variant(**applied)}), "tried", machine)
    few = replace(dataset, train=dataset.train[: STEPS * train.batch_size])
    return training_of(made, net(), task_of(few, made.train, joined.device), batches_of(few, made, joined), joined, 0)


def observe(
    joined: World, dataset: Dataset, net: Callable[[], nn.Module], train: Train, applied: dict[str, Any]
) -> Observed:
    """Observe a run of ``STEPS`` steps, and the same run stopped and resumed in the middle."""
    training = make_training(dataset, joined, net, train, **applied)
    straight = training.run()
    next(straight)
    gradients = whole_gradients(training)
    losses = [row.train_loss or math.nan for _ in range(STEPS - 1) if (row := next(straight))]
    weights = copied(training.weights())

    with pytest.MonkeyPatch.context() as patch:  # times decide where a pipeline is cut, and a cut rounds as it does
        for cut in (technique._cut for technique in training.techniques if hasattr(technique, "_cut")):
            patch.setattr(pipeline_parallel, "best_cut", lambda *_, cut=cut: cut)
        half = make_training(dataset, joined, net, train, **applied)
    state = stopped(half, STEPS // 2)
    resumed = make_training(dataset, joined, net, train, **applied)
    torch.manual_seed(12345)
    resumed.restore(state)
    steps = resumed.run()
    for _ in range(STEPS - STEPS // 2):
        next(steps)

    straight_state = copied_state(training)
    for _ in straight:
        pass
    assert training.score is not None
    return Observed(
        gradients=gradients,
        weights=weights,
        losses=losses,
        optimizer_state=straight_state,
        parameter_bytes=held_bytes(training.model.parameters()),
        optimizer_bytes=held_bytes(
            value for values in training.optimizer.state.values() for value in values.values() if torch.is_tensor(value)
        ),
        resumed_sha256=state_sha256(resumed.weights()),
        straight_sha256=state_sha256(weights),
        resumed_optimizer_state=copied_state(resumed),
        accuracy=training.score.accuracy,
    )


def assert_same_training(ranks: list[Observed], alone: Observed, *, rough: bool = False) -> None:
    """Assert that each rank has one device's gradients within 1e-4 and final weights within 1e-3, and resumes exactly.

    ``rough``: the tolerances are those of bfloat16.
    """
    exact: dict[str, Any] = {"rtol": 0.1, "atol": 0.05} if rough else {"rtol": 1e-4, "atol": 1e-6}
    close: dict[str, Any] = {"rtol": 0.1, "atol": 0.05} if rough else {"rtol": 1e-3, "atol": 1e-4}
    for rank in ranks:
        torch.testing.assert_close(rank.gradients, alone.gradients, **exact)
        assert list(rank.weights) == list(alone.weights)
        torch.testing.assert_close(rank.weights, alone.weights, **close)
        torch.testing.assert_close(rank.losses, alone.losses, rtol=0.02 if rough else 1e-3, atol=0)
        torch.testing.assert_close(rank.optimizer_state, alone.optimizer_state, rtol=1e-2, atol=0.3 if rough else 1e-4)
        assert abs(rank.accuracy - alone.accuracy) <= 0.01
        assert_exact_resume(rank)
        assert rank.straight_sha256 == ranks[0].straight_sha256


def assert_exact_resume(rank: Observed) -> None:
    assert rank.resumed_sha256 == rank.straight_sha256
    torch.testing.assert_close(rank.resumed_optimizer_state, rank.optimizer_state, rtol=0, atol=0)


def whole_gradients(training: Training) -> dict[str, torch.Tensor]:
    layouts: dict[nn.Parameter, Any] = {}
    for technique in training.techniques:
        layouts |= getattr(technique, "layouts", {})
    gradients = {}
    for name, parameter in training.model.named_parameters():
        gradient: Any = parameter.grad
        if parameter in layouts:
            gradient = layouts[parameter].dtensor(gradient)
        if gradient is not None:
            gradients[name] = whole(gradient).detach().clone()
    others = training.world.gather(gradients) if training.plan.applied.parallelism == "pipeline" else []
    return {name: gradient for part in (*others, gradients) for name, gradient in part.items()}


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(own_part(tensor).untyped_storage().nbytes() for tensor in tensors if not tensor.is_meta)


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: whole(value).detach().clone() for name, value in state.items()}


def copied_state(training: Training) -> dict[int, dict[str, Any]]:
    """Return a copy of the whole optimizer state: index of the parameter in the model -> the parameter's state."""
    named = list(training.model.named_parameters())
    places: dict[Any, int] = {name: place for place, (name, _) in enumerate(named)}
    if training.plan.applied.parallelism != "pipeline":  # whose state has places in the model already
        place_of = {id(parameter): place for place, (_, parameter) in enumerate(named)}
        held = (parameter for group in training.optimizer.param_groups for parameter in group["params"])
        places |= {index: place_of[id(parameter)] for index, parameter in enumerate(held)}
    state = training.optimizer_state.read()["state"]
    return {places.get(key, key): copied(values) for key, values in state.items()}
