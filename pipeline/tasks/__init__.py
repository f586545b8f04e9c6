"""What a job learns from its data: classification, a language model, labels, regression, or a task of the user's own.

``batches`` shuffles and shards the samples, and lets the task make batches. ``loader`` does the same with PyTorch's
DataLoader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline import factories
from pipeline.data.prepared import LEFT_OUT, Dataset, like_targets
from pipeline.params import Train
from pipeline.tasks.base import CPU, AsIndices, Batch, LabelledTask, LogitsTask, Normalise, Task, TaskError

__all__ = ["Task", "TaskError", "of_job"]


class Classification(LogitsTask):
    """The loss is the cross-entropy, and the score is the accuracy."""

    needs = "labels"

    def output_arguments(self) -> dict[str, int]:
        labels = self.dataset.train.targets.shape[1:]
        return {**({"labels": labels.numel()} if labels else {}), "classes": len(self.dataset.classes)}

    def output_shape(self) -> tuple[int, ...]:
        return *self.dataset.train.targets.shape[1:], len(self.dataset.classes)


class MultiLabel(LabelledTask):
    """A sample has any number of labels: its targets are 0 or 1 for each label. The loss is the binary cross-entropy,
    and the score is the share of the labels that are predicted right."""

    needs = "labels"

    def __post_init__(self) -> None:
        targets = self.dataset.train.targets
        if targets.ndim != 2 or len(self.dataset.classes) != 2:
            raise TaskError(
                f"train.task: multi_label needs targets of 0 and 1 [N, labels], and those of {self.dataset.name} have "
                f"the shape {list(targets.shape)} and {len(self.dataset.classes)} values; allowed: classification."
            )
        super().__post_init__()

    def balanced(self) -> Tensor:
        without, having = ((self.dataset.train.targets == value).sum(0).clamp(min=1) for value in (0, 1))
        return without / having

    def weights(self) -> Tensor | None:
        return (self.dataset.train.targets != LEFT_OUT).double().mean(1) if self.dataset.left_out_count else None

    def output_arguments(self) -> dict[str, int]:
        return {"classes": self.dataset.train.targets.shape[1]}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        counts = (targets != LEFT_OUT).to(outputs.dtype) if self.dataset.left_out_count else None
        labels = targets.to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, labels, counts, pos_weight=self.class_weights)

    def test_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(outputs, targets.float(), reduction="none")
        return (losses.double() * (targets != LEFT_OUT)).sum()

    def predicted(self, outputs: Tensor) -> Tensor:
        return (outputs > 0).long()

    def ties(self, outputs: Tensor, targets: Tensor, nearness: float) -> int:  # noqa: ARG002
        """Return the number of outputs that are nearly zero."""
        return int((outputs.abs() <= nearness * outputs.abs().amax(1, keepdim=True)).sum())


class Regression(Task):
    """The loss is the mean squared error. The score is the share of samples whose outputs are all near their targets.

    Errors are in standard deviations of the training targets. The option ``tolerance`` of ``train.task_options`` is the
    largest error that counts as near (0.5 by default).
    """

    needs = "float targets"
    directions: ClassVar = {"explained_variance_fraction": "higher is better"}

    def __post_init__(self) -> None:
        unknown, given = set(self.train.task_options) - {"tolerance"}, self.tolerance
        if unknown or not isinstance(given, int | float) or not given > 0:
            raise TaskError(
                f"train.task_options: found {self.train.task_options}; regression takes tolerance, a number above 0."
            )

    @property
    def tolerance(self) -> float:
        value: float = self.train.task_options.get("tolerance", 0.5)
        return value

    @cached_property
    def postprocess(self) -> Restored:
        return Restored(self.dataset.statistics["targets"], self.dataset.train.targets).to(self.device)

    def raw(self, rows: Sequence[Tensor]) -> Batch:
        inputs, targets = super().raw(rows)
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


class LanguageModel(LogitsTask):
    """The loss is the next token's cross-entropy, and the score is the next token's accuracy.

    A sample is a window. Its loss and its score are means over its tokens.
    """

    arrays = ("inputs",)
    needs = "tokens"
    unit = "tokens"
    loss_by_row = True
    directions: ClassVar = {"perplexity": "lower is better"}

    @property
    def units_per_sample(self) -> int:
        """Number of tokens that a sample predicts."""
        return self.dataset.train.inputs.shape[1] - 1

    def raw(self, rows: Sequence[Tensor]) -> Batch:
        (windows,) = rows
        return windows[:, :-1], windows[:, 1:].long()

    @cached_property
    def preprocess(self) -> nn.Module:
        return AsIndices()

    def input_arguments(self) -> dict[str, Any]:
        return {"length": self.units_per_sample}

    def output_arguments(self) -> dict[str, int]:
        assert self.dataset.vocabulary is not None
        return {"vocabulary": self.dataset.vocabulary}

    def output_shape(self) -> tuple[int, ...]:
        return (self.units_per_sample, *self.output_arguments().values())

    def findings(self, test_loss: float) -> dict[str, float]:
        """Return the perplexity; nothing for a loss of the user's own, which need not be a cross-entropy."""
        return {} if ":" in self.train.loss else {"perplexity": math.exp(min(test_loss, 700.0))}


_OWN = {
    "classification": Classification,
    "language_model": LanguageModel,
    "multi_label": MultiLabel,
    "regression": Regression,
}


def of_job(train: Train, dataset: Dataset, device: torch.device = CPU) -> Task:
    """Return the task ``train.task`` for the job's settings and data set.

    Raises TaskError if the task does not fit the data set. It also raises TaskError for an array, other than ``inputs``
    and ``targets``, that the task does not take, because the array's name may be misspelled.
    """
    has = {"labels": dataset.classes, "tokens": dataset.vocabulary, "float targets": "targets" in dataset.statistics}
    task = find(train.task)(train, dataset, device)
    if not isinstance(task, Task):
        raise TaskError(f"train.task: {train.task} returned {task!r}; expected a pipeline.tasks.Task.")
    if task.needs and not has.get(task.needs):
        fitting = [name for name, own in _OWN.items() if has[own.needs]]
        rename = f"; or rename the array {labels} to targets" if (labels := like_targets(dataset.train.arrays)) else ""
        raise TaskError(
            f"train.task: {train.task} needs {task.needs}, and {dataset.name} has none; allowed: "
            f"{', '.join([*fitting, 'module:class of your own'])}{rename}."
        )
    names, takes = set(dataset.train.arrays), set(task.arrays)
    if takes - names or names - takes - {"inputs", "targets"}:
        raise TaskError(
            f"train.task: {dataset.name} has the arrays {', '.join(sorted(names))}, but {train.task} takes "
            f"{', '.join(task.arrays)}: rename or drop arrays, or name them in `arrays` of a task of your own."
        )
    return task


def find(name: str) -> Callable[..., Any]:
    """Return the class of the task ``name``; a user's own task is imported. Raises TaskError if the import fails."""
    if ":" not in name:
        return _OWN[name]
    return factories.find(name, "train.task", "a task", example="my_tasks:Autoencoding", error=TaskError)
