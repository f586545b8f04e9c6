"""Pipelines on two and four gloo ranks, compared with the same micro-batches on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.distributed import WorkerError, World
from pipeline.params import Variant
from pipeline.profiling import ledger
from pipeline.results import Ledger
from pipeline.techniques import cutting, of_plan
from pipeline.techniques.cutting import Cut
from pipeline.techniques.pipeline_parallel import Pipeline
from pipeline.training.loop import Training
from pipeline.training.losses import DeviceLosses, NonFiniteLoss
from tests.nets import ALONE, chosen, conv_net, make_plan
from tests.ranks import run_ranks
from tests.test_training import TRAIN, make_training

STEPS = 10

CASES: dict[str, tuple[int, dict[str, bool], dict[str, Any]]] = {
    # Global batch, options of the net, other settings. The stages do not always divide the number of micro-batches.
    "gpipe, 4": (96, {"norm": True}, {"schedule": "gpipe", "gradient_accumulation": 4}),
    "1f1b, 4": (96, {"norm": True}, {"schedule": "1f1b", "gradient_accumulation": 4}),
    "gpipe, 3": (90, {"norm": True}, {"schedule": "gpipe", "gradient_accumulation": 3}),
    "1f1b, 5": (90, {"norm": True}, {"schedule": "1f1b", "gradient_accumulation": 5}),
    "no norm": (96, {}, {"gradient_accumulation": 2}),
    "checkpointed": (96, {"norm": True}, {"gradient_accumulation": 4, "activation_checkpointing": True}),
    "channels_last": (96, {"norm": True}, {"gradient_accumulation": 4, "channels_last": True}),
    "bf16": (96, {"norm": True}, {"gradient_accumulation": 2, "precision": "bf16"}),
}


class Seen(NamedTuple):
    """One rank's results after some steps."""

    losses: list[float]
    test_loss: float
    first_gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    """State of the whole model, including buffers."""
    own_bytes: tuple[int, int]
    """Bytes of this rank's parameters and buffers, and of its optimizer state."""
    cut: Cut | None
    in_flight: int
    """Largest number of micro-batches between their forward and their backward pass through the stage."""


def technique_of(training: Training) -> Pipeline | None:
    return next((each for each in training.techniques if isinstance(each, Pipeline)), None)


def _bytes(training: Training) -> tuple[int, int]:
    tensors = [*training.model.parameters(), *training.model.buffers()]
    state = [value for state in training.optimizer.state.values() for value in state.values()]
    return (
        sum(tensor.nbytes for tensor in tensors if not tensor.is_meta),
        sum(value.nbytes for value in state if isinstance(value, torch.Tensor)),
    )


def _run(joined: World, dataset: Dataset, case: str, extra: dict[str, Any]) -> Seen:
    batch_size, parts, applied = CASES[case]
    train = TRAIN.model_copy(update={"batch_size": batch_size, "epochs": 1, "history_every_steps": 1})
    if joined.size == 1:
        applied = {key: value for key, value in applied.items() if key != "schedule"} | {"parallelism": "none"}
    else:
        applied = applied | {"parallelism": "pipeline"} | extra
    training = make_training(dataset, joined, model=conv_net(**parts), train=train, **applied)
    technique = technique_of(training)
    flying = _watch_flights(technique) if technique else []
    steps, losses, gradients = training.run(), [], {}
    for step in range(STEPS):
        row = next(steps)
        assert row is not None
        losses.append(row.train_loss)
        if step == 0:
            gradients = {
                name: parameter.grad.clone()
                for name, parameter in training.model.named_parameters()
                if parameter.grad is not None
            }
    *_, last = steps
    assert last is not None
    assert last.test_loss is not None
    weights = {name: tensor.clone() for name, tensor in training.model_state.read().items()}
    cut = technique._cut if technique else None
    return Seen(losses, last.test_loss, gradients, weights, _bytes(training), cut, max(flying, default=0))


