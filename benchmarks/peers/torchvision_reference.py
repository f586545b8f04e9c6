"""torchvision's reference training for classification. Every step reads the loss, two accuracies and the speed; every
tenth step prints their running medians."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.job import Job
from benchmarks.peers.textbook import correct

PRINT_EVERY, REMEMBERED = 10, 20
"""Steps between printed lines, and the number of steps in a running median."""


def accuracy(output: Tensor, target: Tensor, *counts: int) -> list[float]:
    """Return, for each k in ``counts``, the percentage of samples whose class is among the k likeliest."""
    likeliest = output.topk(min(max(counts), output.shape[1]), 1).indices.eq(target[:, None])
    return [100 * likeliest[:, :count].sum().item() / len(target) for count in counts]


def train_one_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, device: torch.device, epoch: int
) -> None:
    criterion = nn.CrossEntropyLoss()
    seen: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
    for step, (image, target) in enumerate(loader):
        started = time.time()
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first, fifth = accuracy(output, target, 1, 5)
        rates = {"lr": optimizer.param_groups[0]["lr"], "img/s": len(image) / (time.time() - started)}
        for name, value in {**rates, "loss": loss.item(), "acc1": first, "acc5": fifth}.items():
            seen[name].append(value)
        if step % PRINT_EVERY == 0:
            shown = "  ".join(f"{name}: {median(values):.4f}" for name, values in seen.items())
            print(f"Epoch: [{epoch}]  [{step}/{len(loader)}]  {shown}", flush=True)


if __name__ == "__main__":
    Job.requested().run(train_one_epoch, correct)
