"""Classification: one label per sample, for images or any other inputs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pipeline.tasks.base import Task, TaskError


class Classification(Task):
    """The loss is the cross-entropy, and the score is the accuracy."""

    def __post_init__(self) -> None:
        if not self.dataset.classes:
            raise TaskError(
                f"train.task: found 'classification', but {self.dataset.name} has no labels; allowed: "
                f"{'language_model' if self.dataset.vocabulary else 'regression'}, or module:class of your own."
            )

    def output_arguments(self) -> dict[str, int]:
        return {"classes": len(self.dataset.classes)}

    def output_shape(self) -> tuple[int, ...]:
        return (len(self.dataset.classes),)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=self.train.label_smoothing)

    def test_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the samples' cross-entropies, without label smoothing."""
        return F.cross_entropy(outputs, targets, reduction="none").double().sum()

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return whether the label has the largest logit, [b]."""
        return outputs.argmax(1) == targets

    def distance(self, outputs: Tensor, taught: Tensor, temperature: float) -> Tensor:
        return divergence(outputs, taught, temperature)

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(1)

    def ties(self, outputs: Tensor, targets: Tensor, nearness: float) -> int:  # noqa: ARG002
        return near_ties(outputs, nearness)


def divergence(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(softmax(taught / T) || softmax(logits / T)), averaged over rows [..., classes]; T: temperature.

    The gradients of KL shrink as 1 / T^2, and the factor T^2 compensates for this. Source: Hinton et al., "Distilling
    the Knowledge in a Neural Network", 2015, section 2.
    """
    ours, theirs = ((each.float() / temperature).flatten(0, -2).log_softmax(-1) for each in (logits, taught))
    return temperature**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def near_ties(logits: Tensor, nearness: float) -> int:
    """Return the number of rows [..., classes] whose two largest logits nearly tie.

    Two logits nearly tie if they differ by at most ``nearness`` times the row's largest absolute logit.
    """
    if logits.shape[-1] < 2:
        return 0
    first, second = logits.topk(2).values.unbind(-1)
    return int((first - second <= nearness * logits.abs().amax(-1)).sum())
