"""Count a step's work instead of assuming it: the samples that enter the model and the loss."""

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
    """The samples of one step, over all replicas of the model."""

    credited: int
    """Samples of the global batch."""
    model: int
    """Samples that entered the model, not counting passes that only recompute."""
    loss: int | None
    """Samples that entered the step's criterion; None if a technique calls its own loss instead."""

    @property
    def missing(self) -> int:
        return max(0, self.credited - min(self.model, self.model if self.loss is None else self.loss))

    def __str__(self) -> str:
        loss = "" if self.loss is None else f" and {self.loss:,} the loss"
        return f"of a step's {self.credited:,} samples, {self.model:,} entered the model{loss}"


class Counted:
    """What one rank counts: the samples of each call of the model and of the loss."""

    def __init__(self) -> None:
        self.model: list[int] = []
        self.loss: list[int] = []


@contextmanager
def counted(step: TrainingStep, model: nn.Module) -> Iterator[Counted]:
    """While the block runs, count the samples of each call of ``model``, the bare module, and of the step's criterion.

    Hooks cannot see into a compiled graph: there, and at a pipeline stage, the samples that enter it are counted.
    """
    seen = Counted()
    inward = [each for each in step.model.modules() if each is model or isinstance(each, torch._dynamo.OptimizedModule)]
    entrance = inward[0] if model in inward else step.model

    def entering(_: nn.Module, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        seen.model.append(len(next(iter((*arguments, *named.values())))))

    def into_loss(criterion: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counting(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen.loss.append(len(targets))
            return criterion(outputs, targets)

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
    """Add up the counts of all ``ranks``. Every ``model_processes`` consecutive ranks hold one model: its inputs enter
    on the first of them, and its loss is computed on the last."""
    losses = [each.loss for each in ranks[model_processes - 1 :: model_processes]]
    model = sum(sum(each.model) for each in ranks[::model_processes])
    return Work(credited, model, sum(map(sum, losses)) if all(losses) else None)
