"""Classification: one label per sample, for images or any other inputs."""

from __future__ import annotations

from torch import Tensor

from pipeline.tasks.base import LogitsTask


class Classification(LogitsTask):
    """The loss is the cross-entropy, and the score is the accuracy."""

    needs = "labels"

    def output_arguments(self) -> dict[str, int]:
        return {"classes": len(self.dataset.classes)}

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return whether the label has the largest logit, [b]."""
        return self.predicted(outputs) == targets
