"""The folders of the data, digests, and atomic writes: files and directories are written completely or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

RAW = Path("data/raw")
"""The folder that ``fetch`` writes."""
PREPARED = Path("data/prepared")
"""The folder that ``prepare`` writes."""


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content. The file is read in blocks, so memory use is small."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(content: Any) -> str:
    """Return the SHA-256 of ``content`` written as JSON with sorted keys. Only equal contents have equal digests."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
