"""Regression: predicts numbers, standardised with the mean and standard deviation of the training targets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.data.batches import Batch
from pipeline.tasks.base import Task, TaskError


class Regression(Task):
    """The loss is the mean squared error. The score is the share of samples whose outputs are all near their targets.

    Errors are in standard deviations of the training targets. The option ``tolerance`` of ``train.task_options`` is the
    largest error that counts as near (0.5 by default).
    """

    directions: ClassVar = {"explained_variance_fraction": "higher is better"}

    def __post_init__(self) -> None:
        if "targets" not in self.dataset.statistics:
            raise TaskError(
                f"train.task: found 'regression', but {self.dataset.name} has no targets that are floats; allowed: "
                f"{'language_model' if self.dataset.vocabulary else 'classification'}, or module:class of your own."
            )
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
    def postprocess(self) -> nn.Module:
        return Standardised(self, inverse=True).to(self.device)

    @cached_property
    def _standardise(self) -> nn.Module:
        return Standardised(self).to(self.device)

    def raw(self, rows: Sequence[Tensor]) -> Batch:
        inputs, targets = rows
        return inputs, self._standardise(targets.flatten(1) if targets.ndim > 1 else targets.unsqueeze(1))

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


class Standardised(nn.Module):
    """Maps x [b, outputs] to (x - mean) / std or, if ``inverse``, to x * std + mean. Mean and std are the mean and
    standard deviation of the training targets."""

    mean: Tensor
    std: Tensor

    def __init__(self, task: Task, *, inverse: bool = False) -> None:
        super().__init__()
        found, row = task.dataset.statistics["targets"], task.dataset.train.targets[:1]
        shape = (-1, *[1] * (row.ndim - 2))
        for name, values in (("mean", found.mean), ("std", found.std)):
            each = torch.tensor(values, dtype=torch.float32).view(shape).expand(row.shape[1:] or (1,))
            self.register_buffer(name, each.flatten())
        self.inverse = inverse

    def forward(self, values: Tensor) -> Tensor:
        return values * self.std + self.mean if self.inverse else (values - self.mean) / self.std
