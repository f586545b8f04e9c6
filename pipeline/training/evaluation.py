"""Evaluate exactly: every test sample counts once, on one of the ranks, and the ranks add up sums, not means."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from pipeline.distributed import World
from pipeline.models.keeping import copied, evaluating
from pipeline.models.loss_and_metric import RESOLUTION, ObjectiveError
from pipeline.tasks import Task
from pipeline.tasks.batches import evaluation_batches


@dataclass(frozen=True)
class Score:
    """A model's result on the test set."""

    correct: int | float
    """Sum of the samples' scores; for accuracy, the number of correct samples."""
    count: int
    loss: float
    """Mean of the job's loss over the samples. Cross-entropy is computed without label smoothing."""

    @property
    def accuracy(self) -> float:
        """The metric's mean over the samples, 0 to 1."""
        return self.correct / self.count


def without_weights(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` on the meta device; only buffers that its state dict leaves out keep their values."""
    stored = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta") if id(tensor) in stored else tensor.detach().clone()

    return copied(model, changed)


def evaluate(model: nn.Module, task: Task, world: World, batch_size: int, model_processes: int = 1) -> Score:
    """Score ``model`` on the test split with all ranks, in float32 even if the training has another precision.

    The ranks take disjoint shares of the split, without padding, and add up their scores, so the accuracy is that of a
    single device. Each group of ``model_processes`` consecutive ranks computes one share. The forward pass of a sharded
    model waits for all ranks, so a rank with fewer batches also evaluates a sample that is not counted.
    BatchNorm uses the main rank's running statistics. Raises ObjectiveError for a score outside 0 to 1, and for a loss
    that is not finite.
    """
    objective, test = task.objective, task.dataset.test
    (share, member), shares = divmod(world.rank, model_processes), world.size // model_processes
    batches = evaluation_batches(test, task, rank=share, world_size=shares, batch_size=batch_size)
    most = math.ceil(math.ceil(len(test) / shares) / batch_size)
    not_counted = next(evaluation_batches(test[:1], task, rank=0, world_size=1, batch_size=1))
    world.broadcast_buffers_(model)
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)  # scores, samples, losses, scores out of bounds
    with torch.no_grad(), evaluating(model):
        for _ in range(most):
            batch = next(batches, not_counted)
            inputs, targets = batch
            outputs = model(inputs).float()
            if batch is not_counted or member:  # only the first rank of a group adds to the sums
                continue
            scores = objective.scores(outputs, targets)
            if scores.dtype != torch.bool:
                sums[3] += (~((scores >= 0) & (scores <= 1))).sum()  # also counts NaN
                scores = (scores.double() * RESOLUTION).round() / RESOLUTION
            sums[0] += scores.sum()
            sums[1] += len(targets)
            sums[2] += objective.test_losses(outputs, targets)
    correct, count, loss, outside = world.sum_(sums).tolist()
    if outside:
        raise ObjectiveError(
            f"train.metric: {outside:.0f} of {count:.0f} test samples have a score that is not from 0 to 1. "
            "Change the metric: it must return a score from 0 to 1 for each sample."
        )
    if not math.isfinite(loss):
        raise ObjectiveError(
            f"train.loss: its mean over the {count:.0f} test samples is {loss}. If the training has diverged, "
            "lower train.learning_rate. If your own loss is not finite for bad outputs, bound it."
        )
    return Score(correct=int(correct) if correct.is_integer() else correct, count=int(count), loss=loss / count)
