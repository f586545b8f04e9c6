from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.distributed import World
from pipeline.techniques import chosen
from pipeline.training import HostLosses, TrainingStep
from tests.nets import ALONE, batch, conv_net, gradients, make_plan
from tests.ranks import run_ranks


def _step(joined: World, micro_batches: int) -> tuple[list[torch.Tensor], float, int]:
    """One step over this rank's share of the same 32 samples: gradients, loss over all ranks, number of reductions."""
    plan = make_plan(
        parallelism="ddp" if joined.size > 1 else "none", processes=joined.size, gradient_accumulation=micro_batches
    )
    model = conv_net()
    techniques = chosen(plan, joined)
    wrapped: nn.Module = model
    for technique in techniques:
        wrapped = technique.wrap_model(wrapped)
    reductions = []
    if joined.size > 1:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def counted(state, bucket):  # type: ignore[no-untyped-def]
            reductions.append(bucket.index())
            return allreduce_hook(state, bucket)

        wrapped.register_comm_hook(None, counted)  # type: ignore[operator]
    losses = HostLosses(joined)
    step = TrainingStep(
        wrapped, F.cross_entropy, torch.optim.SGD(wrapped.parameters(), lr=0.0), losses, techniques, micro_batches
    )
    images, labels = (part.chunk(joined.size)[joined.rank] for part in batch(32))
    step(zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True))
    return gradients(model), losses.take(), len(reductions)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_two_ranks_have_the_gradients_of_one_device_and_reduce_once_a_step(micro_batches: int) -> None:
    expected, loss, _ = _step(ALONE, 1)
    for ranks_gradients, ranks_loss, reductions in run_ranks(_step, micro_batches):
        torch.testing.assert_close(ranks_gradients, expected, rtol=1e-4, atol=1e-6)
        assert ranks_loss == pytest.approx(loss, rel=1e-5)
        assert reductions == 1


def test_it_applies_only_when_asked() -> None:
    assert [technique.name for technique in chosen(make_plan(), ALONE)] == []
