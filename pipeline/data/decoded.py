"""The type that every decoder returns, and what ``fetch`` and the decoders share: the checksums of published files,
reading ``fetch``'s listing, lines for a person, and choosing samples."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from pipeline.data import DataError
from pipeline.errors import printable
from pipeline.files import open_regular

AGAIN = "run `dvc repro --force fetch`."
Chunk = tuple[npt.NDArray[Any], ...]
"""The next n rows [n, ...] of each array, the inputs first."""


SHA256 = {
    "fashion_mnist": {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    "mnist": {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "cifar10": {
        "data_batch_1": "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
        "data_batch_2": "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
        "data_batch_3": "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
        "data_batch_4": "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
        "data_batch_5": "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
        "test_batch": "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
    },
}
"""SHA-256 of the uncompressed raw files, by data set and name. ``fetch`` and ``prepare`` refuse any other content.

The values were compared across several independent public sources. The values of Fashion-MNIST were also compared with
the files of the Debian package. The values of MNIST and CIFAR-10 were also compared with the archives' checksums in
torchvision and Keras.
"""


@dataclass(frozen=True)
class Decoded:
    train: Iterable[Chunk]
    """Chunks of the training split, to be read only once."""
    test: Iterable[Chunk]
    arrays: tuple[str, ...] = ("inputs", "targets")
    """Names of the arrays in a chunk, in order; targets may be absent."""
    classes: tuple[str, ...] = ()
    """Names of the classes in the order of the labels; empty if the targets are not labels."""
    vocabulary: int | None = None
    """Size of the vocabulary, which is greater than every token; None if the inputs are not tokens."""
    changes: Counter[str] = field(default_factory=Counter)
    """What was left out or changed -> how often. Complete after both splits were read."""
    version: str = ""
    """Python's version if its source code is the data, and the tokenizer's version if there is one; else empty."""


def listed(path: Path, allowed: str = ".+") -> list[tuple[str, str]]:
    """Return the path and SHA-256 of each file in ``fetch``'s listing.

    The files are sorted by the paths' hashes, which shuffles them. Raises DataError if the listing cannot be read, or
    if a path does not match the regular expression ``allowed``.
    """
    try:
        with io.TextIOWrapper(open_regular(path), "utf-8", "surrogateescape", newline="") as file:
            rows = [(row["path"], row["sha256"]) for row in csv.DictReader(file)]
        if not all(re.fullmatch(allowed, path or "", re.DOTALL) for path, _ in rows):
            raise ValueError(f"a path does not match {allowed}")
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({error!r}): {AGAIN}") from None
    return sorted(rows, key=lambda row: hashed(row[0]))


def say(line: str) -> None:
    """Print one plain line to stderr, for a person or a log."""
    tqdm.write(printable(line), file=sys.stderr)


def progress(what: str, total: int | None, unit: str, initial: int = 0) -> tqdm[Any]:
    """Return a progress bar, which is shown only on a terminal."""
    return tqdm(total=total, initial=initial, desc=what, unit=unit, unit_scale=True, leave=False, disable=None)


def held_out(keys: Iterable[str], labels: npt.ArrayLike, fraction: float) -> npt.NDArray[np.bool_]:
    """Choose ``fraction`` of each class as test samples, but at least one and never all. Returns [N] bool.

    If a class has only one sample, this sample is for training. Samples are chosen by the first 8 bytes of their keys'
    SHA-256. So the split is the same on every machine and for any order of the samples, and adding a sample hardly
    changes the split. ``labels`` are [N] integers from 0.
    """
    numbers = np.asarray(labels, np.intp)  # an empty list would become floats
    digests = np.fromiter((int.from_bytes(hashed(key)[:8]) for key in keys), np.uint64, len(numbers))
    order = np.lexsort((digests, numbers))
    chosen = np.zeros(len(numbers), dtype=np.bool_)
    start = 0
    for size in np.bincount(numbers).tolist():
        if size > 1:
            count = min(max(round(fraction * size), 1), size - 1)
            chosen[order[start : start + count]] = True
        start += size
    return chosen


def drawn(size: int, count: int, labels: npt.NDArray[Any] | None = None) -> npt.NDArray[np.intp]:
    """Choose ``count`` of ``size`` rows from all over, because the rows may be sorted. Returns ascending indices [n],
    where n is at most ``size``.

    A row is drawn from each of n equal parts, the same on every machine. With ``labels`` [size], a class has its share
    of the rows, but at least one row as far as n allows.
    """
    count = min(count, size)
    if labels is not None:
        order = np.argsort(labels, kind="stable")
        starts = np.unique(labels[order], return_index=True)[1]  # the first row of each class
        ones, rest = order[starts[drawn(len(starts), count)]], np.delete(order, starts)
        return np.sort(np.append(ones, rest[drawn(len(rest), count - len(ones))]))
    ends = np.arange(count + 1) * size // max(count, 1)
    random = np.random.PCG64(0).random_raw(count)  # a bit generator: its output is the same in every version
    return ends[:-1] + (random % np.diff(ends).astype(np.uint64)).astype(np.intp)


def hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
