"""The prepared data set, which ``packing`` writes and every variant reads.

::

    data/prepared/train_inputs.npy    integers or floats [N, ...], C-contiguous: the model's inputs. Or several arrays,
                                      such as train_input_ids.npy, with which the model is called by name
    data/prepared/train_targets.npy   [N, ...]: the values to predict, such as int64 labels; absent for tokens
    data/prepared/train_NAME.npy      [N, ...]: a further array for the user's own task
    data/prepared/test_inputs.npy, test_targets.npy, test_NAME.npy
    data/prepared/dataset.json        name, classes, counts, types and shapes, statistics, checksums
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.data import DataError
from pipeline.errors import ConfigError, first_line
from pipeline.files import file_sha256, json_sha256, read_bytes

if TYPE_CHECKING:  # packing imports this module without torch, and publish imports it without torch and numpy
    import numpy as np
    from torch import Tensor

MemoryMap: TypeAlias = "np.memmap[Any, np.dtype[Any]]"

DESCRIPTION = "dataset.json"
LEFT_OUT = -100
"""A label that counts neither in the loss nor in the score, such as that of a padding token; as in torch."""
CACHED_FRACTION = 0.5
"""The page cache might not keep an array that is larger than this share of the memory. Training reads rows in random
order, so the pages that the system reads ahead would be dropped before they are used. Therefore the system's read-ahead
is switched off for such a training array, and ``Reader`` announces the next rows to the system instead."""
_AGAIN = "run `dvc repro --force prepare`."


@dataclass(frozen=True)
class Split:
    """Named tensors with one row per sample, memory-mapped: pages are read on first access and shared by processes."""

    arrays: Mapping[str, Tensor]
    beyond_cache: Mapping[str, MemoryMap] = field(default_factory=dict)
    """Name -> numpy's memory map, for training arrays larger than ``CACHED_FRACTION`` of the memory; empty on a system
    without posix_fadvise."""

    @property
    def inputs(self) -> Tensor:
        """The model's inputs; of several, the first."""
        return self.arrays[input_names(self.arrays)[0]]

    @property
    def targets(self) -> Tensor:
        return self.arrays["targets"]

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def drawn(self, count: int) -> Tensor:
        """Return the indices of at most ``count`` samples from all over the split, every class among them if the
        targets are one label per sample; see ``decoded.drawn``."""
        import torch

        from pipeline.data.decoded import drawn

        targets = self.arrays.get("targets")
        labels = None if targets is None or targets.is_floating_point() or targets.ndim > 1 else targets.numpy()
        return torch.from_numpy(drawn(len(self), count, labels))

    def __getitem__(self, rows: slice | Tensor) -> Split:
        return Split({name: array[rows] for name, array in self.arrays.items()})


