"""Reads arrays from .npy, .npz, .safetensors and Parquet files. The files are not trusted: every size is checked.

Also writes .npy files in chunks of rows, so that an array of any size is read and written in bounded memory.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data import DataError
from pipeline.data.decoded import AGAIN
from pipeline.errors import first_line

Rows = npt.NDArray[Any]

CHUNK_BYTES = 16 << 20
LIMIT_HEADER_BYTES = 1 << 20
"""Largest header of a .safetensors file: more than enough for the descriptions of many arrays."""
LIMIT_ROW_BYTES = 64 << 20
"""Largest allowed size of a row. Without a limit a row could fill the memory, because a chunk holds at least one row.
Even a small file can declare a huge row, or contain a huge row in compressed form."""


class Array(NamedTuple):
    """The array of a .npy file, a member of an .npz or .safetensors file, or columns of a Parquet table."""

    path: Path
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = 0
    """Offset of the first value, in bytes."""
    columns: tuple[str, ...] = ()
    """Columns of a table; empty for any other file. Only a single column can hold lists of numbers."""

    def __str__(self) -> str:
        return f"{self.path.parent / self.member} {self.dtype} {list(self.shape)}"

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    def chunks(self, length: int | None = None) -> Iterator[Rows]:
        """Yield chunks of ``length`` rows; if ``length`` is None, chunks of about ``CHUNK_BYTES`` bytes.

        Raises DataError if the array is cut short.
        """
        length = length or max(1, CHUNK_BYTES // (self.row_bytes or 1))
        with naming(self.path):
            yield from self._of_table(length) if self.columns else self._of_stream(length)

    def _of_stream(self, length: int) -> Iterator[Rows]:
        with _stream(self.path, self.member) as file:
            file.seek(self.offset)
            for start in range(0, self.shape[0], length):
                count = min(length, self.shape[0] - start)
                content = file.read(count * self.row_bytes)
                yield np.frombuffer(content, self.dtype).reshape(count, *self.shape[1:])

    def _of_table(self, length: int) -> Iterator[Rows]:
        from pyarrow.parquet import ParquetFile

        left = self.shape[0]
        with ParquetFile(self.path) as table:
            for batch in table.iter_batches(length, columns=list(self.columns)):
                left -= batch.num_rows
                found = [self._values(batch.column(name)) for name in self.columns]
                yield (np.stack(found, 1) if self.columns != (self.member,) else found[0]).reshape(-1, *self.shape[1:])
        if left:
            raise DataError(f"{self}: the file has only {self.shape[0] - left} rows; write it again and {AGAIN}")

    def _values(self, column: Any) -> Rows:
        while column.null_count == 0 and hasattr(column.type, "list_size"):
            column = column.flatten()
        if column.null_count:
            raise DataError(f"{self} has empty fields; fill them, or leave out their rows, and {AGAIN}")
        values: Rows = column.to_numpy(zero_copy_only=False)
        return values.astype(self.dtype)


def read(path: Path) -> Iterator[Array]:
    """Yield the arrays that the file's header describes. Raises DataError if the file is damaged, or if an array does
    not hold numbers in rows of one shape."""
    with naming(path):
        for array in _READERS[path.suffix](path):
            check_name(array.member, path)
            if min(array.shape, default=-1) < 0 or array.dtype.kind not in "iuf":
                raise DataError(
                    f"{array}: expected numbers in C order, in rows of one shape. Pad ragged rows, which numpy "
                    "stores as objects."
                )
            if array.row_bytes > LIMIT_ROW_BYTES:
                raise DataError(
                    f"{array}: a row (a sample) has {array.row_bytes:,} bytes; allowed: {LIMIT_ROW_BYTES:,}."
                )
            if not array.columns and array.offset + array.shape[0] * array.row_bytes > _size(array):
                raise DataError(f"{array} is cut short; write it again and {AGAIN}")
            yield array


def check_name(name: str, place: Path | str) -> None:
    """Raise DataError if an array cannot have this ``name``."""
    if not re.fullmatch("[a-z][a-z0-9_]{0,49}", Path(name).stem):
        raise DataError(
            f"{place} has an array {name!r}; expected inputs, targets, test_inputs, test_targets or, for a task of "
            "your own, names of lower-case letters, digits and underscores: rename it."
        )


def _size(array: Array) -> int:
    """Return the size in bytes of the file, or of the unpacked member of an .npz file."""
    if array.path.suffix != ".npz":
        return array.path.stat().st_size
    with zipfile.ZipFile(array.path) as opened:
        return opened.getinfo(array.member).file_size


def _in_numpy(path: Path) -> Iterator[Array]:
    """Yield the array of a .npy file, or the arrays of an .npz file."""
    members = zipfile.ZipFile(path).namelist() if path.suffix == ".npz" else [path.name]
    if len(set(members)) < len(members):
        raise ValueError("two arrays have the same name")
    for member in members:
        with _stream(path, member) as file:
            first = np.lib.format.read_magic(file) == (1, 0)
            header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = header(file)
            yield Array(path, member, shape, np.dtype(object) if is_fortran else dtype, file.tell())


def _in_safetensors(path: Path) -> Iterator[Array]:
    """Yield each tensor as an array.

    Format, from https://github.com/huggingface/safetensors: the header's length in 8 bytes, little endian; the header
    in JSON; the values. A tensor's two ``data_offsets`` are the start and the end of its values, counted in bytes from
    the end of the header.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LIMIT_HEADER_BYTES:
            raise ValueError(f"the header has {length:,} bytes, which is too many")
        header = json.loads(file.read(length))
    for name, each in header.items():
        if name != "__metadata__":
            kind, (start, end) = re.fullmatch("([FIU])(8|16|32|64)", each["dtype"]), each["data_offsets"]
            dtype = np.dtype(f"<{kind[1].lower()}{int(kind[2]) // 8}" if kind else object)
            if start < 0:
                raise ValueError(f"{name} starts {-start:,} bytes before the values")
            array = Array(path, name, tuple(each["shape"]), dtype, 8 + length + start)
            if dtype.kind != "O" and math.prod(array.shape) * dtype.itemsize != end - start:
                raise ValueError(f"{name} has {end - start:,} bytes, which do not fit its shape")
            yield array


