from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.data.prepared import Dataset
from pipeline.profiling import ledger
from tests.test_training import TRAIN, make_training, resumes_exactly, weights

ADAMW = TRAIN.model_copy(update={"optimizer": "adamw", "learning_rate": 0.002})


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


@pytest.mark.parametrize("train", [TRAIN, ADAMW])
@pytest.mark.parametrize("kernel", ["foreach", "for_loop"])
def test_the_weights_are_those_of_fused_within_rounding(digits: Dataset, train: Any, kernel: str) -> None:
    fused, other = (make_training(digits, train=train, optimizer_kernel=each) for each in ("fused", kernel))
    for training in (fused, other):
        training.advance(10)
    torch.testing.assert_close(list(other.model.parameters()), list(fused.model.parameters()), rtol=1e-4, atol=1e-5)


def test_adafactor_learns_with_a_small_state(digits: Dataset) -> None:
    steep = ADAMW.model_copy(update={"learning_rate": 0.05})  # relative to the size of the weights
    adamw = make_training(digits, train=ADAMW)
    factored = make_training(digits, train=steep, optimizer_state="factored")
    losses = []
    for training in (adamw, factored):
        losses.append([row.train_loss for row in training.run() if row])
    assert losses[1][-1] < 0.8 * losses[1][0]

    def state_bytes(optimizer: torch.optim.Optimizer) -> int:
        return sum(t.nbytes for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))

    assert state_bytes(factored.optimizer) < 0.25 * state_bytes(adamw.optimizer)


def test_adafactor_s_memory_is_measured(digits: Dataset) -> None:
    training = make_training(digits, train=ADAMW, optimizer_state="factored")
    training.advance(2)
    found = ledger.measured(training, 10**9)
    assert found is not None
    parameters = [parameter.shape for parameter in training.model.parameters()]
    rows_and_columns = sum(s.numel() // s[-1] + s.numel() // s[-2] for s in parameters if len(s) > 1)
    vectors = sum(s.numel() for s in parameters if len(s) == 1)
    # Each parameter also has a step count.
    assert found.optimizer_state_bytes == 4 * (rows_and_columns + vectors + len(parameters))


def test_adafactor_s_state_is_resumed_to_the_last_bit(digits: Dataset) -> None:
    how: Any = {"train": ADAMW, "optimizer_state": "factored"}
    assert resumes_exactly(*(make_training(digits, **how) for _ in range(3)))


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
