"""Makes batches on the device: shuffles the samples, shards them over ranks and micro-batches, and augments images.

The order of the samples and all random draws of the augmentation depend only on the seed and the epoch. Order and draws
are computed on the CPU for the whole epoch. So all ranks together see, bit for bit, the global batches that one device
sees. This holds for any number of micro-batches and for every placement, including PyTorch's DataLoader (``loader``).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pipeline import environment
from pipeline.data.prepared import Dataset, Split, check_batch
from pipeline.data.reader import Reader
from pipeline.errors import ConfigError, count
from pipeline.params import Augment
from pipeline.tasks.base import CPU, Batch, Task

if TYPE_CHECKING:
    from pipeline.tasks.loader import WorkerBatches

Placement = Literal["resident", "streamed", "dataloader"]
"""How the rows of a batch are read: from arrays on the device ("resident"), by a thread that reads ahead ("streamed"),
or by PyTorch's DataLoader ("dataloader")."""

RESIDENT_FRACTION = 0.25
"""The placement "auto" means "resident" if the training arrays take at most this share of the device's free memory."""


class TrainBatches:
    """The training set as micro-batches for one rank.

    ``batch_size`` is the number of samples in a global batch. A global batch has ``world_size`` equal parts, one per
    rank. A rank splits its part into ``micro_batches`` consecutive micro-batches of b samples. An incomplete last
    global batch is dropped. ``workers`` is the number of worker processes for placement ``dataloader``.

    Raises ConfigError if the data set is smaller than one global batch, if the batch cannot be divided evenly, or if
    the inputs are not images and ``augment`` asks for augmentation.
    """

    steps_per_epoch: int
    placement: Placement

    def __init__(
        self,
        task: Task,
        *,
        batch_size: int,
        micro_batches: int,
        rank: int,
        world_size: int,
        seed: int,
        augment: Augment,
        placement: Placement,
        workers: int = 0,
    ) -> None:
        dataset, device = task.dataset, task.device
        check_batch(batch_size, dataset.name, len(dataset.train))
        if batch_size % (world_size * micro_batches):
            raise ConfigError(
                f"train.batch_size: found {batch_size}, which is not divisible by {count(world_size, 'process')} x "
                f"{count(micro_batches, 'micro-batch')}; allowed: a multiple of {world_size * micro_batches}."
            )
        arrays = [dataset.train.arrays[name] for name in task.arrays]
        self._sides = arrays[0].shape[2:] if arrays[0].ndim == 4 else None
        if augment != Augment() and self._sides is None:
            raise ConfigError(
                f"train.augment: found {augment}, but the inputs of {dataset.name}, of shape "
                f"{list(arrays[0].shape[1:])}, are no images [channels, height, width]; remove it."
            )
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.steps_per_epoch = len(dataset.train) // batch_size
        self.placement = placement
        self._weights = task.weights()
        self._scale = torch.ones((), device=device)
        """The inverse of the mean weight (``Task.weights``) of the current global batch's samples."""
        self._split = (self.steps_per_epoch, world_size, micro_batches, batch_size // (world_size * micro_batches))
        self._rank = rank
        self._seed = seed
        self._augment = augment
        self._device = device
        self._task = task
        # On the CPU, resident arrays stay memory-mapped: a page that was read once stays in memory for all processes.
        self._arrays = [array.to(device) for array in arrays] if self.placement == "resident" else arrays
        task.batch([array[:1].to(device) for array in arrays])  # copies the task's constants to the device
        self._loader: WorkerBatches | None = None
        if self.placement == "dataloader":
            from pipeline.tasks.loader import WorkerBatches  # imported here, because it imports torchvision

            self._loader = WorkerBatches(task.on(CPU), augment, workers, pinned=device.type == "cuda")
        self._each = torch.arange(self._split[-1], device=device)
        self._readers: set[Reader] = set()
        # The finalizer also runs when the interpreter exits, so that no thread is still copying while torch shuts down.
        self._finalizer = weakref.finalize(self, _stop_all, self._readers)

    def weighed(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of a step: ``loss`` itself or, if samples weigh differently, its product with the number by
        which the sum over the global batch becomes a weighted mean."""
        return loss if self._weights is None else lambda outputs, targets: loss(outputs, targets) * self._scale

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Iterate over one epoch's micro-batches from ``start_step`` on, ``micro_batches`` of them per step.

        A micro-batch is a pair of inputs [b, ...] and targets [b, ...] on the device. The caller may keep or change
        these tensors. The iteration never waits for the device.
        """
        drawn = draw_epoch(self._seed, epoch, len(self._arrays[0]), self._sides or (1, 1), self._augment.crop_padding)
        host = Draws(*(self._own_part(values, start_step) for values in drawn))
        made = self._made(host)
        yield from made if self._weights is None else self._scaled(made, drawn[0], start_step)

    def _scaled(self, made: Iterator[Batch], order: Tensor, start_step: int) -> Iterator[Batch]:
        """Yield the micro-batches ``made``; before the first of each step, set the step's scale. All ranks know the
        weights of the whole global batch, so they need not exchange any, and nothing waits for the device."""
        assert self._weights is not None
        steps, _, micro_batches, _ = self._split
        used = self._weights[order[: math.prod(self._split)]].view(steps, -1)
        means = used.mean(1)[start_step:]
        scales = _move(torch.where(means > 0, 1 / means, 0.0).float(), self._device)
        for index, batch in enumerate(made):
            if index % micro_batches == 0:
                self._scale.copy_(scales[index // micro_batches])
            yield batch

    def _made(self, host: Draws) -> Iterator[Batch]:
        if self._loader:
            for inputs, targets in self._loader.epoch(host):
                yield tree_map(partial(_sent, self._device), (inputs, targets))
            return
        draws = Draws(*(_move(values, self._device) for values in host))
        if self.placement == "resident":
            for index in range(len(draws.order)):
                yield self._batch([array.index_select(0, draws.order[index]) for array in self._arrays], draws, index)
            return
        reader = Reader(self._task.dataset.train, self._task.arrays, host.order, self._device)
        self._readers.add(reader)
        try:
            for index in range(len(draws.order)):
                yield self._batch(reader.take(), draws, index)
        finally:
            reader.stop()
            self._readers.discard(reader)

    def hold(self) -> None:
        """Pause reading ahead until the next micro-batch is requested. ``hold`` is called when a window of steps
        ends (``Clock``).

        Without the pause, reading ahead would slow down another variant's window. Besides, this variant's next window
        would use micro-batches that were read before the window began, and would not include the time for reading them.
        """
        for reader in self._readers:
            reader.hold()
        if self._loader:
            self._loader.hold()

    def close(self) -> None:
        """End the threads and processes that read. Afterwards the iterators of unfinished epochs raise RuntimeError,
        unless the placement is "resident"."""
        _stop_all(self._readers)
        if self._loader:
            self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_part(self, values: Tensor, start_step: int) -> Tensor:
        """Return this rank's part of ``values`` [N], which are in the epoch's order, from ``start_step`` on. The shape
        is [remaining micro-batches, b]."""
        steps, ranks, micro_batches, samples = self._split
        used = values[: steps * ranks * micro_batches * samples].view(self._split)
        return used[start_step:, self._rank].reshape(-1, samples)

    def _batch(self, rows: Sequence[Tensor], draws: Draws, index: int) -> Batch:
        first, *others = rows
        if self._augment.crop_padding:
            first = crop(first, draws.top[index], draws.left[index], self._augment.crop_padding, self._each)
        if self._augment.flip:
            first = flip(first, draws.flipped[index])
        inputs, targets = self._task.batch((first, *others))
        if self._augment.cutout:
            cutout_(tree_leaves(inputs)[0], draws.row[index], draws.column[index], self._augment.cutout)
        return inputs, targets


def evaluation_batches(split: Split, task: Task, *, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
    """Yield this rank's share of ``split`` in order, at most ``batch_size`` samples at a time, on the task's device.

    The ranks' shares are consecutive, differ in size by at most one sample, and together contain every sample once. A
    share can be empty.
    """
    start, end = (len(split) * part // world_size for part in (rank, rank + 1))
    for first in range(start, end, batch_size):
        rows = slice(first, min(first + batch_size, end))
        yield task.batch([_move(split.arrays[name][rows], task.device) for name in task.arrays])


def _stop_all(readers: set[Reader]) -> None:
    for reader in list(readers):
        reader.stop()


def _sent(device: torch.device, values: Tensor) -> Tensor:
    return values.to(device, non_blocking=True)


def _move(values: Tensor, device: torch.device) -> Tensor:
    """Copy ``values`` to the device without waiting for the device."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def choose_placement(dataset: Dataset, device: torch.device) -> Literal["resident", "streamed"]:
    """Choose the placement for the setting "auto" by the memory that is free now and, on the CPU, by the memory limits
    of the process's control groups (cgroups). All ranks and seeds use the main rank's choice."""
    if device.type == "cuda":
        return placement_within(torch.cuda.mem_get_info(device)[0], dataset)
    return placement_within(min([psutil.virtual_memory().available, *environment.memory_limits()]), dataset)


def placement_within(free_bytes: int, dataset: Dataset) -> Literal["resident", "streamed"]:
    """Choose the placement for the setting "auto" on a device with ``free_bytes`` of free memory."""
    needed = sum(array.nbytes for array in dataset.train.arrays.values())
    return "resident" if needed <= RESIDENT_FRACTION * free_bytes else "streamed"


class Draws(NamedTuple):
    """The random draws of an epoch: tensors of the same shape. ``flipped`` is bool, and the other tensors are int64."""

    order: Tensor
    """Indices of the samples, in the epoch's order."""
    top: Tensor
    left: Tensor
    """``top`` and ``left`` are the crop's first row and column in the padded image, from 0 to twice the padding."""
    flipped: Tensor
    row: Tensor
    column: Tensor
    """``row`` and ``column`` are the position of the cutout's centre."""


def draw_epoch(seed: int, epoch: int, count: int, size: tuple[int, ...], padding: int) -> Draws:
    """Return all draws [count] for images of ``size`` (height, width). The draws depend only on the arguments.

    Augmentations that are switched off get draws too, so that switching one on or off does not change the other draws.
    """
    (mixed,) = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(mixed))

    def below(end: int) -> Tensor:
        return torch.randint(end, (count,), generator=generator)

    return Draws(
        order=torch.randperm(count, generator=generator),
        top=below(2 * padding + 1),
        left=below(2 * padding + 1),
        flipped=below(2).bool(),
        row=below(size[0]),
        column=below(size[1]),
    )


def crop(images: Tensor, top: Tensor, left: Tensor, padding: int, index: Tensor) -> Tensor:
    """Pad images [b, C, H, W] with ``padding`` zeros on each side, and return an H x W window of each padded image.

    The window of image i starts at (top[i], left[i]). ``index`` is arange(b). It indexes a strided view of all windows,
    so an index has one number per image, not one per pixel.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (padding, padding, padding, padding))
    return padded.unfold(2, height, 1).unfold(3, width, 1)[index, :, top, left]


def flip(images: Tensor, flipped: Tensor) -> Tensor:
    """Return images [b, C, H, W]. Image i is mirrored left to right if ``flipped[i]`` is true."""
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


def cutout_(images: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """Set a square in each of the images [b, C, H, W] to zero, in place, and return the images.

    The square of image i is ``side`` pixels wide, has its centre at (row[i], column[i]), and is cut off at the image's
    edges. Zero is the mean of normalised images. Source: DeVries and Taylor (2017), arXiv:1708.04552.
    """
    height, width = images.shape[2:]
    rows = torch.arange(height, device=images.device) - (row.view(-1, 1) - side // 2)
    columns = torch.arange(width, device=images.device) - (column.view(-1, 1) - side // 2)
    inside = ((rows >= 0) & (rows < side)).unsqueeze(2) & ((columns >= 0) & (columns < side)).unsqueeze(1)
    return images.masked_fill_(inside.unsqueeze(1), 0.0)
