"""Packs the decoded raw files into the prepared data set."""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data import DataError, array_files
from pipeline.data.datasets import decode
from pipeline.data.decoded import Chunk
from pipeline.data.prepared import DESCRIPTION, LEFT_OUT, Description, MemoryMap, Statistics, form_of, input_names
from pipeline.errors import say
from pipeline.files import file_sha256, whole_directory
from pipeline.params import Config

Digests = npt.NDArray[np.uint64]

STATISTICS_CHUNK_BYTES = 16 << 20


def prepare(config: Config, raw: Path, out: Path) -> None:
    """Decode ``raw/<dataset>/``, and replace the directory ``out`` by the packed data set. After an error ``out`` is
    unchanged.

    Memory holds only a few chunks of rows and, for each row, what is needed to choose test samples and to count
    repeated inputs. Raises DataError if the raw files cannot be decoded, a split is empty, or values are NaN or
    infinite. It also raises DataError if a training channel is constant, if all training samples have the same label,
    or if no test sample has one.
    """
    with whole_directory(out) as work:
        decoded = decode(config, raw, work)
        train, train_digests = _write_split(work, "train", decoded.arrays, decoded.train)
        test, test_digests = _write_split(work, "test", decoded.arrays, decoded.test)
        forms, tested = ({name: form_of(rows) for name, rows in split.items()} for split in (train, test))
        if tested != forms:
            raise DataError(f"training rows are {_named(forms)}, but test rows are {_named(tested)}; make them equal.")
        train_counts, test_counts = (_class_counts(split, decoded.classes) for split in (train, test))
        if decoded.classes and np.count_nonzero(train_counts) < 2:
            raise DataError(f"all training labels are {np.argmax(train_counts)}; classification needs two classes.")
        if decoded.classes and not any(test_counts):
            raise DataError(f"all labels of the test split are left out ({LEFT_OUT}), so it has no score.")
        of_task = [name for name in (*input_names(train), "targets") if name in train]
        description = Description(
            name=" ".join(filter(None, (config.fetch.dataset, decoded.version))),
            classes=decoded.classes,
            vocabulary=decoded.vocabulary,
            arrays=forms,
            train_count=len(train_digests),
            test_count=len(test_digests),
            train_class_counts=train_counts,
            test_class_counts=test_counts,
            test_in_train_count=_count_known(train_digests, test_digests),
            test_repeated_count=int(np.count_nonzero(test_digests[1:] == test_digests[:-1])),
            changes=dict(decoded.changes),
            statistics={name: statistics(name, train[name]) for name in of_task if measures(name, train[name])},
            files={path.name: file_sha256(path) for path in sorted(work.glob("*.npy"))},
        )
        description = description.model_copy(update={"sha256": description.digest()})
        (work / DESCRIPTION).write_text(description.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for change, times in description.changes.items():
        say(f"{change}: {times:,}", file=sys.stderr)
    for split, counts in (("training", train_counts), ("test", test_counts)):
        if absent := counts.count(0):
            first = f"the first is {decoded.classes[counts.index(0)]!r}"
            say(f"warning: {absent} of {len(counts)} classes have no {split} sample; {first}", file=sys.stderr)
    say(
        f"prepared {description.name}: {description.train_count:,} training and {description.test_count:,} test "
        f"samples of {_named(forms)}; {description.test_in_train_count:,} test inputs are also training inputs, "
        f"and {description.test_repeated_count:,} repeat another test input",
        file=sys.stderr,
    )


def measures(name: str, rows: npt.NDArray[Any]) -> bool:
    """Whether an array of inputs or targets holds quantities, such as pixels, not labels, tokens or a mask."""
    return rows.dtype.kind == "f" or (rows.dtype == np.uint8 and (name == "inputs" or rows.ndim == 4))


def statistics(name: str, rows: npt.NDArray[Any]) -> Statistics:
    """Return the statistics of ``rows`` [N, ...], the training array ``name``. uint8 values are scaled to 0..1 first.

    Raises DataError for a constant channel, which cannot be normalised.
    """
    channels = rows.reshape(len(rows), rows.shape[1] if rows.ndim > 1 else 1, -1)
    mean, std = pixel_statistics(channels) if rows.dtype == np.uint8 else _moments(channels)
    if 0.0 in std:
        raise DataError(
            f"channel {std.index(0.0)} (of a table: column; first: 0) of the training {name} is constant; drop it."
        )
    return Statistics(mean=mean, std=std)


def _moments(rows: npt.NDArray[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and population standard deviation of each channel of floats [N, C, V].

    They are computed in float64, in two passes. The results are rounded to float32, the type in which training uses
    them. The rounding hides most differences between CPUs, which add up values in different orders.
    """
    step = max(1, STATISTICS_CHUNK_BYTES // (rows[0].nbytes or 1))
    chunks = [rows[start : start + step] for start in range(0, len(rows), step)]
    values = rows.size // rows.shape[1]
    zeros = np.zeros(rows.shape[1])
    mean = sum((chunk.sum((0, 2), dtype=np.float64) for chunk in chunks), zeros) / values
    squares = sum((((chunk - mean[:, None]) ** 2).sum((0, 2)) for chunk in chunks), zeros)
    std = np.sqrt(squares / values)
    return tuple(mean.astype(np.float32).tolist()), tuple(std.astype(np.float32).tolist())


def pixel_statistics(images: npt.NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and population standard deviation of each channel of uint8 images [N, C, H, W], scaled to 0..1.

    The computation uses a histogram of integers, so it is exact except for the final rounding.
    """
    count, channels = images.shape[:2]
    histogram = np.zeros((channels, 256), dtype=np.int64)
    step = max(1, STATISTICS_CHUNK_BYTES // (images[0].size or 1))
    for start in range(0, count, step):
        chunk = images[start : start + step]
        for channel in range(channels):
            histogram[channel] += np.bincount(chunk[:, channel].ravel(), minlength=256)
    counts, values = histogram.astype(object), np.arange(256).astype(object)  # Python's integers do not overflow
    pixels, total, squares = counts.sum(1), counts @ values, counts @ values**2
    variance = pixels * squares - total * total  # pixels**2 times the variance
    std = (math.sqrt(square) / (255 * number) for square, number in zip(variance, pixels, strict=True))
    return tuple(total / (255 * pixels)), tuple(std)


def _write_split(
    directory: Path, split: str, names: Sequence[str], chunks: Iterable[Chunk]
) -> tuple[dict[str, MemoryMap], Digests]:
    """Write one file per array. Returns the arrays, memory-mapped, and the first 8 bytes of each input's SHA-256,
    sorted.

    Raises DataError for an empty split, and for NaN or infinite values.
    """
    digests = array("Q")

    def checked() -> Iterator[dict[str, npt.NDArray[Any]]]:
        for chunk in chunks:
            named = dict(zip(names, chunk, strict=False))
            for name, rows in named.items():
                if rows.dtype.kind == "f" and not np.isfinite(rows).all():
                    row = len(digests) + int(np.argwhere(~np.isfinite(rows))[0, 0])
                    raise DataError(f"row {row} of the {split} {name} has a NaN or infinite value; repair or drop it.")
            digests.extend(int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:8]) for row in chunk[0])
            yield named

    array_files.write(checked(), f"the {split} split", directory, f"{split}_")
    if not digests:
        raise DataError(f"the {split} split is empty; nothing can be trained or tested with it.")
    all_digests = np.frombuffer(digests, np.uint64)
    all_digests.sort()
    written = {name: directory / f"{split}_{name}.npy" for name in names}
    return {name: np.load(path, mmap_mode="r") for name, path in written.items() if path.is_file()}, all_digests


def _count_known(known: Digests, digests: Digests) -> int:
    """Return the number of ``digests`` that are in ``known``; both are sorted."""
    places = np.searchsorted(known[:-1], digests)
    return int(np.count_nonzero(known[places] == digests))


def _class_counts(split: Mapping[str, MemoryMap], classes: Sequence[str]) -> tuple[int, ...]:
    """Return the number of labels of each class, without those that are left out; () without classes."""
    if not classes:
        return ()
    counts, labels = np.zeros(len(classes), np.int64), split["targets"].reshape(-1)
    for start in range(0, len(labels), STATISTICS_CHUNK_BYTES // 8):
        chunk = labels[start : start + STATISTICS_CHUNK_BYTES // 8]
        counts += np.bincount(chunk[chunk != LEFT_OUT], minlength=len(classes))
    return tuple(counts.tolist())


def _named(forms: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {form}" for name, form in forms.items())
