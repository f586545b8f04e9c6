"""Exact evaluation: every test sample counted once, on whichever rank, and sums instead of means of means."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.data.batches import evaluation_batches
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.models.loss_and_metric import CLASSIFICATION, RESOLUTION, Objective, ObjectiveError


@dataclass(frozen=True)
class Score:
    """What a model does on the test set."""

    correct: int | float
    """Sum of the samples' scores: of accuracy, how many are right."""
    count: int
    loss: float
    """Mean of the job's loss; of cross-entropy, without label smoothing."""

    @property
    def accuracy(self) -> float:
        """The metric's mean over the samples, 0 to 1."""
        return self.correct / self.count


class UnshardedModel:
    """A single-device model's form without its weights, from which a model that ranks hold in parts is cast whole."""

    def __init__(self, model: nn.Module) -> None:
        stored = model.state_dict().keys()
        self._unstored = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in stored}
        shadows = {id(tensor): _without_values(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._form = copy.deepcopy(model, shadows)  # or the device would have to hold the weights twice

    def cast(self, state: dict[str, Any], device: torch.device) -> nn.Module:
        """A model with the weights and buffers of ``state``, a whole state dict, on ``device``."""
        model = copy.deepcopy(self._form).to_empty(device=device)
        model.load_state_dict(state)
        for name, value in self._unstored.items():
            model.get_buffer(name).copy_(value)
        return model


def _without_values(tensor: torch.Tensor) -> Any:
    shadow = torch.empty_like(tensor, device="meta")
    return nn.Parameter(shadow, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shadow


def evaluate(
    model: nn.Module, dataset: Dataset, world: World, batch_size: int, objective: Objective = CLASSIFICATION
) -> Score:
    """Score ``model`` on the test split, in float32 whatever the precision of training, on all ranks together.

    The ranks take disjoint shares of the split, without padding, and add up their scores, so the accuracy
    is that of a single device. BatchNorm uses the main rank's running statistics. ``model`` is the bare
    module: a parallel wrapper would wait for ranks whose share is smaller. Raises ObjectiveError for a score
    that is not from 0 to 1, and for a loss that is not finite.
    """
    world.broadcast_buffers_(model)
    training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)  # scores, samples, losses, scores out of bounds
    with torch.no_grad():
        for images, labels in evaluation_batches(
            dataset.test, dataset, rank=world.rank, world_size=world.size, batch_size=batch_size, device=world.device
        ):
            logits = model(images).float()
            scores = objective.scores(logits, labels)
            if scores.dtype != torch.bool:
                sums[3] += (~((scores >= 0) & (scores <= 1))).sum()  # NaN is neither
                scores = (scores.double() * RESOLUTION).round() / RESOLUTION
            sums[0] += scores.sum()
            sums[1] += len(labels)
            sums[2] += objective.test_losses(logits, labels)
    model.train(training)
    correct, count, loss, outside = world.sum_(sums).tolist()
    if outside:
        raise ObjectiveError(
            f"train.metric: {outside:.0f} of {count:.0f} test samples have a score that is not from 0 to 1."
        )
    if not math.isfinite(loss):
        raise ObjectiveError(
            f"train.loss: its mean over the {count:.0f} test samples is {loss}. Either the training has diverged: "
            "lower train.learning_rate; or a loss of your own is not finite where the model is far off: bound it."
        )
    return Score(correct=int(correct) if correct.is_integer() else correct, count=int(count), loss=loss / count)
