"""Language models: each token of a window predicts the next one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn

from pipeline.tasks.base import Batch, LogitsTask


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
        return _AsIndices()

    def input_arguments(self) -> dict[str, Any]:
        return {"length": self.units_per_sample}

    def output_arguments(self) -> dict[str, int]:
        assert self.dataset.vocabulary is not None
        return {"vocabulary": self.dataset.vocabulary}

    def output_shape(self) -> tuple[int, ...]:
        return (self.units_per_sample, *self.output_arguments().values())

    def scores(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of a window's tokens for which the next token has the largest logit, [b]."""
        return (self.predicted(outputs) == targets).double().mean(1)

    def findings(self, test_loss: float) -> dict[str, float]:
        """Return the perplexity; nothing for a loss of the user's own, which need not be a cross-entropy."""
        return {} if ":" in self.train.loss else {"perplexity": math.exp(min(test_loss, 700.0))}


class _AsIndices(nn.Module):
    """Converts tokens of any integer type to int64, which torch's embeddings need."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.long()
