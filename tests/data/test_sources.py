"""Fetching, against a server on the loopback that misbehaves on request; nothing here leaves the machine."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from pipeline.data import DataError
from pipeline.data.sources import fetch, listings, local, places, store
from pipeline.data.sources.listings import Listing
from pipeline.data.sources.places import Archive, DebianPackage, GzippedFiles, Source, WebArchive
from pipeline.data.sources.store import RawFile
from pipeline.errors import printable
from pipeline.params import Fetch
from tests.conftest import Terminal

CONTENTS = {"images": np.random.default_rng(0).bytes(300_000), "labels": b"0123456789" * 100}
FILES = tuple(RawFile(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in CONTENTS.items())


PACKAGE_FOLDER = "usr/share/datasets/some-package"


class Server(ThreadingHTTPServer):
    """Serves ``content`` by path; the other attributes say how it misbehaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        """Path and Range header of every request."""
        self.ranges = True
        self.drop_after: list[int] = []
        """The next answers end after these numbers of bytes."""
        self.statuses: list[int] = []
        """The next answers have these statuses."""
        self.says_length = True
        self.raw = b""
        """Unless empty, sent instead of any answer. If it ends with "drip", a byte follows every 10 ms."""
        self.silent = threading.Event()
        """While set, requests are not answered."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Range"]))
        while self.server.silent.is_set():
            threading.Event().wait(0.01)
        if self.server.raw:
            self.wfile.write(self.server.raw)
            while self.server.raw.endswith(b"drip"):
                threading.Event().wait(0.01)
                self.wfile.write(b"x")
            return
        if self.server.statuses:
            self.send_error(self.server.statuses.pop(0))
            return
        content = self.server.content.get(self.path.removeprefix("/"))
        if content is None:
            self.send_error(404)
            return
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        if asked and self.server.ranges:
            start = int(asked[1])
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if self.server.says_length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        self.wfile.write(body[: self.server.drop_after.pop(0)] if self.server.drop_after else body)

    def log_message(self, *_: object) -> None:
        pass


Use = Callable[..., None]


@pytest.fixture(autouse=True)
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Let ``mnist`` stand for two small files that the sources may have, without pauses between attempts."""
    monkeypatch.setattr(store, "PAUSE_SECONDS", 0.0)

    def used(*sources: Source, archive: Archive | None = None) -> None:
        monkeypatch.setitem(listings.LISTINGS, "mnist", Listing(FILES, sources, archive))

    return used


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, use: Use) -> Iterator[Server]:
    """The server that is the only source, unless a test says otherwise."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    use(GzippedFiles(server.url))
    server.content = {f"{name}.gz": gzip.compress(data, 1) for name, data in CONTENTS.items()}
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.silent.clear()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return tmp_path / "data" / "raw"


def config(**values: object) -> Fetch:
    return Fetch.model_validate({"dataset": "mnist", "timeout_seconds": 5.0, **values})


def assert_complete(raw: Path) -> None:
    """Assert that both files are right, and that the download left nothing else behind."""
    assert not (raw.parent / "raw.partial").exists()
    found = {path.relative_to(raw.parent).as_posix(): path for path in raw.parent.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in found.items()} == {
        f"raw/mnist/{name}": data for name, data in CONTENTS.items()
    }


def test_files_arrive_uncompressed_and_a_second_fetch_asks_nobody(server: Server, raw: Path) -> None:
    fetch(config(), raw)
    assert_complete(raw)
    assert server.requests == [("/images.gz", None), ("/labels.gz", None)]
    fetch(config(), raw)
    assert len(server.requests) == 2


def test_a_transfer_shows_its_progress_on_a_terminal(
    server: Server, raw: Path, open_terminal: Callable[[], Terminal]
) -> None:
    server.drop_after = [100_000]
    terminal = open_terminal()
    fetch(config(), raw)
    shown = re.findall(r"images\.gz: +(\d+)%", terminal.getvalue())
    assert shown[0] == "0"
    assert int(shown[-1]) >= 99
    assert shown.count("33") > 1, "and goes on where the transfer was continued"


def test_elsewhere_a_transfer_is_a_line(server: Server, raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch(config(), raw)
    assert capsys.readouterr().err == f"fetching 2 files of mnist from {server.url}\n"


def test_sources_that_failed_before_one_delivered_are_a_line(
    server: Server, raw: Path, use: Use, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = "http://127.0.0.1:9"
    use(GzippedFiles(closed), GzippedFiles(f"{server.url}/absent"), GzippedFiles(server.url))
    fetch(config(), raw)
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"fetching 2 files of mnist from {closed}"
    assert second.startswith(f"fetched from {server.url}; other sources failed: {closed}: ")
    assert second.endswith(f"; {server.url}/absent: HTTP status 404 Not Found")


def test_a_file_that_was_changed_is_fetched_again_alone(server: Server, raw: Path) -> None:
    fetch(config(), raw)
    (raw / "mnist" / "labels").write_bytes(b"tampered")
    server.requests.clear()
    fetch(config(), raw)
    assert_complete(raw)
    assert server.requests == [("/labels.gz", None)]


def test_a_dropped_transfer_is_continued_where_it_ended(server: Server, raw: Path) -> None:
    server.drop_after = [100_000, 50_000]
    fetch(config(attempts=3), raw)
    assert_complete(raw)
    assert [asked for _, asked in server.requests] == [None, "bytes=100000-", "bytes=150000-", None]


def test_a_later_run_continues_what_an_earlier_one_could_not_finish(server: Server, raw: Path) -> None:
    server.drop_after = [100_000]
    with pytest.raises(DataError, match=r"connection ended after 100,000 bytes \(after 1 attempt\)"):
        fetch(config(attempts=1), raw)
    assert list((raw / "mnist").iterdir()) == []  # DVC sees no half file, and emptying its output loses no progress
    fetch(config(attempts=1), raw)
    assert_complete(raw)
    assert server.requests[1] == ("/images.gz", "bytes=100000-")


def test_a_transfer_that_had_ended_but_was_never_used_needs_no_byte_more(server: Server, raw: Path) -> None:
    server.drop_after = [100_000]
    with pytest.raises(DataError):
        fetch(config(attempts=1), raw)
    (partial,) = (raw.parent / "raw.partial").iterdir()
    partial.write_bytes(server.content["images.gz"])
    fetch(config(attempts=1), raw)
    assert_complete(raw)


def test_a_server_without_ranges_starts_over(server: Server, raw: Path) -> None:
    server.ranges = False
    server.drop_after = [100_000]
    fetch(config(), raw)
    assert_complete(raw)
    assert [path for path, _ in server.requests] == ["/images.gz", "/images.gz", "/labels.gz"]


def test_a_file_that_changed_on_the_server_between_two_transfers_is_fetched_whole(server: Server, raw: Path) -> None:
    right = server.content["images.gz"]
    server.content["images.gz"] = gzip.compress(b"an older edition" * 30_000, 0)
    server.drop_after = [100_000]
    with pytest.raises(DataError):
        fetch(config(attempts=1), raw)
    server.content["images.gz"] = right
    fetch(config(attempts=1), raw)
    assert_complete(raw)
    assert [asked for _, asked in server.requests] == [None, "bytes=100000-", None, None]


def test_passing_faults_are_waited_out_with_growing_pauses(
    server: Server, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PAUSE_SECONDS", 1.0)
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    server.statuses = [503, 429, 500]
    fetch(config(attempts=4), raw)
    assert_complete(raw)
    assert pauses == [1.0, 2.0, 4.0]


def test_a_silent_server_is_given_up(server: Server, raw: Path) -> None:
    server.silent.set()
    with pytest.raises(DataError, match=r"no answer within 0\.05 s \(after 2 attempts\)"):
        fetch(config(attempts=2, timeout_seconds=0.05), raw)


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (b"<html>This page has moved.</html>", "damaged, or not the expected file"),
        (gzip.compress(b"other data"), "wrong content"),
        (gzip.compress(CONTENTS["images"] + b"!"), "more than the expected 300,000 bytes"),
        (gzip.compress(CONTENTS["images"], 1)[:-2000], "damaged, or not the expected file"),
        (gzip.compress(bytes(3_000_000), 0), "the server announces"),
    ],
    ids=["page", "other", "longer", "cut", "huge"],
)
def test_a_source_with_junk_is_passed_over(
    junk: bytes,
    reason: str,
    server: Server,
    raw: Path,
    use: Use,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(GzippedFiles(f"{server.url}/bad"), GzippedFiles(server.url))
    server.content["bad/images.gz"] = junk
    server.content["bad/labels.gz"] = junk
    fetch(config(), raw)
    assert_complete(raw)
    assert reason in capsys.readouterr().err
    assert [path for path, _ in server.requests].count("/bad/images.gz") == 1  # junk is not asked for again


@pytest.mark.parametrize(
    ("raw_answer", "reason"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", "'file:///etc/passwd'"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://\xff\xfe/\r\n\r\n", "invalid start byte"),
        (b"HTTP/1.1 302 Found\r\nLocation: /images.gz\r\n\r\n", "more than 10 redirects"),
        (b"HTTP/1.1 302 Found\r\nLocation: /images.gz\r\n\r\ndrip", "more than 10 redirects"),
        (b"HTTP/1.1 416 No\r\nContent-Range: bytes */0\r\n\r\n", "did not continue where the last transfer ended"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\njunk", "damaged, or not the expected file"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\njunk", "damaged, or not the expected file"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\njunk", "connection ended"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\njunk" % (b"9" * 9_000), "damaged, or not the expected file"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "connection ended"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200, "100 headers"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "65536"),
        (b"HTTP/1.1 404 \x1b[2J\r\n\r\n", "HTTP status 404 \\x1b[2J"),
        (b"HTTP/1.1 200 OK\r\n\r\ndrip", "fewer than 1,000 bytes a second"),
        (bytes(100), ""),
    ],
)
def test_a_server_that_means_harm_is_passed_over(
    raw_answer: bytes, reason: str, server: Server, raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.raw = raw_answer
    with pytest.raises(DataError) as caught:
        fetch(config(attempts=1, timeout_seconds=0.5), raw)
    said = printable(str(caught.value)) + capsys.readouterr().err
    assert reason in said
    assert "\x1b" not in said
    assert [path for path in raw.parent.rglob("*") if path.is_file() and "partial" not in path.name] == []


def test_a_server_that_does_not_say_how_much_it_sends_is_cut_off_at_the_limit(server: Server, raw: Path) -> None:
    server.says_length = False
    fetch(config(), raw)
    assert_complete(raw)
    (raw / "mnist" / "images").unlink()
    server.content["images.gz"] += bytes(2_000_000)  # gzip ignores trailing zeros
    with pytest.raises(DataError, match="more than the expected 1,348,576 bytes"):
        fetch(config(), raw)


def test_what_an_unfinished_source_left_is_removed_once_another_delivered(server: Server, raw: Path, use: Use) -> None:
    use(GzippedFiles(f"{server.url}/slow"), GzippedFiles(server.url))
    server.content["slow/images.gz"] = server.content["images.gz"]
    server.drop_after = [100_000]
    fetch(config(attempts=1), raw)
    assert_complete(raw)


def test_a_wrong_file_is_never_left_under_its_final_name(server: Server, raw: Path) -> None:
    server.content["images.gz"] = gzip.compress(b"wrong")
    with pytest.raises(DataError, match="images: wrong content"):
        fetch(config(), raw)
    assert [path for path in raw.parent.rglob("*") if path.is_file()] == []


def test_the_final_message_names_every_source_why_it_failed_and_what_to_do(
    server: Server, raw: Path, tmp_path: Path, use: Use
) -> None:
    closed = "http://127.0.0.1:9"
    use(GzippedFiles(f"{server.url}/absent"), GzippedFiles(closed))
    with pytest.raises(DataError) as caught:
        fetch(config(mirror=str(tmp_path / "nowhere")), raw)
    message = str(caught.value)
    assert "images, labels could not be fetched" in message
    assert f"1. mirror {tmp_path}/nowhere: no such directory" in message
    assert f"2. {server.url}/absent: HTTP status 404 Not Found" in message
    assert re.search(rf"3\. {closed}: .*[Cc]onnection refused.* \(after 3 attempts\)", message)
    assert "fetch.mirror" in message
    assert "HTTPS_PROXY" in message


def test_what_one_source_lacks_the_next_one_adds(server: Server, raw: Path, use: Use) -> None:
    use(GzippedFiles(f"{server.url}/half"), GzippedFiles(server.url))
    server.content["half/images.gz"] = server.content["images.gz"]
    fetch(config(), raw)
    assert_complete(raw)
    assert [path for path, _ in server.requests] == ["/half/images.gz", "/half/labels.gz", "/labels.gz"]


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("as_url", [False, True], ids=["path", "url"])
def test_the_users_mirror_comes_first(zipped: bool, as_url: bool, server: Server, raw: Path, tmp_path: Path) -> None:
    mirror = tmp_path / "my mirror"
    mirror.mkdir()
    for name, data in CONTENTS.items():
        (mirror / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(data) if zipped else data)
    fetch(config(mirror=mirror.as_uri() if as_url else str(mirror)), raw)
    assert_complete(raw)
    assert server.requests == []


@pytest.mark.usefixtures("server")
def test_a_mirror_with_a_wrong_file_is_not_believed(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").write_bytes(b"wrong")
    (tmp_path / "labels").write_bytes(CONTENTS["labels"])
    fetch(config(mirror=str(tmp_path)), raw)
    assert "images: wrong content" in capsys.readouterr().err
    assert (raw / "mnist" / "images").read_bytes() == CONTENTS["images"]


def test_a_mirror_on_the_web_is_refused_by_name(raw: Path) -> None:
    with pytest.raises(DataError, match=r"fetch\.mirror: found 'https://example\.org/mnist'; expected a directory"):
        fetch(config(mirror="https://example.org/mnist"), raw)


def tar_of(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, target in (links or {}).items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


def archive_of(packed: bytes) -> Archive:
    return Archive("all.tar.gz", "batches", len(packed), hashlib.sha256(packed).hexdigest())


def test_an_archive_gives_its_wanted_files_and_nothing_else(server: Server, raw: Path, use: Use) -> None:
    hostile = {"../escaped": b"x", "/tmp/absolute": b"x", "batches/extra": b"x", "images": b"wrong place"}
    members = hostile | {f"batches/{name}": data for name, data in CONTENTS.items()}
    packed = gzip.compress(tar_of(members, links={"batches/link": "/etc/passwd"}))
    server.content["all.tar.gz"] = packed
    use(WebArchive(f"{server.url}/all.tar.gz", archive_of(packed)))
    fetch(config(), raw)
    assert_complete(raw)


def test_a_link_in_the_place_of_a_wanted_file_is_not_followed(server: Server, raw: Path, use: Use) -> None:
    packed = gzip.compress(tar_of({"batches/labels": CONTENTS["labels"]}, links={"batches/images": "labels"}))
    server.content["all.tar.gz"] = packed
    use(WebArchive(f"{server.url}/all.tar.gz", archive_of(packed)))
    with pytest.raises(DataError, match="the archive lacks batches/images"):
        fetch(config(), raw)
    assert not (raw / "mnist" / "images").exists()


def test_an_archive_with_another_checksum_is_not_opened(
    server: Server, raw: Path, monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    right = gzip.compress(tar_of({f"batches/{name}": data for name, data in CONTENTS.items()}), 1)
    server.content["all.tar.gz"] = gzip.compress(tar_of({"batches/images": b"?"}))
    use(WebArchive(f"{server.url}/all.tar.gz", archive_of(right)))
    monkeypatch.setattr(places, "take_members", lambda *_: pytest.fail("opened"))
    with pytest.raises(DataError, match=r"all\.tar\.gz: wrong content"):
        fetch(config(), raw)


@pytest.mark.parametrize("unpacked", [False, True], ids=["archive", "unpacked"])
def test_a_mirror_may_hold_the_archive_or_its_folder(unpacked: bool, raw: Path, tmp_path: Path, use: Use) -> None:
    packed = gzip.compress(tar_of({f"batches/{name}": data for name, data in CONTENTS.items()}))
    mirror = tmp_path / "mirror"
    (mirror / "batches").mkdir(parents=True)
    if unpacked:
        for name, data in CONTENTS.items():
            (mirror / "batches" / name).write_bytes(data)
    else:
        (mirror / "all.tar.gz").write_bytes(packed)
    use(archive=archive_of(packed))
    fetch(config(mirror=str(mirror)), raw)
    assert_complete(raw)


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for apt-get and dpkg-deb. Returns the log, in which apt-get writes one line per call.

    The package is known only after an update, and only with the lists that the update filled.
    """
    tools, log = tmp_path / "tools", tmp_path / "apt.log"
    tools.mkdir()
    packed = tmp_path / "package.tar"
    packed.write_bytes(
        tar_of({f"./{PACKAGE_FOLDER}/{name}.gz": gzip.compress(data) for name, data in CONTENTS.items()})
    )
    (tools / "apt-get").write_text(
        f"""#!/bin/sh
echo "$@" >> {log}
lists=$(echo "$@" | sed -n 's/.*Dir::State::Lists=\\([^ ]*\\).*/\\1/p')
reports=$(echo "$@" | sed -n 's/.*APT::Status-Fd=\\([0-9]*\\).*/\\1/p')
case "$*" in
  *update) touch "$lists/known" ;;
  *"download some-package")
    if [ -z "$lists" ] || [ ! -e "$lists/known" ]; then echo "E: Unable to locate package some-package"; exit 100; fi
    for percent in 8.333 91.67; do echo "dlstatus:1:$percent:Retrieving file 1 of 1" >/dev/fd/$reports; done
    cp {packed} some-package_1_all.deb ;;
esac
"""
    )
    (tools / "dpkg-deb").write_text('#!/bin/sh\n[ "$1" = --fsys-tarfile ] && cat "$2"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return log


def test_a_debian_package_unknown_to_the_systems_lists_is_found_with_private_ones(
    apt: Path, raw: Path, use: Use
) -> None:
    use(DebianPackage("some-package", PACKAGE_FOLDER))
    fetch(config(attempts=2), raw)
    assert_complete(raw)
    first, update, second = apt.read_text().splitlines()
    assert "Dir::State::Lists" not in first
    assert "Acquire::Retries=1" in first
    assert update.endswith("update")
    assert "Dir::State::Lists" in second
    assert "Dir::Cache" in second


@pytest.mark.usefixtures("apt")
def test_what_apt_downloads_shows_its_progress_on_a_terminal(
    raw: Path, use: Use, open_terminal: Callable[[], Terminal]
) -> None:
    use(DebianPackage("some-package", PACKAGE_FOLDER))
    terminal = open_terminal()
    fetch(config(), raw)
    assert re.findall(r"apt-get download: +(\d+)%", terminal.getvalue()) == ["0", "0", "8", "91"]
    assert "apt-get update:   0%" in terminal.getvalue()


def test_without_apt_the_debian_package_is_passed_over(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    use(DebianPackage("some-package", PACKAGE_FOLDER))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="package some-package: not found: apt-get, dpkg-deb; this source needs Debian"):
        fetch(config(), raw)


def test_a_debian_package_that_is_installed_is_used_as_it_is(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    for name, data in CONTENTS.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    use(DebianPackage("some-package", str(tmp_path).removeprefix("/")))
    monkeypatch.setenv("PATH", "")
    fetch(config(), raw)
    assert (raw / "mnist" / "images").read_bytes() == CONTENTS["images"]


@pytest.mark.parametrize("name", ["fashion_mnist", "mnist", "cifar10"])
def test_every_listed_data_set_has_several_sources_over_https_and_checksums(name: str) -> None:
    listing = listings.LISTINGS[name]
    web = [source.label for source in listing.sources if "://" in source.label]
    assert len(web) >= 2
    assert all(url.startswith("https://") for url in web)
    assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) for file in listing.files)
    assert len({file.sha256 for file in listing.files}) == len(listing.files)


