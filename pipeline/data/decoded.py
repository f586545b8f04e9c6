"""The type that every decoder returns, and the functions that decoders share: reading ``fetch``'s listing, and choosing
test samples."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data import DataError

AGAIN = "run `dvc repro --force fetch`."
Chunk = tuple[npt.NDArray[Any], ...]
"""The next n rows [n, ...] of each array, the inputs first."""


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
    version: str = ""
    """Python's version if its source code is the data, and the tokenizer's version if there is one; else empty."""


def listed(path: Path, allowed: str = ".+") -> list[tuple[str, str]]:
    """Return the path and SHA-256 of each file in ``fetch``'s listing.

    The files are sorted by the paths' hashes, which shuffles them. Raises DataError if the listing cannot be read, or
    if a path does not match the regular expression ``allowed``.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = [(row["path"], row["sha256"]) for row in csv.DictReader(file)]
        if not all(re.fullmatch(allowed, path or "", re.DOTALL) for path, _ in rows):
            raise ValueError(f"a path does not match {allowed}")
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({error!r}): {AGAIN}") from None
    return sorted(rows, key=lambda row: hashed(row[0]))


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


def hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
