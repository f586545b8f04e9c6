"""Models whose ranks would wait for each other, or drift apart: refused in the step in which it shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.distributed import ALONE, WorkerError, World
from pipeline.errors import ConfigError
from pipeline.techniques.data_parallel import DataParallel
from pipeline.techniques.lockstep import keep_in_step
from pipeline.techniques.sync_batchnorm import SyncBatchNorm
from tests.nets import changed, conv_net, make_plan
from tests.ranks import run_ranks
from tests.trainings import make_training

REMEDY = "multiply the output of a part that is dropped at random"


class LayerDrop(nn.Module):
    """A net with four blocks. ``skips``: drop some of them at random, in training or in evaluation; ``"by 0"``:
    multiply their outputs by 0 instead; ``"some steps"``: all ranks drop the same block after the first step."""

    def __init__(self, skips: str) -> None:
        super().__init__()
        self.net, self.skips, self.passes = conv_net(), skips, 0
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.ReLU()) for _ in range(4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        self.passes += 1
        for number, block in enumerate(self.blocks):
            kept = bool(torch.rand(()) > 0.5)
            if self.skips == "by 0":
                logits = logits + block(logits) * kept
            elif self.skips == "some steps":
                logits = logits + block(logits) if self.passes < 3 or number else logits
            elif kept or self.skips != ("training" if self.training else "evaluation"):
                logits = logits + block(logits)
        return logits


def _dropping(joined: World, dataset: Dataset, skips: str, applied: dict[str, Any]) -> int:
    training = make_training(dataset, joined, model=LayerDrop(skips), **applied)
    training.advance(5)
    training.evaluate()
    return training.steps


@pytest.mark.parametrize(
    "applied",
    [
        {"parallelism": "ddp"},
        {"parallelism": "ddp", "gradient_accumulation": 2},
        {"parallelism": "ddp", "static_graph": True},
        {"parallelism": "ddp", "activation_checkpointing": True},
        {"parallelism": "zero1", "bucket_mb": 0.0005},
        {"parallelism": "fsdp"},
        {"parallelism": "fsdp", "gradient_accumulation": 2, "activation_checkpointing": True},
    ],
)
def test_ranks_that_skip_different_layers_are_refused(digits: Dataset, applied: dict[str, Any]) -> None:
    parallelism, is_static = applied["parallelism"], "static_graph" in applied
    for skips in ("training", "some steps"):
        with pytest.raises(WorkerError, match=rf"variants\.tried\.parallelism: found '{parallelism}'") as refused:
            run_ranks(_dropping, digits, skips, applied)
        assert REMEDY in str(refused.value)
        assert ("set static_graph" in str(refused.value)) is (not is_static and parallelism != "fsdp")
    assert run_ranks(_dropping, digits, "by 0", applied) == [5, 5]


def test_skipping_in_evaluation_is_refused_with_shared_parameters(digits: Dataset) -> None:
    with pytest.raises(WorkerError, match=r"one ran (blocks\.\d|no more part) where another process or step ran "):
        run_ranks(_dropping, digits, "evaluation", {"parallelism": "fsdp"})
    assert run_ranks(_dropping, digits, "evaluation", {"parallelism": "ddp"}) == [5, 5]


class Skipped(nn.Sequential):
    """Runs in about half of the passes."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self if torch.rand(()) > 0.5 else ():
            values = layer(values)
        return values


def _staged(joined: World, dataset: Dataset) -> int:
    model = nn.Sequential(*conv_net(), Skipped(nn.Linear(10, 10)), nn.Linear(10, 10))
    applied: dict[str, Any] = {"parallelism": "pipeline", "replicas": 2, "gradient_accumulation": 2}
    make_training(dataset, joined, model=model, **applied).advance(20)
    return 0


def test_replicas_that_skip_different_layers_are_refused(digits: Dataset) -> None:
    with pytest.raises(WorkerError, match=r"found 'pipeline' with replicas, .* did not use some parameters") as refused:
        run_ranks(_staged, digits, size=4)
    assert REMEDY in str(refused.value)


