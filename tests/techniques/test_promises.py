"""Promises of techniques in one process: weights that differ by rounding, exact resumption, no update by a NaN loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.errors import ConfigError
from pipeline.techniques import low_bit_optimizer
from pipeline.training.loop import Training
from tests.nets import ALONE, batch, changed, chosen, conv_net, make_plan, make_step, setup_of
from tests.test_training import TRAIN, _until_broken, make_training, resumes_exactly, weights

ADAMW = TRAIN.model_copy(update={"optimizer": "adamw", "learning_rate": 0.002})
IN_BACKWARD: dict[str, Any] = {"optimizer_in_backward": True}
CHECKPOINTED: list[dict[str, Any]] = [{"activation_checkpointing": each} for each in (True, "selective", 0.3, 0.8)]
LOW_BIT: dict[str, Any] = {"optimizer_state": "8bit"}
needs_library = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra low-bit")


def large_net(seed: int = 0) -> nn.Sequential:
    """Return a net with BatchNorm, and a layer whose state bitsandbytes keeps in 8 bits."""
    *blocks, _ = conv_net(norm=True, seed=seed)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def after(dataset: Dataset, steps: int, **how: Any) -> Training:
    training = make_training(dataset, **how)
    training.advance(steps)
    return training


@pytest.mark.parametrize("train", [TRAIN, ADAMW], ids=lambda train: train.optimizer)
@pytest.mark.parametrize("applied", [IN_BACKWARD, *CHECKPOINTED, *(each | IN_BACKWARD for each in CHECKPOINTED)])
def test_no_bit_of_the_weights_changes(digits: Dataset, train: Any, applied: dict[str, Any]) -> None:
    plain, ours = (
        after(digits, 20, model=conv_net(norm=True, dropout=True), train=train, **how) for how in ({}, applied)
    )
    assert weights(ours) == weights(plain)


@needs_library
def test_no_bit_of_8_bit_weights_changes_in_the_backward_pass(digits: Dataset) -> None:
    plain, ours = (after(digits, 20, model=large_net(), train=ADAMW, **LOW_BIT | how) for how in ({}, IN_BACKWARD))
    assert weights(ours) == weights(plain)


@pytest.mark.parametrize(
    ("train", "applied"),
    [
        *((train, {"optimizer_kernel": each}) for train in (TRAIN, ADAMW) for each in ("foreach", "for_loop")),
        (TRAIN, {"channels_last": True}),
        *((TRAIN, {"gradient_accumulation": each}) for each in (2, 4)),
        *(
            (TRAIN, {"compile": "default"} | more)
            for more in ({}, {"channels_last": True}, {"gradient_accumulation": 2})
        ),
        *((TRAIN, {"loss_chunks": 5, "activation_checkpointing": each}) for each in (False, True)),
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
    found, expected = (dict(training.model.named_parameters()) for training in (ours, plain))
    torch.testing.assert_close(found, expected, check_stride=False, rtol=1e-3, atol=1e-5)


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
def test_a_resumed_run_ends_with_the_same_weights_to_the_last_bit(
    digits: Dataset, train: Any, applied: dict[str, Any]
) -> None:
    assert resumes_exactly(*(make_training(digits, model=large_net(n), train=train, **applied) for n in (0, 0, 5)))


@pytest.mark.parametrize(
    "applied", [IN_BACKWARD, IN_BACKWARD | {"optimizer_state": "factored"},
                *(pytest.param(LOW_BIT | each, marks=needs_library) for each in ({}, IN_BACKWARD))],
)  # fmt: skip
def test_a_loss_that_is_not_finite_changes_no_parameter(
    digits: Dataset, applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_bit_optimizer, "LEAST_VALUES", 1)  # because the net is small
    message, before, after_it = _until_broken(digits, False, train=ADAMW, **applied)
    assert "epoch 1, step 8: the loss became nan" in message
    assert after_it == before[7]


def test_weights_and_input_are_channels_last_and_the_loss_is_the_same() -> None:
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


def test_without_images_and_convolutions_there_is_nothing_to_rearrange() -> None:
    (technique,) = chosen(make_plan(channels_last=True), ALONE)
    with pytest.raises(
        ConfigError, match=r"variants.tried.channels_last: found true, but Linear takes inputs of 2 dim"
    ):
        technique.change_model(setup_of(nn.Linear(4, 2), torch.zeros(2, 4)))
    technique.change_model(setup_of(nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 1)), torch.zeros(2, 4)))


def test_a_micro_batch_is_read_only_after_the_forward_pass_of_the_one_before() -> None:
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
