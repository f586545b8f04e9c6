"""The places that may hold a data set's files: a mirror, a web folder, an archive, a package."""

from __future__ import annotations

import gzip
import math
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeline.data.sources.store import Files, SourceError, Store, say
from pipeline.files import file_sha256


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
        found = file_sha256(path)
        if found != self.sha256:
            raise SourceError(f"{self.name}: wrong content (SHA-256 {found}, not {self.sha256})")
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
            candidates = (folder / each for folder in folders for each in (name, f"{name}.gz"))
            found = next(filter(Path.is_file, candidates), None)
            if found is None:
                raise SourceError(f"holds neither {name} nor {name}.gz")
            if not os.access(found, os.R_OK):
                raise SourceError(f"{found} cannot be read")
            with gzip.open(found) if found.suffix == ".gz" else found.open("rb") as content:
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
