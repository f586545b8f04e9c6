"""Reads arrays from .npy, .npz, .safetensors and Parquet files, which are not trusted, and writes .npy files.

An array is a memory map of a .npy file. Files of the other types are first unpacked into .npy files. So an array of any
size is read and written in bounded memory.
"""

from __future__ import annotations

import math
import re
import resource
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from numpy.lib.format import open_memmap

from pipeline.data import DataError
from pipeline.data.decoded import AGAIN
from pipeline.errors import count, first_line, said

Rows = npt.NDArray[Any]

CHUNK_BYTES = 16 << 20
BUFFER_BYTES = 1 << 16
"""Bytes that are read at a time from each column of a Parquet table. By default pyarrow reads whole columns of many row
groups ahead, and keeps what it read until the end."""
LIMIT_ROW_BYTES = 64 << 20
"""Largest allowed size of a row. Even a small file can declare a huge row, or contain one in compressed form, and a
chunk holds at least one row."""

LIMIT_UNPACKED_BYTES, LIMIT_RATIO = 1 << 30, 100
"""A file may unpack to this number of bytes, or to this multiple of its own size, whichever is more. A few kilobytes
can unpack to more than the disk holds."""
LEAST_ROW_BYTES = 32
"""A row counts as at least this number of bytes, because even an empty row takes time."""


def read(path: Path, unpacked: Path, changes: Counter[str]) -> dict[str, Rows]:
    """Return the arrays of a file by name, memory-mapped. A file other than .npy is first unpacked into the empty
    folder ``unpacked``. Columns that are left out are counted in ``changes``.

    Raises DataError if the file is damaged, or if it holds anything but numbers in rows of one shape.
    """
    with naming(path):
        if path.suffix == ".npz":
            _unzip(path, unpacked)
        elif path.suffix != ".npy":
            chunks = _in_table(path, changes) if path.suffix == ".parquet" else _in_safetensors(path)
            write(chunks, str(path), unpacked)
        arrays: dict[str, Rows] = {}
        for file in [path] if path.suffix == ".npy" else sorted(unpacked.iterdir()):
            check_name(file.stem, path)
            rows = arrays[file.stem] = open_memmap(file, "r")
            if rows.dtype.kind not in "iuf" or not rows.ndim or 0 in rows.shape[1:]:
                raise ValueError(f"{file.stem}: found {rows.dtype} {list(rows.shape)}")
            _check_row_bytes(path, rows.dtype.itemsize * math.prod(rows.shape[1:]))
        return arrays


def write(chunks: Iterable[Any], source: str, directory: Path, prefix: str = "") -> None:
    """Write ``directory/<prefix><name>.npy`` for each name in the chunks, which are dicts of arrays [n, ...].

    Raises DataError, naming ``source``, for anything else.
    """
    files: dict[str, GrowingArray] = {}
    with ExitStack() as opened:
        for chunk in chunks:
            if not isinstance(chunk, Mapping):
                raise DataError(f"{source} yielded {type(chunk)}; expected a dict of inputs and further arrays.")
            for name, values in chunk.items():
                check_name(str(name), source)
                try:
                    rows = np.asarray(values)
                    if rows.dtype.kind not in "iuf" or not rows.ndim:
                        raise ValueError(f"found {rows.dtype} {list(rows.shape)}")
                    if name not in files:
                        files[name] = GrowingArray(directory / f"{prefix}{name}.npy")
                        opened.callback(files[name].close)
                    files[name].append(rows)
                except (ValueError, TypeError, RuntimeError) as error:  # ragged lists; tensors that need a gradient
                    raise DataError(
                        f"{source} yielded {name} that cannot be used ({first_line(error)}); expected numbers [n, ...] "
                        "of one type and shape."
                    ) from None


def check_name(name: str, place: Path | str) -> None:
    """Raise DataError if an array cannot have this ``name``."""
    if not re.fullmatch("[a-z][a-z0-9_]{0,49}", name):
        raise DataError(
            f"{place} has an array {name!r}; expected inputs, targets, test_inputs, test_targets or, for a task of "
            "your own, names of lower-case letters, digits and underscores: rename it."
        )


