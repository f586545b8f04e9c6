"""Batches on the device: shuffled, sharded over ranks and micro-batches, augmented, normalised.

The order of the samples and every random draw of the augmentation are functions of (seed, epoch) alone. They are drawn
on the CPU for the whole epoch, so N ranks together see, bit for bit, the global batches that one device sees, whatever
the placement and the number of micro-batches, also where PyTorch's DataLoader makes them (``loader``). Pixel values
equal torchvision's ToTensor and Normalize in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import psutil
import torch
from torch import Tensor

from pipeline.data.augmentation import Draws, Normalise, crop, cutout_, draw_epoch, flip
from pipeline.data.prepared import Dataset, Split
from pipeline.data.reader import Reader
from pipeline.errors import ConfigError
from pipeline.params import Augment

if TYPE_CHECKING:
    from pipeline.data.loader import WorkerBatches

Batch = tuple[Tensor, Tensor]
Placement = Literal["resident", "streamed", "dataloader"]
"""Where the images are before a step: on the device; in the memory map, read by a thread; there, read by workers."""

RESIDENT_FRACTION = 0.25
"""Placement auto: resident if the training images take at most this share of the device's free memory."""


class TrainBatches:
    """The training set as micro-batches for one rank.

    ``batch_size`` is the global batch; of each global batch, rank r of R takes the r-th of R equal parts, split into
    ``micro_batches`` consecutive micro-batches of b samples. An incomplete last global batch is dropped. ``workers``:
    processes of the DataLoader, for that placement.

    Raises ConfigError when there is not one full global batch, or it cannot be divided evenly.
    """

    steps_per_epoch: int
    placement: Placement

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        micro_batches: int,
        rank: int,
        world_size: int,
        seed: int,
        augment: Augment,
        placement: Placement,
        device: torch.device,
        workers: int = 0,
    ) -> None:
        if batch_size > len(dataset.train):
            raise ConfigError(
                f"train.batch_size: found {batch_size}, but {dataset.name} has {len(dataset.train)} training samples; "
                f"allowed: at most {len(dataset.train)}."
            )
        if batch_size % (world_size * micro_batches):
            raise ConfigError(
                f"train.batch_size: found {batch_size}, which {world_size} process(es) x {micro_batches} "
                f"micro-batch(es) do not divide; allowed: a multiple of {world_size * micro_batches}."
            )
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.steps_per_epoch = len(dataset.train) // batch_size
        self.placement = placement
        self._split = (self.steps_per_epoch, world_size, micro_batches, batch_size // (world_size * micro_batches))
        self._rank = rank
        self._seed = seed
        self._augment = augment
        self._device = device
        # On the CPU the memory map itself: its pages stay in memory once touched, shared by all processes.
        self._images = dataset.train.images.to(device) if self.placement == "resident" else dataset.train.images
        self._labels = dataset.train.labels if self.placement == "dataloader" else dataset.train.labels.to(device)
        self._loader: WorkerBatches | None = None
        if self.placement == "dataloader":
            from pipeline.data.loader import WorkerBatches  # and with it torchvision

            self._loader = WorkerBatches(dataset, augment, workers, pinned=device.type == "cuda")
        self._normalise = Normalise(dataset, device)
        self._each = torch.arange(self._split[-1], device=device)
        self._readers: set[Reader] = set()
        # Also runs when the interpreter exits, so that no thread is still copying while torch is taken down.
        self._finalizer = weakref.finalize(self, _stop_all, self._readers)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Micro-batches of one epoch, ``micro_batches`` for each step from ``start_step`` on.

        Each is images float32 [b, C, H, W] and labels int64 [b], both on the device and the caller's to keep or change.
        Nothing here waits for the device.
        """
        if not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(f"start_step {start_step} is outside an epoch of {self.steps_per_epoch} steps")
        return self._epoch(epoch, start_step)

    def hold(self) -> None:
        """Let what reads ahead wait until the next micro-batch is asked for: a measured window has ended.

        Or it would work in somebody else's window, and what it has done by the next one would be nobody's time.
        """
        for reader in self._readers:
            reader.hold()
        if self._loader:
            self._loader.hold()

    def close(self) -> None:
        """End the threads and processes of unfinished epochs; their iterators raise RuntimeError afterwards."""
        _stop_all(self._readers)
        if self._loader:
            self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _epoch(self, epoch: int, start_step: int) -> Iterator[Batch]:
        drawn = draw_epoch(self._seed, epoch, len(self._labels), self._images.shape[2:], self._augment.crop_padding)
        host = Draws(*(self._own_part(values, start_step) for values in drawn))
        if self._loader:
            for pixels, labels in self._loader.epoch(host):
                yield pixels.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)
            return
        draws = Draws(*(_move(values, self._device) for values in host))
        if self.placement == "resident":
            for index in range(len(draws.order)):
                yield self._batch(self._images.index_select(0, draws.order[index]), draws, index)
            return
        reader = Reader(self._images, host.order, self._device)
        self._readers.add(reader)
        try:
            reader.start()
            for index in range(len(draws.order)):
                yield self._batch(reader.take(), draws, index)
        finally:
            reader.stop()
            self._readers.discard(reader)

    def _own_part(self, values: Tensor, start_step: int) -> Tensor:
        """[N] in the epoch's order -> [remaining micro-batches, b], this rank's."""
        steps, ranks, micro_batches, samples = self._split
        used = values[: steps * ranks * micro_batches * samples].view(self._split)
        return used[start_step:, self._rank].reshape(-1, samples)

    def _batch(self, images: Tensor, draws: Draws, index: int) -> Batch:
        labels = self._labels.index_select(0, draws.order[index])
        if self._augment.crop_padding:
            images = crop(images, draws.top[index], draws.left[index], self._augment.crop_padding, self._each)
        if self._augment.flip:
            images = flip(images, draws.flipped[index])
        pixels = self._normalise(images)
        if self._augment.cutout:
            cutout_(pixels, draws.row[index], draws.column[index], self._augment.cutout)
        return pixels, labels


def evaluation_batches(
    split: Split, dataset: Dataset, *, rank: int, world_size: int, batch_size: int, device: torch.device
) -> Iterator[Batch]:
    """This rank's share of ``split``, in order, at most ``batch_size`` samples at a time.

    The ranks' shares are consecutive, differ by at most one sample, and hold every sample once; a share can be empty.
    Images are float32 [b, C, H, W], normalised with the training set's statistics; labels are int64 [b].
    """
    normalise = Normalise(dataset, device)
    start, end = (len(split) * part // world_size for part in (rank, rank + 1))
    for first in range(start, end, batch_size):
        rows = slice(first, min(first + batch_size, end))
        yield normalise(_move(split.images[rows], device)), _move(split.labels[rows], device)


def _stop_all(readers: set[Reader]) -> None:
    for reader in list(readers):
        reader.stop()


def _move(values: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def choose_placement(dataset: Dataset, device: torch.device) -> Literal["resident", "streamed"]:
    """Placement auto, by the memory that is free now; the main rank's choice is for all ranks and seeds."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return placement_within(free, dataset)


def placement_within(free_bytes: int, dataset: Dataset) -> Literal["resident", "streamed"]:
    """Placement auto on a device with so much free memory."""
    return "resident" if dataset.train.images.nbytes <= RESIDENT_FRACTION * free_bytes else "streamed"