def test_digits_come_without_any_source(raw: Path) -> None:
    fetch(named("digits"), raw)
    digits = load_digits()
    np.testing.assert_array_equal(np.load(raw / "digits" / "images.npy"), digits.images)
    np.testing.assert_array_equal(np.load(raw / "digits" / "labels.npy"), digits.target)


def named(name: str, folder: Path | None = None) -> Fetch:
    return Fetch.model_validate({"dataset": name, "image_folder": folder and str(folder)})


def test_an_image_folder_is_listed_not_copied(raw: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    for name in ("train/cat/2.png", "train/cat/1.JPG", "test/dog/x/3.webp", "train/cat/notes.txt", "train/dog/.x.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    fetch(named("image_folder", folder), raw)
    (listing,) = (raw / "image_folder").iterdir()
    assert listing.read_text().splitlines() == [
        "path,size_bytes,sha256",
        *(
            f"{name},{len(name)},{hashlib.sha256(name.encode()).hexdigest()}"
            for name in ("test/dog/x/3.webp", "train/cat/1.JPG", "train/cat/2.png")
        ),
    ]


def test_an_image_folder_without_images_says_what_is_expected(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"fetch\.image_folder: found '.*', which has no directory 'train'; expected"):
        fetch(named("image_folder", tmp_path), raw)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match=f"expected train/CLASS/.* Did you mean '{tmp_path}'"):
        fetch(named("image_folder", tmp_path / "train"), raw)
    with pytest.raises(DataError, match="holds no image; expected train/CLASS/NAME"):
        fetch(named("image_folder", tmp_path), raw)


def test_an_image_that_cannot_be_read_is_named_and_nothing_is_left(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "1.png").touch()

    def forbidden(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(local, "file_sha256", forbidden)
    with pytest.raises(PermissionError, match=r"Permission denied: .*/train/cat/1\.png"):
        fetch(named("image_folder", tmp_path), raw)
    assert list((raw / "image_folder").iterdir()) == []


def test_a_limit_below_the_content_is_enforced(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gzip file whose content is a thousand times larger must not fill the disk."""
    files = tuple(replace(file, limit_bytes=100) for file in FILES)
    monkeypatch.setitem(listings.LISTINGS, "mnist", Listing(files, ()))
    (tmp_path / "images.gz").write_bytes(gzip.compress(bytes(10_000_000)))
    with pytest.raises(DataError, match="images: more than the expected 100 bytes"):
        fetch(config(mirror=str(tmp_path)), raw)
