"""The user's own arrays: ``inputs``, ``targets`` (absent for tokens), and further arrays for the user's own task. Or,
without ``inputs``, arrays with which the model is called by name, such as ``input_ids`` and ``attention_mask``.

The arrays are in .npy files of a folder, in one .npz or .safetensors file, in a Parquet table, or in a data set that
the library ``datasets`` saved. A function may also yield the arrays. scikit-learn's digits are arrays, too.

An array's type decides how the array is used. Integer targets are labels, one or several per sample, of which -100 are
left out; float targets are numbers to predict. Two-dimensional integer inputs without targets are tokens, and so are
``input_ids``. Other inputs, and float targets, become float32, but uint8 inputs stay uint8. In arrays of other names,
uint8 stays uint8, other integers become int64, and floats become float32. Numbers of which float32 keeps too little are
refused.

``test_inputs``, ``test_targets`` and so on are for testing. Without test arrays, a share of the samples is held out
for testing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from pipeline import factories
from pipeline.data import LISTING, DataError, array_files
from pipeline.data.array_files import Rows, naming
from pipeline.data.decoded import AGAIN, Chunk, Decoded, drawn, held_out, listed
from pipeline.data.prepared import LEFT_OUT, input_names
from pipeline.files import file_sha256, read_json
from pipeline.params import Config, Fetch

LIMIT_CLASSES = 1 << 16
LIMIT_VOCABULARY = 1 << 32
"""Largest allowed vocabulary: every token must fit into uint32, the largest type in which tokens are prepared."""
TEST = "test_"
"""Prefix of the names of the test split's arrays."""
TOKENS = "input_ids"
"""Name of the array that holds tokens even if there are targets, as in the library ``transformers``."""
KEY = "fetch.arrays"
FILES = (".npz", ".safetensors", ".parquet")
"""Suffixes of a file that holds all arrays."""
SAVED = ("state.json", "dataset_dict.json")
"""Files that ``save_to_disk`` of the library ``datasets`` writes: the first for a data set without splits, the second
for a data set with splits."""
Named = Mapping[str, Rows]
LIMIT_ROUNDING = 2.0**-12
"""Largest allowed rounding error of a number, relative to the span of its channel (``prepared.Statistics``)."""
CHUNK_ROWS = 1000
"""Largest number of rows per chunk of a data set that the library ``datasets`` saved."""


def root(fetch: Fetch, directory: Path) -> Path:
    """Return the folder of the arrays' files: the user's folder, or ``directory`` if ``export`` writes the files."""
    place = Path(fetch.arrays or "").expanduser()
    return directory if is_exported(fetch) else place.parent if place.suffix in FILES else place


def is_exported(fetch: Fetch) -> bool:
    """Whether the arrays come from a library, from a function, or from a data set that ``datasets`` saved."""
    if fetch.dataset != "arrays":
        return fetch.dataset == "digits"
    return bool(fetch.own_module) or any((Path(fetch.arrays or "").expanduser() / name).is_file() for name in SAVED)


def files(fetch: Fetch, directory: Path) -> list[str]:
    """Return the names of the arrays' files. Raises DataError if the user's file does not exist, or if the user's
    folder has no .npy file."""
    place = Path(fetch.arrays or "").expanduser()
    paths = [place] if place.suffix in FILES else root(fetch, directory).glob("*.npy")
    names = sorted(path.name for path in paths if path.is_file())
    if not names and not is_exported(fetch):
        missing = "" if place.exists() else ", which does not exist"
        raise DataError(
            f"fetch.arrays: found {fetch.arrays!r}{missing}; expected a file of type {', '.join(FILES)}, a folder with "
            "inputs.npy (and targets.npy, test_inputs.npy and test_targets.npy, where they exist), a folder that the "
            "library datasets saved, or module:function of your own."
        )
    return names


