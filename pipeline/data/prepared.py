"""The prepared data set: what ``packing`` writes and every variant reads.

::

    data/prepared/train_images.npy   uint8 [N, C, H, W], C-contiguous
    data/prepared/train_labels.npy   int64 [N]
    data/prepared/test_images.npy, test_labels.npy
    data/prepared/dataset.json       name, classes, counts, shape, mean, standard deviation, checksums
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.data import DataError, file_sha256
from pipeline.errors import first_line

if TYPE_CHECKING:  # packing needs this module's description, but not torch
    from torch import Tensor

DESCRIPTION = "dataset.json"


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
    test_in_train_count: int | None = None
    """Test images that are training images too, to the last pixel; None, like the next: not counted."""
    test_repeated_count: int | None = None
    """Test images that repeat an earlier one."""


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
    test_in_train_count: int | None = None
    """As in ``Dataset``, like the next."""
    test_repeated_count: int | None = None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    files: dict[str, str]
    """File name -> SHA-256."""
    sha256: str = ""
    """Of all the above, but for what is counted of the arrays."""

    def digest(self) -> str:
        counted = {"sha256", "test_in_train_count", "test_repeated_count"}
        content = json.dumps(self.model_dump(mode="json", exclude=counted), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


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
        test_in_train_count=description.test_in_train_count,
        test_repeated_count=description.test_repeated_count,
    )


def verify(directory: Path) -> None:
    """Read every byte of a prepared data set. Raises DataError unless all of it is what dataset.json says."""
    description = _describe(directory)
    if description.sha256 != description.digest():
        raise DataError(f"{directory / DESCRIPTION}: was changed after it was written; {_AGAIN}")
    for name, expected in description.files.items():
        path = directory / name
        found = file_sha256(path) if path.is_file() else "missing"
        if found != expected:
            raise DataError(f"{path}: SHA-256 is {found}, but {DESCRIPTION} says {expected}; {_AGAIN}")


_AGAIN = "run `dvc repro --force prepare`."


def _describe(directory: Path) -> Description:
    path = directory / DESCRIPTION
    try:
        return Description.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} is missing: run `dvc repro prepare` first.") from None
    except (OSError, ValidationError) as error:
        raise DataError(f"{path} is not a description this version can read; {_AGAIN} ({error})") from None


def _open(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    try:
        # "c": copy on write. Read-only memory would make torch warn, and a stray write must not reach the file.
        array: npt.NDArray[np.generic] = open_memmap(path, mode="c")
    except Exception as error:  # a damaged header can raise nearly anything
        raise DataError(f"{path} cannot be read ({first_line(error)}); {_AGAIN}") from None
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise DataError(
            f"{path} holds {array.dtype} {array.shape}, but {DESCRIPTION} says {np.dtype(dtype)} {shape}; {_AGAIN}"
        )
    return np.asarray(array)
