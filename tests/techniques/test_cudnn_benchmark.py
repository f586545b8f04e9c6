from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.techniques.cudnn_benchmark import CudnnBenchmark
from tests.nets import ALONE, GPU, conv_net, make_plan, take_within
from tests.test_training import make_training, rows_of


class _Asks(nn.Module):
    """Records whether cuDNN searches, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net()
        self.found: dict[bool, set[bool]] = {True: set(), False: set()}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.found[self.training].add(torch.backends.cudnn.benchmark)
        logits: torch.Tensor = self.net(images)
        return logits


def test_cudnn_searches_only_in_training_steps(digits: Dataset) -> None:
    model, plain = _Asks(), _Asks()
    list(make_training(digits, model=model, cudnn_benchmark=True).run())
    assert model.found == {True: {True}, False: {False}}
    assert torch.backends.cudnn.benchmark is False
    list(make_training(digits, model=plain).run())
    assert plain.found == {True: {False}, False: {False}}


def test_the_search_is_switched_off_when_a_step_fails() -> None:
    def fails(_: object) -> None:
        assert torch.backends.cudnn.benchmark is True
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        take_within(CudnnBenchmark(make_plan(cudnn_benchmark=True), ALONE), fails)
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.gpu
def test_the_losses_are_the_same_within_rounding(digits: Dataset) -> None:
    losses = [
        [row.train_loss for row in rows_of(make_training(digits, GPU, cudnn_benchmark=on).run())]
        for on in (False, True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