def export(fetch: Fetch, directory: Path) -> None:
    """Write .npy files into the empty ``directory``. They contain the digits, or the arrays of the function or of the
    saved data set that ``fetch.arrays`` names.

    A function is called twice, first with ``split`` "train" and then with "test". It yields the split's samples in
    chunks. A chunk of n samples is a dict of ``inputs`` [n, ...] and optionally ``targets`` [n, ...] and further
    arrays. Only one chunk is in memory at a time. Raises DataError if the function or the data set yields anything
    else.
    """
    name = str(fetch.arrays if fetch.dataset == "arrays" else fetch.dataset)
    for split, prefix in (("train", ""), ("test", TEST)):
        if fetch.dataset == "digits":
            chunks = _digits() if split == "train" else ()
        else:
            chunks = _called(fetch, name, split) if fetch.own_module else _saved(Path(name).expanduser(), split)
        bar = tqdm(chunks or (), desc=f"{name} {split}", unit=" chunks", leave=False, disable=None)
        array_files.write(bar, f"{KEY}: {name}", directory, prefix)
        if split == "train" and any(directory.glob(f"{TEST}*")):
            raise DataError(
                f"{KEY}: {name} yielded {TEST}* for the split train; yield them when split is test, without {TEST}."
            )


def _digits() -> Iterator[Any]:
    """Yield scikit-learn's digits: images uint8 [1797, 1, 8, 8], scaled from 0..16 to 0..255, and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    yield {"inputs": images[:, None], "targets": digits.target}


def _called(fetch: Fetch, name: str, split: str) -> Any:
    function = factories.find(name, KEY, "an iterator", example="my_data:samples", error=DataError)
    return factories.call(function, name, KEY, fetch.arrays_options, error=DataError, split=split)


def _saved(folder: Path, split: str) -> Iterator[Any]:
    """Yield chunks of the saved data set's ``split``. A data set without splits counts as the train split.

    Raises DataError if the library is missing, if the data set cannot be read, or if one of its splits is named neither
    ``train`` nor ``test``.
    """
    datasets = factories.library("datasets", f"{KEY}: the library datasets saved {folder}", DataError)
    with naming(folder):
        names = read_json(folder / SAVED[1])["splits"] if (folder / SAVED[1]).exists() else ["."]
        if others := sorted(set(names) - {"train", "test", "."}):
            raise DataError(
                f"{KEY}: {folder} has the split {others[0]!r}; expected train and test: rename the split, or drop it."
            )
        for file in (part["filename"] for name in names for part in read_json(folder / name / SAVED[0])["_data_files"]):
            if Path(file).name != file:
                raise ValueError(f"its data file {file!r} is in another folder")
        with array_files.limited(folder, sum(file.stat().st_size for file in folder.rglob("*.arrow"))):
            loaded = datasets.load_from_disk(folder)  # maps plain files, but unpacks compressed ones
    splits = loaded if isinstance(loaded, Mapping) else {"train": loaded}
    if split in splits:
        rows = splits[split].with_format("numpy", dtype=None)  # None keeps the saved dtypes
        yield from rows.iter(min(CHUNK_ROWS, max(1, array_files.CHUNK_BYTES * len(rows) // (rows.data.nbytes or 1))))


def decode(config: Config, directory: Path, work: Path | None) -> Decoded:
    """Decode the files in ``directory``'s listing. ``work``: as in ``read``.

    Raises DataError for a changed file, and for unsuitable arrays.
    """
    paths = []
    for name, expected in listed(directory / LISTING):
        path = root(config.fetch, directory) / name
        if not path.is_file() or file_sha256(path) != expected:
            raise DataError(f"{path} is not the file that fetch listed: it has changed; {AGAIN}")
        paths.append(path)
    train, test = splits(config.fetch, read(paths, work, changes := Counter[str]()))
    types, vocabulary, classes = forms(train, test)
    first, limits = input_names(train)[0], config.prepare
    labels = np.zeros(len(train[first]), np.uint32)
    if classes and train["targets"].ndim == 1:
        labels = _labels(train["targets"], classes)
    if test:
        chosen, tested = np.arange(len(labels)), np.arange(len(test[first]))
    else:
        out = held_out(map(str, range(len(labels))), labels, limits.test_fraction)
        chosen, tested = np.flatnonzero(~out), np.flatnonzero(out)

    def limited(arrays: Named, rows: npt.NDArray[np.intp], limit: int | None) -> npt.NDArray[np.intp]:
        of_class = arrays["targets"][rows] if classes and arrays["targets"].ndim == 1 else None
        return rows if limit is None else rows[drawn(len(rows), limit, of_class)]

    return Decoded(
        train=_rows(train, types, limited(train, chosen, limits.train_limit), check_rounding=True),
        test=_rows(test or train, types, limited(test or train, tested, limits.test_limit)),
        arrays=tuple(types),
        changes=changes,
        classes=tuple(map(str, range(classes))),
        vocabulary=vocabulary,
    )


def splits(fetch: Fetch, arrays: Named) -> tuple[Named, Named]:
    """Return the arrays of the training split and of the test split, by the same names; the latter is empty if there is
    none. Raises DataError if arrays are missing, or have different numbers of samples."""
    train = {name: rows for name, rows in arrays.items() if not name.startswith(TEST)}
    test = {name.removeprefix(TEST): rows for name, rows in arrays.items() if name.startswith(TEST)}
    misspelt = "input" in train and "inputs" not in train  # otherwise the model would be called with it by name
    if misspelt or not input_names(train) or (test and test.keys() != train.keys()):
        raise DataError(
            f"fetch.arrays: {fetch.arrays} has {', '.join(arrays) or 'none of the arrays'}; expected inputs, and in a "
            "test split the same arrays as in the training split."
        )
    for split in (train, test):
        if len(set(map(len, split.values()))) > 1:
            raise DataError(f"{KEY}: {named(split)} have different numbers of samples; make them equal.")
    return train, test


def forms(train: Named, test: Named) -> tuple[dict[str, np.dtype[Any]], int | None, int]:
    """Return the type in which each array is prepared, the size of the vocabulary (None: no tokens), and the number of
    classes (0: no labels). Raises DataError for tokens or labels that are out of range."""
    first, targets, vocabulary, classes = input_names(train)[0], train.get("targets"), None, 0
    inputs, types = train[first], {name: _prepared_type(name, rows.dtype) for name, rows in train.items()}
    if (targets is None or first == TOKENS) and inputs.dtype.kind in "iu" and inputs.ndim == 2:
        vocabulary = _checked(train, test, first, LIMIT_VOCABULARY, "tokens in the vocabulary")
        if inputs.shape[1] < 2 and targets is None:
            raise DataError(f"{KEY}: a row of the inputs needs two tokens or more; expected windows [N, length + 1].")
        types[first] = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
    if targets is not None and targets.dtype.kind in "iu":
        classes = _checked(train, test, "targets", LIMIT_CLASSES, "classes")
        types["targets"] = np.dtype(np.int64)
    return types, vocabulary, classes


def _prepared_type(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which the array ``name`` of type ``dtype`` is prepared, unless it holds tokens or labels."""
    if dtype == np.uint8 and name != "targets":
        return dtype
    return np.dtype(np.int64 if dtype.kind in "iu" and name not in ("inputs", "targets") else np.float32)


