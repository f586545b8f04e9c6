from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.distributed import World
from pipeline.techniques.sync_batchnorm import SyncBatchNorm
from tests.nets import ALONE, batch, changed, chosen, conv_net, gradients, make_plan
from tests.ranks import run_ranks

PLAN = make_plan(parallelism="ddp", processes=2, sync_batchnorm=True)


def test_every_batchnorm_is_replaced_and_names_in_the_state_dict_stay() -> None:
    model = changed(conv_net(norm=True), [SyncBatchNorm(PLAN, ALONE)])
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in model.modules()) == 2
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert list(model.state_dict()) == list(conv_net(norm=True).state_dict())


def _statistics(joined: World, sync: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return gradients and buffers after both passes over this rank's share of 32 samples. Ranks share a GPU."""
    here = World(joined.rank, joined.size, torch.device("cuda", 0), joined.backend)
    plan = make_plan(parallelism="ddp" if joined.size > 1 else "none", processes=joined.size, sync_batchnorm=sync)
    model = conv_net(norm=True).to(here.device)
    wrapped: nn.Module = model
    wrapped = changed(wrapped, chosen(plan, here))
    images, labels = (part.chunk(joined.size)[joined.rank].to(here.device) for part in batch(32))
    F.cross_entropy(wrapped(images), labels).backward()
    return [each.cpu() for each in gradients(model)], {name: each.cpu() for name, each in model.named_buffers()}


@pytest.mark.gpu
def test_two_ranks_have_the_gradients_and_statistics_of_one_device() -> None:
    expected, buffers = _statistics(ALONE, False)
    for ranks_gradients, ranks_buffers in run_ranks(_statistics, True):
        torch.testing.assert_close(ranks_gradients, expected, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(ranks_buffers, buffers, rtol=1e-4, atol=1e-6)
    plain, _ = run_ranks(_statistics, False)[0]
    assert any(not torch.allclose(*pair, rtol=1e-2) for pair in zip(plain, expected, strict=True))
