"""DistributedDataParallel: every rank has the model and a share of the batch; gradients are averaged as they arise."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed import World
from pipeline.techniques.base import HoldSync, Technique

_NO_BROADCAST = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"  # its name before torch 2.15
)


def replicated(model: nn.Module, world: World, **options: Any) -> DistributedDataParallel:
    """``model`` in DistributedDataParallel; ``options`` are its own, such as the ``process_group`` of the replicas."""
    device_ids = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids, **{_NO_BROADCAST: False, "gradient_as_bucket_view": True} | options
    )


class DDP(Technique):
    """``torch.nn.parallel.DistributedDataParallel`` around the model.

    Buffers are not broadcast before each forward pass: training does not read BatchNorm's running
    statistics, and evaluation takes the main rank's (``World.broadcast_buffers_``) either way.
    """

    name = "ddp"

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self.model = replicated(model, self.world)
        return self.model

    def wrap_hold_sync(self, hold_sync: HoldSync) -> HoldSync:  # noqa: ARG002
        return self.model.no_sync
