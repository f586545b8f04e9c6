"""A .npy file that grows by chunks of rows, so that an array of any size is written in bounded memory."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt


class GrowingArray:
    """An array [N, ...] whose rows have the type and shape of the first row. The file is complete after the ``with``
    block."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._file:
            if self.dtype is not None:
                self._file.seek(0)
                self._write_header()

    def _write_header(self) -> None:
        """Write the header. numpy leaves room for the first dimension to grow, so the header's length never changes."""
        assert self.dtype is not None
        header, shape = BytesIO(), (self.count, *self.shape)
        np.lib.format.write_array_header_1_0(header, {"descr": self.dtype.str, "fortran_order": False, "shape": shape})
        self._file.write(header.getvalue())
