"""Batches on the device: shuffled, sharded over ranks and micro-batches, augmented, normalised.

The order of the samples and every random draw of the augmentation are functions of (seed, epoch) alone. They are drawn
on the CPU for the whole epoch, so N ranks together see, bit for bit, the global batches that one device sees, whatever
the placement and the number of micro-batches, also where PyTorch's DataLoader makes them (``loader``). Pixel values
equal torchvision's ToTensor and Normalize in float32.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import Augment, ConfigError
from pipeline.data.prepared import Dataset, Split

if TYPE_CHECKING:
    from pipeline.data.loader import WorkerBatches

Batch = tuple[Tensor, Tensor]
Placement = Literal["resident", "streamed", "dataloader"]
"""Where the images are before a step: on the device; in the memory map, read by a thread; there, read by workers."""

RESIDENT_FRACTION = 0.25
"""Placement auto: resident if the training images take at most this share of the device's free memory."""
READ_AHEAD = 4
"""Micro-batches that the background thread may be ahead."""


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
        self._normalise = _Normalise(dataset, device)
        self._each = torch.arange(self._split[-1], device=device)
        self._readers: set[_Reader] = set()
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
        host = _Draws(*(self._own_part(values, start_step) for values in drawn))
        if self._loader:
            for pixels, labels in self._loader.epoch(host):
                yield pixels.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)
            return
        draws = _Draws(*(_move(values, self._device) for values in host))
        if self.placement == "resident":
            for index in range(len(draws.order)):
                yield self._batch(self._images.index_select(0, draws.order[index]), draws, index)
            return
        reader = _Reader(self._images, host.order, self._device)
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

    def _batch(self, images: Tensor, draws: _Draws, index: int) -> Batch:
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
    normalise = _Normalise(dataset, device)
    start, end = (len(split) * part // world_size for part in (rank, rank + 1))
    for first in range(start, end, batch_size):
        rows = slice(first, min(first + batch_size, end))
        yield normalise(_move(split.images[rows], device)), _move(split.labels[rows], device)


class _Draws(NamedTuple):
    """What is random in an epoch; all int64 and of one shape but for ``flipped``, which is bool."""

    order: Tensor
    """Which sample."""
    top: Tensor
    left: Tensor
    """Where the crop begins in the padded image, 0 to twice the padding."""
    flipped: Tensor
    row: Tensor
    column: Tensor
    """The cutout's centre."""


def draw_epoch(seed: int, epoch: int, count: int, size: tuple[int, ...], padding: int) -> _Draws:
    """All draws [count] for images of ``size`` (height, width), a function of the arguments alone.

    Everything is drawn whether it is used or not, so that switching one augmentation leaves the others as they were.
    """
    (mixed,) = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(mixed))

    def below(end: int) -> Tensor:
        return torch.randint(end, (count,), generator=generator)

    return _Draws(
        order=torch.randperm(count, generator=generator),
        top=below(2 * padding + 1),
        left=below(2 * padding + 1),
        flipped=below(2).bool(),
        row=below(size[0]),
        column=below(size[1]),
    )


def crop(images: Tensor, top: Tensor, left: Tensor, padding: int, each: Tensor) -> Tensor:
    """Pad [b, C, H, W] with ``padding`` zeros all around, then cut image i's H x W window at (top[i], left[i]).

    ``each`` is arange(b). The index holds one number an image: windows are a strided view, so no index a pixel.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (padding, padding, padding, padding))
    return padded.unfold(2, height, 1).unfold(3, width, 1)[each, :, top, left]


def flip(images: Tensor, flipped: Tensor) -> Tensor:
    """Mirror left-right those of [b, C, H, W] for which ``flipped`` [b] is true."""
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


def cutout_(images: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """Set to zero, in place, a square of ``side`` pixels centred on (row[i], column[i]); it may hang over the edge.

    Zero is the mean of normalised images. After DeVries and Taylor (2017), arXiv:1708.04552.
    """
    height, width = images.shape[2:]
    rows = torch.arange(height, device=images.device) - (row.view(-1, 1) - side // 2)
    columns = torch.arange(width, device=images.device) - (column.view(-1, 1) - side // 2)
    inside = ((rows >= 0) & (rows < side)).unsqueeze(2) & ((columns >= 0) & (columns < side)).unsqueeze(1)
    return images.masked_fill_(inside.unsqueeze(1), 0.0)


class _Normalise:
    """uint8 -> (x / 255 - mean) / std in float32, in the order of operations of ToTensor and Normalize."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        # A tensor, not a number: on CUDA, division by a number becomes multiplication by its rounded reciprocal.
        self._scale = torch.tensor(255.0, device=device)
        self._mean = torch.tensor(dataset.mean, dtype=torch.float32, device=device).view(-1, 1, 1)
        self._std = torch.tensor(dataset.std, dtype=torch.float32, device=device).view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        return images.to(torch.float32).div_(self._scale).sub_(self._mean).div_(self._std)


class _Reader:
    """Gathers rows of the memory map in a background thread, at most ``READ_AHEAD`` micro-batches ahead.

    On CUDA, rows go through pinned memory and are copied on a stream of their own. torch's caching allocators keep
    a pinned buffer, and through ``record_stream`` the copy on the device, until the streams are done with them.
    """

    def __init__(self, images: Tensor, order: Tensor, device: torch.device) -> None:
        self._images = images
        self._order = order
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._room = threading.Semaphore(READ_AHEAD)
        self._may_go = threading.Event()
        self._may_go.set()
        self._ready: queue.SimpleQueue[tuple[Tensor, torch.cuda.Event | None] | BaseException] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Tensor:
        """The next micro-batch, uint8 [b, C, H, W], ready for the current stream; raises what the thread raised."""
        self._may_go.set()
        taken = self._ready.get()
        if self._stopped:
            raise RuntimeError("these batches were closed before the epoch's end")
        if isinstance(taken, BaseException):
            raise taken
        self._room.release()
        images, copied = taken
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            images.record_stream(stream)
        return images

    def hold(self) -> None:
        """Read no further micro-batch until one is taken."""
        self._may_go.clear()

    def stop(self) -> None:
        """End the thread and wait for it; can be called more than once."""
        self._stopped = True
        self._may_go.set()
        self._room.release()
        if self._thread.is_alive():
            self._thread.join()
        self._ready.put(StopIteration())  # wakes a consumer that waits in another thread

    def _run(self) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._device)  # else a new thread would open a context on device 0
            for rows in self._order:
                self._room.acquire()
                self._may_go.wait()
                if self._stopped:
                    return
                self._ready.put(self._load(rows))
        except BaseException as error:
            self._ready.put(error)

    def _load(self, rows: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if self._stream is None:
            return self._images.index_select(0, rows), None
        pinned = torch.empty((len(rows), *self._images.shape[1:]), dtype=torch.uint8, pin_memory=True)
        torch.index_select(self._images, 0, rows, out=pinned)
        with torch.cuda.stream(self._stream):
            return pinned.to(self._device, non_blocking=True), self._stream.record_event()


def _stop_all(readers: set[_Reader]) -> None:
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
