"""Batches of real digits, compared with torchvision and with the same samples divided in other ways."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.profiler import profile
from torchvision.transforms import functional as reference

from pipeline import environment
from pipeline.data.prepared import Dataset, read
from pipeline.data.reader import READ_AHEAD, OpenRows, Reader
from pipeline.errors import ConfigError
from pipeline.params import Augment
from pipeline.tasks.batches import choose_placement, crop, cutout_, draw_epoch, evaluation_batches, flip
from tests.nets import labelled, task_of
from tests.trainings import EVERYTHING, make_batches, same

CPU = torch.device("cpu")
PLACEMENTS = ("resident", "streamed")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert reading() == 0


def whole(made: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*made, strict=True)
    return torch.cat(images), torch.cat(labels)


def tagged(dataset: Dataset) -> Dataset:
    """Return the data set with each training sample's number as its label."""
    return replace(dataset, train=labelled(dataset.train.inputs, torch.arange(len(dataset.train))))


def known(dataset: Dataset) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation of each channel."""
    return list(dataset.statistics["inputs"].mean), list(dataset.statistics["inputs"].std)


def test_pixels_are_bit_for_bit_those_of_torchvision(digits: Dataset) -> None:
    made = make_batches(tagged(digits))
    images, labels = whole(made.epoch(0))
    for image, label in zip(images, labels, strict=True):
        pixels = reference.to_tensor(digits.train.inputs[label].numpy().transpose(1, 2, 0))
        expected = reference.normalize(pixels, *known(digits))
        assert torch.equal(image, expected)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.shape == (14 * 96, 1, 8, 8)


def test_the_global_generator_plays_no_part(digits: Dataset) -> None:
    expected = list(make_batches(digits, augment=EVERYTHING).epoch(1))
    torch.manual_seed(123)
    before = torch.get_rng_state()
    same(make_batches(digits, augment=EVERYTHING).epoch(1), expected)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_micro_batches_add_up_to_one_devices_batches(placement: str, digits: Dataset) -> None:
    share = {"augment": EVERYTHING, "world_size": 3, "micro_batches": 2, "placement": placement}
    ranks = [list(make_batches(digits, rank=rank, **share).epoch(1)) for rank in range(3)]
    steps = [[part for rank in ranks for part in rank[start : start + 2]] for start in range(0, len(ranks[0]), 2)]
    same(map(whole, steps), make_batches(digits, augment=EVERYTHING).epoch(1))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_epoch_can_be_taken_up_at_any_step(placement: str, digits: Dataset) -> None:
    made = make_batches(digits, augment=EVERYTHING, micro_batches=2, placement=placement)
    same(made.epoch(5, start_step=9), list(made.epoch(5))[2 * 9 :])
    assert list(made.epoch(5, start_step=14)) == []


def test_batches_are_the_callers_to_change(digits: Dataset) -> None:
    made = make_batches(digits)
    expected = [images.clone() for images, _ in made.epoch(0)]
    kept = []
    for images, labels in made.epoch(0):
        kept.append(images.clone())
        images.fill_(float("nan"))
        labels.fill_(-1)
    assert torch.equal(torch.cat(kept), torch.cat(expected))
    assert len({images.data_ptr() for images, _ in list(made.epoch(0))}) == 14


def test_an_even_cutout_begins_before_the_centre() -> None:
    even = cutout_(torch.ones(1, 1, 4, 4), torch.tensor([2]), torch.tensor([2]), 2)
    assert even[0, 0].tolist() == [[1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]]


def test_each_augmentation_does_its_own_part_in_a_batch(digits: Dataset) -> None:
    """The plain batch, augmented by torchvision with the epoch's draws, equals the augmented batch."""
    (plain, _), (augmented, _) = (
        next(make_batches(digits, augment=augment).epoch(2)) for augment in (Augment(), EVERYTHING)
    )
    draws = draw_epoch(0, 2, len(digits.train), (8, 8), padding=2)
    mean, std = map(torch.tensor, known(digits))
    black = ((0 - mean) / std).item()
    for index in range(96):
        padded = reference.pad(plain[index], [2], fill=black)
        image = reference.crop(padded, int(draws.top[index]), int(draws.left[index]), 8, 8)
        if draws.flipped[index]:
            image = reference.hflip(image)
        row, column = int(draws.row[index]), int(draws.column[index])
        image[:, max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2] = 0
        assert torch.equal(augmented[index], image)


