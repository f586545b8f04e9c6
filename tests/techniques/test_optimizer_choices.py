"""The optimizers, their state, and when they update parameters and free gradients."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.data.prepared import Dataset
from pipeline.profiling import ledger
from pipeline.training.loop import Training
from tests.techniques.test_promises import ADAMW, LOW_BIT, large_net, needs_library
from tests.test_training import make_training, rows_of, weights


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _update(dataset: Dataset, kernel: str) -> tuple[Counter[str], int]:
    """Return the operations of one update and the number of parameters."""
    training = make_training(dataset, train=ADAMW, optimizer_kernel=kernel)
    training.advance(2)
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Counts() as counts:
        training.optimizer.step()
    return counts.calls, len(list(training.model.parameters()))


def test_fused_runs_one_kernel_foreach_one_per_operation_and_for_loop_one_per_parameter(digits: Dataset) -> None:
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
    assert last.train_loss < 0.8 * first.train_loss
    held, whole = (sum(t.nbytes for t in state_tensors(training)) for training in (factored, adamw))
    assert held < 0.25 * whole


@needs_library
def test_a_large_tensor_s_state_takes_two_bytes_a_value_and_training_goes_on_as_with_adamw(digits: Dataset) -> None:
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
    found = ledger.measured(training, 10**9)
    assert found is not None
    standing = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state_tensors(training)}
    assert found.optimizer_state_bytes == sum(standing.values())


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


def test_a_seed_s_parameters_do_not_outlive_its_training(digits: Dataset) -> None:
    training = make_training(digits, train=ADAMW, optimizer_in_backward=True)
    training.advance(2)
    parameters = [weakref.ref(each) for each in training.model.parameters()]
    del training
    gc.collect()
    assert not any(each() is not None for each in parameters)


def test_zeroed_gradients_stay_where_they_are_and_change_no_bit(digits: Dataset) -> None:
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
