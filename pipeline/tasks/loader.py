"""PyTorch's DataLoader in its usual form: worker processes read, augment and prepare one sample at a time.

The workers draw no random numbers: they receive each sample's index and the random draws that ``draw_epoch`` made for
it. The other placements use the same draws, so all placements yield bitwise equal tensors and differ only in speed and
memory.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset
from torchvision.transforms import functional as F

from pipeline.params import Augment
from pipeline.processes import randomness
from pipeline.step import Inputs
from pipeline.tasks.base import Batch, Task

Draw = tuple[int, int, int, bool, int, int]
"""A sample's index; top and left of its crop; whether it is mirrored; row and column of its cutout's centre."""


class WorkerBatches:
    """Micro-batches from ``workers`` processes (0: from this process). The workers run until ``close``.

    Each worker prefetches two micro-batches, the DataLoader's default. ``hold`` stops the prefetching until the next
    request for a micro-batch or an epoch. Only the epoch that was requested last can be read.
    """

    def __init__(self, task: Task, augment: Augment, workers: int, *, pinned: bool) -> None:
        self._workers, self._pinned = workers, pinned
        self._brake = _Brake()
        self._samples = _Samples(task, augment, self._brake)
        self._order = _Order()
        self._loader: DataLoader[Any] | None = None
        self._reading: Any = None
        self._epochs = 0

    def epoch(self, draws: Sequence[Tensor]) -> Iterator[Batch]:
        """Yield m micro-batches of b samples: inputs [b, ...] and targets [b, ...] on the host.

        ``draws`` has a tensor [m, b] for each item of ``Draw``. Raises RuntimeError if the batches were closed, or if a
        later epoch was requested.
        """
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
                generator=torch.Generator(),  # by default, a seed is drawn from the generator that the model uses
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
        """Pause each worker after its current sample, until the next request."""
        self._brake.pull()

    def close(self) -> None:
        """End the workers. A later epoch starts new ones."""
        self._brake.release()
        if self._reading is not None and self._workers:
            self._reading._shutdown_workers()  # otherwise the iterator's destructor would end them, at an unknown time
        self._epochs += 1
        self._loader = self._reading = None


class _Samples(TorchDataset[Batch]):
    """The training set as single, augmented samples. ``task`` is on the CPU."""

    def __init__(self, task: Task, augment: Augment, brake: _Brake) -> None:
        self._task, self._augment, self._brake = task, augment, brake
        self._arrays = [task.dataset.train.arrays[name] for name in task.arrays]

    def __getitems__(self, draws: list[Draw]) -> list[Batch]:
        """Return a micro-batch's samples. What a task's own code draws in a worker depends only on the micro-batch, so
        a resumed training repeats it."""
        if get_worker_info():
            randomness.seed(zlib.crc32(repr(draws).encode()))
        return [self[draw] for draw in draws]

    def __getitem__(self, draw: Draw) -> Batch:
        """Return the sample's inputs [...] and targets [...]."""
        self._brake.wait()
        index, top, left, flipped, row, column = draw
        augment = self._augment
        first, *others = (array[index] for array in self._arrays)
        if augment.crop_padding:
            first = F.crop(F.pad(first, [augment.crop_padding]), top, left, *first.shape[1:])
        if augment.flip and flipped:
            first = F.hflip(first)
        batch, (target,) = self._task.batch([array.unsqueeze(0) for array in (first, *others)])
        inputs: Inputs = tree_map(lambda values: values[0], batch)
        if augment.cutout:
            upper, begin = row - augment.cutout // 2, column - augment.cutout // 2
            inputs = tree_map(torch.clone, inputs)
            image = tree_leaves(inputs)[0]
            image[:, max(0, upper) : upper + augment.cutout, max(0, begin) : begin + augment.cutout] = 0
        return inputs, target


class _Order:
    """The batch sampler, which yields the draws of each micro-batch. The DataLoader iterates over it once per epoch."""

    def __init__(self) -> None:
        self.draws: Sequence[Tensor] = ()

    def __iter__(self) -> Iterator[list[Draw]]:
        for rows in zip(*self.draws, strict=True):
            yield list(zip(*(row.tolist() for row in rows), strict=True))


class _Brake:
    """Pauses the workers. While the brake is off, ``wait`` only reads one value in shared memory."""

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
        """Wait until the brake is off. Ends this worker if the training process has died."""
        while self._on.value and not self._released.wait(timeout=1.0):
            trainer = multiprocessing.parent_process()
            if trainer is not None and not trainer.is_alive():
                sys.exit(1)


def _ignore_signals(_: int) -> None:
    """Make this worker ignore SIGINT and SIGTERM.

    After such a signal, the training process finishes its step, for which it needs the workers, and then ends them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
