"""What must hold for every task: batches, evaluation, resuming, verify's claims, and a job from data to result."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipeline import plans, tasks
from pipeline.data.prepared import Dataset, Split, Statistics, read
from pipeline.distributed import World
from pipeline.environment import code
from pipeline.errors import PipelineError
from pipeline.models import ModelError
from pipeline.params import Augment, Config, Machine, parse
from pipeline.plans import plan
from pipeline.profiling import flops
from pipeline.tasks import Task, TaskError
from pipeline.tasks.base import Batch
from pipeline.tasks.batches import TrainBatches, evaluation_batches
from pipeline.tools.verification import Verifier
from pipeline.training.checkpoints import state_sha256
from pipeline.training.outcomes import Score
from tests import trainings
from tests.nets import ALONE, make_plan, stopped, task_of
from tests.ranks import run_ranks
from tests.trainings import (
    DATA,
    KNOWN,
    LENGTH,
    OF_TASK,
    OWN,
    OWN_TASK,
    VOCABULARY,
    ledgers,
    settings_of,
    table,
    tokens,
    training_on,
)
from tests.workspaces import PREPARED, enter

CPU_ONLY = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=False, installed=frozenset({"torchao"}))


each_task = pytest.mark.parametrize("name", OF_TASK)


@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    dtype=st.sampled_from(
        [
            *(torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32, torch.int64),
            *(torch.float16, torch.float32, torch.float64),
        ]
    ),
    split_into=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)),
    left_over=st.integers(0, 20),
    steps=st.tuples(st.integers(0, 4), st.integers(1, 4)),
    placement=st.sampled_from(["resident", "streamed", "dataloader"]),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_any_arrays_make_the_same_global_batches(
    shape: list[int], dtype: torch.dtype, split_into: tuple[int, int, int], left_over: int, steps: tuple[int, int],
    placement: Any, seed: int,
) -> None:  # fmt: skip
    world_size, micro_batches, _ = split_into
    batch_size, start = math.prod(split_into), steps[0]
    count = sum(steps) * batch_size + left_over % batch_size
    rows = (torch.arange(count * math.prod(shape)) % 251).reshape(count, *shape).to(dtype)
    split = Split({"inputs": rows, "targets": torch.arange(count), "weights": -torch.arange(count)})
    task: Any = SimpleNamespace(
        dataset=Dataset("any", "0" * 64, (), None, {}, split, split), device=ALONE.device, arrays=tuple(split.arrays),
        batch=lambda rows: (rows[0], torch.stack((rows[1], rows[2]), 1)), on=lambda _: task, weights=lambda: None,
    )  # fmt: skip
    made = [
        TrainBatches(
            task, batch_size=batch_size, micro_batches=micro_batches, rank=rank, world_size=world_size, seed=seed,
            augment=Augment(), placement=placement,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    epochs = [list(batches.epoch(3, start)) for batches in made]
    for batches in made:
        batches.close()
    assert {len(rank) for rank in epochs} == {steps[1] * micro_batches}
    order = np.random.SeedSequence((seed, 3)).generate_state(1, np.uint64)
    expected = torch.randperm(count, generator=torch.Generator().manual_seed(int(order[0])))
    for step in range(steps[1]):
        micros = [micro for rank in epochs for micro in rank[step * micro_batches :][:micro_batches]]
        for inputs, weighted in micros:
            assert inputs.dtype == dtype
            targets, weights = weighted.unbind(1)
            assert torch.equal(inputs.long(), rows.long()[targets])
            assert torch.equal(weights, -targets)
        numbers = torch.cat([micro[1] for micro in micros])[:, 0]
        assert torch.equal(numbers, expected[(start + step) * batch_size :][:batch_size])
    evaluated = [
        evaluation_batches(split, task, rank=rank, world_size=world_size, batch_size=3) for rank in range(world_size)
    ]
    tested = [(inputs, weighted[:, 0]) for share in evaluated for inputs, weighted in share]
    assert torch.equal(torch.cat([numbers for _, numbers in tested]), torch.arange(count))
    assert all(torch.equal(inputs, rows[numbers]) for inputs, numbers in tested)


def test_a_language_model_predicts_the_next_token() -> None:
    task = task_of(DATA["language_model"], settings_of("language_model"))
    inputs, targets = task.batch([tokens(4).inputs])
    assert (inputs.dtype, inputs.shape, targets.shape) == (torch.int64, (4, LENGTH), (4, LENGTH))
    assert torch.equal(targets, (inputs + 1) % VOCABULARY)
    right = F.one_hot(targets, VOCABULARY).float()
    right[0, :3] = right[0, :3].roll(1, -1)
    assert task.scores(right, targets).tolist() == [0.75, 1.0, 1.0, 1.0]
    logits = torch.randn(4, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(0))
    assert task.loss(logits, targets).item() == pytest.approx(task.test_losses(logits, targets).item() / (4 * LENGTH))
    assert task.findings(math.log(7.0)) == pytest.approx({"perplexity": 7.0})


@pytest.mark.parametrize(
    ("name", "figure"), [("language_model", "perplexity"), ("regression", "explained_variance_fraction")]
)
def test_another_loss_gives_no_figure(name: str, figure: str) -> None:
    assert task_of(DATA[name], settings_of(name)).findings(0.5).keys() == {figure}
    assert task_of(DATA[name], settings_of(name, loss="losses:absolute")).findings(0.5) == {}


def test_regression_counts_in_standard_deviations() -> None:
    task = task_of(DATA["regression"], settings_of("regression", task_options={"tolerance": 0.25}))
    split = DATA["regression"].test
    _, targets = task.batch([split.inputs, split.targets])
    torch.testing.assert_close(targets, ((split.targets - 100) / 6.7).unsqueeze(1))
    assert task.scores(targets + 0.2, targets).all()
    assert not task.scores(targets + 0.3, targets).any()
    assert task.ties(targets + 0.25, targets, 1e-5) > 0
    torch.testing.assert_close(task.postprocess(targets).squeeze(1), split.targets)


def test_targets_are_standardised_by_channel() -> None:
    rows = torch.randn(20, 2, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([[5.0], [0.1]]) + 7
    split = Split({"inputs": table(20).inputs, "targets": rows})
    known = Statistics(mean=(7.0, 6.9), std=(5.0, 0.1))
    dataset = replace(DATA["regression"], statistics={"inputs": KNOWN, "targets": known}, train=split, test=split)
    task = task_of(dataset, settings_of("regression"))
    _, targets = task.batch([split.inputs, split.targets])
    mean, std = torch.tensor([known.mean, known.std]).unsqueeze(-1)
    assert torch.equal(targets, ((rows - mean) / std).flatten(1))
    torch.testing.assert_close(task.postprocess(targets), rows.flatten(1))


@each_task
def test_a_model_learns_with_known_flops_and_memory(name: str) -> None:
    training = training_on(name)
    rows = [row for row in training.run() if row]
    assert (rows[-1].train_loss or math.nan) < 0.8 * (rows[0].train_loss or math.nan)
    measured, foreseen = ledgers(training)
    assert foreseen.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)
    assert foreseen.activations_bytes > 0
    counted = flops.counted(training.plan, task_of(DATA[name], training.train), "Some CPU")
    assert counted.model_per_sample == counted.executed_per_sample > 0


def squashed(**shape: int) -> torch.nn.Module:
    """The docs' model with outputs from 0 to 1."""
    return torch.nn.Sequential(trainings.net(**shape), torch.nn.Sigmoid())  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", ["MSELoss", "SmoothL1Loss", "SoftMarginLoss", "BCELoss", "HuberLoss"])
