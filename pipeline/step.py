"""The training step: one optimizer update from one global batch. Techniques and measurements replace its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from pipeline.processes import replaced

Inputs: TypeAlias = Any
"""A model's inputs: a tensor [b, ...], or a dict of tensors [b, ...], with which the model is called by name. Most code
only passes them on."""
MicroBatches = Iterator[tuple[Inputs, torch.Tensor]]
"""Yields one micro-batch of b samples after the other: inputs [b, ...] and targets [b, ...], on the device."""


class Losses(Protocol):
    """Collects the losses of micro-batches. A step's loss is their sum over the step, averaged over the ranks."""

    total: Any

    def add(self, loss: torch.Tensor) -> None: ...

    def end_step(self) -> None: ...

    def read(self) -> float: ...

    def read_and_reset(self) -> float: ...


class TrainingStep:
    """One optimizer step. Each part is a callable, which a technique may replace when a run is set up."""

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
        """Maps outputs [b, ...] and targets [b, ...] to the mean loss, a scalar. The loss is the task's own
        (``pipeline/tasks``), or ``train.loss`` if this setting names another loss."""
        self.forward: Callable[[Inputs, torch.Tensor], torch.Tensor] = self._plain_forward
        """Maps inputs [b, ...] and targets [b, ...] to the micro-batch's mean loss, a scalar. Gradient
        accumulation divides this loss by the number of micro-batches."""
        self.backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
        """Adds the gradients of a loss to the parameters' gradients."""
        self.no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
        """Returns a context in which ranks do not exchange gradients. A micro-batch runs in it if its entry in
        ``syncs`` is False."""
        self.accumulate: Callable[[MicroBatches], None] = self._plain_accumulate
        """Runs a step's micro-batches, records their losses, and sums their gradients in the parameters."""
        self.zero_grad: Callable[[], None] = optimizer.zero_grad
        """Clears the last step's gradients."""
        self.unscale: Callable[[], object] = lambda: None
        """Divides the gradients by the loss scale. A technique that reads gradients in ``update`` calls this first."""
        self.update: Callable[[], object] = optimizer.step
        """Updates the parameters from their gradients."""
        self.trial_update: Callable[[], object] | None = None
        """Replaces ``update`` in a trial step, which tests whether a step fits into memory. It must not wait for
        another rank. If it is None, a trial step calls ``update``."""
        self.whole: Callable[[MicroBatches], None] = self._plain_whole
        """Runs all parts of the step in order."""
        self.syncs = [False] * (micro_batches - 1) + [True]
        """For each micro-batch, whether ranks exchange gradients in its backward pass."""

    def __call__(self, micro_batches: MicroBatches) -> None:
        self.whole(micro_batches)

    def _plain_whole(self, micro_batches: MicroBatches) -> None:
        self.zero_grad()
        self.accumulate(micro_batches)
        self.update()
        self.losses.end_step()

    def _plain_accumulate(self, micro_batches: MicroBatches) -> None:
        for sync in self.syncs:
            inputs, targets = next(micro_batches)
            with nullcontext() if sync else self.no_sync():
                loss = self.forward(inputs, targets)
                self.losses.add(loss)
                self.backward(loss)

    def _plain_forward(self, inputs: Inputs, targets: torch.Tensor) -> torch.Tensor:
        return self.criterion(self.model(inputs), targets)

    @contextmanager
    def instrument(self, **around: Callable[[Any], Any]) -> Iterator[None]:
        """Replace parts while the block runs: ``instrument(update=timed)`` replaces ``update`` by ``timed(update)``."""
        with ExitStack() as parts:
            for name, changed in around.items():
                parts.enter_context(replaced(self, name, changed(getattr(self, name))))
            yield