def test_draws_have_torchvisions_distribution() -> None:
    count = 250_000
    draws = draw_epoch(0, 0, count, (8, 10), padding=2)
    assert abs(draws.flipped.double().mean().item() - 0.5) < 0.005
    for values, end in ((draws.top, 5), (draws.left, 5), (draws.row, 8), (draws.column, 10)):
        shares = torch.bincount(values, minlength=end).double() / count
        assert len(shares) == end
        assert (shares - 1 / end).abs().max() < 0.005
    offsets = torch.bincount(draws.top * 5 + draws.left, minlength=25).double() / count  # top and left are independent
    assert (offsets - 1 / 25).abs().max() < 0.003


def test_switching_one_augmentation_leaves_the_others_draws_alone(digits: Dataset) -> None:
    with_cutout, _ = next(make_batches(digits, augment=Augment(crop_padding=2, flip=True, cutout=3)).epoch(0))
    without, _ = next(make_batches(digits, augment=Augment(crop_padding=2, flip=True)).epoch(0))
    untouched = with_cutout != 0
    assert untouched.float().mean() > 0.7
    assert torch.equal(with_cutout[untouched], without[untouched])


def test_augmenting_builds_no_index_of_pixels() -> None:
    images, offsets = torch.randint(0, 256, (4, 3, 224, 224), dtype=torch.uint8), torch.tensor([0, 5, 10, 16])
    with profile(profile_memory=True) as operations:
        flip(crop(images, offsets, offsets, 8, torch.arange(4)), torch.tensor([True, False, True, False]))
    largest = max(event.self_cpu_memory_usage for event in operations.events())
    assert 0 < largest <= 4 * 3 * 240 * 240  # the padded uint8 images; an int64 index of every value would be 4.8 MB


def test_an_impossible_batch_size_is_refused(digits: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"found 1439, but digits has 1438 training samples; allowed: at most 1438"):
        make_batches(digits, batch_size=1439)
    assert make_batches(digits, batch_size=1438).steps_per_epoch == 1
    with pytest.raises(ConfigError, match=r"found 96, which is not divisible by 5 processes x 2 micro-batches"):
        make_batches(digits, world_size=5, micro_batches=2)


def test_auto_is_resident_only_where_memory_suffices(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = digits.train.inputs.nbytes + digits.train.targets.nbytes
    for available, placement in ((4 * needed, "resident"), (4 * needed - 4, "streamed")):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=available: SimpleNamespace(available=free))
        assert choose_placement(digits, CPU) == placement
        monkeypatch.setattr(environment, "memory_limits", lambda: [4 * needed - 4])
        assert choose_placement(digits, CPU) == "streamed", "a container may not use all memory of its machine"
        monkeypatch.undo()


def reading() -> int:
    return sum(thread.name == "read-ahead" for thread in threading.enumerate())


def test_an_abandoned_epoch_leaves_no_thread(digits: Dataset) -> None:
    made = make_batches(digits, placement="streamed")
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
    made = make_batches(digits, placement="streamed")
    epoch = made.epoch(0)
    next(epoch)
    assert reading() == 1
    made.close()
    assert reading() == 0
    with pytest.raises(RuntimeError, match="closed before the epoch's end"):
        next(epoch)
    made.close()


def test_two_epochs_can_be_under_way_at_once(digits: Dataset) -> None:
    made = make_batches(digits, placement="streamed")
    same(made.epoch(0), made.epoch(0))


