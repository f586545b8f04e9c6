from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pipeline.training.losses import HostLosses
from tests.nets import ALONE, batch, chosen, conv_net, gradients, make_plan, make_step


def _gradients(micro_batches: int) -> tuple[list[torch.Tensor], float]:
    """Return the gradients and the loss of one step over the same 32 samples."""
    plan = make_plan(gradient_accumulation=micro_batches)
    model, (images, labels) = conv_net(), batch(32)
    losses = HostLosses(ALONE)
    step = make_step(model, chosen(plan, ALONE), losses=losses, micro_batches=micro_batches)
    step(zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True))
    return gradients(model), losses.read_and_reset()


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_the_gradients_of_micro_batches_add_up_to_those_of_the_whole_batch(micro_batches: int) -> None:
    whole, whole_loss = _gradients(1)
    parts, parts_loss = _gradients(micro_batches)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-5)


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
