"""The places that may hold a data set's files: a mirror, a web folder, an archive, a package."""

from __future__ import annotations

import gzip
import math
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, cast

from pipeline.data.sources.store import CHUNK_BYTES, RawFile, Readable, SourceError, Store, progress, say
from pipeline.files import file_sha256


class Source(Protocol):
    """A place that may hold a data set's files."""

    @property
    def label(self) -> str: ...

    def deliver(self, files: Sequence[RawFile], store: Store) -> None:
        """Place all of ``files``, or raise SourceError; files placed before the error stay."""


@dataclass(frozen=True)
class Archive:
    """A tar archive from which only the wanted regular files are read."""

    name: str
    folder: str
    limit_bytes: int
    sha256: str


@dataclass(frozen=True)
class Mirror:
    """The user's directory with plain files, gzipped files, or the official archive."""

    path: Path
    archive: Archive | None = None

    @property
    def label(self) -> str:
        return f"mirror {self.path}"

    def deliver(self, files: Sequence[RawFile], store: Store) -> None:
        if not self.path.is_dir():
            raise SourceError("no such directory")
        if self.archive is not None and (self.path / self.archive.name).is_file():
            unpack_archive(self.path / self.archive.name, self.archive, files, store)
            return
        folders = [self.path, *([self.path / self.archive.folder] if self.archive else [])]
        for file in files:
            candidates = (folder / name for folder in folders for name in (file.name, f"{file.name}.gz"))
            path = next(filter(Path.is_file, candidates), None)
            if path is None:
                raise SourceError(f"holds neither {file.name} nor {file.name}.gz")
            try:
                with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as content:
                    store.place(content, file)
            except OSError as error:
                raise SourceError(f"{path} cannot be read ({error.strerror or error})") from None


@dataclass(frozen=True)
class GzippedFiles:
    """A web folder with one NAME.gz for each file."""

    url: str

    @property
    def label(self) -> str:
        return self.url

    def deliver(self, files: Sequence[RawFile], store: Store) -> None:
        for file in files:

            def use(path: Path, file: RawFile = file) -> None:
                with gzip.open(path) as content:
                    store.place(content, file)

            # the limit has room for content that gzip cannot compress, which grows by a few bytes
            store.download(f"{self.url}/{file.name}.gz", file.limit_bytes + CHUNK_BYTES, use)


@dataclass(frozen=True)
class WebArchive:
    """An archive on the web that contains all files."""

    url: str
    archive: Archive

    @property
    def label(self) -> str:
        return self.url

    def deliver(self, files: Sequence[RawFile], store: Store) -> None:
        store.download(
            self.url,
            self.archive.limit_bytes,
            lambda path: unpack_archive(path, self.archive, files, store),
        )


@dataclass(frozen=True)
class DebianPackage:
    """A package of Debian and Ubuntu, downloaded with apt without root rights; nothing is installed.

    apt verifies the package's signature chain. If the system's package lists are missing or out of date, fresh lists
    are downloaded into a private directory. The system's lists never change.
    """

    package: str
    folder: str

    @property
    def label(self) -> str:
        return f"Debian/Ubuntu package {self.package}"

    def deliver(self, files: Sequence[RawFile], store: Store) -> None:
        installed = Path("/") / self.folder
        if installed.is_dir():
            Mirror(installed).deliver(files, store)
            return
        tools = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
        if tools:
            raise SourceError(f"not found: {', '.join(tools)}; this source needs Debian or Ubuntu")
        with tempfile.TemporaryDirectory(prefix="fetch-") as scratch:
            package = self._download(Path(scratch), store)
            with subprocess.Popen(
                ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as unpacker:
                assert unpacker.stdout is not None
                take_members(unpacker.stdout, self.folder, ".gz", files, store)

    def _download(self, scratch: Path, store: Store) -> Path:
        options = [
            f"Acquire::Retries={store.attempts - 1}",
            f"Acquire::http::Timeout={math.ceil(store.timeout_seconds)}",
            f"Acquire::https::Timeout={math.ceil(store.timeout_seconds)}",
            "APT::Sandbox::User=root",  # as root, apt would by default download as a user who cannot write here
        ]
        private = [f"Dir::State::Lists={scratch}/lists", f"Dir::Cache={scratch}/cache"]
        for folder in ("lists/partial", "cache/archives/partial"):
            (scratch / folder).mkdir(parents=True)
        say(f"{self.label}: apt-get download")
        failed = _apt_get(["download", self.package], options, scratch)
        if failed:
            say(f"{self.label}: {failed}; trying again with private, fresh package lists")
            # Even if the update fails, it may have fetched the right list, so the download is tried anyway.
            update_failed = _apt_get(["update"], options + private, scratch)
            failed = _apt_get(["download", self.package], options + private, scratch)
            if failed:
                raise SourceError("; ".join(filter(None, [f"apt-get download: {failed}", update_failed])))
        return next(scratch.glob("*.deb"))


def unpack_archive(path: Path, archive: Archive, files: Sequence[RawFile], store: Store) -> None:
    """Place ``files`` from the archive at ``path``. Raises SourceError before unpacking if its SHA-256 is wrong."""
    found = file_sha256(path)
    if found != archive.sha256:
        raise SourceError(f"{archive.name}: wrong content (SHA-256 {found}, not {archive.sha256})")
    with gzip.open(path) as content:
        take_members(content, archive.folder, "", files, store)


def take_members(tar: Readable, folder: str, suffix: str, files: Sequence[RawFile], store: Store) -> None:
    """Place ``files`` from a tar stream in which each file is called ``folder/NAME<suffix>``.

    Only regular members with exactly these names are read, and only ``Store.place`` writes their content. So the
    archive cannot create a file of another name, a link or a device.
    """
    wanted = {f"{folder}/{file.name}{suffix}": file for file in files}
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", tar), mode="r|") as members:
            for member in members:
                file = wanted.get(member.name.removeprefix("./"))
                content = members.extractfile(member) if member.isreg() else None
                if file is None or content is None:
                    continue
                store.place(gzip.GzipFile(fileobj=content) if suffix else content, file)
                del wanted[member.name.removeprefix("./")]
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise SourceError(f"the archive is damaged ({error})") from None
    if wanted:
        raise SourceError(f"the archive lacks {', '.join(wanted)}")


def _apt_get(command: list[str], options: list[str], directory: Path) -> str:
    """Run apt-get in ``directory``, and show its progress. Returns the reason for a failure, or an empty string."""
    log = directory / "apt-get.log"
    reports, apt_reports = os.pipe()
    options = [*options, f"APT::Status-Fd={apt_reports}"]
    with log.open("wb") as output, os.fdopen(reports, encoding="utf-8", errors="replace") as lines:
        process = subprocess.Popen(
            ["apt-get", "--quiet", *(part for option in options for part in ("--option", option)), *command],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[apt_reports],
            env={**os.environ, "LC_ALL": "C"},
        )
        os.close(apt_reports)
        with process, progress(f"apt-get {command[0]}", 100, "%") as bar:
            for line in lines:  # a line reads dlstatus:FILE:PERCENT OF ALL:WORDS
                if report := re.match(r"dlstatus:\d+:(\d+)", line):
                    bar.update(int(report[1]) - bar.n)
    if process.returncode == 0:
        return ""
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("E: ") for line in said if line.startswith("E: ")]
    return errors[0] if errors else f"apt-get {command[0]} ended with status {process.returncode}"