def _watch_flights(technique: Pipeline) -> list[int]:
    """Return a list; hooks append the number of micro-batches between forward and backward pass when it changes."""
    flying = [0]
    technique._module.register_forward_hook(lambda *_: flying.append(flying[-1] + 1))
    first = next(technique._module.parameters())
    first.register_post_accumulate_grad_hook(lambda _: flying.append(flying[-1] - 1))
    return flying


def _run_all(joined: World, dataset: Dataset, cases: list[str], extra: dict[str, Any]) -> dict[str, Seen]:
    return {case: _run(joined, dataset, case, extra) for case in cases}


@pytest.fixture(scope="module")
def alone(digits: Dataset) -> dict[str, Seen]:
    return _run_all(ALONE, digits, list(CASES), {})


@pytest.fixture(scope="module")
def staged(digits: Dataset) -> list[dict[str, Seen]]:
    """The results of two ranks."""
    return run_ranks(_run_all, digits, list(CASES), {})


@pytest.mark.parametrize("case", CASES)
def test_two_stages_train_what_one_device_trains_with_the_same_micro_batches(
    case: str, alone: dict[str, Seen], staged: list[dict[str, Seen]]
) -> None:
    expected, ranks = alone[case], [rank[case] for rank in staged]
    gradients = {name: gradient for rank in ranks for name, gradient in rank.first_gradients.items()}
    assert gradients.keys() == expected.first_gradients.keys()
    assert sum(len(rank.first_gradients) for rank in ranks) == len(gradients), "each has its own"
    bf16 = case == "bf16"
    # Both run the same operations on the same micro-batches; only the order of a few sums differs.
    rtol, atol = (0.05, 0.01) if bf16 else (1e-4, 1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected.first_gradients[name], rtol=rtol, atol=atol)
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=0.02 if bf16 else 1e-3)
        assert rank.test_loss == pytest.approx(expected.test_loss, rel=0.02 if bf16 else 1e-3)
        assert rank.weights.keys() == expected.weights.keys()
        rtol, atol = (0.1, 0.05) if bf16 else (1e-3, 1e-4)
        for name, tensor in rank.weights.items():
            torch.testing.assert_close(tensor, expected.weights[name], check_stride=False, rtol=rtol, atol=atol)
    assert ranks[0].losses == ranks[1].losses
    assert all(torch.equal(ranks[0].weights[name], ranks[1].weights[name]) for name in ranks[0].weights)


def test_each_rank_holds_only_the_bytes_of_its_stage(alone: dict[str, Seen], staged: list[dict[str, Seen]]) -> None:
    for case in CASES:
        whole, parts = alone[case].own_bytes, [rank[case].own_bytes for rank in staged]
        assert tuple(map(sum, zip(*parts, strict=True))) == whole
        assert all(0 < mine < of_all for part in parts for mine, of_all in zip(part, whole, strict=True))


def test_1f1b_keeps_at_most_as_many_micro_batches_as_stages_and_gpipe_keeps_all(staged: list[dict[str, Seen]]) -> None:
    assert [rank["gpipe, 4"].in_flight for rank in staged] == [4, 4]
    assert [rank["1f1b, 4"].in_flight for rank in staged] == [2, 1]
    assert [rank["1f1b, 5"].in_flight for rank in staged] == [2, 1]


def test_the_cut_is_the_same_on_both_ranks_and_passes_16_bits_under_bf16(staged: list[dict[str, Seen]]) -> None:
    for case in CASES:
        cuts = [rank[case].cut for rank in staged]
        assert cuts[0] == cuts[1]
        assert cuts[0] is not None
        assert len(cuts[0].ends) == 2
    cut = staged[0]["bf16"].cut
    assert cut is not None
    assert {form.dtype for form in cut.forms[1:]} == {torch.bfloat16}


