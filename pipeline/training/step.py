"""The step: one optimizer update from one global batch, and where techniques change it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn

from pipeline.techniques import (
    Accumulate,
    Backward,
    Criterion,
    Forward,
    HoldSync,
    MicroBatches,
    Step,
    Technique,
    Update,
    ZeroGrad,
)
from pipeline.training.losses import DeviceLosses, HostLosses


class TrainingStep:
    """One optimizer update from one global batch: what ``techniques`` made of its parts."""

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        losses: HostLosses | DeviceLosses,
        techniques: Sequence[Technique],
        micro_batches: int,
    ) -> None:
        for technique in techniques:
            criterion = technique.wrap_criterion(criterion)

        def forward(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return criterion(model(images), labels)

        self.optimizer, self.losses = optimizer, losses
        self.forward: Forward = forward
        self.backward: Backward = torch.Tensor.backward
        self.zero_grad: ZeroGrad = optimizer.zero_grad
        self.update: Update = optimizer.step
        self.accumulate: Accumulate = self._one_by_one
        self.take: Step = self._take
        hold_sync: HoldSync = nullcontext
        for technique in techniques:
            self.forward = technique.wrap_forward(self.forward)
            self.backward = technique.wrap_backward(self.backward)
            hold_sync = technique.wrap_hold_sync(hold_sync)
            self.accumulate = technique.wrap_accumulate(self.accumulate, self._forward, self)
            self.zero_grad = technique.wrap_zero_grad(self.zero_grad, optimizer)
            self.update = technique.wrap_update(self.update, optimizer)
            self.take = technique.wrap_step(self.take)
        self.hold_sync = hold_sync
        self.syncs: list[HoldSync] = [hold_sync] * (micro_batches - 1) + [nullcontext]

    def __call__(self, micro_batches: MicroBatches) -> None:
        self.take(micro_batches)

    def _take(self, micro_batches: MicroBatches) -> None:
        self.zero_grad()
        self.accumulate(micro_batches)
        self.update()
        self.losses.end_step()

    def add(self, loss: torch.Tensor) -> None:
        """Note a micro-batch's share of the loss."""
        self.losses.add(loss)

    def _forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.forward(images, labels)

    def _one_by_one(self, micro_batches: MicroBatches) -> None:
        for sync in self.syncs:
            images, labels = next(micro_batches)
            with sync():
                loss = self.forward(images, labels)
                self.losses.add(loss)
                self.backward(loss)
