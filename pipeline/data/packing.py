"""Packing: raw files, decoded once, become the prepared data set."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from pipeline.data import DataError, file_sha256
from pipeline.data.datasets import Chunk, decode
from pipeline.data.prepared import DESCRIPTION, Description
from pipeline.files import write_array
from pipeline.params import Config

STATISTICS_CHUNK_BYTES = 16 << 20


def prepare(config: Config, raw: Path, out: Path) -> None:
    """Decode ``raw/<dataset>/`` and replace the directory ``out`` with the packed data set, whole or not at all.

    Raises DataError if the raw files cannot be decoded, a split is empty, or a channel is constant.
    """
    decoded = decode(config, raw)
    work = out.with_name(f"{out.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        classes = len(decoded.classes)
        train_counts, train_digests = _write_split(work, "train", decoded.train, decoded.shape, classes)
        test_counts, test_digests = _write_split(work, "test", decoded.test, decoded.shape, classes)
        known = set(train_digests)
        mean, std = pixel_statistics(np.load(work / "train_images.npy", mmap_mode="r"))
        channels, height, width = decoded.shape
        description = Description(
            name=config.fetch.dataset,
            classes=decoded.classes,
            channels=channels,
            height=height,
            width=width,
            train_count=len(train_digests),
            test_count=len(test_digests),
            train_class_counts=train_counts,
            test_class_counts=test_counts,
            test_in_train_count=sum(each in known for each in test_digests),
            test_repeated_count=len(test_digests) - len(set(test_digests)),
            mean=mean,
            std=std,
            files={path.name: file_sha256(path) for path in sorted(work.glob("*.npy"))},
        )
        description = description.model_copy(update={"sha256": description.digest()})
        text = json.dumps(description.model_dump(mode="json"), indent=2) + "\n"
        (work / DESCRIPTION).write_text(text, encoding="utf-8")
        _replace_directory(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(
        f"prepared {description.name}: {description.train_count:,} training and {description.test_count:,} test images "
        f"of {channels}x{height}x{width}, {classes} classes; {description.test_in_train_count:,} test images are "
        f"training images too, {description.test_repeated_count:,} repeat another",
        file=sys.stderr,
    )


def pixel_statistics(images: npt.NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation per channel of uint8 images [N, C, H, W], in units of 0..1.

    Summed over a histogram in whole numbers, so exact but for the last rounding. Raises DataError for a constant
    channel: it could not be normalised.
    """
    count, channels = images.shape[:2]
    histogram = np.zeros((channels, 256), dtype=np.int64)
    step = max(1, STATISTICS_CHUNK_BYTES // (images[0].size or 1))
    for start in range(0, count, step):
        chunk = images[start : start + step]
        for channel in range(channels):
            histogram[channel] += np.bincount(chunk[:, channel].ravel(), minlength=256)
    mean, std = [], []
    for channel, counts in enumerate(histogram.tolist()):
        pixels = sum(counts)
        total = sum(value * number for value, number in enumerate(counts))
        squares = sum(value * value * number for value, number in enumerate(counts))
        variance = pixels * squares - total * total  # pixels**2 times the variance
        if variance == 0:
            raise DataError(f"channel {channel} of the training images is {total // pixels} everywhere; no data in it.")
        mean.append(total / (255 * pixels))
        std.append(math.sqrt(variance) / (255 * pixels))
    return tuple(mean), tuple(std)


def _write_split(
    directory: Path, split: str, chunks: Iterable[Chunk], shape: tuple[int, int, int], classes: int
) -> tuple[tuple[int, ...], list[bytes]]:
    """Write one split's two files. Returns the number of samples of each class, and each image's digest."""
    labels, digests = [], []
    count = 0
    with (directory / f"{split}_images.npy").open("wb") as file:
        _write_header(file, (0, *shape))
        for images, chunk_labels in chunks:
            assert images.dtype == np.uint8
            assert images.shape == (len(chunk_labels), *shape)
            file.write(np.ascontiguousarray(images).data)
            digests += [hashlib.sha256(image.tobytes()).digest() for image in images]
            labels.append(chunk_labels)
            count += len(chunk_labels)
        file.seek(0)
        _write_header(file, (count, *shape))
    if count == 0:
        raise DataError(f"the {split} split is empty; nothing can be trained or tested with it.")
    together = np.concatenate(labels)
    if together.min() < 0 or together.max() >= classes:
        raise DataError(f"{split} labels are {together.min()} to {together.max()}, but there are {classes} classes.")
    write_array(directory / f"{split}_labels.npy", together)
    return tuple(np.bincount(together, minlength=classes).tolist()), digests


def _write_header(file: BinaryIO, shape: Sequence[int]) -> None:
    """The .npy header; numpy leaves room in it for the first dimension to grow, so its length does not change."""
    header = BytesIO()
    description = {"descr": np.dtype(np.uint8).str, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(header, description)
    file.write(header.getvalue())


def _replace_directory(new: Path, directory: Path) -> None:
    """Put ``new`` in the place of ``directory``. An interruption leaves one of the two there, or the old one beside."""
    old = directory.with_name(f"{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.replace(old)
    new.replace(directory)
    shutil.rmtree(old, ignore_errors=True)