def _unzip(path: Path, directory: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if len(set(names)) < len(names):
            raise ValueError("two arrays have the same name")
        if {member.compress_type for member in archive.infolist()} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise ValueError("it is compressed by another method than numpy's")  # which decompresses without limit
        _check_unpacked(path, sum(member.file_size for member in archive.infolist()))
        for name in names:
            check_name(name.removesuffix(".npy"), path)
            archive.extract(name, directory)


def _in_safetensors(path: Path) -> Iterator[dict[str, Rows]]:
    from safetensors import safe_open

    with safe_open(path, "numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - the file is no mapping
            rows = tensors.get_slice(name)
            size, *shape = rows.get_shape()
            length = max(1, CHUNK_BYTES // (8 * math.prod(shape) or 1))
            _check_unpacked(path, size * LEAST_ROW_BYTES)
            if not size:  # the library slices no empty tensor
                yield {name: tensors.get_tensor(name)}
            for start in range(0, size, length):
                yield {name: rows[start : min(start + length, size)]}


def _in_table(path: Path, changes: Counter[str]) -> Iterator[dict[str, Rows]]:
    """If a column is named ``inputs`` or ``input_ids``, yield each column as an array. Otherwise yield all columns
    except ``targets`` as one array, the inputs, and also the column ``targets`` if it exists.

    A column holds numbers, or lists of numbers, which may be nested. All lists of a column have the length that the
    column's type declares. The index of a pandas data frame, which numbers or names the rows, is left out, unless it is
    named ``inputs`` or ``targets``.
    """
    from pyarrow.parquet import ParquetFile  # imported here: the import takes a quarter of a second

    with ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES) as table:
        noted = (table.schema_arrow.pandas_metadata or {}).get("index_columns", ())
        kept = [name for name in table.schema_arrow.names if name in ("inputs", "targets") or name not in noted]
        changes.update(f"left out: {name!r}, the data frame's index" for name in {*table.schema_arrow.names} - {*kept})
        row_bytes = sum(_row_bytes(table.schema_arrow.field(name).type) for name in kept)
        _check_row_bytes(path, row_bytes)
        _check_unpacked(path, table.metadata.num_rows * max(row_bytes, LEAST_ROW_BYTES))
        row_count = 0
        for batch in table.iter_batches(max(1, CHUNK_BYTES // (row_bytes or 1)), columns=kept):
            columns = {name: _values(path, name, batch.column(name)) for name in kept}
            if not columns.keys() & {"inputs", "input_ids"}:
                features = [rows for name, rows in columns.items() if name != "targets"]
                columns = {name: rows for name, rows in columns.items() if name == "targets"}
                columns |= {"inputs": np.stack(features, 1)} if features else {}
            row_count += batch.num_rows
            yield columns
        if row_count != table.metadata.num_rows:
            raise ValueError(f"found {row_count} rows, but the header claims {table.metadata.num_rows}")


@contextmanager
def limited(path: Path, size: int) -> Iterator[None]:
    """Raise DataError if the block, which reads the ``size`` bytes of ``path``, takes more memory than they may unpack
    to."""
    allowed, (soft, hard) = max(LIMIT_UNPACKED_BYTES, LIMIT_RATIO * size), resource.getrlimit(resource.RLIMIT_DATA)
    most = psutil.Process().memory_info().data + allowed
    limit = min([most, *(present for present in (soft, hard) if present != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    except MemoryError:
        raise DataError(
            f"fetch.arrays: {path}: {size:,} bytes unpack to more memory than is allowed: {allowed:,}. If the data set "
            "is yours, save it without compression."
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _check_row_bytes(path: Path, row_bytes: int) -> None:
    if row_bytes > LIMIT_ROW_BYTES:
        raise DataError(f"{path}: a row (a sample) has {row_bytes:,} bytes; allowed: {LIMIT_ROW_BYTES:,}.")


def _check_unpacked(path: Path, unpacked_bytes: int) -> None:
    size = path.stat().st_size
    if unpacked_bytes > (allowed := max(LIMIT_UNPACKED_BYTES, LIMIT_RATIO * size)):
        raise DataError(
            f"{path}: {size:,} bytes would unpack to {unpacked_bytes:,}; allowed: {allowed:,}. If the file is yours, "
            "save its arrays as .npy files, and name their folder in fetch.arrays."
        )


def _row_bytes(kind: Any) -> int:
    """Return the bytes of a row of a column's type."""
    if hasattr(kind, "list_size"):
        return _row_bytes(kind.value_type) * int(kind.list_size)
    return int(np.dtype(kind.to_pandas_dtype()).itemsize)


def _values(path: Path, name: str, column: Any) -> Rows:
    shape = [len(column)]
    while column.null_count == 0 and hasattr(column.type, "list_size"):
        shape.append(column.type.list_size)
        column = column.flatten()
    rows: Rows = column.to_numpy(zero_copy_only=False)
    if column.null_count or rows.dtype.kind not in "iuf":
        raise DataError(
            f"{path}: the column {name!r} holds {column.type}, {count(column.null_count, 'empty field')}; expected "
            f"numbers, or lists of numbers whose length the column's type declares. Repair or drop it, and {AGAIN}"
        )
    return rows.reshape(shape)


class GrowingArray:
    """Writes an array [N, ...] to a .npy file, chunk by chunk. All rows have the type and shape of the first row. The
    file is complete after ``close``."""

    def __init__(self, path: Path) -> None:
        self.dtype: np.dtype[Any] | None = None
        self.shape: tuple[int, ...] = ()
        """Shape of one row."""
        self.count = 0
        self._file = path.open("wb")

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Add ``rows`` [n, ...]. Raises ValueError if their type or shape differs from the first row's."""
        if self.dtype is None:
            self.dtype, self.shape = rows.dtype, rows.shape[1:]
            self._write_header()
        if (rows.dtype, rows.shape[1:]) != (self.dtype, self.shape):
            raise ValueError(
                f"rows of {rows.dtype} {list(rows.shape[1:])} follow rows of {self.dtype} {list(self.shape)}"
            )
        self._file.write(np.ascontiguousarray(rows).data)
        self.count += len(rows)

    def close(self) -> None:
        with self._file:
            if self.dtype is not None:
                self._file.seek(0)
                self._write_header()

    def _write_header(self) -> None:
        """Write the header. numpy leaves room for the first dimension to grow, so the header's length never changes."""
        assert self.dtype is not None
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count, *self.shape)}
        np.lib.format.write_array_header_1_0(self._file, header)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an exception in the block into a DataError that names ``path``, because readers raise exceptions of many
    types for a damaged file. Errors that ``said`` can word stay as they are."""
    try:
        yield
    except Exception as error:
        if said(error) and not isinstance(error, MemoryError):  # Python's parser raises MemoryError for deep nesting
            raise
        raise DataError(
            f"{path} cannot be read ({first_line(error)}); expected numbers in rows of one shape. Write it again and "
            f"{AGAIN}"
        ) from None
