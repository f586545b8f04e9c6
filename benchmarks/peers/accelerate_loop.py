"""The training loop from the documentation of Hugging Face accelerate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from benchmarks.peers.job import Job, told


def main(job: Job) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = job.net()
    model, optimizer, train, test = accelerator.prepare(
        model, job.optimizer(model.parameters()), job.loader("train"), job.loader("test")
    )
    for epoch in range(job.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        model.eval()
        right, count = 0, 0
        with torch.no_grad():
            for images, labels in test:
                predicted, wanted = accelerator.gather_for_metrics((model(images).argmax(1), labels))
                right += int((predicted == wanted).sum())
                count += len(wanted)
        accelerator.print(told(epoch + 1, job.epochs, right / count), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(Job.requested())
