"""The folders of the data; atomic writes: a file is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

RAW = Path("data/raw")
"""What ``fetch`` writes."""
PREPARED = Path("data/prepared")
"""What ``prepare`` writes."""


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically, with ``whole``."""
    with whole(path) as file:
        file.write(text.encode())


def write_array(path: Path, array: Any) -> None:
    """Write ``array`` as .npy atomically, with ``whole``: numpy's own writing may miss that the disk is full."""
    import numpy as np  # imported here: light commands write only text

    with BytesIO() as content, whole(path) as file:
        np.save(content, array)
        file.write(content.getbuffer())


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing, which replaces ``path`` at the block's end: whole or not at all.

    An interruption, a full disk or a power failure leaves the old content: the new content is on the disk before the
    file is renamed. Raises OSError, which names ``path``. After an error the temporary file is deleted, as the disk may
    be full.
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
            os.fsync(folder)  # the new name, too
        finally:
            os.close(folder)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError of the block that names no file, as when a write fails."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
