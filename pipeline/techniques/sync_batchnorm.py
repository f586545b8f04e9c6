"""SyncBatchNorm: compute mean and variance over the micro-batches of all ranks, as a single device does."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import ConfigError
from pipeline.techniques.base import Setup, Technique
from pipeline.techniques.lockstep import keep_in_step


class SyncBatchNorm(Technique):
    """Replaces every BatchNorm by ``torch.nn.SyncBatchNorm``; names in the state dict stay the same.

    torch implements SyncBatchNorm only for GPUs. The running statistics are the same on every rank.
    """

    name = "sync_batchnorm"

    def change_model(self, setup: Setup) -> None:
        model = setup.model
        if not any(isinstance(module, _BatchNorm) for module in model.modules()):
            raise ConfigError(
                f"{self.where('sync_batchnorm')}, but {type(model).__name__} has no BatchNorm; allowed: false, or a "
                "model with nn.BatchNorm layers."
            )
        setup.model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        keep_in_step(setup.model, nn.SyncBatchNorm, self.world, self.where("sync_batchnorm"), [])