def _checked(train: Named, test: Named, name: str, limit: int, of: str) -> int:
    """Return the largest number in the array ``name`` of ``train``, plus one.

    Raises DataError for a number that is negative, that is ``limit`` or more, or that is in ``test`` and larger than
    every number in ``train``. A target may also be ``LEFT_OUT``. The numbers are checked before they are converted from
    the file's own type, because a conversion would turn a number that is out of range into another number.
    """
    count = 0
    for split, rows in ((split, arrays[name]) for split, arrays in (("train", train), ("test", test)) if arrays):
        least, most = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
        if name == "targets" and least == LEFT_OUT:
            least = int(np.where(rows == LEFT_OUT, 0, rows).min())
        count = count or min(max(most, 0) + 1, limit)
        if least < 0 or most >= count:
            raise DataError(
                f"{KEY}: found values from {least} to {most} in the {split} {name}, but there are {count} {of}, "
                "numbered from 0."
            )
    return count


def _labels(targets: Rows, classes: int) -> npt.NDArray[np.uint32]:
    """Return the labels [N]; those that are left out become a class of their own. Raises DataError for a class without
    a training sample."""
    labels = np.where(targets == LEFT_OUT, classes, targets).astype(np.uint32)
    absent = np.flatnonzero(np.bincount(labels, minlength=classes)[:classes] == 0)
    if len(absent) and len(labels):
        raise DataError(
            f"{KEY}: the training targets go up to {classes - 1}, but {len(absent)} of the {classes} classes (first: "
            f"{absent[0]}) have no training sample; number the classes from 0 without gaps, or correct the label."
        )
    return labels


