"""The folders of the data, digests, reads of regular files, and atomic writes: files and directories are written
completely or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

RAW = Path("data/raw")
"""The folder that ``fetch`` writes."""
PREPARED = Path("data/prepared")
"""The folder that ``prepare`` writes."""
LIMIT_BYTES = 1 << 26
"""Largest allowed size of a record, such as a result or a session of the bench."""


def open_regular(path: Path, limit: int | None = None) -> BufferedReader:
    """Open a file for reading. Raises OSError, naming the file, unless it is a regular file of at most ``limit`` bytes:
    a named pipe could block forever, and a device need not end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    status = os.fstat(file.fileno())
    large = limit is not None and status.st_size > limit
    if large or not stat.S_ISREG(status.st_mode):
        file.close()
        why = f"has {status.st_size:,} bytes; allowed: {limit:,}" if large else "is not a regular file"
        raise OSError(errno.ENOTSUP, why, str(path))
    return file


def read_bytes(path: Path, limit: int = LIMIT_BYTES) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises OSError as ``open_regular`` does."""
    with open_regular(path, limit) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_text(path: Path) -> str:
    """Return the text of a regular file. Raises OSError as ``read_bytes`` does, and ValueError if it is not UTF-8."""
    return read_bytes(path).decode()


def read_json(path: Path) -> Any:
    """Return the values in a JSON file. Raises OSError as ``read_bytes`` does, and ValueError if it is not JSON."""
    try:
        return json.loads(read_bytes(path))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def file_sha256(path: Path, limit: int | None = None) -> str:
    """Return the SHA-256 of a file's content. The file is read in blocks, so memory use is small. Raises OSError as
    ``open_regular`` does."""
    with open_regular(path, limit) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(content: Any) -> str:
    """Return the SHA-256 of ``content`` written as JSON with sorted keys. Only equal contents have equal digests."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def differing(present: Any, requested: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted path of each value that differs between ``present`` and ``requested``, and both values."""
    if isinstance(present, Mapping) and isinstance(requested, Mapping):
        for key in dict.fromkeys([*requested, *present]):
            yield from differing(present.get(key), requested.get(key), f"{path}.{key}" if path else key)
    elif present != requested:
        yield path, present, requested


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically, with ``whole``."""
    write_texts({path: text})


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write each text to its path, with ``whole``: all files, or none if the disk has no room for all."""
    with ExitStack() as opened:
        for path, text in texts.items():
            file = opened.enter_context(whole(path))
            file.write(text.encode())
            file.flush()


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, open for writing. At the block's end it replaces ``path``, completely or not at all.

    An interruption, a full disk or a power failure leaves the old or the new content, because the new content is on the
    disk before the file is renamed. An OSError that names no file gets ``path`` as its file. After an error the
    temporary file is deleted, because the disk may be full.
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
            os.fsync(folder)  # also write the new name to the disk
        finally:
            os.close(folder)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield a new, empty directory. At the block's end it replaces ``path``, completely or not at all.

    After an interruption there is the old directory, the new one, or the old one with the suffix ``.old``. An OSError
    that names no file gets ``path`` as its file.
    """
    new, old = (path.with_name(f"{path.name}.{kind}") for kind in ("partial", "old"))
    with naming(path):
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        try:
            yield new
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.replace(old)
            new.replace(path)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """If the block raises an OSError that names no file, as a failed write does, add ``path`` to the error."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