def _in_table(path: Path) -> Iterator[Array]:
    """If a column is named ``inputs``, yield each column as an array. Otherwise yield all columns except ``targets`` as
    one array, the inputs, and then the column ``targets`` if it exists.

    A column holds numbers. A column that is an array of its own may hold lists of numbers instead. All lists of a
    column have the length that the column's type declares.
    """
    from pyarrow.parquet import ParquetFile  # imported here: the import takes a quarter of a second
    from pyarrow.types import is_floating, is_integer

    with ParquetFile(path) as table:
        schema, count = table.schema_arrow, table.metadata.num_rows
    members = {name: (name,) for name in schema.names}
    if "inputs" not in members:
        members = {"inputs": tuple(name for name in schema.names if name != "targets"), "targets": ("targets",)}
    for member, columns in members.items():
        types = [schema.field(name).type for name in columns if name in schema.names]
        shape: tuple[int, ...] = (count, len(columns))
        if columns == (member,) and types:
            shape = (count,)
            while hasattr(types[0], "list_size"):
                shape, types = (*shape, types[0].list_size), [types[0].value_type]
        for name, kind in zip(columns, types, strict=False):
            if not (is_integer(kind) or is_floating(kind)):
                raise DataError(
                    f"{path}: the column {name!r} holds {kind}; expected numbers. The columns inputs and "
                    "targets, and all columns of a table with a column inputs, may also hold lists of numbers, if the "
                    "column's type declares their length."
                )
        if types:
            dtype = np.result_type(*(np.dtype(each.to_pandas_dtype()) for each in types))
            yield Array(path, member, shape, dtype, columns=columns)


_READERS = {".npy": _in_numpy, ".npz": _in_numpy, ".safetensors": _in_safetensors, ".parquet": _in_table}


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
    """Turn any exception in the block into a DataError that names ``path``, because readers raise exceptions of many
    types for a damaged file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} cannot be read ({first_line(error)}); write it again and {AGAIN}") from None


@contextmanager
def _stream(path: Path, member: str) -> Iterator[IO[bytes]]:
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            yield file
    else:
        with path.open("rb") as file:
            yield file