def opened(fetch: Fetch) -> Named:
    """Return the arrays of the user's files, as ``read`` does. Raises DataError."""
    return read([root(fetch, Path()) / name for name in files(fetch, Path())], None, Counter())


def read(paths: Iterable[Path], work: Path | None, changes: Counter[str]) -> Named:
    """Return the arrays of the files by name, the inputs first, memory-mapped. Raises DataError for an unusable file.
    What is left out is counted in ``changes``.

    Files other than .npy are unpacked in the folder ``work`` (None: the system's folder for temporary files). The
    unpacked files have no names any more when this function returns, and the system deletes them with the last memory
    map.
    """
    arrays: dict[str, Rows] = {}
    with TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as unpacked:
        for path in paths:
            arrays |= array_files.read(path, Path(unpacked), changes)

    def place(name: str) -> tuple[bool, int, str]:
        """Of other inputs by name, the largest rows come first: those of images, not those of their masks."""
        return name.removeprefix(TEST) not in ("inputs", TOKENS), -arrays[name][:1].nbytes, name

    return {name: arrays[name] for name in sorted(arrays, key=place)}


def named(arrays: Named) -> str:
    """Return name, type and shape of each array, in words."""
    return ", ".join(f"{name} {rows.dtype} {list(rows.shape)}" for name, rows in arrays.items())


def _rows(
    arrays: Named, types: Mapping[str, np.dtype[Any]], chosen: npt.NDArray[np.intp], *, check_rounding: bool = False
) -> Iterator[Chunk]:
    """Yield chunks of the rows ``chosen`` [n] of every array, converted to ``types``. With ``check_rounding``, raise
    DataError at the end for numbers of which float32 keeps too little."""
    length = max(1, array_files.CHUNK_BYTES // (sum(rows[:1].nbytes for rows in arrays.values()) or 1))
    most: dict[str, npt.NDArray[np.float64]] = {}  # [3, channels]: the largest error, x and -x of the numbers x
    for start in range(0, len(chosen), length):
        chunk = []
        for name, dtype in types.items():
            given = arrays[name][chosen[start : start + length]]
            chunk.append(rows := _as(dtype, given, name))
            if check_rounding and dtype == np.float32 and not np.can_cast(given.dtype, dtype):
                exact = given.astype(np.float64).reshape(len(given), given.shape[1] if given.ndim > 1 else 1, -1)
                with np.errstate(invalid="ignore"):  # infinite values, which packing refuses
                    error = np.abs(exact - rows.reshape(exact.shape))
                seen = np.stack([error.max((0, 2)), exact.max((0, 2)), -exact.min((0, 2))])
                most[name] = np.maximum(most.get(name, -np.inf), seen)
        yield tuple(chunk)
    for name, (error, high, low) in most.items():
        for channel in np.flatnonzero((high > -low) & (error > LIMIT_ROUNDING * (high + low)))[:1]:
            raise DataError(
                f"{KEY}: channel {channel} (of a table: column; first: 0) of the training {name}: float32 changes "
                f"values by up to {error[channel]:g}, and they span only {high[channel] + low[channel]:g}. Subtract a "
                "constant, such as the smallest value (of times: the first)."
            )


def _as(dtype: np.dtype[Any], rows: Rows, name: str) -> Rows:
    """Return ``rows`` as ``dtype``. Raises DataError for a value that does not fit.

    NaN and infinite values pass, because ``packing`` refuses them. Floats are rounded.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        converted = rows.astype(dtype)
        if dtype.kind in "iu":
            lost = (converted.astype(rows.dtype) != rows) | ((converted < 0) != (rows < 0))
        else:
            lost = np.isinf(converted) & ~np.isinf(rows)
    if lost.any():
        raise DataError(f"{KEY}: {name} has {rows[lost][0]:,}, which {dtype} cannot hold; scale down large values.")
    return converted
