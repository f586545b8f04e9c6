"""The job that all peers share: the same model, data, batch, optimizer and evaluation. Each peer has its own loop.

A peer is a script: ``python -m benchmarks.peers.NAME JOB``, where JOB is a ``Job`` as JSON. After each epoch a peer
prints the line ``told``, as the pipeline does. The process that started the peer records the time of this line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import FashionMNIST, ImageFolder
from torchvision.transforms import Compose, Normalize, ToTensor

from pipeline.data import prepared
from pipeline.models import build

WARM_STEPS = 500
"""Number of warm-up steps before steps over ready batches are timed."""


@dataclass(frozen=True)
class Job:
    model: str
    """The setting ``train.model``, or "nothing": a single linear layer."""
    data: str
    """Kind of data in ``folder``. "fashion_mnist": files as torchvision expects them. "in_memory": the same files, read
    into memory, without a loader. "image_folder": train/CLASS/NAME and test/CLASS/NAME. "ready": a prepared data set,
    read into memory, without a loader."""
    batch_size: int
    """Samples of an optimizer step, over all processes."""
    epochs: int = 2
    learning_rate: float = 0.05
    processes: int = 1
    workers: int = 0
    """Worker processes of each process's DataLoader."""
    variation: str = ""
    """Name of the variation, for a peer that has several."""
    seed: int = 0
    folder: str = ""
    shape: tuple[int, ...] = (1, 28, 28)
    classes: int = 10
    mean: tuple[float, ...] = (0.2860,)
    std: tuple[float, ...] = (0.3530,)

    @classmethod
    def requested(cls) -> Job:
        """Return the job on the command line."""
        return cls(**json.loads(sys.argv[1]))

    def of(self, data: prepared.Dataset, folder: Path) -> Job:
        """Return the same job on ``data``, which is stored in ``folder`` in the form of ``self.data``."""
        known = data.statistics["inputs"]
        facts: dict[str, Any] = {
            "shape": data.shape,
            "classes": len(data.classes),
            "mean": known.mean,
            "std": known.std,
        }
        return replace(self, folder=str(folder), **facts)

    def command(self, module: str) -> list[str]:
        """Return the command that runs the job with the peer ``module``. torchrun starts several processes, except for
        Lightning, which starts its own."""
        launcher: list[str] = []
        if self.processes > 1 and module != "lightning_trainer":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
            launcher.append(f"--nproc-per-node={self.processes}")
        return [sys.executable, *launcher, "-m", f"benchmarks.peers.{module}", json.dumps(asdict(self))]

    def train_section(self) -> dict[str, Any]:
        """Return the section ``train`` of params.yaml with this job's model, optimizer, batch and epochs."""
        constant = {"schedule": "constant", "warmup_fraction": 0.0, "weight_decay": 0.0}
        own = {"batch_size": self.batch_size, "epochs": self.epochs, "learning_rate": self.learning_rate}
        return {"model": self.model, "seeds": [self.seed], **own, **constant}

    def net(self) -> nn.Module:
        """Seed torch's random state; return the model with the seed's initial weights."""
        torch.manual_seed(self.seed)
        channels, height, width = self.shape
        if self.model == "nothing":
            return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, self.classes))
        like = torch.zeros(2, channels, height, width)
        sizes = {"channels": channels, "height": height, "width": width, "classes": self.classes}
        return build(self.model, {}, sizes, inputs=like, outputs=(self.classes,))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD. With ready batches it is fused, as in our pipeline, so that only the loops differ."""
        fused = True if self.data == "ready" else None
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9, nesterov=True, fused=fused)

    def loader(self, split: str, *, distributed: bool = False) -> Any:
        """Return the batches (images, labels) of one process. If ``distributed``, they come from this process's part of
        the split; otherwise from the whole split, which the peer's library divides."""
        train = split == "train"
        if self.data == "ready":
            return Ready(getattr(prepared.read(Path(self.folder)), split), self)
        transform = Compose([ToTensor(), Normalize(self.mean, self.std)])
        if self.data == "image_folder":
            images: Any = ImageFolder(str(Path(self.folder, split)), transform)
        else:
            images = FashionMNIST(self.folder, train=train, transform=transform)
        if self.data == "in_memory":
            return Ready(prepared.Split({"inputs": images.data.unsqueeze(1), "targets": images.targets}), self)
        sampler: Any = DistributedSampler(images, shuffle=train) if distributed else None
        size, shuffle = self.batch_size // self.processes, train and not distributed
        return DataLoader(images, size, shuffle, sampler, num_workers=self.workers, drop_last=train)

    def run(self, train_epoch: Callable[..., None], correct: Callable[..., Tensor]) -> None:
        """Run the job with a script's own loops; with several processes, in DistributedDataParallel.

        ``train_epoch`` takes the model, optimizer, batches, device and epoch; ``correct`` takes the model, batches and
        device, and returns the number of correct samples and of all samples.
        """
        distributed = self.processes > 1
        if distributed:
            dist.init_process_group()
        rank = dist.get_rank() if distributed else 0
        device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        train, test = (self.loader(split, distributed=distributed) for split in ("train", "test"))
        net = self.net().to(device)
        if distributed:
            net = DistributedDataParallel(net)
        optimizer = self.optimizer(net.parameters())
        for epoch in range(self.epochs):
            if distributed:
                train.sampler.set_epoch(epoch)
            net.train()
            train_epoch(net, optimizer, train, device, epoch)
            net.eval()
            counts = correct(net, test, device)
            if distributed:
                dist.all_reduce(counts)
            if rank == 0:
                print(told(epoch + 1, self.epochs, float(counts[0] / counts[1])), flush=True)
        if distributed:
            dist.destroy_process_group()


class Ready:
    """Batches of a split in memory, made with the fewest operations. At an epoch's end, the iterator prints the mean
    time between requests for batches, not counting the first ``WARM_STEPS``. This is the time of a step in any loop. An
    epoch of at most ``WARM_STEPS`` + 1 steps prints nothing."""

    def __init__(self, split: prepared.Split, job: Job) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.images, self.labels = split.inputs.to(self.device), split.targets.to(self.device)
        self.batch_size = job.batch_size
        self.mean, self.std = (torch.tensor(value, device=self.device).view(-1, 1, 1) for value in (job.mean, job.std))

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order, last = torch.randperm(len(self.labels), device=self.device), len(self) - 1
        for step, chosen in enumerate(order.split(self.batch_size)):
            if step == WARM_STEPS:
                began = time.perf_counter()
            if step == last > WARM_STEPS:  # a loop that knows the length requests no further batch
                print(step_told((time.perf_counter() - began) / (step - WARM_STEPS)), flush=True)
            yield self.images[chosen].float().div_(255).sub_(self.mean).div_(self.std), self.labels[chosen]


def told(epoch: int, epochs: int, accuracy: float) -> str:
    """Return the line that a peer prints after the evaluation of ``epoch``, counted from 1."""
    return f"epoch {epoch}/{epochs}, test accuracy {accuracy:.2%}"


def step_told(seconds: float) -> str:
    return f"a step took {1e6 * seconds:.3f} microseconds"
