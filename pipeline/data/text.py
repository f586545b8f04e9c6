"""Turns text files into tokens (bytes of UTF-8, or tokens of a tokenizer), and cuts the tokens into windows."""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
import resource
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from numpy.lib.stride_tricks import sliding_window_view

from pipeline import factories
from pipeline.data import LIMIT_BYTES, LISTING, DataError
from pipeline.data.decoded import AGAIN, Chunk, Decoded, held_out, listed
from pipeline.data.own_files import files_under
from pipeline.errors import count, first_line
from pipeline.files import open_regular, read_bytes
from pipeline.params import Config, Fetch
from pipeline.processes import end_with_parent

Tokens = npt.NDArray[Any]

END = 256
"""The token after each file's last token, if the tokens are bytes."""
KEY = "prepare.tokenizer"
BLOCK_BYTES = 1 << 20
LIMIT_MEMORY_BYTES = 2 << 30
"""Memory that a tokenizer's process may take. A tokenizer can multiply text."""
LIMIT_SECONDS = 10
"""Longest allowed time for a part of a text, apart from a minute for each MiB. A pattern in a tokenizer can take
forever."""

FOLDERS = ("text_folder", "python_source")
"""The data sets that are folders of text."""
_UNREAD = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Names of the folders that ``python_source`` skips: folders of tests (some test files are broken on purpose), folders
of caches, and folders of packages that do not belong to Python."""


def root(fetch: Fetch) -> Path:
    """Return the folder of ``fetch.dataset``: the user's folder, or the standard library of the running Python."""
    if fetch.dataset == "python_source":
        return Path(sysconfig.get_path("stdlib"))
    return Path(fetch.text_folder or "").expanduser()


def files(fetch: Fetch) -> list[str]:
    """Return the paths of the text files, sorted, relative to ``root``.

    Raises DataError for fewer than two files, and for an empty file in the user's folder.
    """
    top, of_python = root(fetch), fetch.dataset == "python_source"
    if of_python:
        names = files_under(top, "", lambda place: "" if place.suffix == ".py" else "other", _UNREAD)
        names = [name for name in names if (top / name).stat().st_size]
    else:
        names = files_under(top, f"fetch.{fetch.dataset}", lambda _: "")
        for empty in (name for name in names if not (top / name).stat().st_size):
            raise DataError(f"fetch.{fetch.dataset}: {top / empty} is empty; remove it.")
    if len(names) < 2:
        there = f"found {count(len(names), 'file')} in {top}"
        raise DataError(f"fetch.{fetch.dataset}: {there}; expected two or more, because testing needs its own file.")
    return names


def decode(config: Config, directory: Path) -> Decoded:
    """Decode the files that ``directory``'s listing names. The share ``prepare.test_fraction`` of these files is for
    testing."""
    rows, top, kept = listed(directory / LISTING), root(config.fetch), config.prepare
    encode, end, version = _tokenizer(kept.tokenizer)
    test = held_out([path for path, _ in rows], [0] * len(rows), kept.test_fraction)
    python = platform.python_version() if config.fetch.dataset == "python_source" else ""

    def split(wanted: bool, limit: int | None) -> Iterator[Chunk]:
        chosen = [row for row, out in zip(rows, test, strict=True) if out == wanted]
        return windows(_tokens(top, chosen, encode, end), kept.window, limit)

    return Decoded(
        train=split(False, kept.train_limit),
        test=split(True, kept.test_limit),
        vocabulary=end + 1,
        version=" ".join(filter(None, (python, version))),
    )


def windows(tokens: Iterable[Tokens], length: int, limit: int | None = None) -> Iterator[Chunk]:
    """Cut tokens into windows, and yield chunks of n windows [n, length + 1]: at most ``limit`` windows in all.

    Neighbouring windows share a token: the last target of a window is the first input of the next window. An incomplete
    last window is dropped.
    """
    left, count = np.empty(0, np.uint16), 0
    for block in tokens:
        left = np.concatenate([left, block], dtype=block.dtype)
        windows = (len(left) - 1) // length
        if limit is not None:
            windows = min(windows, limit - count)
        if windows > 0:
            yield (sliding_window_view(left[: windows * length + 1], length + 1)[::length],)
            left, count = left[windows * length :], count + windows
        if count == limit:
            return


