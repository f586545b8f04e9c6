"""A textbook training: torchvision's data set and transforms, a DataLoader, and a loop over its batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.job import Job


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, device: torch.device, _: int) -> None:
    for pixels, labels in batches:
        pixels, labels = pixels.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pixels), labels)
        loss.backward()
        optimizer.step()


def correct(model: nn.Module, batches: Any, device: torch.device) -> Tensor:
    right, count = 0, 0
    with torch.no_grad():
        for pixels, labels in batches:
            right += int((model(pixels.to(device)).argmax(1) == labels.to(device)).sum())
            count += len(labels)
    return torch.tensor([right, count], device=device)


if __name__ == "__main__":
    Job.requested().run(train_epoch, correct)
