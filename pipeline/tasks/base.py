"""The base class of tasks; the rest of the pipeline knows tasks only by this class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline import models
from pipeline.data.batches import Batch
from pipeline.data.prepared import Dataset, Statistics
from pipeline.errors import PipelineError
from pipeline.models import loss_and_metric
from pipeline.models.loss_and_metric import Objective
from pipeline.params import Train

CPU = torch.device("cpu")
PROBES = 6
"""Number of samples on which loss and score are tried."""


class TaskError(PipelineError):
    """The task and the data set do not fit. The message says what was found and what is expected."""


@dataclass(frozen=True, eq=False)
class Task(ABC):
    """What a job learns from a data set: its batches, the arguments of its model, its loss and its score.

    A user's task defines the abstract methods. By default a sample's inputs and targets are the arrays of these
    names, and the inputs are standardised with the statistics of the training set.
    """

    train: Train
    dataset: Dataset
    device: torch.device = CPU

    arrays: ClassVar[tuple[str, ...]] = ("inputs", "targets")
    """The arrays of the data set that the task takes, first the one with the inputs."""
    unit: ClassVar[str] = "samples"
    """Unit of a throughput; a sample has ``units_per_sample`` of them."""
    loss_by_row: ClassVar[bool] = False
    """Whether ``loss`` is the mean over all rows of the outputs [..., d], so that any rows can form a part. If not, it
    is the mean over the samples."""
    directions: ClassVar[Mapping[str, Literal["higher is better", "lower is better"]]] = {}
    """Each figure that ``findings`` returns -> which values are better."""

    def __post_init__(self) -> None:  # noqa: B027
        """Raise TaskError if the data set or the settings do not fit the task."""

    def on(self, device: torch.device) -> Self:
        """The same task on another device."""
        return self if device == self.device else replace(self, device=device)

    @property
    def units_per_sample(self) -> int:
        return 1

    def raw(self, rows: Sequence[Tensor]) -> Batch:
        """Inputs as users have them, and targets as the loss takes them, from rows [b, ...] of each of ``arrays``."""
        inputs, targets = rows
        return inputs, targets

    @cached_property
    def preprocess(self) -> nn.Module:
        """The module from raw inputs to the model's inputs; a part of the deployed model."""
        inputs = self.dataset.train.inputs
        return Normalise(self.dataset.statistics["inputs"], inputs.dtype, inputs.ndim).to(self.device)

    @cached_property
    def postprocess(self) -> nn.Module:
        """The module from the model's outputs to those that users want; a part of the deployed model."""
        return nn.Identity()

    def batch(self, rows: Sequence[Tensor]) -> Batch:
        """The model's inputs and the loss's targets from rows of each of ``arrays``, on the task's device."""
        inputs, targets = self.raw(rows)
        return self.preprocess(inputs), targets

    def input_arguments(self) -> dict[str, Any]:
        """Arguments of a model's factory that describe the inputs."""
        shape = self.dataset.shape
        names = {1: ("features",), 3: ("channels", "height", "width")}.get(len(shape))
        return dict(zip(names, shape, strict=True)) if names else {"shape": shape}

    @abstractmethod
    def output_arguments(self) -> dict[str, int]:
        """Arguments of a model's factory, and of a loss's, that describe the outputs."""

    @abstractmethod
    def output_shape(self) -> tuple[int, ...]:
        """Shape of a sample's output."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss that training minimises: the mean of the samples' own losses, a scalar."""

    def test_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of the samples' losses in the evaluation, float64."""
        return self.loss(outputs, targets).double() * len(targets)

    @abstractmethod
    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Each sample's score, [b]: true or false, or a number from 0 to 1; higher is better."""

    def predicted(self, outputs: Tensor) -> Tensor:
        """The targets that the outputs predict. Two models agree if one's outputs score well against the other's."""
        return outputs

    def ties(self, outputs: Tensor, targets: Tensor, nearness: float) -> int:  # noqa: ARG002
        """Number of samples whose score may change if outputs change by ``nearness`` times the sample's largest."""
        return 0

    def findings(self, test_loss: float) -> dict[str, float]:  # noqa: ARG002
        """The field's own figures that follow from a run's test loss, by the names in ``directions``."""
        return {}

    @cached_property
    def objective(self) -> Objective:
        """The job's loss and score: the task's, or those that ``train.loss`` and ``train.metric`` name.

        Raises ObjectiveError.
        """
        own = Objective(self.loss, self.test_losses, self.scores)
        return loss_and_metric.of_job(self.train, own, self.device, self.output_arguments())

    def distance(self, outputs: Tensor, taught: Tensor, temperature: float) -> Tensor:  # noqa: ARG002
        """The distance between a student's outputs and its teacher's, a scalar: the mean over the samples."""
        return F.mse_loss(outputs.float(), taught.float())

    def model(self, name: str | None = None, options: Mapping[str, Any] | None = None) -> nn.Module:
        """A single-device model with new weights, on the CPU; by default the job's own. Raises ModelError."""
        return models.build(
            name or self.train.model,
            dict(options or {}) if name else self.train.model_options,
            self.input_arguments() | self.output_arguments(),
            inputs=self.zeros(2),
            outputs=self.output_shape(),
        )

    def zeros(self, count: int) -> Tensor:
        """Zeros with the shape and dtype of the model's inputs [count, ...], on the CPU."""
        inputs, _ = self.on(CPU).batch([self.dataset.train.arrays[name][:1] for name in self.arrays])
        return inputs.new_zeros((count, *inputs.shape[1:]))

    def check(self) -> None:
        """Try the user's own loss and score on noise. Raises ObjectiveError if a comparison would mean nothing."""
        rows = torch.arange(PROBES) % len(self.dataset.train)
        _, targets = self.on(CPU).batch([self.dataset.train.arrays[name][rows] for name in self.arrays])
        noise = torch.randn(PROBES, *self.output_shape(), generator=torch.Generator().manual_seed(0))
        loss_and_metric.check(self.train, self.on(CPU).objective, noise, targets)


class Normalise(nn.Module):
    """(x - mean) / std in float32, along the first dimension of a sample. uint8 is first divided by 255. The operations
    and their order are those of torchvision's ToTensor and Normalize. Raises ValueError for another number of channels.
    """

    mean: Tensor
    std: Tensor
    scale: Tensor

    def __init__(self, statistics: Statistics, dtype: torch.dtype, dimensions: int) -> None:
        super().__init__()
        shape = (1, -1, *[1] * (dimensions - 2)) if dimensions > 1 else (-1,)
        self.register_buffer("mean", torch.tensor(statistics.mean, dtype=torch.float32).view(shape))
        self.register_buffer("std", torch.tensor(statistics.std, dtype=torch.float32).view(shape))
        # A tensor, because on CUDA division by a number becomes multiplication by its rounded reciprocal.
        self.register_buffer("scale", torch.tensor(255.0 if dtype == torch.uint8 else 1.0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        mean = self.mean  # once, because looking up a module's buffer costs about a microsecond
        if inputs.ndim != mean.ndim or inputs.shape[1:2] != mean.shape[1:2]:  # one channel would broadcast
            expected = ["N", *mean.shape[1:2], *["..."] * (mean.ndim - 2)]
            raise ValueError(f"inputs: found shape {list(inputs.shape)}; expected [{', '.join(map(str, expected))}].")
        return inputs.to(torch.float32, copy=True).div_(self.scale).sub_(mean).div_(self.std)