def test_the_memory_that_a_loss_keeps_is_foreseen(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"model": "tests.test_tasks:squashed", "loss": f"torch.nn:{loss}"}
    monkeypatch.setitem(OF_TASK, OWN_TASK, OF_TASK[OWN_TASK] | changes)
    training = training_on(OWN_TASK)
    training.advance(1)
    measured, foreseen = ledgers(training)
    assert foreseen.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.01)


@pytest.mark.parametrize(("asked", "repeats"), [(True, True), ("selective", False), (0.5, True)])
def test_a_checkpointed_language_model_s_memory_is_foreseen(asked: Any, repeats: bool) -> None:
    counted, kept = [], []
    for checkpointing in (False, asked):
        training = training_on("language_model", activation_checkpointing=checkpointing)
        training.advance(1)
        with FlopCounterMode(display=False) as counter:
            training.step(training.batches.epoch(0))
        counted.append(counter.get_total_flops())
        measured, foreseen = ledgers(training)
        kept.append(measured.activations_bytes)
    assert (counted[1] > counted[0]) is repeats  # selective repeats no product and no attention
    assert kept[1] < kept[0]
    assert foreseen.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)


@pytest.mark.parametrize("attention", ["auto", "math"])
def test_the_memory_of_longer_sequences_is_foreseen(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations grow in proportion to the length. Math also keeps a weight for each pair of tokens."""
    kept = []
    for length in (16, 64):
        windows = Split({"inputs": torch.zeros(64, length + 1, dtype=torch.uint16)})
        monkeypatch.setitem(DATA, "language_model", replace(DATA["language_model"], train=windows, test=windows))
        training = training_on("language_model", attention=attention)
        training.advance(2)
        measured, foreseen = ledgers(training)
        assert foreseen.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)
        kept.append(foreseen.activations_bytes)
    pairs = 64**2 - 4 * 16**2 if attention == "math" else 0
    assert kept[1] - 4 * kept[0] == pytest.approx(4 * 16 * 2 * 2 * pairs, abs=100)  # bytes, samples, heads, layers


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "bert": {"num_hidden_layers": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces the tests' language model by a model of ``transformers``."""

    def use(family: str, **changes: Any) -> None:
        own = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
        values = {"model_type": family, **own, **FAMILIES.get(family, {}), **changes}
        (tmp_path / "config.json").write_text(json.dumps(values))
        options = {"config": str(tmp_path / "config.json")}
        model = OF_TASK["language_model"] | {"model": "transformers", "model_options": options}
        monkeypatch.setitem(OF_TASK, "language_model", model)

    return use


def test_a_configuration_of_transformers_is_a_model(configured: Callable[..., None]) -> None:
    configured("llama")
    losses, kept = [], []
    for applied in ({}, {"activation_checkpointing": True}, {"loss_chunks": 4}):
        training = training_on("language_model", **applied)
        rows = [row for row in training.run() if row]
        assert (rows[-1].train_loss or math.nan) < 0.8 * (rows[0].train_loss or math.nan)
        losses.append(rows[-1].train_loss)
        measured, foreseen = ledgers(training)
        kept.append(measured.activations_bytes)
        assert foreseen.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-4)
    assert max(kept[1:]) < kept[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_sees_one_that_follows(configured: Callable[..., None], family: str) -> None:
    configured(family)
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    tokens[1, -1] = 5
    with torch.no_grad():
        usual, changed = training_on("language_model").model(tokens)
    torch.testing.assert_close(usual[:-1], changed[:-1])
    assert not torch.equal(usual[-1], changed[-1])


def test_a_configuration_without_model_is_refused(
    configured: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family, changes, message in (
        ("nonesuch", {}, r"config\.json', from which transformers cannot make a causal language model: .*nonesuch"),
        ("t5", {}, "from which transformers cannot make a causal language model"),
        ("llama", {"max_position_embeddings": 8}, r"config\.json', for 8 tokens; reduce prepare.window, now 12, to 8"),
    ):
        configured(family, **changes)
        with pytest.raises(PipelineError, match=message):
            training_on("language_model")
    (tmp_path / "config.json").unlink()
    with pytest.raises(PipelineError, match="No such file"):
        training_on("language_model")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PipelineError, match=r"transformers cannot be imported .*pip install '\.\[text\]'"):
        training_on("language_model")


def test_a_change_of_the_configuration_trains_again(configured: Callable[..., None]) -> None:
    digests = []
    for layers in (1, 2):
        configured("llama", num_hidden_layers=layers)
        train = settings_of("language_model")
        digests.append(code.of_variant(make_plan(train=train)))
    assert set(digests[0]) == set(digests[1]) == {train.model_options["config"]}
    assert digests[0] != digests[1]
    config = parse({"train": train.model_dump(), "variants": {"baseline": {}, "other": {"model": "gpt"}}})
    assert plans.relied_on(config)["variants"] == {"baseline": {"transformers"}, "other": set()}


def _trained(joined: World, name: str) -> tuple[dict[str, torch.Tensor], Score | None]:
    training = training_on(name, joined, parallelism="ddp" if joined.size > 1 else "none")
    for _ in training.run():
        pass
    return {key: value.clone() for key, value in training.model_state.read().items()}, training.score


def test_changed_tokens_do_not_change_targets() -> None:
    task = task_of(DATA["language_model"], settings_of("language_model"))
    inputs, targets = task.batch([task.dataset.train.inputs[:4]])
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    before = targets.clone()
    inputs.fill_(0)
    assert torch.equal(targets, before)


@each_task
def test_two_processes_train_and_evaluate_as_one(name: str) -> None:
    alone, score = _trained(ALONE, name)
    (evaluated, theirs), (_, others) = run_ranks(_trained, name, size=2)
    assert theirs == others
    assert score is not None
    assert theirs is not None
    assert theirs.count == score.count == 37
    assert theirs.loss == pytest.approx(score.loss, rel=1e-3)
    for key, value in alone.items():
        torch.testing.assert_close(evaluated[key], value, rtol=1e-3, atol=1e-4)


def _resumed_and_whole(joined: World, name: str, parallelism: str) -> list[tuple[str, Score | None]]:
    whole, resumed, interrupted = (training_on(name, joined, parallelism=parallelism) for _ in range(3))
    resumed.restore(stopped(interrupted, after=15))
    for training in (whole, resumed):
        for _ in training.run():
            pass
    return [(state_sha256(training.model_state.read()), training.score) for training in (whole, resumed)]


@each_task
def test_a_resumed_training_ends_with_the_same_bits(name: str) -> None:
    whole, resumed = _resumed_and_whole(ALONE, name, "none")
    assert whole == resumed


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["ddp", "zero1", "fsdp", "tensor"])
def test_tied_weights_are_resumed_exactly_by_ranks(parallelism: str) -> None:
    model = training_on("language_model").model
    assert model[0].weight is model[-1].weight  # type: ignore[index]
    for whole, resumed in run_ranks(_resumed_and_whole, "language_model", parallelism):
        assert whole == resumed


