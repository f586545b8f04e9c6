"""Regression: predicts numbers, standardised with the mean and standard deviation of the training targets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from pipeline.tasks.base import Batch, Normalise, Task, TaskError


class Regression(Task):
    """The loss is the mean squared error. The score is the share of samples whose outputs are all near their targets.

    Errors are in standard deviations of the training targets. The option ``tolerance`` of ``train.task_options`` is the
    largest error that counts as near (0.5 by default).
    """

    needs = "float targets"
    directions: ClassVar = {"explained_variance_fraction": "higher is better"}

    def __post_init__(self) -> None:
        unknown, found = set(self.train.task_options) - {"tolerance"}, self.tolerance
        if unknown or not isinstance(found, int | float) or not found > 0:
            raise TaskError(
                f"train.task_options: found {self.train.task_options}; regression takes tolerance, a number above 0."
            )

    @property
    def tolerance(self) -> float:
        found: float = self.train.task_options.get("tolerance", 0.5)
        return found

    @cached_property
    def postprocess(self) -> Restored:
        return Restored(self.dataset.statistics["targets"], self.dataset.train.targets).to(self.device)

    def raw(self, rows: Sequence[Tensor]) -> Batch:
        inputs, targets = rows
        known = self.postprocess
        return inputs, ((targets - known.mean) / known.std).unsqueeze(-1).flatten(1)

    def output_arguments(self) -> dict[str, int]:
        return {"outputs": self.dataset.train.targets[0].numel()}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)

    def test_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).double().square().mean(1).sum()

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return whether all errors of a sample are within the tolerance, [b]."""
        return ((outputs - targets).abs() <= self.tolerance).all(1)

    def ties(self, outputs: Tensor, targets: Tensor, nearness: float) -> int:
        """Return the number of samples with an error that is nearly equal to the tolerance."""
        beyond = (outputs - targets).abs() - self.tolerance
        return int((beyond.abs() <= nearness * outputs.abs().amax(1, keepdim=True)).any(1).sum())

    def findings(self, test_loss: float) -> dict[str, float]:
        """Return the explained variance, 1 - MSE, because the loss is in units of the targets' variance. Return nothing
        for a loss of the user's own."""
        return {} if ":" in self.train.loss else {"explained_variance_fraction": 1.0 - test_loss}


class Restored(Normalise):
    """Maps outputs x [b, outputs] to x * std + mean, with the mean and standard deviation of the training targets."""

    def forward(self, outputs: Tensor) -> Tensor:
        mean, std = self.mean.view(-1, 1), self.std.view(-1, 1)
        by_channel: Tensor = outputs.unflatten(1, (len(mean), -1))
        return (by_channel * std + mean).flatten(1)
