"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO


def write_text(path: Path, text: str) -> None:
    """Write ``path`` as ``whole`` does."""
    with whole(path) as file:
        file.write(text.encode())


def write_array(path: Path, array: Any) -> None:
    """Write numpy's ``array`` as ``whole`` does, and .npy; numpy itself need not notice that the disk is full."""
    import numpy as np  # not above: light commands write text alone

    with BytesIO() as content, whole(path) as file:
        np.save(content, array)
        file.write(content.getbuffer())


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes ``path``'s place at the block's end: whole or not at all.

    An interruption, a full disk or a power failure leaves the old content: what is written is on the disk before it
    gets the name. Raises OSError, which names ``path``; what was written of it is deleted then, for the disk may be
    full.
    """
    partial = path.with_name(path.name + ".partial")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name, too
        finally:
            os.close(folder)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError of the block that names no file name ``path``: the system names none when it cannot write on."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
