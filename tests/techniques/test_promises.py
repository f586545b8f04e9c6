"""Promises of techniques in one process: weights that differ by rounding, exact resumption, no update by a NaN loss."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.errors import ConfigError
from pipeline.profiling import ledger
from pipeline.techniques import low_bit_optimizer
from pipeline.training.loop import Training
from tests.nets import ALONE, Counts, batch, changed, chosen, conv_net, large_net, make_plan, make_step, setup_of
from tests.trainings import (
    ADAMW,
    LOW_BIT,
    TRAIN,
    make_training,
    needs_library,
    resumes_exactly,
    rows_of,
    until_broken,
    weights,
)

IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True}
CHECKPOINTED: list[dict[str, Any]] = [{"activation_checkpointing": share} for share in (True, "selective", 0.3, 0.8)]


def after(dataset: Dataset, steps: int, **how: Any) -> Training:
    training = make_training(dataset, **how)
    training.advance(steps)
    return training


@pytest.mark.parametrize("train", [TRAIN, ADAMW], ids=lambda train: train.optimizer)
@pytest.mark.parametrize("applied", [IN_BACKWARD, *CHECKPOINTED, *(keys | IN_BACKWARD for keys in CHECKPOINTED)])
def test_no_bit_of_the_weights_changes(digits: Dataset, train: Any, applied: dict[str, Any]) -> None:
    plain, ours = (
        after(digits, 20, model=conv_net(norm=True, dropout=True), train=train, **how) for how in ({}, applied)
    )
    assert weights(ours) == weights(plain)


@needs_library
def test_8_bit_states_change_no_bit_in_backward(digits: Dataset) -> None:
    plain, ours = (after(digits, 20, model=large_net(), train=ADAMW, **LOW_BIT | how) for how in ({}, IN_BACKWARD))
    assert weights(ours) == weights(plain)


@pytest.mark.parametrize(
    ("train", "applied"),
    [
        *((train, {"optimizer_kernel": kernel}) for train in (TRAIN, ADAMW) for kernel in ("foreach", "for_loop")),
        (TRAIN, {"channels_last": True}),
        *((TRAIN, {"gradient_accumulation": count}) for count in (2, 4)),
        *(
            (TRAIN, {"compile": "default"} | more)
            for more in ({}, {"channels_last": True}, {"gradient_accumulation": 2})
        ),
        *((TRAIN, {"loss_chunks": 5, "activation_checkpointing": checkpointing}) for checkpointing in (False, True)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else value.optimizer,
)
def test_the_weights_differ_only_by_rounding(
    digits: Dataset, train: Any, applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch runs the forward and backward graphs that the compiler would get."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, ours = (after(digits, 10, train=train, **how) for how in ({}, applied))
    assert ours.losses.read_and_reset() == pytest.approx(plain.losses.read_and_reset(), rel=1e-4)
    actual, expected = (dict(training.model.named_parameters()) for training in (ours, plain))
    torch.testing.assert_close(actual, expected, check_stride=False, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("train", "applied"),
    [
        (TRAIN, IN_BACKWARD),
        (ADAMW, IN_BACKWARD),
        (ADAMW, {"optimizer_state": "factored"}),
        pytest.param(ADAMW, LOW_BIT, marks=needs_library),
        pytest.param(ADAMW, LOW_BIT | IN_BACKWARD, marks=needs_library),
    ],
)
def test_a_resumed_run_ends_with_the_same_weights(digits: Dataset, train: Any, applied: dict[str, Any]) -> None:
    assert resumes_exactly(*(make_training(digits, model=large_net(n), train=train, **applied) for n in (0, 0, 5)))


@pytest.mark.parametrize(
    "applied", [IN_BACKWARD, IN_BACKWARD | {"optimizer_state": "factored"},
                *(pytest.param(LOW_BIT | options, marks=needs_library) for options in ({}, IN_BACKWARD))],
)  # fmt: skip
def test_a_non_finite_loss_changes_no_parameter(
    digits: Dataset, applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_bit_optimizer, "LEAST_VALUES", 1)  # because the net is small
    message, before, after_it = until_broken(digits, False, train=ADAMW, **applied)
    assert "epoch 1, step 8: the loss became nan" in message
    assert after_it == before[7]


def test_weights_and_input_are_channels_last() -> None:
    images, labels = batch()
    images = torch.cat([images, images], 1)  # with a single channel both formats are the same
    model = nn.Sequential(nn.Conv2d(2, 1, 1), conv_net())
    expected = F.cross_entropy(model(images), labels)

    techniques = chosen(make_plan(channels_last=True), ALONE)
    result = changed(model, techniques)
    seen = []
    result[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))  # type: ignore[index]
    loss = make_step(result, techniques).forward(images, labels)

    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in result.parameters() if p.dim() == 4)
    assert not result[1][1][0].weight.is_contiguous()  # type: ignore[index]
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert not seen[0].is_contiguous()
    torch.testing.assert_close(loss, expected)


def test_volumes_are_channels_last_too() -> None:
    class Volumes(nn.Sequential):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images.unflatten(2, (2, 4)).repeat(1, 2, 1, 1, 1))  # type: ignore[no-untyped-call,no-any-return]

    convolution = nn.Conv3d(2, 2, (2, 3, 3))
    model = Volumes(convolution, nn.Flatten(), nn.LazyLinear(10))
    images, labels = batch()
    expected = F.cross_entropy(model(images), labels)
    techniques = chosen(make_plan(channels_last=True), ALONE)
    loss = make_step(changed(model, techniques), techniques).forward(images, labels)
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert not convolution.weight.is_contiguous()
    torch.testing.assert_close(loss, expected)


def test_without_convolutions_there_is_nothing_to_rearrange() -> None:
    (technique,) = chosen(make_plan(channels_last=True), ALONE)
    with pytest.raises(ConfigError, match=r"variants.tried.channels_last: found true, but Linear takes inputs of 2"):
        technique.change_model(setup_of(nn.Linear(4, 2), torch.zeros(2, 4)))
    technique.change_model(setup_of(nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 1)), torch.zeros(2, 4)))


def test_a_micro_batch_is_read_when_it_is_due() -> None:
    plan = make_plan(gradient_accumulation=4)
    order: list[str] = []

    def micro_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels in zip(*(part.chunk(4) for part in batch(32)), strict=True):
            order.append("input")
            yield images, labels

    model = conv_net()
    model.register_forward_hook(lambda *_: order.append("forward"))
    step = make_step(model, chosen(plan, ALONE), micro_batches=4)
    step(micro_batches())
    assert order == ["input", "forward"] * 4


def _update(dataset: Dataset, kernel: str) -> tuple[Counter[str], int]:
    """Return the operations of one update and the number of parameters."""
    training = make_training(dataset, train=ADAMW, optimizer_kernel=kernel)
    training.advance(2)
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Counts() as counts:
        training.optimizer.step()
    return counts.calls, len(list(training.model.parameters()))


def test_each_optimizer_kernel_runs_its_operations(digits: Dataset) -> None:
    fused, _ = _update(digits, "fused")
    foreach, _ = _update(digits, "foreach")
    for_loop, parameters = _update(digits, "for_loop")
    assert fused["_fused_adamw_"] == 1
    assert foreach["_foreach_addcdiv_"] == 1
    assert for_loop["addcdiv_"] == parameters
    assert not any("foreach" in name or "fused" in name for name in for_loop)


def state_tensors(training: Training) -> list[torch.Tensor]:
    return [t for state in training.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]


def test_adafactor_learns_with_a_small_state(digits: Dataset) -> None:
    steep = ADAMW.model_copy(update={"learning_rate": 0.05})  # relative to the size of the weights
    adamw, factored = make_training(digits, train=ADAMW), make_training(digits, train=steep, optimizer_state="factored")
    adamw.advance(1)
    first, *_, last = rows_of(factored.run())
    assert (last.train_loss or math.nan) < 0.8 * (first.train_loss or math.nan)
    held, whole = (sum(t.nbytes for t in state_tensors(training)) for training in (factored, adamw))
    assert held < 0.25 * whole


@needs_library
def test_8_bit_state_takes_two_bytes_a_value(digits: Dataset) -> None:
    plain, small = (make_training(digits, model=large_net(), train=ADAMW, **how) for how in ({}, LOW_BIT))
    losses = [rows_of(training.run())[-1].train_loss for training in (plain, small)]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)

    def state_bytes(training: Any) -> int:
        state = training.optimizer.state[training.model[3].weight]
        return sum(t.nbytes for key, t in state.items() if torch.is_tensor(t) and not key.startswith("qmap"))

    values = 64 * 64
    assert state_bytes(plain) == 8 * values + 4
    assert state_bytes(small) == 2 * values + 2 * values // 256 * 4


@pytest.mark.parametrize("state", ["factored", pytest.param("8bit", marks=needs_library)])
def test_the_measured_ledger_counts_the_optimizer_s_state(digits: Dataset, state: Any) -> None:
    training = make_training(digits, model=large_net(), train=ADAMW, optimizer_state=state)
    training.advance(3)
    measured = ledger.measured(training, 10**9)
    assert measured is not None
    standing = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state_tensors(training)}
    assert measured.optimizer_state_bytes == sum(standing.values())


def test_parameters_change_in_the_backward_pass(digits: Dataset) -> None:
    training = make_training(digits, optimizer_in_backward=True)
    first, last = training.model[0][0].weight, training.model[2][1].weight  # type: ignore[index]
    before = [tensor.detach().clone() for tensor in (first, last)]
    seen = []

    def when_the_first_layer_s_gradient_is_due(*_: Any) -> None:
        seen.append((torch.equal(first, before[0]), torch.equal(last, before[1]), last.grad))

    def note(_: object, __: object, output: torch.Tensor) -> None:
        output.register_hook(when_the_first_layer_s_gradient_is_due)

    training.model[0][0].register_forward_hook(note)  # type: ignore[index]
    training.advance(1)
    assert seen == [(True, False, None)]  # the last layer is already updated, and its gradient freed
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_a_seed_s_parameters_do_not_outlive_its_training(digits: Dataset) -> None:
    training = make_training(digits, train=ADAMW, optimizer_in_backward=True)
    training.advance(2)
    parameters = [weakref.ref(parameter) for parameter in training.model.parameters()]
    del training
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)


def test_zeroed_gradients_stay_and_change_no_bit(digits: Dataset) -> None:
    plain, zeroed = (make_training(digits, set_to_none=set_to_none) for set_to_none in (True, False))
    plain.advance(10)
    zeroed.advance(1)
    places = [parameter.grad.data_ptr() for parameter in zeroed.model.parameters()]  # type: ignore[union-attr]
    zeroed.advance(8)
    zeroed.step.zero_grad()
    assert [parameter.grad.data_ptr() for parameter in zeroed.model.parameters()] == places  # type: ignore[union-attr]
    assert not any(parameter.grad.any() for parameter in zeroed.model.parameters())  # type: ignore[union-attr]
    zeroed.advance(1)
    assert weights(zeroed) == weights(plain)
