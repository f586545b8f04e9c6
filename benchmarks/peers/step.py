"""Measure the time of a step whose model does almost nothing, in a minimal hand-written loop and in our loop."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.peers.job import WARM_STEPS, Job, step_told
from benchmarks.stages import Steady
from pipeline.params import Train


def barest(job: Job) -> None:
    batches = job.loader("train")
    model = job.net().to(batches.device)
    optimizer = job.optimizer(model.parameters())
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()


class Ours(Steady):
    """The training of a baseline, but with the model of ``job``."""

    def __init__(self, job: Job, history: Path) -> None:
        super().__init__(Path(job.folder), history, job.batch_size)
        self.job, self.train = job, Train.model_validate(job.train_section() | {"model": "small_cnn"})

    def net(self) -> torch.nn.Module:
        return self.job.net()


def ours(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        training = Ours(job, Path(folder, "history.csv"))
        loop, steps = training.steps(), len(training.task.dataset.train) // job.batch_size - WARM_STEPS - 1
        training.throughput(loop, WARM_STEPS)
        print(step_told(job.batch_size / training.throughput(loop, steps)))


if __name__ == "__main__":
    {"barest": barest, "ours": ours}[Job.requested().variation](Job.requested())