def _tokenizer(file: str | None) -> tuple[Callable[[str], Tokens], int, str]:
    """Return a function that turns text into tokens, the token after each file's last token, and a version.

    ``file`` holds a tokenizer that the library https://github.com/huggingface/tokenizers wrote. Without a file, the
    bytes of UTF-8 are the tokens.

    Raises DataError if the library is missing, or if the file cannot be read as a tokenizer.
    """
    if file is None:
        return lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint16), END, ""
    path = Path(file).expanduser()
    factories.library("tokenizers", f"{KEY}: found {file!r}", DataError)
    try:
        content = read_bytes(path, LIMIT_BYTES)
    except OSError as error:
        raise DataError(f"{KEY}: {path} cannot be read: {error.strerror}.") from None
    ours, childs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_encode, args=(childs, LIMIT_MEMORY_BYTES), daemon=True)
    process.start()
    childs.close()
    try:
        problem = ours.recv()  # None: it has started
    except EOFError:
        problem = "it ended at once"
    if problem is not None:
        raise DataError(f"{KEY}: the process that encodes the text cannot start: {problem}.")

    def ask(request: str | bytes) -> Any:
        limit = LIMIT_SECONDS + 60 * len(request) / (1 << 20)
        try:
            ours.send(request)
            answer = ours.recv() if ours.poll(limit) else f"it took longer than {limit:.0f} s"
        except (EOFError, OSError):  # it was killed, or the library ended it
            answer = f"it ended, perhaps because it took more than {LIMIT_MEMORY_BYTES >> 20:,} MiB of memory"
        if isinstance(answer, str):
            process.kill()
            what = "cannot encode the text" if isinstance(request, str) else "is not a tokenizer's file"
            raise DataError(f"{KEY}: {path} {what} ({answer}); save it anew, or use another.")
        return answer

    end = ask(content)
    version = f"tokenizer {hashlib.sha256(content).hexdigest()[:16]}"
    return ask, end, version


def _encode(requests: Connection, memory_bytes: int) -> None:
    """Answer the first request, a tokenizer's file, with the number of its tokens, and each text with its tokens.

    An answer of text is an error. This runs in a process of its own, with limited memory and without output, because
    the file is not trusted: it can let the library take any amount of memory or time, or end the process.
    """
    end_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # a panic is printed, and also raised
    try:
        import tokenizers

        used = psutil.Process().memory_info().vms
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = used + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
        requests.send(None)
        tokenizer = tokenizers.Tokenizer.from_buffer(requests.recv())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        end = 1 + max(tokenizer.get_vocab().values(), default=-1)
        dtype = np.dtype(np.uint16 if end < 1 << 16 else np.uint32)
        if end > np.iinfo(np.uint32).max:
            raise ValueError(f"a token has the number {end - 1:,}; allowed: less than {2**32 - 1:,}")
        requests.send(end)
        while True:
            tokens = np.array(tokenizer.encode(requests.recv(), add_special_tokens=False).ids, np.uint32)
            if tokens.size and tokens.max() >= end:
                raise ValueError(f"it made the token {tokens.max():,}, but its vocabulary has only {end:,}")
            requests.send(tokens.astype(dtype))
    except EOFError:  # the parent needs no more
        pass
    except BaseException as error:  # a panic of the library is no Exception
        requests.send(first_line(error))


def _tokens(top: Path, rows: Iterable[tuple[str, str]], encode: Callable[[str], Tokens], end: int) -> Iterator[Tokens]:
    """Yield each file's tokens in blocks, and then the token ``end``. A block ends at the end of a line, unless it
    contains no line end."""
    for name, expected in rows:
        path, digest, uncoded = top / name, hashlib.sha256(), ""
        try:
            for block in codecs.iterdecode(_blocks(path, digest), "utf-8"):
                uncoded += block
                cut = uncoded.rfind("\n") + 1 or len(uncoded)
                yield encode(uncoded[:cut])
                uncoded = uncoded[cut:]
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): the files have changed; {AGAIN}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 ({error.reason}); convert it, or remove it, and {AGAIN}") from None
        if digest.hexdigest() != expected:
            raise DataError(f"{path} is not the file that fetch listed: it has changed; {AGAIN}")
        yield encode(uncoded)
        yield np.array([end], encode("").dtype)


def _blocks(path: Path, digest: Any) -> Iterator[bytes]:
    """Yield the file's content, and update ``digest`` with it, so that the file is read only once."""
    with open_regular(path) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            yield block
