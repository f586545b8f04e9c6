"""A LightningModule and a Trainer with its defaults: progress bar, log and a checkpoint per epoch.

The variation "barebones" is the Trainer's own mode that leaves out everything except training.
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.job import Job, told


class Classifier(L.LightningModule):  # type: ignore[misc]  # without Lightning, mypy knows no type of it
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.net = job, job.net()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # noqa: ARG002
        images, labels = batch
        right = self.net(images).argmax(1) == labels
        self.log("test_accuracy", right.float().mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        if "test_accuracy" in self.trainer.callback_metrics:
            accuracy = float(self.trainer.callback_metrics["test_accuracy"])
            self.print(told(self.current_epoch + 1, self.job.epochs, accuracy), flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.optimizer(self.parameters())


def main(job: Job) -> None:
    trainer = L.Trainer(
        max_epochs=job.epochs,
        devices=job.processes,
        strategy="ddp" if job.processes > 1 else "auto",
        barebones=job.variation == "barebones",
        default_root_dir=f"{job.folder}-lightning",
    )
    trainer.fit(Classifier(job), job.loader("train"), job.loader("test"))


if __name__ == "__main__":
    main(Job.requested())