def test_two_pipelines_of_two_stages_train_what_one_device_trains(digits: Dataset, alone: dict[str, Seen]) -> None:
    """Each pipeline has half of the batch and thus smaller micro-batches, so the net must not have BatchNorm."""
    extra = {"replicas": 2}
    expected = alone["no norm"]
    ranks = [rank["no norm"] for rank in run_ranks(_run_all, digits, ["no norm"], extra, size=4)]
    for rank in ranks:
        for name, gradient in rank.first_gradients.items():
            torch.testing.assert_close(gradient, expected.first_gradients[name], rtol=1e-4, atol=1e-6)
        assert rank.losses == pytest.approx(expected.losses, rel=1e-3)
        assert rank.test_loss == pytest.approx(expected.test_loss, rel=1e-3)
        for name, tensor in rank.weights.items():
            torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-3, atol=1e-4)
    assert [rank.first_gradients.keys() for rank in ranks[:2]] == [rank.first_gradients.keys() for rank in ranks[2:]]
    assert ranks[0].own_bytes == ranks[2].own_bytes
    assert ranks[0].own_bytes[0] + ranks[1].own_bytes[0] == expected.own_bytes[0]


# The cut


class _Costly(nn.Linear):
    """A layer whose forward pass takes ``cost`` seconds by a simulated clock."""

    clock = 0.0

    def __init__(self, cost: float) -> None:
        super().__init__(8, 8)
        self.cost = cost

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        _Costly.clock += self.cost
        return super().forward(images)


class _InPlace(nn.Linear):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.relu_())


def _net(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *parts, nn.Linear(8, 10))


@contextmanager
def _own_clock() -> Iterator[None]:
    original = cutting._now
    cutting._now = lambda world: _Costly.clock  # noqa: ARG005
    yield
    cutting._now = original


def _cuts(joined: World, dataset: Dataset) -> list[tuple[int, ...]]:
    found = []
    nets = [
        _net(*map(_Costly, (4, 1, 1, 1, 1))),
        _net(*map(_Costly, (1, 1, 1, 1, 4))),
        _net(*map(_Costly, (1, 1, 1, 2, 1))),
        _net(_Costly(5), _InPlace(8, 8), _Costly(5)),
    ]
    with _own_clock():
        for net in nets:
            before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            random = torch.get_rng_state()
            training = make_training(dataset, joined, model=net, parallelism="pipeline", gradient_accumulation=4)
            technique = technique_of(training)
            assert technique is not None
            found.append(technique._cut.ends)
            state = training.model_state.read()
            assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
            torch.set_rng_state(random)
            next(training.run())
    return found


def test_the_cut_makes_the_slowest_stage_as_fast_as_possible(digits: Dataset) -> None:
    """The units are the first layer, the costly layers and the last layer. A layer that changes its input in place is
    joined to the unit before it."""
    expected = [(2, 7), (5, 7), (4, 7), (2, 4)]
    assert run_ranks(_cuts, digits) == [expected, expected]


# Resuming


def _resumed(joined: World, dataset: Dataset, stop_after: int) -> tuple[bool, list[str], tuple[Any, Any]]:
    """Compare a run with a run that is resumed from its state in a training that would cut the model elsewhere."""
    few = replace(dataset, train=dataset.train[: 20 * TRAIN.batch_size])

    def made(seed: int) -> Training:
        model = conv_net(norm=True, dropout=True, seed=seed)
        return make_training(few, joined, model=model, parallelism="pipeline", gradient_accumulation=4)

    def weights(training: Training) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in training.model_state.read().items()}

    whole = made(0)
    steps = whole.run()
    for _ in range(stop_after):
        next(steps)
    with whole.paused():
        state = whole.state()
    state["model"] = {name: tensor.clone() for name, tensor in state["model"].items()}
    list(steps)

    ends = technique_of(whole)._cut.ends  # type: ignore[union-attr]
    elsewhere = [1, 5] if ends[0] != 1 else [3, 5]
    original = cutting.balanced  # type: ignore[attr-defined]
    cutting.balanced = lambda costs, parts: elsewhere  # type: ignore[attr-defined]  # noqa: ARG005
    again = made(5)
    cutting.balanced = original  # type: ignore[attr-defined]
    assert technique_of(again)._cut.ends == tuple(elsewhere)  # type: ignore[union-attr]
    torch.manual_seed(12345)
    again.restore(state)
    list(again.run())
    one, other = weights(whole), weights(again)
    same = all(torch.equal(one[name], other[name]) for name in one)
    return same, sorted(one), (_bytes(whole), _bytes(again))