class MaxNorm(nn.Module):
    def __init__(self, within: bool) -> None:
        super().__init__()
        self.net, embedding = conv_net(), nn.Embedding(20, 10, max_norm=1.0)
        self.part: nn.Module = nn.Sequential(embedding, nn.ReLU()) if within else embedding

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return torch.add(logits, self.part(logits.argmax(1)))


def _renormed(joined: World, dataset: Dataset, within: bool, applied: dict[str, Any]) -> int:
    training = make_training(dataset, joined, model=MaxNorm(within), **applied)
    training.advance(2)
    return training.steps


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("parallelism", ["ddp", "zero1", "fsdp"])
def test_a_forward_pass_must_not_change_parameters(digits: Dataset, parallelism: str, within: bool) -> None:
    name = r"part\.0\.weight" if within else r"part\.weight"
    says = rf"parallelism: found '{parallelism}', .* changes its parameter {name}\. .*parallelism: none"
    with pytest.raises(WorkerError, match=says):
        run_ranks(_renormed, digits, within, {"parallelism": parallelism})


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Embedding(20, 10, max_norm=1.0)

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.add(logits, self.part(logits.argmax(1)))


def _renormed_stage(joined: World, dataset: Dataset) -> int:
    applied: dict[str, Any] = {"parallelism": "pipeline", "replicas": 2, "gradient_accumulation": 2}
    model = nn.Sequential(*conv_net(), Renormed(), nn.Linear(10, 10))
    make_training(dataset, joined, model=model, **applied).advance(2)
    return 0


@pytest.mark.parametrize("within", [True, False])
def test_no_replica_or_copy_may_change_parameters(digits: Dataset, within: bool) -> None:
    changes, name = r", .* changes its parameter ", r"part\.0\.weight" if within else r"part\.weight"
    copied = DataParallel(make_plan(parallelism="data_parallel", devices_per_process=2), ALONE)
    with pytest.raises(ConfigError, match=rf"parallelism: found 'data_parallel'{changes}{name}"):
        changed(MaxNorm(within), [copied])
    if not within:
        with pytest.raises(WorkerError, match=rf"parallelism: found 'pipeline' with replicas{changes}.*{name}"):
            run_ranks(_renormed_stage, digits, size=4)


def _passes(joined: World) -> list[str]:
    """Let the ranks run a model alike, then recompute a part, then leave out a part on one rank; return the errors."""
    parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model, seen = nn.Sequential(*parts), []
    keep_in_step(model, nn.Linear, joined, "key", [])
    for _ in range(2):
        model(torch.zeros(1, 2))
    model[1](torch.zeros(1, 2))  # outside a pass, as in a backward pass
    model.eval()
    if joined.is_main:
        model(torch.zeros(1, 2))  # the other mode is not watched
    model.train()
    model.register_forward_pre_hook(lambda *_: model.__delitem__(0), prepend=True)
    try:
        model(torch.zeros(1, 2))
    except Exception as error:
        seen.append(str(error))
    return seen


def test_parts_are_compared_with_the_first_pass() -> None:
    for (error,) in run_ranks(_passes):
        assert error.startswith("key, whose processes must run")
        assert "one ran 0 where another process or step ran 1." in error


def _synced(joined: World) -> None:
    """Skip one of two BatchNorms on one rank. torch's SyncBatchNorm needs a GPU, so its forward pass is left out."""
    nn.SyncBatchNorm.forward = lambda _, values: values  # type: ignore[method-assign,assignment]
    blocks = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)), nn.Sequential(nn.BatchNorm1d(2)))
    plan = make_plan(processes=2, parallelism="ddp", sync_batchnorm=True)
    model = changed(blocks, [SyncBatchNorm(plan, joined)])
    if joined.is_main:
        vars(model.get_submodule("0"))["forward"] = nn.Identity()
    model(torch.zeros(2, 2))


def test_ranks_that_skip_different_batchnorms_are_refused() -> None:
    says = r"sync_batchnorm: found true, .* one ran 1\.0 where another process or step ran 0\.0\."
    with pytest.raises(WorkerError, match=says):
        run_ranks(_synced)
