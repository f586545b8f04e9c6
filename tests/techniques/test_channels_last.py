from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline.data.prepared import Dataset
from pipeline.techniques.channels_last import ChannelsLast
from tests.nets import ALONE, batch, changed, conv_net, make_plan, make_step
from tests.test_training import make_training


def test_weights_and_input_are_channels_last_and_the_loss_is_the_same() -> None:
    images, labels = batch()
    images = torch.cat([images, images], 1)  # with a single channel both formats are the same
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 1, 1), conv_net())
    expected = F.cross_entropy(model(images), labels)

    technique = ChannelsLast(make_plan(channels_last=True), ALONE)
    result = changed(model, [technique])
    seen = []
    result[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))  # type: ignore[index]
    loss = make_step(result, [technique]).forward(images, labels)

    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in result.parameters() if p.dim() == 4)
    assert not result[1][1][0].weight.is_contiguous()  # type: ignore[index]
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert not seen[0].is_contiguous()
    torch.testing.assert_close(loss, expected)


def test_the_trained_weights_are_the_same_within_rounding(digits: Dataset) -> None:
    plain, changed = (make_training(digits, model=conv_net(norm=True), channels_last=on) for on in (False, True))
    for training in (plain, changed):
        training.advance(20)
    assert changed.losses.read_and_reset() == pytest.approx(plain.losses.read_and_reset(), rel=1e-3)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(changed.model.state_dict()[name], value, check_stride=False, rtol=1e-3, atol=1e-4)
