"""The base class of tasks. The rest of the pipeline uses tasks only through this class."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline import models
from pipeline.data.prepared import LEFT_OUT, Dataset, Statistics, input_names
from pipeline.errors import PipelineError, first_line
from pipeline.models import finetuning, loss_and_metric, optimizers
from pipeline.models.keeping import copied
from pipeline.models.loss_and_metric import Objective
from pipeline.params import Train
from pipeline.processes import randomness
from pipeline.step import Inputs

CPU = torch.device("cpu")
Batch = tuple[Inputs, Tensor]
"""The model's inputs [b, ...], a tensor or tensors by name, and the loss's targets [b, ...]."""
PROBES = 6
"""Number of samples in a batch on which ``Task.check`` tries loss and score."""
WEIGHED_SAMPLES = 1 << 14
"""Number of samples whose weights are computed together."""
PROBED_BATCHES, PROBED_NUMBERS = 6, 1 << 26
"""``Task.check`` tries as many batches as there are, or as all classes need, but at most this many outputs in all."""


class TaskError(PipelineError):
    """The task and the data set do not fit together. The message says what was found and what is expected."""


@dataclass(frozen=True, eq=False)
class Task(ABC):
    """What a job learns from a data set: its batches, the arguments of its model, its loss and its score.

    A user's task defines the abstract methods. By default, the arrays ``inputs`` and ``targets`` contain a sample's
    inputs and targets, and the inputs are standardised with the statistics of the training set.
    """

    train: Train
    dataset: Dataset
    device: torch.device = CPU

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the data set's arrays that the task takes, the inputs first. A task of the user's own may have a
        tuple of names instead."""
        return *input_names(self.dataset.train.arrays), "targets"

    needs: ClassVar[str] = ""
    """What the data set must have: "labels", "tokens" or "float targets". Empty for a task that takes any arrays."""
    unit: ClassVar[str] = "samples"
    """Unit of the throughput. A sample has ``units_per_sample`` units."""
    loss_by_row: ClassVar[bool] = False
    """True if ``loss`` is the mean over all rows. A row is a vector of length d in the outputs [..., d], such as the
    vector of a token. In this case a batch can also be divided within a sample. False if ``loss`` is the mean over
    whole samples."""
    directions: ClassVar[Mapping[str, Literal["higher is better", "lower is better"]]] = {}
    """Name of each figure that ``findings`` returns -> whether higher or lower values are better."""

    def __post_init__(self) -> None:  # noqa: B027
        """Raise TaskError if the settings do not fit the task, or the data set does not fit for other reasons than
        ``arrays`` and ``needs``."""

    def on(self, device: torch.device) -> Self:
        """Return the same task on another device."""
        return self if device == self.device else replace(self, device=device)

    @property
    def units_per_sample(self) -> int:
        return 1

    def raw(self, rows: Sequence[Tensor]) -> Batch:
        """Return the inputs before ``preprocess``, and the targets for the loss. ``rows``: for each of ``arrays``, one
        tensor [b, ...] of b samples."""
        *inputs, targets = rows
        return dict(zip(self.arrays, inputs, strict=False)) if self.by_name else inputs[0], targets

    @cached_property
    def preprocess(self) -> nn.Module:
        """The module that turns raw inputs into the model's inputs. It is a part of the deployed model."""
        known, like = self.dataset.statistics, self.dataset.train.arrays
        parts = {
            name: Normalise(known[name], like[name]) if name in known else AsIndices() for name in input_names(like)
        }
        return (ByName(parts) if self.by_name else parts["inputs"]).to(self.device)

    @cached_property
    def by_name(self) -> bool:
        """Whether the model is called with its inputs by name."""
        return "inputs" not in self.dataset.train.arrays

    @cached_property
    def postprocess(self) -> nn.Module:
        """The module that turns the model's outputs into results for users. It is a part of the deployed model."""
        return nn.Identity()

    def batch(self, rows: Sequence[Tensor]) -> Batch:
        """Return the model's inputs and the loss's targets. ``rows``: as in ``raw``, on the task's device."""
        inputs, targets = self.raw(rows)
        return self.preprocess(inputs), targets

    def input_arguments(self) -> dict[str, Any]:
        """Return the arguments that tell a model's factory the form of the inputs."""
        shape, names = self.dataset.shape, input_names(self.dataset.train.arrays)
        if self.dataset.vocabulary is not None:
            return {"length": shape[0], "vocabulary": self.dataset.vocabulary}
        if self.by_name:
            return {"shapes": {name: tuple(self.dataset.train.arrays[name].shape[1:]) for name in names}}
        sides = {1: ("features",), 3: ("channels", "height", "width")}.get(len(shape))
        return dict(zip(sides, shape, strict=True)) if sides else {"shape": shape}

    @abstractmethod
    def output_arguments(self) -> dict[str, int]:
        """Return the arguments that tell the factories of models and losses the form of the outputs."""

    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of a sample's output."""
        return tuple(self.output_arguments().values())

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that training minimises: the mean of the samples' losses, a scalar."""

    def test_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the samples' losses for the evaluation, a float64 scalar."""
        return self.loss(outputs, targets).double() * len(targets)

    def weights(self) -> Tensor | None:
        """Return each training sample's weight in the loss, [N] on the CPU; None if samples count equally.

        The step then multiplies ``loss`` by the number of samples of the global batch, divided by the sum of their
        weights. So ``loss`` stays a mean over the samples, of losses that are already multiplied by their weights, and
        the gradients are those of one device with the whole batch, whatever its parts weigh.
        """
        return None

    def counted(self, targets: Tensor) -> Tensor | int:
        """Return the number by which ``test_losses`` is divided; by default, the number of samples."""
        return len(targets)

    @abstractmethod
    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the scores [b] of b samples, or [n] of the n labels that count: true or false, or a number from 0 to
        1; higher is better. The job's score is their mean."""

    def of_labels(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs and targets that a metric of the whole test set gets. If samples have several labels, they
        are those of the labels that count."""
        return outputs, targets

    def kept(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002
        """Return the outputs, with zeros in place of those whose labels are left out, if there are any."""
        return outputs

    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the targets that the outputs predict.

        Two models agree if one model's outputs score well against the targets that the other model predicts.
        """
        return outputs

    def ties(self, outputs: Tensor, targets: Tensor, nearness: float) -> int:  # noqa: ARG002
        """Return the number of samples whose score may change if the outputs change slightly.

        A slight change is at most ``nearness`` times the largest absolute output of the sample.
        """
        return 0

    def findings(self, test_loss: float) -> dict[str, float]:  # noqa: ARG002
        """Return further figures, such as perplexity, from a run's test loss. ``directions`` lists their names."""
        return {}

    @cached_property
    def objective(self) -> Objective:
        """The job's loss and score: the task's own, or the user's from ``train.loss`` and ``train.metric``.

        Raises ObjectiveError if the user's loss or metric is invalid.
        """
        own = Objective(self.loss, self.test_losses, self.scores, self.counted)
        return loss_and_metric.of_job(self.train, own, self.device, self.output_arguments())

    def distance(self, outputs: Tensor, taught: Tensor, temperature: float) -> Tensor:  # noqa: ARG002
        """Return the distance between the outputs of student and teacher: a scalar, the mean over the samples."""
        return F.mse_loss(outputs.float(), taught.float())

    def model(self, name: str | None = None, options: Mapping[str, Any] | None = None) -> nn.Module:
        """Build a single-device model with new weights on the CPU, by default the job's model, in which the parts of
        ``train.frozen`` are frozen. Raises PipelineError."""
        model = models.build(
            name or self.train.model,
            dict(options or {}) if name else self.train.model_options,
            self.input_arguments() | self.output_arguments(),
            inputs=self.inputs(2),
            outputs=self.output_shape(),
        )
        if not name:
            finetuning.freeze(model, self.train)
        return model

    def begun(self) -> nn.Module:
        """Return the job's model with the weights with which training begins (``train.weights``). Raises
        PipelineError."""
        model = self.model()
        finetuning.load(model, self.train)
        return model

    def inputs(self, count: int) -> Inputs:
        """Return the model's inputs [count, ...] of training samples, on the CPU."""
        return self._samples(torch.arange(count) % len(self.dataset.train))[0]

    def _samples(self, rows: Tensor) -> Batch:
        return self.on(CPU).batch([self.dataset.train.arrays[name][rows] for name in self.arrays])

    def try_step(self, model: nn.Module) -> None:
        """Take a training step of ``PROBES`` samples with a copy of ``model``, on the CPU. Raises ModelError if the
        model cannot be copied, or if its loss, gradients or optimizer fail."""
        where = f"train.model: {self.train.model}"
        try:
            tried = copied(model, lambda tensor: tensor.detach().clone())
        except Exception as error:
            raise models.ModelError(
                f"{where} cannot be copied ({first_line(error)}); expected a model that copy.deepcopy can copy."
            ) from error
        try:
            with randomness.kept():
                rows = self.dataset.train.drawn(PROBES)
                inputs, targets = self._samples(rows[torch.arange(PROBES) % len(rows)])
                self.on(CPU).objective.loss(tried(inputs), targets).backward()
                optimizers.optimizer_of(self.train, tried).step()
        except PipelineError:
            raise
        except Exception as error:
            raise models.ModelError(f"{where} fails in a step of {PROBES} samples: {first_line(error)}") from error

    def check(self) -> None:
        """Try the user's own loss and score on noise. Raises ObjectiveError if they are unfit to compare variants.

        The targets are from all over the training set, every class among them. A batch shares a sample with the next
        one. So classes that count differently meet in a batch, even if the data set is sorted.
        """
        if not any(":" in name for name in (self.train.task, self.train.loss, self.train.metric)):
            return
        task, train, generator = self.on(CPU), self.dataset.train, torch.Generator().manual_seed(0)
        most = PROBED_NUMBERS // (PROBES * math.prod(self.output_shape()))
        batches = max(1, min(most, max(PROBED_BATCHES, -(-len(self.dataset.classes) // (PROBES - 1)))))
        rows = train.drawn(count := batches * (PROBES - 1) + 1)
        for batch in rows[torch.arange(count) % len(rows)].unfold(0, PROBES, PROBES - 1):
            _, targets = self._samples(batch)
            noise = torch.randn(PROBES, *self.output_shape(), generator=generator)
            loss_and_metric.check(self.train, task.objective, noise, targets)
        if task.objective.over_set:
            noise = torch.randn(len(rows), *self.output_shape(), generator=generator)
            task.objective.over_set(*task.of_labels(noise, self._samples(rows)[1]))


class LabelledTask(Task):
    """A task whose targets are labels, one or several per sample. Those that are ``LEFT_OUT`` count in no loss and no
    score."""

    def __post_init__(self) -> None:
        weights = self.train.class_weights
        if isinstance(weights, list) and len(weights) != (classes := self.output_shape()[-1]):
            raise TaskError(
                f"train.class_weights: found {len(weights)} weights, but {self.dataset.name} has {classes} classes; "
                "give each class a weight."
            )

    @cached_property
    def class_weights(self) -> Tensor | None:
        """The weight of each class in the loss, float32 on the task's device; None if all classes weigh the same."""
        weights = self.balanced() if self.train.class_weights == "balanced" else self.train.class_weights
        return None if weights is None else torch.as_tensor(weights, dtype=torch.float32, device=self.device)

    def balanced(self) -> Tensor:
        """Return the weights with which each class counts as much as the others."""
        counts = torch.tensor(self.dataset.class_counts).clamp(min=1)
        return sum(self.dataset.class_counts) / (len(counts) * counts)

    def kept(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not self.dataset.left_out_count:
            return outputs
        return outputs.where((targets != LEFT_OUT).view(*targets.shape, *[1] * (outputs.ndim - targets.ndim)), 0.0)

    def counted(self, targets: Tensor) -> Tensor:
        """Return the number of labels that count."""
        return (targets != LEFT_OUT).sum()

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of a sample's labels that are predicted right, [b], or, if labels are left out, whether each
        of the n labels that count is, [n]."""
        right = self.predicted(outputs) == targets
        if self.dataset.left_out_count:
            return right[targets != LEFT_OUT]
        return right if right.ndim == 1 else right.flatten(1).double().mean(1)


class LogitsTask(LabelledTask):
    """A task whose outputs are logits [b, ..., classes], and whose targets are the right classes [b, ...].

    The loss is the cross-entropy. If labels are left out, or if classes have weights, the loss of a global batch is the
    sum of its labels' losses, divided by the sum of their weights: the mean of torch's cross_entropy over the whole
    batch.
    """

    @cached_property
    def uneven(self) -> bool:
        """Whether samples can differ in how much they count in the loss."""
        return self.dataset.left_out_count > 0 or self.class_weights is not None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows, labels, smoothing = outputs.flatten(0, -2), targets.flatten(), self.train.label_smoothing
        if not self.uneven:
            return F.cross_entropy(rows, labels, label_smoothing=smoothing)
        return F.cross_entropy(rows, labels, self.class_weights, reduction="sum", label_smoothing=smoothing) / len(
            labels
        )

    def weights(self) -> Tensor | None:
        if not self.uneven:
            return None
        weights = torch.ones(self.output_shape()[-1]) if self.class_weights is None else self.class_weights.cpu()
        of_class = F.pad(weights.double(), (0, 1))  # the last weight is that of labels that are left out: 0
        parts = self.dataset.train.targets.reshape(len(self.dataset.train), -1).split(WEIGHED_SAMPLES)
        return torch.cat([of_class[labels.clamp(min=-1)].mean(1) for labels in parts])

    def test_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the labels' losses, without label smoothing and weights of classes."""
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none").double().sum()

    def of_labels(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows, labels = outputs.flatten(0, -2), targets.flatten()
        counts = labels != LEFT_OUT
        return rows[counts], labels[counts]

    def distance(self, outputs: Tensor, taught: Tensor, temperature: float) -> Tensor:
        """Return T^2 KL(softmax(taught / T) || softmax(outputs / T)), averaged over the rows; T: temperature.

        The gradients of KL shrink as 1 / T^2, and the factor T^2 compensates for this. Source: Hinton et al.,
        "Distilling the Knowledge in a Neural Network", 2015, section 2.
        """
        ours, theirs = ((logits.float() / temperature).flatten(0, -2).log_softmax(-1) for logits in (outputs, taught))
        return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def ties(self, outputs: Tensor, targets: Tensor, nearness: float) -> int:  # noqa: ARG002
        """Return the number of rows whose two largest logits differ by at most ``nearness`` times the row's largest
        absolute logit."""
        if outputs.shape[-1] < 2:
            return 0
        first, second = outputs.topk(2).values.unbind(-1)
        return int((first - second <= nearness * outputs.abs().amax(-1)).sum())


class AsIndices(nn.Module):
    """Converts tokens or a mask, of any integer type, to int64, which torch's embeddings need."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.long()


class ByName(nn.Module):
    """Applies a module to each of several inputs."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: part(inputs[name]) for name, part in self.parts.items()}


class Normalise(nn.Module):
    """Computes (x - mean) / std in float32, per channel (the first dimension of a sample).

    uint8 is first divided by 255. The operations and their order are the same as in torchvision's ToTensor and
    Normalize. The inputs are like the rows ``like`` [N, ...], in type and dimensions. Raises ValueError if the inputs
    have another number of channels than the statistics.
    """

    mean: Tensor
    std: Tensor
    scale: Tensor

    def __init__(self, statistics: Statistics, like: Tensor) -> None:
        super().__init__()
        shape = (1, -1, *[1] * (like.ndim - 2)) if like.ndim > 1 else (-1,)
        self.register_buffer("mean", torch.tensor(statistics.mean, dtype=torch.float32).view(shape))
        self.register_buffer("std", torch.tensor(statistics.std, dtype=torch.float32).view(shape))
        # A tensor, because on CUDA division by a number becomes multiplication by its rounded reciprocal.
        self.register_buffer("scale", torch.tensor(255.0 if like.dtype == torch.uint8 else 1.0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        mean = self.mean  # looked up once, because the lookup of a buffer costs about a microsecond
        if inputs.ndim != mean.ndim or inputs.shape[1:2] != mean.shape[1:2]:  # a single channel would broadcast
            expected = ["N", *mean.shape[1:2], *["..."] * (mean.ndim - 2)]
            raise ValueError(f"inputs: found shape {list(inputs.shape)}; expected [{', '.join(map(str, expected))}].")
        return inputs.to(torch.float32, copy=True).div_(self.scale).sub_(mean).div_(self.std)
