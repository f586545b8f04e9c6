"""Batches of real digits, against torchvision and against themselves cut in other ways."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision.transforms import functional as reference

from pipeline import environment
from pipeline.data.augmentation import crop, cutout_, draw_epoch, flip
from pipeline.data.batches import TrainBatches, choose_placement, evaluation_batches
from pipeline.data.prepared import Dataset, RowFile, read
from pipeline.data.reader import READ_AHEAD, OpenRows, Reader
from pipeline.errors import ConfigError
from pipeline.params import Augment
from tests.nets import labelled, task_of

CPU = torch.device("cpu")
EVERYTHING = Augment(crop_padding=2, flip=True, cutout=3)
PLACEMENTS = ("resident", "streamed")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "read-ahead"] == []


def make(dataset: Dataset, **changes: Any) -> TrainBatches:
    values: dict[str, Any] = {
        "batch_size": 96,
        "micro_batches": 1,
        "rank": 0,
        "world_size": 1,
        "seed": 0,
        "augment": Augment(),
        "placement": "resident",
    }
    device = changes.pop("device", CPU)
    return TrainBatches(task_of(dataset, device=device), **values | changes)


def whole(made: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*made, strict=True)
    return torch.cat(images), torch.cat(labels)


def tagged(dataset: Dataset) -> Dataset:
    """The label of every training sample is its number."""
    return replace(dataset, train=labelled(dataset.train.inputs, torch.arange(len(dataset.train))))


def known(dataset: Dataset) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel."""
    return list(dataset.statistics["inputs"].mean), list(dataset.statistics["inputs"].std)


def test_pixels_are_bit_for_bit_those_of_torchvision(digits: Dataset) -> None:
    made = make(tagged(digits))
    images, labels = whole(made.epoch(0))
    for image, label in zip(images, labels, strict=True):
        pixels = reference.to_tensor(digits.train.inputs[label].numpy().transpose(1, 2, 0))
        expected = reference.normalize(pixels, *known(digits))
        assert torch.equal(image, expected)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.shape == (14 * 96, 1, 8, 8)


def test_images_keep_their_labels(digits: Dataset) -> None:
    _, numbers = whole(make(tagged(digits)).epoch(3))
    _, labels = whole(make(digits).epoch(3))
    assert torch.equal(digits.train.targets[numbers], labels)


def test_an_epoch_takes_samples_once_and_drops_the_incomplete_batch(digits: Dataset) -> None:
    made = make(tagged(digits), batch_size=100)
    assert made.steps_per_epoch == 14
    _, numbers = whole(made.epoch(0))
    assert len(numbers) == len(set(numbers.tolist())) == 1400


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else(digits: Dataset) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        numbers: list[int] = whole(make(tagged(digits), seed=seed).epoch(epoch))[1].tolist()
        return numbers

    orders = [order(seed, epoch) for seed in (0, 1, 2**40) for epoch in (0, 1)]
    assert len({tuple(numbers) for numbers in orders}) == 6
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert order(0, 1) == orders[1]
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is not drawn from


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 1), (2, 1), (1, 4), (3, 2), (2, 4)])
def test_ranks_and_micro_batches_add_up_to_one_devices_batches(
    world_size: int, micro_batches: int, placement: Literal["resident", "streamed"], digits: Dataset
) -> None:
    expected = list(make(digits, augment=EVERYTHING).epoch(1))
    ranks = [
        list(
            make(
                digits,
                augment=EVERYTHING,
                world_size=world_size,
                rank=rank,
                micro_batches=micro_batches,
                placement=placement,
            ).epoch(1)
        )
        for rank in range(world_size)
    ]
    for step, (images, labels) in enumerate(expected):
        own = slice(step * micro_batches, (step + 1) * micro_batches)
        parts = [part for rank in ranks for part in rank[own]]
        assert len(parts) == world_size * micro_batches
        assert len({len(part[0]) for part in parts}) == 1
        assert torch.equal(torch.cat([part[0] for part in parts]), images)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)
    assert all(len(rank) == len(expected) * micro_batches for rank in ranks)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_epoch_can_be_taken_up_at_any_step(placement: str, digits: Dataset) -> None:
    made = make(digits, augment=EVERYTHING, micro_batches=2, placement=placement)
    complete = list(made.epoch(5))
    rest = list(made.epoch(5, start_step=9))
    assert len(rest) == 2 * (14 - 9)
    for (images, labels), (others, other_labels) in zip(rest, complete[18:], strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)
    assert list(made.epoch(5, start_step=14)) == []
    with pytest.raises(ValueError, match="start_step 15 is outside an epoch of 14 steps"):
        made.epoch(5, start_step=15)