JOBS: dict[str, dict[str, Any]] = {
    "language_model": {"fetch": {"dataset": "text_folder", "text_folder": "texts"}, "prepare": {"window": 16}},
    "regression": {"fetch": {"dataset": "arrays", "arrays": "houses.npz"}},
    "my_tasks:Autoencoding": {"fetch": {"dataset": "digits"}, "prepare": {"train_limit": 400, "test_limit": 37}},
}
VARIANTS = {"baseline": {}, "stack": {"parallelism": "ddp", "gradient_accumulation": 2, "precision": "bf16"}}
OF_GPT: dict[str, dict[str, Any]] = {
    "kernel": {"attention": "math"},
    "chunks": {"loss_chunks": 4},
    "selective": {"activation_checkpointing": "selective"},
    "fsdp": {"parallelism": "fsdp"},
    "tensor": {"parallelism": "tensor"},
    "float8": {"precision": "float8"},
}


@pytest.fixture(params=list(JOBS))
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the configuration of a small job, once for each task; the current directory is like a checkout."""
    name: str = request.param
    (tmp_path / "texts").mkdir()
    for index in range(8):
        words = " ".join(f"{number} hills" for number in range(index, 60 + index))
        (tmp_path / "texts" / f"{index}.txt").write_text(words, encoding="utf-8")
    split = table(300)
    np.savez(tmp_path / "houses.npz", inputs=split.inputs.numpy(), targets=split.targets.numpy())
    (tmp_path / "my_tasks.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    own = OF_TASK.get(name, {"model": "my_tasks:net"})
    train = {
        "task": name, "device": "cpu", "seeds": [0], "epochs": 1, "batch_size": 16, "without_native": "run",
        "checkpoint_every_steps": 2,
    }  # fmt: skip
    variants = VARIANTS | (OF_GPT if name == "language_model" else {})
    sections = {"train": train | own, "publish": {"live": False}, "variants": variants}
    return enter(tmp_path, monkeypatch, JOBS[name] | sections)


@pytest.mark.slow
def test_verify_holds_for_each_task(config: Config, tmp_path: Path) -> None:
    task = tasks.of_job(config.train, read(PREPARED))
    task.check()
    verifier = Verifier(config, CPU_ONLY, PREPARED, task, tmp_path)
    claims = [claim for name in config.variants for claim in verifier.claims(plan(config, name, CPU_ONLY))]
    assert all(claim.holds or claim.undecided for claim in claims), claims
    assert sum(bool(claim.holds) for claim in claims) >= 5, claims
    held = [claim.claim for claim in claims if claim.holds and claim.variant == "stack"]
    assert "gradients of a step: equal to those of a single device" in held
    assert any(claim.startswith("evaluation by 2 processes") for claim in held)
    for name in OF_GPT.keys() & config.variants.keys():
        assert any(claim.holds for claim in claims if claim.variant == name), (name, claims)


def test_an_unfit_task_is_refused() -> None:
    for name, data_of, message in (
        ("language_model", "regression", "language_model needs tokens, and table has none; allowed: regression, mod"),
        ("regression", "language_model", "regression needs float targets, and steps has none; allowed: language_model"),
    ):
        with pytest.raises(TaskError, match=message):
            task_of(DATA[data_of], settings_of(name))
    with pytest.raises(TaskError, match="classification needs labels, and table has none; allowed: regression"):
        task_of(DATA["regression"])
    split = Split({"inputs": torch.ones(2, 3), "labels": torch.ones(2)})
    with pytest.raises(TaskError, match=r"table has none; allowed: .*; or rename the array labels to targets"):
        task_of(replace(DATA["regression"], train=split, statistics={}))
    split = Split({**DATA["regression"].train.arrays, "weight": torch.ones(1)})
    with pytest.raises(TaskError, match="has the arrays inputs, targets, weight, but regression takes inputs, targets"):
        task_of(replace(DATA["regression"], train=split), settings_of("regression"))
    with pytest.raises(TaskError, match="regression takes tolerance, a number above 0"):
        task_of(DATA["regression"], settings_of("regression", task_options={"tolerance": "much"}))
    with pytest.raises(ModelError, match=r"gpt is called with features, outputs .*but its signature is .*vocabulary"):
        task_of(DATA["regression"], settings_of("regression", model="gpt", model_options={})).model()


def test_the_docs_task_takes_at_most_30_lines() -> None:
    assert len([line for line in OWN.splitlines() if line.strip()]) <= 30


class Weighted(Task):
    arrays = ("inputs", "targets", "weights")

    def raw(self, rows: Sequence[Tensor]) -> Batch:
        inputs, targets, weights = rows
        return inputs, torch.stack((targets, weights), 1)

    def output_arguments(self) -> dict[str, int]:
        return {"outputs": 1}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets[:, 1] * (outputs[:, 0] - targets[:, 0]) ** 2).mean()

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets[:, 0]).abs() < 0.5


def test_a_task_gives_its_loss_a_third_array() -> None:
    of = DATA["regression"]
    dataset = replace(of, train=Split({**of.train.arrays, "weights": torch.arange(200.0)}))
    task = task_of(dataset, settings_of("regression", task=f"{__name__}:Weighted"))
    task.check()
    rows = [dataset.train.arrays[name][:3] for name in task.arrays]
    _, targets = task.batch(rows)
    # Errors of 2, with the weights 0, 1 and 2.
    assert task.loss(rows[1][:, None] + 2, targets).item() == pytest.approx((0 * 4 + 1 * 4 + 2 * 4) / 3, rel=1e-4)
