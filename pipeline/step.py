"""The step: one optimizer update from one global batch. Techniques change its parts, instruments watch them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

MicroBatches = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Images float32 [b, C, H, W] and labels int64 [b], on the device."""


class Losses(Protocol):
    """Where the losses of micro-batches are noted. Their sum over a step, averaged over ranks, is the step's loss."""

    total: Any

    def add(self, loss: torch.Tensor) -> None: ...

    def end_step(self) -> None: ...

    def read(self) -> float: ...

    def take(self) -> float: ...


class TrainingStep:
    """What happens between two batches. Each part is a callable, which a technique may replace when a run is set up."""

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        losses: Losses,
        micro_batches: int,
    ) -> None:
        self.model, self.optimizer, self.losses = model, optimizer, losses
        self.criterion = criterion
        """Logits [b, classes] and labels int64 [b] to their mean loss, a scalar."""
        self.forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._forward
        """Images float32 [b, C, H, W] and labels int64 [b] to the micro-batch's mean loss, a scalar; gradient
        accumulation makes it 1/N of that, its share of the step's."""
        self.backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
        """Adds the gradients of a loss to the parameters'."""
        self.no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
        """A context in which gradients stay on their rank: for every micro-batch of a step but the last."""
        self.accumulate: Callable[[MicroBatches], None] = self._one_by_one
        """Takes a step's micro-batches, notes their losses, and leaves the sum of their gradients in the parameters."""
        self.zero_grad: Callable[[], None] = optimizer.zero_grad
        """Forgets the last step's gradients."""
        self.update: Callable[[], object] = optimizer.step
        """Changes the parameters by their gradients."""
        self.trial_update: Callable[[], object] | None = None
        """The update of a step that is tried for its memory, if not ``update``: no rank may wait in it for another."""
        self.take: Callable[[MicroBatches], None] = self._take
        """All of it in order."""
        self.syncs = [False] * (micro_batches - 1) + [True]
        """Of each micro-batch, whether ranks exchange gradients after it."""

    def __call__(self, micro_batches: MicroBatches) -> None:
        self.take(micro_batches)

    def _take(self, micro_batches: MicroBatches) -> None:
        self.zero_grad()
        self.accumulate(micro_batches)
        self.update()
        self.losses.end_step()

    def _one_by_one(self, micro_batches: MicroBatches) -> None:
        for sync in self.syncs:
            images, labels = next(micro_batches)
            with nullcontext() if sync else self.no_sync():
                loss = self.forward(images, labels)
                self.losses.add(loss)
                self.backward(loss)

    def _forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.criterion(self.model(images), labels)

    @contextmanager
    def instrument(self, **around: Callable[[Any], Any]) -> Iterator[None]:
        """While the block runs, parts are what these functions make of them: ``step.instrument(update=timed)``."""
        parts = {name: getattr(self, name) for name in around}
        for name, part in parts.items():
            setattr(self, name, around[name](part))
        try:
            yield
        finally:
            for name, part in parts.items():
                setattr(self, name, part)