def test_batches_are_the_callers_to_change(digits: Dataset) -> None:
    made = make(digits)
    expected = [images.clone() for images, _ in made.epoch(0)]
    kept = []
    for images, labels in made.epoch(0):
        kept.append(images.clone())
        images.fill_(float("nan"))
        labels.fill_(-1)
    assert torch.equal(torch.cat(kept), torch.cat(expected))
    assert len({images.data_ptr() for images, _ in list(made.epoch(0))}) == 14


def test_crop_is_torchvisions_pad_and_crop_at_every_offset() -> None:
    images = torch.randint(1, 256, (25, 3, 6, 7), dtype=torch.uint8)
    offsets = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    cropped = crop(images, offsets[:, 0], offsets[:, 1], 2, torch.arange(25))
    for image, (top, left), found in zip(images, offsets.tolist(), cropped, strict=True):
        assert torch.equal(found, reference.crop(reference.pad(image, [2]), top, left, 6, 7))


def test_flip_mirrors_the_chosen_images() -> None:
    images = torch.randint(0, 256, (4, 2, 3, 5), dtype=torch.uint8)
    flipped = flip(images, torch.tensor([True, False, False, True]))
    for index, image in enumerate(images):
        assert torch.equal(flipped[index], reference.hflip(image) if index in (0, 3) else image)


def test_cutout_sets_a_square_to_the_mean_and_may_hang_over_the_edge() -> None:
    images = cutout_(torch.ones(3, 2, 5, 6), torch.tensor([2, 0, 4]), torch.tensor([2, 0, 5]), 3)
    expected = torch.ones(3, 5, 6)
    expected[0, 1:4, 1:4] = 0
    expected[1, :2, :2] = 0
    expected[2, 3:, 4:] = 0
    assert torch.equal(images, expected.unsqueeze(1).expand(3, 2, 5, 6))
    even = cutout_(torch.ones(1, 1, 4, 4), torch.tensor([2]), torch.tensor([2]), 2)
    assert even[0, 0].tolist() == [[1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]]


def test_each_augmentation_does_its_own_part_in_a_batch(digits: Dataset) -> None:
    """The plain batch, augmented by torchvision with the epoch's draws, equals the augmented batch."""
    (plain, _), (found, _) = (next(make(digits, augment=augment).epoch(2)) for augment in (Augment(), EVERYTHING))
    draws = draw_epoch(0, 2, len(digits.train), (8, 8), padding=2)
    black = (
        (0 - torch.tensor(digits.statistics["inputs"].mean)) / torch.tensor(digits.statistics["inputs"].std)
    ).item()
    for index in range(96):
        padded = reference.pad(plain[index], [2], fill=black)
        image = reference.crop(padded, int(draws.top[index]), int(draws.left[index]), 8, 8)
        if draws.flipped[index]:
            image = reference.hflip(image)
        row, column = int(draws.row[index]), int(draws.column[index])
        image[:, max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2] = 0
        assert torch.equal(found[index], image)


def test_draws_have_torchvisions_distribution() -> None:
    count = 250_000
    draws = draw_epoch(0, 0, count, (8, 10), padding=2)
    assert abs(draws.flipped.double().mean().item() - 0.5) < 0.005
    for values, end in ((draws.top, 5), (draws.left, 5), (draws.row, 8), (draws.column, 10)):
        shares = torch.bincount(values, minlength=end).double() / count
        assert len(shares) == end
        assert (shares - 1 / end).abs().max() < 0.005
    offsets = torch.bincount(draws.top * 5 + draws.left, minlength=25).double() / count  # independent of each other
    assert (offsets - 1 / 25).abs().max() < 0.003


def test_switching_one_augmentation_leaves_the_others_draws_alone(digits: Dataset) -> None:
    with_cutout, _ = next(make(digits, augment=Augment(crop_padding=2, flip=True, cutout=3)).epoch(0))
    without, _ = next(make(digits, augment=Augment(crop_padding=2, flip=True)).epoch(0))
    untouched = with_cutout != 0
    assert untouched.float().mean() > 0.7
    assert torch.equal(with_cutout[untouched], without[untouched])


