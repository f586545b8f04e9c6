from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from pipeline.data.prepared import Dataset
from pipeline.techniques.activation_offload import ActivationOffload
from tests.nets import ALONE, GPU, batch, changed, conv_net, gradients, make_plan, make_step
from tests.test_training import make_training, weights


@pytest.mark.gpu
def test_activations_leave_the_gpu_and_no_bit_of_the_gradients_changes() -> None:
    images, labels = (part.cuda() for part in batch(4096))
    plain = conv_net(norm=True).cuda()
    away = copy.deepcopy(plain)
    technique = ActivationOffload(make_plan(activation_offload=True), GPU)
    away = changed(away, [technique])  # type: ignore[assignment]
    forward = make_step(away, [technique]).forward

    def kept(run: object) -> tuple[torch.Tensor, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = run(images, labels)  # type: ignore[operator]
        torch.cuda.synchronize()
        return loss, torch.cuda.memory_allocated() - before

    loss, everything = kept(lambda images, labels: F.cross_entropy(plain(images), labels))
    offloaded_loss, rest = kept(forward)
    assert rest < 0.2 * everything
    assert technique.why_idle() == ""
    loss.backward()
    offloaded_loss.backward()
    assert all(map(torch.equal, gradients(plain), gradients(away)))


def test_where_every_activation_is_small_offloading_has_no_effect() -> None:
    technique = ActivationOffload(make_plan(activation_offload=True), ALONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda _: None)
        make_step(conv_net(), [technique]).forward(*batch())
    assert "no activation has 65,536 bytes or more" in technique.why_idle()


@pytest.mark.gpu
def test_offloading_changes_no_bit_of_the_weights_after_some_steps(digits: Dataset) -> None:
    runs = [make_training(digits, GPU, activation_offload=offload) for offload in (False, True)]
    for training in runs:
        training.advance(20)
    assert weights(runs[0]) == weights(runs[1])
