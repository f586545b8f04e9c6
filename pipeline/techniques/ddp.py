"""DistributedDataParallel: every rank has the model and a share of the batch; gradients are averaged as they arise."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.techniques.base import HoldSync, Technique

_NO_BROADCAST = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"  # its name before torch 2.15
)


class DDPOption(Technique):
    """An argument of ``DistributedDataParallel``, which asks for it."""

    def arguments(self) -> dict[str, Any]:
        raise NotImplementedError


class BucketSize(DDPOption):
    """The size at which a bucket of gradients is reduced."""

    name = "bucket_mb"

    def arguments(self) -> dict[str, Any]:
        return {"bucket_cap_mb": self.plan.applied.bucket_mb}


class GradientsBesideBuckets(DDPOption):
    """Gradients are no views of the buckets."""

    name = "gradients_beside_buckets"
    foreseen = False

    def arguments(self) -> dict[str, Any]:
        return {"gradient_as_bucket_view": False}

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self._gradients = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model

    def communication_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._gradients)


class StaticGraph(DDPOption):
    """The promise that every step uses the same parameters alike. One that is never used is then no error."""

    name = "static_graph"

    def arguments(self) -> dict[str, Any]:
        return {"static_graph": True}


OPTIONS = (BucketSize, GradientsBesideBuckets, StaticGraph)


class DDP(Technique):
    """``torch.nn.parallel.DistributedDataParallel`` around the model.

    Buffers are not broadcast before each forward pass: training does not read BatchNorm's running
    statistics, and evaluation takes the main rank's (``World.broadcast_buffers_``) either way.
    """

    name = "ddp"

    def wrap_model(self, model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {_NO_BROADCAST: False, "gradient_as_bucket_view": True}
        for option in OPTIONS:
            if option.is_asked(self.plan):
                options |= option(self.plan, self.world).arguments()
        device_ids = [self.world.device] if self.world.device.type == "cuda" else None
        self.model = DistributedDataParallel(model, device_ids, **options)
        return self.model

    def wrap_hold_sync(self, hold_sync: HoldSync) -> HoldSync:  # noqa: ARG002
        return self.model.no_sync
