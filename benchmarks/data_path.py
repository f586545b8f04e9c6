"""Measure how many times faster than torchvision our data path makes the same batches, on one CPU thread.

Both sides read 60,000 images of 28x28 from the same IDX files and make normalised float32 batches of 64. Before any
timing, a check requires that both sides make identical tensors from the same samples without augmentation.
"""

from __future__ import annotations

import struct
import tempfile
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST
from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

from benchmarks.pairs import ratio
from pipeline import tasks
from pipeline.data.packing import prepare
from pipeline.data.prepared import Dataset, read
from pipeline.params import Augment, Train, parse
from pipeline.tasks.batches import TrainBatches, draw_epoch

SAMPLES = 60_000
BATCH_SIZE = 64
PADDING = 4
REFERENCE_BATCHES = 60
"""Number of torchvision's batches that are timed: few, because they are slow. Our batches are timed over an epoch."""
CASES = {
    "plain": (Augment(), [], 100.0),
    "augmented": (Augment(crop_padding=PADDING, flip=True), [RandomCrop(28, PADDING), RandomHorizontalFlip()], 30.0),
}
"""Case -> our augmentation, torchvision's augmentation, and the target ratio."""


def ratio_of(case: str, pairs: int = 10) -> dict[str, Any]:
    """Return torchvision's seconds per sample divided by ours. Raises AssertionError if their tensors differ."""
    augment, reference_augment, target = CASES[case]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dataset = _make(Path(folder))
            _assert_identical(dataset, Path(folder))
            ours, epochs = _ours(dataset, augment), count()
            reference = DataLoader(_reference(dataset, Path(folder), reference_augment), BATCH_SIZE, shuffle=True)
            measured = ratio(
                lambda: _seconds_per_sample(reference, REFERENCE_BATCHES),
                lambda: _seconds_per_sample(ours.epoch(next(epochs)), ours.steps_per_epoch),
                pairs,
                warm_up=True,
            )
    finally:
        torch.set_num_threads(threads)
    return {"target_ratio": target, "samples": SAMPLES, "batch_size": BATCH_SIZE, "threads": 1, **measured}


def _make(folder: Path) -> Dataset:
    """Write random images as IDX files where torchvision looks for them, and prepare them with our own stage."""
    random = np.random.default_rng(0)
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split, size in (("train", SAMPLES), ("t10k", 1)):
        images = random.integers(0, 256, (size, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, size, dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (raw / f"{split}-{name}-ubyte").write_bytes(header + array.tobytes())
    (folder / "raw").mkdir()
    (folder / "raw" / "fashion_mnist").symlink_to(raw)
    config = parse({"fetch": {"dataset": "fashion_mnist"}, "variants": {"baseline": {}}})
    prepare(config, folder / "raw", folder / "prepared")
    return read(folder / "prepared")


def _ours(dataset: Dataset, augment: Augment) -> TrainBatches:
    return TrainBatches(
        tasks.of_job(Train(), dataset),
        batch_size=BATCH_SIZE,
        micro_batches=1,
        rank=0,
        world_size=1,
        seed=0,
        augment=augment,
        placement="resident",
    )


def _reference(dataset: Dataset, folder: Path, augment: list[Any]) -> FashionMNIST:
    known = dataset.statistics["inputs"]
    transform = Compose([*augment, ToTensor(), Normalize(known.mean, known.std)])
    return FashionMNIST(folder, train=True, transform=transform)


def _assert_identical(dataset: Dataset, folder: Path) -> None:
    order = draw_epoch(0, 0, SAMPLES, (28, 28), padding=0).order
    loader = DataLoader(_reference(dataset, folder, []), BATCH_SIZE, sampler=order[: 10 * BATCH_SIZE].tolist())
    for (images, labels), (expected, expected_labels) in zip(_ours(dataset, Augment()).epoch(0), loader, strict=False):
        assert torch.equal(images, expected)
        assert torch.equal(labels, expected_labels)


def _seconds_per_sample(batches: Iterable[tuple[Tensor, Tensor]], wanted: int) -> float:
    """Return the seconds per sample over the first ``wanted`` batches of an epoch, including the epoch's start."""
    start = time.perf_counter()
    for number, _ in enumerate(batches, 1):
        if number == wanted:
            break
    return (time.perf_counter() - start) / (wanted * BATCH_SIZE)
