"""Work is counted, not assumed: the samples that a step takes through the model and to the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeline.errors import PipelineError
from pipeline.step import TrainingStep


class WorkLeftOut(PipelineError):
    """A step took fewer samples than it is credited with."""


class Work(NamedTuple):
    """Of one step, over all replicas of the model."""

    credited: int
    """The global batch."""
    model: int
    """Samples that entered the model, those of passes that only recompute not counted."""
    loss: int | None
    """Samples that entered the step's criterion; None where a technique calls a loss of its own instead."""

    @property
    def left_out(self) -> int:
        return max(0, self.credited - min(self.model, self.model if self.loss is None else self.loss))

    def __str__(self) -> str:
        loss = "" if self.loss is None else f" and {self.loss:,} the loss"
        return f"of a step's {self.credited:,} samples, {self.model:,} entered the model{loss}"


class Counted:
    """On one rank."""

    def __init__(self) -> None:
        self.model: list[int] = []
        self.loss: list[int] = []


@contextmanager
def counted(step: TrainingStep, model: nn.Module) -> Iterator[Counted]:
    """While the block runs, count the samples of the calls of ``model``, the bare one, and of the step's criterion.

    Nothing sees into a graph that is compiled: there, what enters it counts. Of a stage, what enters the stage.
    """
    seen = Counted()
    inward = [each for each in step.model.modules() if each is model or isinstance(each, torch._dynamo.OptimizedModule)]
    entrance = inward[0] if model in inward else step.model

    def entering(_: nn.Module, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        seen.model.append(len(next(iter((*arguments, *named.values())))))

    def into_loss(criterion: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counting(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            seen.loss.append(len(labels))
            return criterion(logits, labels)

        return counting

    def recomputing(backward: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def uncounted(loss: torch.Tensor) -> None:
            before = len(seen.model)
            backward(loss)
            del seen.model[before:]

        return uncounted

    hook = entrance.register_forward_pre_hook(entering, with_kwargs=True)
    try:
        with step.instrument(criterion=into_loss, backward=recomputing):
            yield seen
    finally:
        hook.remove()


def work_of(ranks: Sequence[Counted], credited: int, model_processes: int) -> Work:
    """``ranks``: of all, of which ``model_processes`` each hold a model together: its inputs enter on the first of
    them, and its loss is taken on the last."""
    losses = [each.loss for each in ranks[model_processes - 1 :: model_processes]]
    model = sum(sum(each.model) for each in ranks[::model_processes])
    return Work(credited, model, sum(map(sum, losses)) if all(losses) else None)
