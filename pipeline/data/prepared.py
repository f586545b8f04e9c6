"""The prepared data set: what stage ``prepare`` packs and every variant reads.

::

    data/prepared/train_images.npy   uint8 [N, C, H, W], C-contiguous
    data/prepared/train_labels.npy   int64 [N]
    data/prepared/test_images.npy, test_labels.npy
    data/prepared/dataset.json       name, classes, counts, shape, mean, standard deviation, checksums
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.config import Config
from pipeline.data import DataError

if TYPE_CHECKING:  # reading alone needs torch, packing alone needs the decoders: neither pays for the other
    from torch import Tensor

    from pipeline.data.datasets import Chunk

DESCRIPTION = "dataset.json"
STATISTICS_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Split:
    """Both tensors lie in the files: pages are read when they are touched, and shared between processes."""

    images: Tensor
    """uint8 [N, C, H, W]"""
    labels: Tensor
    """int64 [N]"""

    def __len__(self) -> int:
        return self.images.shape[0]


@dataclass(frozen=True)
class Dataset:
    name: str
    sha256: str
    """Over everything: arrays, classes, statistics."""
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    """Per channel, of the training pixels scaled to 0..1."""
    std: tuple[float, ...]
    """Likewise; the population's."""
    shape: tuple[int, int, int]
    """Channels, height, width."""
    train: Split
    test: Split


class Description(BaseModel):
    """``dataset.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    name: str
    classes: tuple[str, ...]
    channels: int
    height: int
    width: int
    train_count: int
    test_count: int
    train_class_counts: tuple[int, ...]
    test_class_counts: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    files: dict[str, str]
    """File name -> SHA-256."""
    sha256: str = ""
    """Of all the above."""

    def digest(self) -> str:
        content = json.dumps(self.model_dump(mode="json", exclude={"sha256"}), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def prepare(config: Config, raw: Path, out: Path) -> None:
    """Decode ``raw/<dataset>/`` and replace the directory ``out`` with the packed data set, whole or not at all.

    Raises DataError if the raw files cannot be decoded, a split is empty, or a channel is constant.
    """
    from pipeline.data.datasets import decode

    decoded = decode(config, raw)
    work = out.with_name(f"{out.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        class_counts = [
            _write_split(work, split, chunks, decoded.shape, len(decoded.classes))
            for split, chunks in (("train", decoded.train), ("test", decoded.test))
        ]
        mean, std = pixel_statistics(np.load(work / "train_images.npy", mmap_mode="r"))
        channels, height, width = decoded.shape
        description = Description(
            name=config.fetch.dataset,
            classes=decoded.classes,
            channels=channels,
            height=height,
            width=width,
            train_count=sum(class_counts[0]),
            test_count=sum(class_counts[1]),
            train_class_counts=class_counts[0],
            test_class_counts=class_counts[1],
            mean=mean,
            std=std,
            files={path.name: _sha256(path) for path in sorted(work.glob("*.npy"))},
        )
        description = description.model_copy(update={"sha256": description.digest()})
        text = json.dumps(description.model_dump(mode="json"), indent=2) + "\n"
        (work / DESCRIPTION).write_text(text, encoding="utf-8")
        _replace_directory(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(
        f"prepared {description.name}: {description.train_count:,} training and {description.test_count:,} test images "
        f"of {channels}x{height}x{width}, {len(decoded.classes)} classes",
        file=sys.stderr,
    )


def read(directory: Path) -> Dataset:
    """Open a prepared data set; the arrays stay in their files until they are touched.

    The tensors may be written to without changing the files. Raises DataError when the arrays are not what
    dataset.json describes; their content is checked by ``verify`` alone.
    """
    import torch

    description = _describe(directory)
    shape = (description.channels, description.height, description.width)

    def split(name: str, count: int) -> Split:
        images = _open(directory / f"{name}_images.npy", np.uint8, (count, *shape))
        labels = _open(directory / f"{name}_labels.npy", np.int64, (count,))
        return Split(images=torch.from_numpy(images), labels=torch.from_numpy(labels))

    return Dataset(
        name=description.name,
        sha256=description.sha256,
        classes=description.classes,
        mean=description.mean,
        std=description.std,
        shape=shape,
        train=split("train", description.train_count),
        test=split("test", description.test_count),
    )


def verify(directory: Path) -> None:
    """Read every byte of a prepared data set. Raises DataError unless all of it is what dataset.json says."""
    description = _describe(directory)
    if description.sha256 != description.digest():
        raise DataError(f"{directory / DESCRIPTION}: was changed after it was written; {_AGAIN}")
    for name, expected in description.files.items():
        path = directory / name
        found = _sha256(path) if path.is_file() else "missing"
        if found != expected:
            raise DataError(f"{path}: SHA-256 is {found}, but {DESCRIPTION} says {expected}; {_AGAIN}")


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


_AGAIN = "run `dvc repro --force prepare`."


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _describe(directory: Path) -> Description:
    path = directory / DESCRIPTION
    try:
        return Description.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing: run the stage prepare first (dvc repro).") from None
    except ValidationError as error:
        raise DataError(f"{path} is not a description this version can read; {_AGAIN} ({error})") from None


def _open(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    try:
        # "c": copy on write. Read-only memory would make torch warn, and a stray write must not reach the file.
        array: npt.NDArray[np.generic] = np.load(path, mmap_mode="c")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}); {_AGAIN}") from None
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise DataError(
            f"{path} holds {array.dtype} {array.shape}, but {DESCRIPTION} says {np.dtype(dtype)} {shape}; {_AGAIN}"
        )
    return np.asarray(array)


def _write_split(
    directory: Path, split: str, chunks: Iterable[Chunk], shape: tuple[int, int, int], classes: int
) -> tuple[int, ...]:
    """Write one split's two files. Returns the number of samples of each class."""
    labels = []
    count = 0
    with (directory / f"{split}_images.npy").open("wb") as file:
        _write_header(file, (0, *shape))
        for images, chunk_labels in chunks:
            assert images.dtype == np.uint8
            assert images.shape == (len(chunk_labels), *shape)
            file.write(np.ascontiguousarray(images).data)
            labels.append(chunk_labels)
            count += len(chunk_labels)
        file.seek(0)
        _write_header(file, (count, *shape))
    if count == 0:
        raise DataError(f"the {split} split is empty; nothing can be trained or tested with it.")
    together = np.concatenate(labels)
    if together.min() < 0 or together.max() >= classes:
        raise DataError(f"{split} labels are {together.min()} to {together.max()}, but there are {classes} classes.")
    np.save(directory / f"{split}_labels.npy", together)
    return tuple(np.bincount(together, minlength=classes).tolist())


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