@pytest.mark.parametrize("stop_after", [7, pytest.param(20, marks=pytest.mark.slow)])
def test_a_resumed_run_is_cut_as_it_was_and_ends_with_the_same_weights_to_the_last_bit(
    digits: Dataset, stop_after: int
) -> None:
    for same, _, sizes in run_ranks(_resumed, digits, stop_after):
        assert same
        assert sizes[0] == sizes[1]


def _states(joined: World, dataset: Dataset) -> dict[str, Any]:
    train = TRAIN.model_copy(update={"optimizer": "adamw"})
    parallelism = "pipeline" if joined.size > 1 else "none"
    training = make_training(dataset, joined, train=train, parallelism=parallelism, gradient_accumulation=4)
    training.advance(3)
    return {"model": training.model_state.read(), "optimizer": training.optimizer_state.read()}


def test_the_whole_state_equals_that_of_a_single_device(digits: Dataset) -> None:
    expected = _states(ALONE, digits)
    for found in run_ranks(_states, digits):
        torch.testing.assert_close(dict(found["model"]), dict(expected["model"]), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found["optimizer"], expected["optimizer"], rtol=1e-3, atol=1e-4)
        assert list(found["optimizer"]["state"]) == list(expected["optimizer"]["state"])


# A loss that is not finite


class _Breaks(nn.Module):
    """Returns its input, or NaN if ``broken``."""

    broken = False

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * float("nan") if self.broken else logits


def _until_broken(joined: World, dataset: Dataset, on_device: bool, directory: str) -> str:
    training = make_training(
        dataset,
        joined,
        model=nn.Sequential(*conv_net(), _Breaks()),
        train=TRAIN.model_copy(update={"history_every_steps": 1}),
        parallelism="pipeline",
        gradient_accumulation=4,
    )
    if on_device:
        training.step.losses = DeviceLosses(joined)
    with Path(directory, str(joined.rank)).open("w") as file:
        try:
            for _ in training.run():
                print("step", file=file, flush=True)
                training.model[-1].broken = training.steps == 7  # type: ignore[index]
        except NonFiniteLoss as error:
            if on_device:
                return str(error)
            raise
    raise AssertionError("the run did not stop")


def test_no_rank_takes_the_step_in_which_the_last_stage_s_loss_is_not_finite(digits: Dataset, tmp_path: Path) -> None:
    for message in run_ranks(_until_broken, digits, True, str(tmp_path)):
        assert "epoch 1, step 8: the loss became nan" in message
    with pytest.raises(WorkerError, match=r"rank 1: (?s:.*)epoch 1, step 8: the loss became nan"):
        run_ranks(_until_broken, digits, False, str(tmp_path))
    assert [(tmp_path / rank).read_text().count("step") for rank in "01"] == [7, 7]


# The ledger


def _watched(joined: World, dataset: Dataset) -> tuple[Ledger, int, tuple[int, int]]:
    training = make_training(dataset, joined, parallelism="pipeline", gradient_accumulation=4)
    training.advance(2)
    found = ledger.measured(training, 10**9)
    assert found is not None
    own = sum(parameter.nbytes for parameter in training.model.parameters() if not parameter.is_meta)
    training.advance(2)
    return found, own, _bytes(training)


def test_the_measured_ledger_shows_what_the_rank_holds(digits: Dataset) -> None:
    for found, own, (parameters, state) in run_ranks(_watched, digits):
        assert found.parameters_bytes == parameters
        assert found.optimizer_state_bytes == state
        assert found.gradients_bytes == own  # after the first micro-batch's backward pass
        assert found.activations_bytes > 0
        assert found.communication_bytes == 0


# Plans and rejections


def test_the_pipeline_replaces_the_technique_of_gradient_accumulation() -> None:
    accumulating = make_plan(gradient_accumulation=4)
    assert [each.name for each in chosen(accumulating, ALONE)] == ["gradient_accumulation"]
    asked = Variant(parallelism="pipeline", gradient_accumulation=4)
    staged = accumulating.model_copy(update={"applied": asked})
    assert [each.__name__ for each in of_plan(staged)] == ["Pipeline"]
