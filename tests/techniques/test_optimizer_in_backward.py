from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from pipeline.data.prepared import Dataset
from pipeline.training.loop import Training
from tests.nets import conv_net
from tests.test_training import TRAIN, _until_broken, make_training, resumes_exactly, weights

ADAMW = TRAIN.model_copy(update={"optimizer": "adamw", "learning_rate": 0.002})


def _after(dataset: Dataset, steps: int, **how: Any) -> Training:
    training = make_training(dataset, model=conv_net(norm=True, dropout=True), **how)
    training.advance(steps)
    return training


@pytest.mark.parametrize("train", [TRAIN, ADAMW])
@pytest.mark.parametrize("checkpointing", [False, True, "selective", 0.5])
def test_the_weights_are_the_plain_optimizer_s_to_the_last_bit(digits: Dataset, train: Any, checkpointing: Any) -> None:
    plain = _after(digits, 30, train=train)
    ours = _after(digits, 30, train=train, optimizer_in_backward=True, activation_checkpointing=checkpointing)
    assert weights(ours) == weights(plain)


def test_parameters_change_in_the_backward_pass_and_gradients_are_freed(digits: Dataset) -> None:
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


@pytest.mark.parametrize("state", ["fp32", "factored"])
def test_a_loss_that_is_not_finite_changes_no_parameter(digits: Dataset, state: str) -> None:
    message, before, after = _until_broken(digits, False, optimizer_in_backward=True, optimizer_state=state)
    assert "epoch 1, step 8: the loss became nan" in message
    assert after == before[7]


@pytest.mark.parametrize("train", [TRAIN, ADAMW])
def test_a_resumed_run_ends_with_the_same_weights_to_the_last_bit(digits: Dataset, train: Any) -> None:
    nets = (conv_net(norm=True, seed=seed) for seed in (0, 0, 5))
    assert resumes_exactly(*(make_training(digits, model=net, train=train, optimizer_in_backward=True) for net in nets))


def test_a_seed_s_parameters_do_not_outlive_its_training(digits: Dataset) -> None:
    training = _after(digits, 2, train=ADAMW, optimizer_in_backward=True)
    parameters = [weakref.ref(each) for each in training.model.parameters()]
    del training
    gc.collect()
    assert not any(each() is not None for each in parameters)