class Largest(TorchDispatchMode):
    """The largest tensor, in bytes, that any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        views = func._schema.name in ("aten::unfold", "aten::expand", "aten::view", "aten::alias")
        if not views:
            sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
            self.bytes = max([self.bytes, *sizes])
        return made


def test_augmenting_large_images_builds_no_index_for_every_pixel() -> None:
    images = torch.randint(0, 256, (4, 3, 224, 224), dtype=torch.uint8)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        offsets = torch.tensor([0, 5, 10, 16])
        flip(crop(images, offsets, offsets, 8, torch.arange(4)), torch.tensor([True, False, True, False]))
    assert largest.bytes <= 4 * 3 * 240 * 240  # the padded uint8 images; an int64 index a pixel would be 4.8 MB


@pytest.mark.parametrize("size", [1439, 10_000])
def test_a_batch_larger_than_the_training_set_is_refused_by_name(size: int, digits: Dataset) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"train\.batch_size: found {size}, but digits has 1438 training samples; allowed: at most 1438",
    ):
        make(digits, batch_size=size)
    assert make(digits, batch_size=1438).steps_per_epoch == 1


def test_a_batch_that_cannot_be_divided_is_refused_by_name(digits: Dataset) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.batch_size: found 96, which is not divisible by 5 processes x 2 micro-batches"
    ):
        make(digits, world_size=5, micro_batches=2)


def test_auto_is_resident_only_where_all_arrays_take_a_small_share_of_memory(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = digits.train.inputs.nbytes + digits.train.targets.nbytes
    for available, placement in ((4 * needed, "resident"), (4 * needed - 4, "streamed")):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=available: SimpleNamespace(available=free))
        assert choose_placement(digits, CPU) == placement


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_dense_targets_are_where_the_inputs_are(placement: str, digits: Dataset) -> None:
    """The device is ``meta``, on which tensors have no values."""
    dense = replace(digits, train=labelled(digits.train.inputs, digits.train.inputs.float()))
    moved = []
    task = task_of(dense, device=CPU)
    placed = SimpleNamespace(
        dataset=dense, device=torch.device("meta"), arrays=task.arrays, batch=lambda rows: moved.extend(rows)
    )
    values: dict[str, Any] = {"batch_size": 96, "micro_batches": 1, "rank": 0, "world_size": 1, "seed": 0}
    made = TrainBatches(placed, **values, augment=Augment(), placement=placement)  # type: ignore[arg-type]
    assert [len(rows) for rows in moved] == [1, 1], "the rows that the task is tried with"
    assert {array.device.type for array in made._arrays} == {"meta" if placement == "resident" else "cpu"}


def reading() -> int:
    return sum(thread.name == "read-ahead" for thread in threading.enumerate())


def test_an_abandoned_epoch_leaves_no_thread(digits: Dataset) -> None:
    made = make(digits, placement="streamed")
    epoch = made.epoch(0)
    next(epoch)
    assert reading() == 1
    del epoch
    assert reading() == 0
    for images, _ in made.epoch(0):
        del images
        break
    assert reading() == 0
    assert len(list(made.epoch(0))) == 14
    assert reading() == 0


def test_closing_ends_the_thread_of_an_unfinished_epoch(digits: Dataset) -> None:
    with make(digits, placement="streamed") as made:
        epoch = made.epoch(0)
        next(epoch)
        assert reading() == 1
    assert reading() == 0
    with pytest.raises(RuntimeError, match="closed before the epoch's end"):
        next(epoch)
    made.close()


def test_two_epochs_can_be_under_way_at_once(digits: Dataset) -> None:
    made = make(digits, placement="streamed")
    pairs = list(zip(made.epoch(0), made.epoch(0), strict=True))
    assert len(pairs) == 14
    assert all(torch.equal(one[0], other[0]) for one, other in pairs)


def test_reading_ahead_is_bounded(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = threading.Semaphore(0)
    load = Reader._load

    def counted(self: Any, *arguments: Any) -> Any:
        loaded.release()
        return load(self, *arguments)

    monkeypatch.setattr(Reader, "_load", counted)
    epoch = make(digits, placement="streamed").epoch(0)
    next(epoch)
    for _ in range(READ_AHEAD + 1):  # the one taken, and those ahead of it
        assert loaded.acquire(timeout=5)
    assert not loaded.acquire(timeout=0.05)
    next(epoch)
    assert loaded.acquire(timeout=5)
    del epoch


def test_rows_of_arrays_that_memory_may_not_hold_are_announced_and_read_from_the_file(
    digits_folder: Path, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, int]] = []

    def fadvise(descriptor: int, *arguments: int) -> None:
        told.append(arguments)  # type: ignore[arg-type]
        system(descriptor, *arguments)

    system = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    monkeypatch.setattr(environment, "memory_limits", lambda: [150_000])
    beyond = read(digits_folder)
    assert set(beyond.train.files) == {"inputs"}, "92,032 bytes are more than half of 150,000"
    beyond.train.inputs.fill_(0)  # does not reach the file
    epoch = make(beyond, placement="streamed").epoch(0)
    first = next(epoch)
    while len(told) < 1 + 2 * 96:
        time.sleep(0.001)
    images, labels = whole(chain([first], epoch))
    expected = whole(make(digits).epoch(0))
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])
    _, order = whole(make(tagged(digits)).epoch(0))
    start = (digits_folder / "train_inputs.npy").stat().st_size - digits.train.inputs.nbytes
    rows = [(start + 64 * row, 64, os.POSIX_FADV_WILLNEED) for row in order.tolist()]
    assert told == [(0, 0, os.POSIX_FADV_RANDOM), *rows]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "int64", "float16", "float64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 5)])
def test_rows_of_any_type_are_read_from_a_file(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 200, (20, *shape)).astype(dtype)
    path = tmp_path / "rows.npy"
    np.save(path, values)
    rows = torch.tensor([19, 0, 7, 7])
    found = torch.empty((4, *shape), dtype=torch.from_numpy(values).dtype)
    row_bytes = values.nbytes // 20
    with path.open("rb", buffering=0) as file:
        opened = OpenRows(RowFile(path, path.stat().st_size - values.nbytes, row_bytes), file.fileno())
        opened.announce(rows)
        opened.read(rows, found)
        np.testing.assert_array_equal(found.numpy(), values[rows])
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(OSError, match=r"rows\.npy: row 19 cannot be read whole; run `dvc repro --force prepare`"):
            opened.read(rows, found)


def test_what_goes_wrong_in_the_thread_is_raised_where_batches_are_taken(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Reader._load
    calls = []

    def fails(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError("the disk went away")
        return load(self, *arguments)

    monkeypatch.setattr(Reader, "_load", fails)
    epoch = make(digits, placement="streamed").epoch(0)
    next(epoch)
    next(epoch)
    with pytest.raises(OSError, match="the disk went away"):
        next(epoch)


@pytest.mark.parametrize("count", [1, 2, 3, 17, 359])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_evaluation_sees_every_sample_once_in_order(count: int, world_size: int, digits: Dataset) -> None:
    split = digits.test[:count]
    shares = [
        list(evaluation_batches(split, task_of(digits), rank=rank, world_size=world_size, batch_size=10))
        for rank in range(world_size)
    ]
    sizes = [sum(len(labels) for _, labels in share) for share in shares]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert all(len(labels) == 10 for share in shares for _, labels in share[:-1])
    images, labels = whole(batch for share in shares for batch in share)
    expected = reference.normalize(split.inputs.float().div(255), *known(digits))
    assert torch.equal(images, expected)
    assert torch.equal(labels, split.targets)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("augment", [Augment(), EVERYTHING], ids=["plain", "augmented"])
def test_the_gpu_sees_the_same_bits_without_waiting(augment: Augment, placement: str, digits: Dataset) -> None:
    expected = [list(make(digits, augment=augment, micro_batches=2).epoch(epoch)) for epoch in range(3)]
    made = make(digits, augment=augment, micro_batches=2, placement=placement, device=torch.device("cuda"))
    found = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for epoch in range(3):
            found.append(list(made.epoch(epoch)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(expected, found, strict=True):
        for (images, labels), (cuda_images, cuda_labels) in zip(one, other, strict=True):
            assert cuda_images.is_cuda
            assert torch.equal(cuda_images.cpu(), images)
            assert torch.equal(cuda_labels.cpu(), labels)


@pytest.mark.gpu("the order of streams")
def test_streaming_survives_a_busy_device(digits: Dataset) -> None:
    """Buffers must not be reused while a slow consumer's kernels still wait to read them."""
    made = make(digits, placement="streamed", batch_size=16, device=torch.device("cuda"))
    expected = [images for images, _ in make(digits, batch_size=16).epoch(0)]
    sums = []
    for images, _ in made.epoch(0):
        torch.cuda._sleep(2_000_000)
        sums.append(images.clone())
        del images
    assert torch.equal(torch.cat(sums).cpu(), torch.cat(expected))


@pytest.mark.gpu
def test_evaluation_on_the_gpu_is_bit_identical(digits: Dataset) -> None:
    def everything(device: torch.device) -> tuple[Tensor, Tensor]:
        task = task_of(digits, device=device)
        return whole(evaluation_batches(digits.test, task, rank=0, world_size=1, batch_size=100))

    for one, other in zip(everything(CPU), everything(torch.device("cuda")), strict=True):
        assert torch.equal(one, other.cpu())