def input_names(arrays: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the arrays that are the model's inputs: ``inputs`` or, without it, all except ``targets``."""
    return ("inputs",) if "inputs" in arrays else tuple(name for name in arrays if name != "targets")


def like_targets(arrays: Collection[str]) -> str:
    """Return the name of an array that should perhaps be called ``targets``; empty if there is none."""
    meant = (name for name in arrays if name.lower() in ("labels", "label", "target", "y"))
    return "" if "targets" in arrays else next(meant, "")


class Statistics(BaseModel):
    """Mean and population standard deviation of an array's training rows, per channel (the first dimension of a row).

    uint8 values are scaled to 0..1 first. An array with one number per row has one channel.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Dataset:
    name: str
    sha256: str
    """SHA-256 over arrays, classes, statistics and more; see ``Description.sha256``."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the labels; empty if the targets are not labels."""
    vocabulary: int | None
    """Size of the vocabulary: tokens are integers from 0 to this size minus 1. None if the first inputs are not
    tokens."""
    statistics: Mapping[str, Statistics]
    """Inputs or "targets" -> statistics. Inputs that are tokens or masks, and targets that are labels, have none."""
    train: Split
    test: Split
    test_in_train_count: int | None = None
    """Number of test inputs that equal a training input byte by byte; None if not counted."""
    test_repeated_count: int | None = None
    """Number of test inputs that repeat an earlier test input; None if not counted."""
    class_counts: tuple[int, ...] = ()
    """Number of training labels of each class; empty if the targets are not labels."""
    test_class_counts: tuple[int, ...] = ()
    left_out_count: int = 0
    """Number of labels, of both splits, that are ``LEFT_OUT``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample's inputs; of several, of the first."""
        return tuple(self.train.inputs.shape[1:])


class Description(BaseModel):
    """Content of ``dataset.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[3] = 3
    """Version 1 held images and labels only. Version 2 held the type and shape of an array's rows as two fields."""
    name: str
    classes: tuple[str, ...]
    vocabulary: int | None
    arrays: dict[str, str]
    """Name -> type and shape of a row, such as "uint8 [1, 28, 28]"."""
    train_count: int
    test_count: int
    train_class_counts: tuple[int, ...]
    test_class_counts: tuple[int, ...]
    test_in_train_count: int | None = None
    """``Dataset`` explains this count and the next."""
    test_repeated_count: int | None = None
    changes: dict[str, int] = {}
    """What ``prepare`` left out or changed -> how often."""
    statistics: dict[str, Statistics]
    files: dict[str, str]
    """File name -> SHA-256."""
    sha256: str = ""
    """SHA-256 over all fields above except ``test_in_train_count``, ``test_repeated_count`` and ``changes``."""

    def digest(self) -> str:
        counted = {"sha256", "test_in_train_count", "test_repeated_count", "changes"}
        return json_sha256(self.model_dump(mode="json", exclude=counted))


def read(directory: Path) -> Dataset:
    """Open a prepared data set; the arrays are memory-mapped.

    Writing to the tensors does not change the files. Raises DataError if a file is missing or cannot be read. It also
    raises DataError if an array's type or shape differs from dataset.json, or if a file was written after dataset.json
    and its SHA-256 differs.
    """
    import numpy as np
    import psutil
    import torch

    from pipeline import environment

    description = described(directory)
    cached = CACHED_FRACTION * min([psutil.virtual_memory().total, *environment.memory_limits()])
    _verify_newer(directory, description)

    def split(name: str, count: int) -> Split:
        opened = {
            array: _open(directory / f"{name}_{array}.npy", form, count) for array, form in description.arrays.items()
        }
        random = name == "train" and hasattr(os, "posix_fadvise")  # test rows are read in order
        large = {array: rows for array, rows in opened.items() if random and rows.nbytes > cached}
        for rows in large.values():
            assert isinstance(rows.base, mmap.mmap)
            rows.base.madvise(mmap.MADV_RANDOM)
        return Split({array: torch.from_numpy(np.asarray(rows)) for array, rows in opened.items()}, large)

    train, test = (split(name, getattr(description, f"{name}_count")) for name in ("train", "test"))
    counts = (*description.train_class_counts, *description.test_class_counts)
    return Dataset(
        name=description.name,
        sha256=description.sha256,
        classes=description.classes,
        vocabulary=description.vocabulary,
        statistics=description.statistics,
        train=train,
        test=test,
        test_in_train_count=description.test_in_train_count,
        test_repeated_count=description.test_repeated_count,
        class_counts=description.train_class_counts,
        test_class_counts=description.test_class_counts,
        left_out_count=train.targets.numel() + test.targets.numel() - sum(counts) if counts else 0,
    )


def check_batch(batch_size: int, name: str, samples: int) -> None:
    """Raise ConfigError if the data set ``name`` has fewer training ``samples`` than a global batch."""
    if batch_size > samples:
        raise ConfigError(
            f"train.batch_size: found {batch_size}, but {name} has {samples} training samples; allowed: at most "
            f"{samples}."
        )


def _verify_newer(directory: Path, description: Description) -> None:
    """Raise DataError if an array's file is missing, or was written after dataset.json and its SHA-256 differs.

    ``prepare`` writes dataset.json last, so only an edit or a checkout writes a file later. After the check,
    dataset.json gets a new modification time, so that the next process need not read the files again.
    """
    path = directory / DESCRIPTION
    arrays = [directory / name for name in description.files]
    for file in arrays:
        if not file.is_file():
            raise DataError(f"{file} is missing; {_AGAIN}")
    newer = [file for file in arrays if file.stat().st_mtime_ns >= path.stat().st_mtime_ns]
    for file in newer:
        expected, actual = description.files[file.name], file_sha256(file)
        if actual != expected:
            raise DataError(f"{file}: SHA-256 is {actual}, but {DESCRIPTION} says {expected}; {_AGAIN}")
    if newer:
        with suppress(OSError):  # the data set may be read-only
            os.utime(path)


def described(directory: Path) -> Description:
    """Read ``dataset.json`` in ``directory``. Raises DataError if it is missing, cannot be read or was changed."""
    path = directory / DESCRIPTION
    try:
        description = Description.model_validate_json(read_bytes(path))
    except FileNotFoundError:
        raise DataError(f"{path} is missing: run `dvc repro prepare` first.") from None
    except (OSError, ValidationError) as error:
        raise DataError(f"{path} is not a description that this version can read; {_AGAIN} ({error})") from None
    if description.sha256 != description.digest():
        raise DataError(f"{path} was changed after it was written; {_AGAIN}")
    return description


def form_of(rows: MemoryMap) -> str:
    """Return the type and shape of a row of ``rows`` [N, ...], such as "uint8 [1, 28, 28]"."""
    return f"{rows.dtype} {list(rows.shape[1:])}"


def _open(path: Path, form: str, count: int) -> MemoryMap:
    from numpy.lib.format import open_memmap

    try:
        # "c": copy on write. Read-only memory would make torch warn, and a stray write must not reach the file.
        rows: MemoryMap = open_memmap(path, mode="c")
    except Exception as error:  # a damaged header can raise exceptions of many types
        raise DataError(f"{path} cannot be read ({first_line(error)}); {_AGAIN}") from None
    if rows.shape[:1] != (count,) or form_of(rows) != form or not rows.flags.c_contiguous:
        raise DataError(f"{path} holds {rows.dtype} {rows.shape}, but {DESCRIPTION} says {count} x {form}; {_AGAIN}")
    return rows
