"""PyTorch's DataLoader as people use it: worker processes that read, augment and normalise one sample at a time.

Nothing random happens in the workers. Each sample's draws come with its number, from the ``draw_epoch`` that the other
ways to read the data use, so that the tensors are the same to the last bit and only speed and memory differ.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torchvision.transforms import functional as F

from pipeline.data.prepared import Dataset
from pipeline.params import Augment

Draw = tuple[int, int, int, bool, int, int]
"""A sample's number; top and left of its crop; whether it is mirrored; row and column of its cutout."""


class WorkerBatches:
    """Micro-batches from ``workers`` processes (0: from this one), which stay for all epochs until ``close``.

    They work ahead by the DataLoader's own two micro-batches a worker, but only between an epoch's beginning, or the
    last request for a micro-batch, and ``hold``. Of the epochs asked for, the last alone can be read.
    """

    def __init__(self, dataset: Dataset, augment: Augment, workers: int, *, pinned: bool) -> None:
        self._workers, self._pinned = workers, pinned
        self._brake = _Brake()
        self._samples = _Samples(dataset, augment, self._brake)
        self._order = _Order()
        self._loader: DataLoader[Any] | None = None
        self._reading: Any = None
        self._epochs = 0

    def epoch(self, draws: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Images float32 [b, C, H, W] and labels int64 [b] on the host, for ``draws`` [m, b] in the order of a Draw."""
        self._brake.release()
        self._order.draws = draws
        if self._loader is None:
            self._loader = DataLoader(
                self._samples,
                batch_sampler=self._order,
                num_workers=self._workers,
                persistent_workers=self._workers > 0,
                pin_memory=self._pinned,
                worker_init_fn=_ignore_signals,
                generator=torch.Generator(),  # or it would draw the workers' seeds from the model's generator
            )
        self._epochs += 1
        epoch, reading = self._epochs, iter(self._loader)
        self._reading = reading
        while True:
            if epoch != self._epochs:
                raise RuntimeError("these batches were closed, or a later epoch has begun")
            self._brake.release()
            batch = next(reading, None)
            if batch is None:
                return
            yield batch

    def hold(self) -> None:
        """Let the workers stop after the sample that each has at hand, until the next request."""
        if self._reading is not None and self._workers:
            self._brake.pull()

    def close(self) -> None:
        """End the workers. A later epoch starts new ones."""
        self._brake.release()
        if self._reading is not None and self._workers:
            self._reading._shutdown_workers()  # what its destructor does, at a moment that we choose
        self._epochs += 1
        self._loader = self._reading = None


class _Samples(TorchDataset[tuple[Tensor, int]]):
    """The training set, sample by sample, through torchvision's functions."""

    def __init__(self, dataset: Dataset, augment: Augment, brake: _Brake) -> None:
        self._images, self._labels = dataset.train.images, dataset.train.labels
        self._mean, self._std = list(dataset.mean), list(dataset.std)
        self._augment, self._brake = augment, brake

    def __getitem__(self, draw: Draw) -> tuple[Tensor, int]:
        """Image float32 [C, H, W] and label."""
        self._brake.wait()
        index, top, left, flipped, row, column = draw
        augment, image = self._augment, self._images[index]
        height, width = image.shape[1:]
        if augment.crop_padding:
            image = F.crop(F.pad(image, [augment.crop_padding]), top, left, height, width)
        if augment.flip and flipped:
            image = F.hflip(image)
        pixels = F.normalize(F.convert_image_dtype(image), self._mean, self._std)
        if augment.cutout:
            first, start = row - augment.cutout // 2, column - augment.cutout // 2
            last, end = first + augment.cutout, start + augment.cutout
            first, start, last, end = max(0, first), max(0, start), min(height, last), min(width, end)
            pixels = F.erase(pixels, first, start, last - first, end - start, torch.zeros(()))
        return pixels, int(self._labels[index])


class _Order:
    """Which samples make which micro-batch. The DataLoader asks anew at the beginning of each epoch."""

    def __init__(self) -> None:
        self.draws: Sequence[Tensor] = ()

    def __iter__(self) -> Iterator[list[Draw]]:
        for rows in zip(*self.draws, strict=True):
            yield list(zip(*(row.tolist() for row in rows), strict=True))


class _Brake:
    """Holds the workers. While it is off, passing it costs them a glance at shared memory."""

    def __init__(self) -> None:
        self._on = multiprocessing.RawValue("b", 0)
        self._released = multiprocessing.Event()

    def pull(self) -> None:
        self._released.clear()
        self._on.value = 1

    def release(self) -> None:
        if self._on.value:
            self._on.value = 0
            self._released.set()

    def wait(self) -> None:
        """Return when the brake is off. Ends a worker whose trainer has died meanwhile."""
        while self._on.value and not self._released.wait(timeout=1.0):
            trainer = multiprocessing.parent_process()
            if trainer is not None and not trainer.is_alive():
                sys.exit(1)


def _ignore_signals(_: int) -> None:
    """Ctrl-C reaches the workers too, but the step that is under way needs them: their end is the trainer's to say."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
