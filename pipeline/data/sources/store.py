"""Downloads and stores raw files. A file gets its final name only after its content was checked."""

from __future__ import annotations

import gzip
import hashlib
import re
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urljoin

import requests
import urllib3
from tqdm import tqdm

from pipeline.errors import printable
from pipeline.files import file_sha256

CHUNK_BYTES = 1 << 20

PAUSE_SECONDS = 1.0
"""Pause before the second attempt. Each further attempt doubles the pause."""

CONNECT_SECONDS = 5.0
"""Longest wait for a connection. A reachable server answers sooner, and without a network the user does not wait for
minutes."""

MOST_REDIRECTS = 10

LEAST_BYTES_PER_SECOND = 1000
"""Lowest allowed mean rate of a transfer. A slower transfer fails. The first ``timeout_seconds`` are left out of the
transfer's duration."""


class SourceError(Exception):
    """A source failed to deliver, so the next source is tried. The message is the reason."""


class InterruptedTransfer(Exception):
    """A transfer failed, but may succeed on another attempt. The message is the reason."""


@dataclass(frozen=True)
class RawFile:
    name: str
    limit_bytes: int
    """The file is never unpacked beyond this size."""
    sha256: str
    """SHA-256 of the uncompressed content."""


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

    def missing(self, files: Sequence[RawFile]) -> list[RawFile]:
        """Return those of ``files`` that ``directory`` lacks. A file with wrong content is deleted and counts as
        missing."""
        absent = []
        for file in files:
            path = self.directory / file.name
            if path.is_file() and file_sha256(path) == file.sha256:
                continue
            path.unlink(missing_ok=True)
            absent.append(file)
        return absent

    def place(self, content: Readable, file: RawFile) -> None:
        """Write ``content`` under the file's final name.

        Raises SourceError, and leaves no file, if the content is wrong.
        """
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
            raise SourceError(f"{file.name}: damaged, or not the expected file ({error})") from None
        finally:
            partial.unlink(missing_ok=True)

    def download(self, url: str, limit_bytes: int, use: Callable[[Path], None]) -> None:
        """Download ``url`` and hand the finished file to ``use``, which raises SourceError if the content is wrong.

        Continues an earlier, interrupted transfer. If the joined parts are wrong, the file on the server may have
        changed between the transfers, so the file is downloaded once more from the start.
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
        """Transfer ``url`` in several attempts. Returns whether ``path`` was joined from more than one transfer."""
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
                if path.exists():  # no message if nothing has arrived yet: another source may work
                    say(f"{url}: {error}; attempt {attempt + 1} of {self.attempts} in {pause:g} s")
                time.sleep(pause)
        raise AssertionError("unreachable: attempts is at least 1")

    def _transfer(self, url: str, path: Path, limit_bytes: int) -> None:
        have = path.stat().st_size if path.exists() else 0
        # Without "identity" a server may compress the content, and a byte range would not match the file on disk.
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
        patience = (min(CONNECT_SECONDS, self.timeout_seconds), self.timeout_seconds)
        try:
            with _answered(url, headers=headers, stream=True, timeout=patience) as response:
                total = self._expected_bytes(response, path, have)
                if total is not None and total > limit_bytes:
                    path.unlink(missing_ok=True)
                    raise SourceError(f"the server announces {total:,} bytes; at most {limit_bytes:,} are expected")
                if response.status_code == 416:  # an earlier transfer has fetched the whole file
                    return
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
                        if have > limit_bytes:
                            path.unlink()
                            raise SourceError(f"more than the expected {limit_bytes:,} bytes")
                        out.write(chunk)
                        bar.update(len(chunk))
                if total is not None and have < total:
                    raise InterruptedTransfer(f"the connection ended after {have:,} bytes")
        except urllib3.exceptions.ProtocolError:  # newer versions of urllib3 check the length themselves
            raise InterruptedTransfer(f"the connection ended after {have:,} bytes") from None
        # A redirect to a malformed URL can raise ValueError.
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
            raise InterruptedTransfer(_reason(error, self.timeout_seconds)) from None

    def _expected_bytes(self, response: requests.Response, path: Path, have: int) -> int | None:
        """Return the size of the whole file; None if it is unknown. Raises SourceError or InterruptedTransfer if the
        response contains neither the file's start nor its continuation."""
        status = response.status_code
        content_range = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range", ""))
        if status == 416 and have and content_range and content_range[2] == str(have):
            return have
        if status == 416 or (status == 206 and not (content_range and content_range[1] == str(have))):
            path.unlink(missing_ok=True)
            raise InterruptedTransfer("the server did not continue where the last transfer ended; starting over")
        if status in (408, 425, 429) or status >= 500:
            raise InterruptedTransfer(f"HTTP status {status} {response.reason}")
        if status not in (200, 206):
            raise SourceError(f"HTTP status {status} {response.reason}")
        length = re.fullmatch("[0-9]{1,18}", response.headers.get("Content-Length", ""))
        return (have if status == 206 else 0) + int(length[0]) if length else None


class _Session(requests.Session):
    """Follows no redirect, because requests would first read the redirect's body, which may have any length."""

    def get_redirect_target(self, resp: requests.Response) -> None:  # noqa: ARG002
        return None


def _answered(url: str, **request: Any) -> requests.Response:
    """Request ``url``, follow redirects without reading their bodies, and return the response."""
    with _Session() as session:
        for _ in range(MOST_REDIRECTS + 1):
            response = session.get(url, **request)
            target = requests.Session.get_redirect_target(session, response)
            if target is None:
                return response
            response.close()
            url = urljoin(response.url, target)
    raise SourceError(f"more than {MOST_REDIRECTS} redirects")


def say(line: str) -> None:
    """Print one plain line to stderr, for a person or a log."""
    tqdm.write(printable(line), file=sys.stderr)


def progress(what: str, total: int | None, unit: str, initial: int = 0) -> tqdm[Any]:
    """Return a progress bar, which is shown only on a terminal."""
    return tqdm(total=total, initial=initial, desc=what, unit=unit, unit_scale=True, leave=False, disable=None)


def _reason(error: Exception, timeout_seconds: float) -> str:
    """Return why a connection failed, in words for the user."""
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {min(CONNECT_SECONDS, timeout_seconds):g} s"
    if isinstance(error, requests.ReadTimeout | urllib3.exceptions.ReadTimeoutError):
        return f"no answer within {timeout_seconds:g} s"
    cause = getattr(error.args[0], "reason", error) if error.args else error
    return str(cause).rsplit(": ", 1)[-1] or type(error).__name__
