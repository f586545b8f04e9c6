"""Classification: one label per sample, for images or any other inputs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pipeline.tasks.base import LogitsTask, TaskError


class Classification(LogitsTask):
    """The loss is the cross-entropy, and the score is the accuracy."""

    def __post_init__(self) -> None:
        if not self.dataset.classes:
            raise TaskError(
                f"train.task: found 'classification', but {self.dataset.name} has no labels; allowed: "
                f"{'language_model' if self.dataset.vocabulary else 'regression'}, or module:class of your own."
            )

    def output_arguments(self) -> dict[str, int]:
        return {"classes": len(self.dataset.classes)}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=self.train.label_smoothing)

    def test_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the samples' cross-entropies, without label smoothing."""
        return F.cross_entropy(outputs, targets, reduction="none").double().sum()

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return whether the label has the largest logit, [b]."""
        return self.predicted(outputs) == targets
