from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.profiling import ledger
from pipeline.techniques import low_bit_optimizer
from tests.test_training import TRAIN, _until_broken, make_training, resumes_exactly, weights

ADAMW = TRAIN.model_copy(update={"optimizer": "adamw", "learning_rate": 0.002})


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def _training(dataset: Dataset, seed: int = 0, **applied: Any) -> Any:
    return make_training(dataset, model=_net(seed), train=ADAMW, **applied)


class TestWithTheLibrary:
    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("bitsandbytes", reason="needs the extra low-bit")

    def test_a_large_tensor_s_state_takes_two_bytes_a_value(self, digits: Dataset) -> None:
        plain, small = _training(digits), _training(digits, optimizer_state="8bit")
        for training in (plain, small):
            training.advance(3)
        large = {id(t): t.model[1].weight for t in (plain, small)}

        def state_bytes(training: Any) -> int:
            state = training.optimizer.state[large[id(training)]]
            return sum(t.nbytes for key, t in state.items() if torch.is_tensor(t) and not key.startswith("qmap"))

        values = 64 * 256
        assert state_bytes(plain) == 8 * values + 4
        assert state_bytes(small) == 2 * values + 2 * values // 256 * 4
        found = ledger.measured(small, 10**9)
        assert found is not None
        tensors = [t for state in small.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        standing = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert found.optimizer_state_bytes == sum(standing.values())

    def test_the_8_bit_optimizer_learns_as_adamw_does(self, digits: Dataset) -> None:
        plain, small = _training(digits), _training(digits, optimizer_state="8bit")
        losses = [[row.train_loss for row in training.run() if row][-1] for training in (plain, small)]
        assert losses[1] == pytest.approx(losses[0], rel=0.1)

    @pytest.mark.parametrize("in_backward", [False, True])
    def test_a_resumed_run_ends_with_the_same_weights_to_the_last_bit(self, digits: Dataset, in_backward: bool) -> None:
        how: Any = {"optimizer_state": "8bit", "optimizer_in_backward": in_backward}
        assert resumes_exactly(*(_training(digits, seed, **how) for seed in (0, 0, 5)))

    @pytest.mark.parametrize("in_backward", [False, True])
    def test_a_loss_that_is_not_finite_changes_no_parameter(
        self, digits: Dataset, in_backward: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(low_bit_optimizer, "LEAST_VALUES", 1)  # because the net is small
        message, before, after = _until_broken(
            digits, False, train=ADAMW, optimizer_state="8bit", optimizer_in_backward=in_backward
        )
        assert "epoch 1, step 8: the loss became nan" in message
        assert after == before[7]

    def test_updates_in_the_backward_pass_give_the_same_weights(self, digits: Dataset) -> None:
        after, within = (_training(digits, optimizer_state="8bit", optimizer_in_backward=how) for how in (False, True))
        for training in (after, within):
            training.advance(20)
        assert weights(within) == weights(after)