def test_reading_ahead_is_bounded(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = threading.Semaphore(0)
    rows = [digits.train.inputs[:96], digits.train.targets[:96]], None

    def load(*_: Any) -> Any:
        loaded.release()
        return rows

    monkeypatch.setattr(Reader, "_load", load)
    epoch = make_batches(digits, placement="streamed").epoch(0)
    next(epoch)
    for _ in range(READ_AHEAD + 1):  # the batch taken, and those read ahead
        assert loaded.acquire(timeout=5)
    assert not loaded.acquire(timeout=0.05)
    next(epoch)
    assert loaded.acquire(timeout=5)
    del epoch


def test_rows_beyond_memory_are_announced_and_read(
    digits_folder: Path, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[tuple[int, int, int]] = []

    def fadvise(descriptor: int, *arguments: int) -> None:
        announced.append(arguments)  # type: ignore[arg-type]
        system(descriptor, *arguments)

    system = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    monkeypatch.setattr(environment, "memory_limits", lambda: [150_000])
    beyond = read(digits_folder)
    assert set(beyond.train.beyond_cache) == {"inputs"}, "92,032 bytes are more than half of 150,000"
    beyond.train.inputs.fill_(0)  # does not reach the file
    epoch = make_batches(beyond, placement="streamed").epoch(0)
    first = next(epoch)
    while len(announced) < 1 + 2 * 96:
        time.sleep(0.001)
    same(chain([first], epoch), make_batches(digits).epoch(0))
    _, order = whole(make_batches(tagged(digits)).epoch(0))
    start = (digits_folder / "train_inputs.npy").stat().st_size - digits.train.inputs.nbytes
    rows = [(start + 64 * row, 64, os.POSIX_FADV_WILLNEED) for row in order.tolist()]
    assert announced == [(0, 0, os.POSIX_FADV_RANDOM), *rows]


def test_the_system_reads_ahead_in_tests_alone(digits_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "memory_limits", lambda: [10_000])
    opened = read(digits_folder)
    assert (set(opened.train.beyond_cache), set(opened.test.beyond_cache)) == ({"inputs", "targets"}, set())
    flags, name = defaultdict[str, set[str]](set), ""  # other tests have the same files open
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name = line.split(str(digits_folder))[-1] if str(digits_folder) in line else name
        if line.startswith("VmFlags:"):
            flags[name].update(line.split())
            name = ""
    assert {name for name in flags if "rr" in flags[name]} == {"/train_inputs.npy", "/train_targets.npy"}
    assert "/test_inputs.npy" in flags


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "uint32", "int64", "float16", "float64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 5)])
def test_rows_of_any_type_are_read_from_a_file(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 200, (20, *shape)).astype(dtype)
    path = tmp_path / "rows.npy"
    np.save(path, values)
    rows = torch.tensor([19, 0, 7, 7])
    read_rows = torch.empty((4, *shape), dtype=torch.from_numpy(values).dtype)
    with OpenRows(np.load(path, mmap_mode="r")) as opened:
        opened.announce(rows)
        opened.fill(read_rows, rows)
        np.testing.assert_array_equal(read_rows.numpy(), values[rows])
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(OSError, match=r"rows\.npy: row 19 cannot be read whole; run `dvc repro --force prepare`"):
            opened.fill(read_rows, rows)


def test_errors_of_the_thread_are_raised_with_batches(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [digits.train.inputs[:96], digits.train.targets[:96]], None
    monkeypatch.setattr(Reader, "_load", Mock(side_effect=[rows, rows, OSError("the disk went away")]))
    epoch = make_batches(digits, placement="streamed").epoch(0)
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
    expected = [list(make_batches(digits, augment=augment, micro_batches=2).epoch(epoch)) for epoch in range(3)]
    made = make_batches(digits, augment=augment, micro_batches=2, placement=placement, device=torch.device("cuda"))
    epochs = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for epoch in range(3):
            epochs.append(list(made.epoch(epoch)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(images.is_cuda for epoch in epochs for images, _ in epoch)
    same(chain(*epochs), chain(*expected))


@pytest.mark.gpu("the order of streams")
def test_streaming_survives_a_busy_device(digits: Dataset) -> None:
    """Buffers must not be reused while a slow consumer's kernels still wait to read them."""
    made = make_batches(digits, placement="streamed", batch_size=16, device=torch.device("cuda"))
    expected = [images for images, _ in make_batches(digits, batch_size=16).epoch(0)]
    sums = []
    for images, _ in made.epoch(0):
        torch.cuda._sleep(2_000_000)
        sums.append(images.clone())
        del images
    assert torch.equal(torch.cat(sums).cpu(), torch.cat(expected))


@pytest.mark.gpu
def test_evaluation_on_the_gpu_is_bit_identical(digits: Dataset) -> None:
    on_cpu, on_gpu = (
        evaluation_batches(digits.test, task_of(digits, device=device), rank=0, world_size=1, batch_size=100)
        for device in (CPU, torch.device("cuda"))
    )
    same(on_cpu, on_gpu)
