"""The data path alone against torchvision's: how many times faster the same batches arrive, on one CPU thread.

Both sides read 60,000 images of 28x28 from the same IDX files and give normalised float32 batches of 64. Before any
timing, their tensors are found identical for the same order. Each pair times both sides one right after the other, and
every second pair in the opposite order, so that a busy machine hits both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import __version__ as torchvision_version
from torchvision.datasets import FashionMNIST
from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from pipeline.config import Augment, parse
from pipeline.data.batches import TrainBatches, draw_epoch
from pipeline.data.packing import prepare
from pipeline.data.prepared import Dataset, read

SAMPLES = 60_000
BATCH_SIZE = 64
PADDING = 4
REFERENCE_BATCHES = 60
"""Of torchvision's epoch, so many batches are timed: it is slow enough. Ours is timed over its whole epoch."""
CASES = {
    "plain": (Augment(), [], 100.0),
    "augmented": (Augment(crop_padding=PADDING, flip=True), [RandomCrop(28, PADDING), RandomHorizontalFlip()], 30.0),
}
"""Our augmentation, torchvision's, and the ratio that is asked for."""


def run(pairs: int = 10) -> dict[str, Any]:
    """Time ``pairs`` pairs of both cases.

    Returns the parameters and, for each case, every pair's ratio (torchvision's time over ours, per sample), their
    median, the target, and each side's median time a sample in microseconds. Raises AssertionError if the two sides
    do not give the same tensors.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dataset = _make(Path(folder))
            _assert_identical(dataset, Path(folder))
            cases = {name: _time_case(dataset, Path(folder), name, pairs) for name in CASES}
    finally:
        torch.set_num_threads(threads)
    parameters = {
        "samples": SAMPLES,
        "shape": [1, 28, 28],
        "batch_size": BATCH_SIZE,
        "threads": 1,
        "pairs": pairs,
        "crop_padding": PADDING,
        "torch": torch.__version__,
        "torchvision": torchvision_version,
    }
    return {"parameters": parameters, "cases": cases}


def _make(folder: Path) -> Dataset:
    """Random images, as IDX files where torchvision looks for them, prepared by our own stage."""
    random = np.random.default_rng(0)
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", SAMPLES), ("t10k", 1)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
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
        dataset,
        batch_size=BATCH_SIZE,
        micro_batches=1,
        rank=0,
        world_size=1,
        seed=0,
        augment=augment,
        placement="resident",
        device=torch.device("cpu"),
    )


def _reference(dataset: Dataset, folder: Path, augment: list[Any]) -> FashionMNIST:
    transform = Compose([*augment, ToTensor(), Normalize(dataset.mean, dataset.std)])
    return FashionMNIST(folder, train=True, transform=transform)


def _assert_identical(dataset: Dataset, folder: Path) -> None:
    order = draw_epoch(0, 0, SAMPLES, (28, 28), padding=0).order
    loader = DataLoader(_reference(dataset, folder, []), BATCH_SIZE, sampler=order[: 10 * BATCH_SIZE].tolist())
    for (images, labels), (expected, expected_labels) in zip(_ours(dataset, Augment()).epoch(0), loader, strict=False):
        assert torch.equal(images, expected)
        assert torch.equal(labels, expected_labels)


def _time_case(dataset: Dataset, folder: Path, name: str, pairs: int) -> dict[str, Any]:
    augment, reference_augment, target = CASES[name]
    ours = _ours(dataset, augment)
    reference = DataLoader(_reference(dataset, folder, reference_augment), BATCH_SIZE, shuffle=True, num_workers=0)

    def time_ours(pair: int) -> float:
        return _seconds_per_sample(ours.epoch(pair), ours.steps_per_epoch)

    def time_reference(_: int) -> float:
        return _seconds_per_sample(reference, REFERENCE_BATCHES)

    times: dict[Any, list[float]] = {time_ours: [], time_reference: []}
    for side in times:  # warm-up
        side(0)
    for pair in range(1, pairs + 1):
        for side in (time_ours, time_reference) if pair % 2 else (time_reference, time_ours):
            times[side].append(side(pair))
    ratios = [other / own for own, other in zip(times[time_ours], times[time_reference], strict=True)]
    return {
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "target_ratio": target,
        "our_sample_us": 1e6 * statistics.median(times[time_ours]),
        "torchvision_sample_us": 1e6 * statistics.median(times[time_reference]),
    }


def _seconds_per_sample(batches: Iterable[tuple[Tensor, Tensor]], count: int) -> float:
    """From asking for the first of ``count`` batches, an epoch's start-up included, to holding the last."""
    start = time.perf_counter()
    for number, _ in enumerate(batches, 1):
        if number == count:
            break
    return (time.perf_counter() - start) / (count * BATCH_SIZE)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--pairs", type=int, default=10)
    print(json.dumps(run(arguments.parse_args().pairs), indent=2))
