"""Exact evaluation: every test sample counted once, on whichever rank, and sums instead of means of means."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.data.batches import evaluation_batches
from pipeline.data.prepared import Dataset
from pipeline.distributed import World


@dataclass(frozen=True)
class Score:
    """What a model does on the test set."""

    correct: int
    count: int
    loss: float
    """Mean cross-entropy, without label smoothing."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.count


class Mould:
    """A single-device model's form without its weights, from which a model that ranks hold in parts is cast whole."""

    def __init__(self, model: nn.Module) -> None:
        stored = model.state_dict().keys()
        self._unstored = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in stored}
        self._form = copy.deepcopy(model).to("meta")

    def cast(self, state: dict[str, Any], device: torch.device) -> nn.Module:
        """A model with the weights and buffers of ``state``, a whole state dict, on ``device``."""
        model = copy.deepcopy(self._form).to_empty(device=device)
        model.load_state_dict(state)
        for name, value in self._unstored.items():
            model.get_buffer(name).copy_(value)
        return model


def evaluate(model: nn.Module, dataset: Dataset, world: World, batch_size: int) -> Score:
    """Score ``model`` on the test split, in float32 whatever the precision of training, on all ranks together.

    The ranks take disjoint shares of the split, without padding, and add up their counts, so the accuracy
    is that of a single device. BatchNorm uses the main rank's running statistics. ``model`` is the bare
    module: a parallel wrapper would wait for ranks whose share is smaller.
    """
    world.broadcast_buffers_(model)
    training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # correct, count, loss
    with torch.no_grad():
        for images, labels in evaluation_batches(
            dataset.test, dataset, rank=world.rank, world_size=world.size, batch_size=batch_size, device=world.device
        ):
            logits = model(images).float()
            sums[0] += (logits.argmax(1) == labels).sum()
            sums[1] += len(labels)
            sums[2] += F.cross_entropy(logits, labels, reduction="none").double().sum()
    model.train(training)
    correct, count, loss = world.sum_(sums).tolist()
    return Score(correct=int(correct), count=int(count), loss=loss / count)
