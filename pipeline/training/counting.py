"""Count a step's work instead of assuming it: the samples that enter the model and the loss, and repeated inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeline.errors import PipelineError
from pipeline.step import TrainingStep

FEWEST_COMPARED = 8
"""Steps with fewer samples are not compared, because two steps may by chance take the same few samples in the
same order."""
COMPARED_SAMPLES, COMPARED_VALUES = 64, 1 << 14
"""Two steps' inputs are compared in part: about ``COMPARED_SAMPLES`` samples of each call of the model, and about
``COMPARED_VALUES`` of these samples' values."""


class WorkLeftOut(PipelineError):
    """A step took fewer samples than it is credited with, or the same samples as another step."""


class Work(NamedTuple):
    """The samples of one step, over all replicas of the model."""

    credited: int
    """Samples of the global batch."""
    model: int
    """Samples that entered the model, not counting passes that only recompute."""
    loss: int | None
    """Samples that entered the step's criterion; None if a technique calls its own loss instead."""
    repeated: bool = False
    """Whether two counted steps took the same inputs in the same order."""

    @property
    def missing(self) -> int:
        """Samples of the global batch that the step left out; all of them if the inputs were repeated."""
        if self.repeated:
            return self.credited
        return max(0, self.credited - min(self.model, self.model if self.loss is None else self.loss))

    def __str__(self) -> str:
        if self.repeated:
            return f"two steps took the same {self.credited:,} samples"
        loss = "" if self.loss is None else f" and {self.loss:,} entered the loss"
        return f"of a step's {self.credited:,} samples, {self.model:,} entered the model{loss}"


class Counted:
    """One rank's counts in one step: the samples of each call of the model and of the loss."""

    def __init__(self) -> None:
        self.model: list[int] = []
        self.loss: list[int] = []
        self.inputs: list[torch.Tensor] = []
        """Some input values of each call of the model, kept on the device so that the step does not wait."""
        self.digest = ""
        """SHA-256 of the values of ``inputs``, set by ``read``; empty if there are none."""

    def read(self) -> Counted:
        """Wait for the device, replace ``inputs`` by their ``digest``, and return this object."""
        if self.inputs:
            content = b"".join(each.contiguous().view(torch.uint8).cpu().numpy().tobytes() for each in self.inputs)
            self.digest, self.inputs = hashlib.sha256(content).hexdigest(), []
        return self


@contextmanager
def counted(step: TrainingStep, model: nn.Module) -> Iterator[Counted]:
    """While the block runs, count the samples of each call of ``model``, the bare module, and of the step's criterion.

    Hooks cannot see into a compiled graph. So in a compiled model the samples that enter the compiled module are
    counted. In a pipeline, the samples that enter the stage are counted.
    """
    seen = Counted()
    inward = [each for each in step.model.modules() if each is model or isinstance(each, torch._dynamo.OptimizedModule)]
    entrance = inward[0] if model in inward else step.model

    def entering(_: nn.Module, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        inputs = next(iter((*arguments, *named.values())))
        seen.model.append(len(inputs))
        # A fake tensor has no values. A copy made while a CUDA graph is recorded would be overwritten by each replay.
        if type(inputs) is torch.Tensor and not (inputs.is_cuda and torch.cuda.is_current_stream_capturing()):
            some = inputs.detach()[:: max(1, len(inputs) // COMPARED_SAMPLES)].flatten()
            seen.inputs.append(some[:: max(1, len(some) // COMPARED_VALUES)].clone())

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
    """Add up the counts of all ``ranks``. Each group of ``model_processes`` consecutive ranks holds one model: inputs
    enter on the group's first rank, and the loss is computed on its last rank."""
    losses = [each.loss for each in ranks[model_processes - 1 :: model_processes]]
    model = sum(sum(each.model) for each in ranks[::model_processes])
    return Work(credited, model, sum(map(sum, losses)) if all(losses) else None)


def most_missing(steps: Sequence[Sequence[Counted]], credited: int, model_processes: int) -> Work | None:
    """Return the work of the step that left out the most samples; None if ``steps`` is empty.

    ``steps``: for each counted step, the counts of all ranks. If two steps of at least ``FEWEST_COMPARED`` samples took
    the same inputs, return the work of the first of all ``steps``, with ``repeated`` set.
    """
    works = [work_of(ranks, credited, model_processes) for ranks in steps]
    taken = [tuple(each.digest for each in ranks[::model_processes]) for ranks in steps]
    if credited >= FEWEST_COMPARED and any(any(each) and taken.count(each) > 1 for each in taken):
        return works[0]._replace(repeated=True)
    return max(works, key=lambda work: work.missing, default=None)
