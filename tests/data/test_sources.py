"""Fetching from a server on the loopback interface that misbehaves on request. No test uses the network."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import os
import re
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from pipeline.data import DataError, own_files, sources
from pipeline.data.decoded import SHA256
from pipeline.data.sources import ARCHIVES, SOURCES, Archive, Source, debian_package, fetch, gzipped_files, web_archive
from pipeline.errors import printable
from pipeline.params import Fetch
from tests.commands import executable
from tests.conftest import Terminal

CONTENTS = {"images": np.random.default_rng(0).bytes(300_000), "labels": b"0123456789" * 100}


class Server(ThreadingHTTPServer):
    """Serves ``content`` by path. ``ranges``, ``drop_after`` and ``raw`` say how it misbehaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        """Path and Range header of every request."""
        self.ranges = True
        self.drop_after: list[int] = []
        """The next answers end after these numbers of bytes."""
        self.raw: Iterator[bytes] = iter(())
        """Sent instead of the next answers. If one ends with "drip", a byte follows every 10 ms."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Range"]))
        if raw := next(self.server.raw, b""):
            self.wfile.write(raw)
            while raw.endswith(b"drip"):
                threading.Event().wait(0.01)
                self.wfile.write(b"x")
            return
        content = self.server.content.get(self.path.removeprefix("/"))
        if content is None:
            self.send_error(404)
            return
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        if asked and self.server.ranges:
            start = int(asked[1])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        self.wfile.write(body[: self.server.drop_after.pop(0)] if self.server.drop_after else body)

    def log_message(self, *_: object) -> None:
        pass


Use = Callable[..., None]


@pytest.fixture(autouse=True)
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Return a function that sets the sources of ``mnist``, here a data set of two small files. Attempts follow without
    pauses."""
    monkeypatch.setattr(sources, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(sources, "LIMIT_BYTES", 400_000)
    monkeypatch.setitem(SHA256, "mnist", {name: hashlib.sha256(data).hexdigest() for name, data in CONTENTS.items()})

    def used(*sources: Source, archive: Archive | None = None) -> None:
        monkeypatch.setitem(SOURCES, "mnist", sources)
        if archive:
            monkeypatch.setitem(ARCHIVES, "mnist", archive)

    return used


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, use: Use) -> Iterator[Server]:
    """The server that is the only source, unless a test says otherwise."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    use(gzipped_files(server.url))
    server.content = {f"{name}.gz": gzip.compress(data, 1) for name, data in CONTENTS.items()}
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
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
    files = {path.relative_to(raw.parent).as_posix(): path for path in raw.parent.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in files.items()} == {
        f"raw/mnist/{name}": data for name, data in CONTENTS.items()
    }


def test_a_second_fetch_asks_for_changed_files_alone(
    server: Server, raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(config(), raw)
    assert_complete(raw)
    assert server.requests == [("/images.gz", None), ("/labels.gz", None)]
    assert capsys.readouterr().err == f"fetching 2 files of mnist from {server.url}\n"
    fetch(config(), raw)
    assert len(server.requests) == 2
    (raw / "mnist" / "labels").write_bytes(b"tampered")
    fetch(config(), raw)
    assert_complete(raw)
    assert server.requests[2:] == [("/labels.gz", None)]


def test_a_transfer_shows_its_progress_on_a_terminal(
    server: Server, raw: Path, open_terminal: Callable[[], Terminal]
) -> None:
    server.drop_after = [100_000]
    terminal = open_terminal()
    fetch(config(), raw)
    shown = re.findall(r"images\.gz: +(\d+)%", terminal.getvalue())
    assert (shown[0], shown[-1]) in {("0", "99"), ("0", "100")}
    assert shown.count("33") > 1, "the progress goes on where the transfer was continued"


def test_sources_that_failed_are_a_line(
    server: Server, raw: Path, use: Use, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = "http://127.0.0.1:9"
    use(gzipped_files(closed), gzipped_files(f"{server.url}/absent"), gzipped_files(server.url))
    fetch(config(), raw)
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"fetching 2 files of mnist from {closed}"
    assert second.startswith(f"fetched from {server.url}; other sources failed: {closed}: ")
    assert second.endswith(f"; {server.url}/absent: HTTP status 404 Not Found")


@pytest.mark.parametrize("ranges", [True, False])
def test_a_dropped_transfer_is_continued(ranges: bool, server: Server, raw: Path) -> None:
    server.ranges, server.drop_after = ranges, [100_000, 50_000]
    fetch(config(attempts=3), raw)
    assert_complete(raw)
    second = "bytes=150000-" if ranges else "bytes=50000-"
    assert [asked for _, asked in server.requests] == [None, "bytes=100000-", second, None]


def test_a_later_run_continues_an_unfinished_transfer(server: Server, raw: Path) -> None:
    server.drop_after = [100_000]
    with pytest.raises(DataError, match=r"connection ended after 100,000 bytes \(after 1 attempt\)"):
        fetch(config(attempts=1), raw)
    assert list((raw / "mnist").iterdir()) == []  # the half file is outside DVC's output, which DVC may empty
    fetch(config(attempts=1), raw)
    assert_complete(raw)
    assert server.requests[1] == ("/images.gz", "bytes=100000-")


def test_passing_faults_are_waited_out_with_growing_pauses(
    server: Server, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PAUSE_SECONDS", 1.0)
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    server.raw = iter(b"HTTP/1.1 %d Busy\r\n\r\n" % status for status in (503, 429, 500))
    fetch(config(attempts=4), raw)
    assert_complete(raw)
    assert pauses == [1.0, 2.0, 4.0]


@pytest.mark.usefixtures("server")
def test_a_silent_server_is_given_up(raw: Path, use: Use) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use(gzipped_files(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        with pytest.raises(DataError, match=r"timed out.*0\.05\) \(after 2 attempts\)"):
            fetch(config(attempts=2, timeout_seconds=0.05), raw)


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (b"<html>This page has moved.</html>", "damaged, or not the expected file"),
        (gzip.compress(b"other data"), "wrong content"),
        (gzip.compress(bytes(10_000_000)), "more than the allowed 400,000 bytes"),
        (gzip.compress(CONTENTS["images"], 1)[:-2000], "damaged, or not the expected file"),
        (gzip.compress(bytes(3_000_000), 0), "more than the allowed 400,000 bytes"),
    ],
    ids=["page", "other", "bomb", "cut", "huge"],
)
def test_a_source_with_junk_is_passed_over(
    junk: bytes, reason: str, server: Server, raw: Path, use: Use, capsys: pytest.CaptureFixture[str]
) -> None:
    use(gzipped_files(f"{server.url}/bad"), gzipped_files(server.url))
    server.content["bad/images.gz"] = junk
    fetch(config(), raw)
    assert_complete(raw)
    assert reason in capsys.readouterr().err
    assert [path for path, _ in server.requests].count("/bad/images.gz") == 1  # junk is not asked for again


EMPTY = b"Connection: close\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("raw_answer", "reason"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n" + EMPTY, "'file:///etc/passwd'"),
        (b"HTTP/1.1 302 Found\r\nLocation: /images.gz\r\n" + EMPTY, "Exceeded 30 redirects"),
        (b"HTTP/1.1 416 No\r\nContent-Range: bytes */0\r\n\r\n", "did not continue where the last transfer ended"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\njunk", "damaged, or not the expected file"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\njunk", "damaged, or not the expected file"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\njunk", "connection ended"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\njunk" % (b"9" * 9_000), "damaged, or not the expected file"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "connection ended"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200, "100 headers"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "65536"),
        (b"HTTP/1.1 404 \x1b[2J\r\n\r\n", "HTTP status 404 \\x1b[2J"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(500_000), "more than the allowed 400,000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\ndrip", "fewer than 1,000 bytes a second"),
        (bytes(100), ""),
    ],
)
def test_a_server_that_means_harm_is_passed_over(
    raw_answer: bytes, reason: str, server: Server, raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.raw = itertools.repeat(raw_answer)
    with pytest.raises(DataError) as caught:
        fetch(config(attempts=1, timeout_seconds=0.5), raw)
    said = printable(str(caught.value)) + capsys.readouterr().err
    assert reason in said
    assert "\x1b" not in said
    assert [path for path in raw.parent.rglob("*") if path.is_file() and "partial" not in path.name] == []


def test_the_final_message_names_every_source_and_remedy(server: Server, raw: Path, tmp_path: Path, use: Use) -> None:
    closed = "http://127.0.0.1:9"
    use(gzipped_files(f"{server.url}/absent"), gzipped_files(closed))
    with pytest.raises(DataError) as caught:
        fetch(config(mirror=str(tmp_path / "nowhere")), raw)
    message = str(caught.value)
    assert "images, labels could not be fetched" in message
    assert f"1. mirror {tmp_path}/nowhere: no such directory" in message
    assert f"2. {server.url}/absent: HTTP status 404 Not Found" in message
    assert re.search(rf"3\. {closed}: .*[Cc]onnection refused.* \(after 3 attempts\)", message)
    assert re.search("HTTPS_PROXY .* fetch.mirror", message, re.DOTALL)


def test_the_next_source_adds_what_one_lacks(server: Server, raw: Path, use: Use) -> None:
    use(*(gzipped_files(f"{server.url}/{name}") for name in ("slow", "half")), gzipped_files(server.url))
    server.content["slow/images.gz"] = server.content["half/images.gz"] = server.content["images.gz"]
    server.drop_after = [100_000]
    fetch(config(attempts=1), raw)
    assert_complete(raw)
    assert [path for path, _ in server.requests] == [
        "/slow/images.gz", "/half/images.gz", "/half/labels.gz", "/labels.gz"
    ]  # fmt: skip


@pytest.mark.parametrize("zipped", [False, True], ids=["plain files at a path", "gzipped files at a URL"])
def test_the_users_mirror_comes_first(zipped: bool, server: Server, raw: Path, tmp_path: Path) -> None:
    place = tmp_path / "my mirror"
    place.mkdir()
    for name, data in CONTENTS.items():
        (place / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(data) if zipped else data)
    fetch(config(mirror=place.as_uri() if zipped else str(place)), raw)
    assert_complete(raw)
    assert server.requests == []


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("name", "says"), [("images", "images: wrong content"), ("other", "holds neither images nor images.gz")]
)
def test_a_mirror_with_a_wrong_file_is_not_believed(
    name: str, says: str, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b"wrong")
    (tmp_path / "labels").write_bytes(CONTENTS["labels"])
    fetch(config(mirror=str(tmp_path)), raw)
    assert says in capsys.readouterr().err
    assert (raw / "mnist" / "images").read_bytes() == CONTENTS["images"]


def test_a_mirror_on_the_web_is_refused_by_name(raw: Path) -> None:
    with pytest.raises(DataError, match=r"fetch\.mirror: found 'https://example\.org/mnist'; expected a directory"):
        fetch(config(mirror="https://example.org/mnist"), raw)


@pytest.fixture
def archive(tmp_path: Path) -> tuple[Path, Archive]:
    """Return the path of an archive with both files in the folder ``batches``, and its description."""
    path = tmp_path / "mirror" / "all.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as packed:
        for name, data in CONTENTS.items():
            member = tarfile.TarInfo(f"batches/{name}")
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
    return path, Archive("all.tar.gz", "batches", hashlib.sha256(path.read_bytes()).hexdigest())


def test_an_archive_is_opened_only_with_its_checksum(
    server: Server, raw: Path, archive: tuple[Path, Archive], use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(web_archive(f"{server.url}/all.tar.gz", archive[1]))
    server.content["all.tar.gz"] = archive[0].read_bytes()
    fetch(config(), raw)
    assert_complete(raw)
    (raw / "mnist" / "images").unlink()
    server.content["all.tar.gz"] += b"?"
    monkeypatch.setattr(tarfile, "open", lambda *_: pytest.fail("opened"))
    with pytest.raises(DataError, match=r"all\.tar\.gz: wrong content"):
        fetch(config(), raw)


@pytest.mark.parametrize("unpacked", [False, True], ids=["archive", "unpacked"])
def test_a_mirror_may_hold_the_archive_or_its_folder(
    unpacked: bool, raw: Path, archive: tuple[Path, Archive], use: Use
) -> None:
    path, described = archive
    if unpacked:
        with tarfile.open(path) as packed:
            packed.extractall(path.parent, filter="data")
        path.unlink()
    use(archive=described)
    fetch(config(mirror=str(path.parent)), raw)
    assert_complete(raw)


def test_a_debian_package_is_found_and_unpacked(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    """The stand-in for apt-get knows the package only with the lists that its update has filled."""
    tools = tmp_path / "tools"
    packed = tools / "content" / "usr/share/some-package"
    packed.mkdir(parents=True)
    for name, data in CONTENTS.items():
        (packed / f"{name}.gz").write_bytes(gzip.compress(data))
    executable(
        tools / "apt-get",
        """#!/bin/sh
lists=$(echo "$@" | sed -n 's/.*Dir::State::Lists=\\([^ ]*\\).*/\\1/p')
case "$*" in
  *Acquire::Retries=1*update) touch "$lists/known" ;;
  *"download some-package") [ -e "$lists/known" ] && touch some-package_1_all.deb ;;
  *) echo "E: Unable to locate package other" >&2; exit 100 ;;
esac
""",
    )
    executable(tools / "dpkg-deb", f'#!/bin/sh\n[ -e "$2" ] && cp -r {tools}/content/* "$3"\n')
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    use(debian_package("some-package", "usr/share/some-package"))
    fetch(config(attempts=2), raw)
    assert_complete(raw)
    (raw / "mnist" / "images").unlink()
    use(debian_package("other", "usr/share/some-package"))
    with pytest.raises(DataError, match="package other: apt-get other: Unable to locate package other"):
        fetch(config(attempts=2), raw)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="package other: not found: apt-get; this source needs Debian or Ubuntu"):
        fetch(config(), raw)
    use(debian_package("some-package", str(packed).removeprefix("/")))
    fetch(config(), raw)  # the package is installed
    assert_complete(raw)


@pytest.mark.parametrize("name", ["fashion_mnist", "mnist", "cifar10"])
def test_every_data_set_has_https_sources_and_checksums(name: str) -> None:
    web = [source.label for source in SOURCES[name] if "://" in source.label]
    assert len(web) >= 2
    assert all(url.startswith("https://") for url in web)
    assert all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in SHA256[name].values())
    assert len(set(SHA256[name].values())) == len(SHA256[name])


def test_an_image_folder_is_listed_or_named(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, files = tmp_path / "pictures", ["train/cat/1.JPG", "train/dog/2.png", "test/cat/3.png", "test/dog/x/4.webp"]
    left = ["train/.ipynb_checkpoints/1.png", "train/cat/.ipynb_checkpoints/1.png", "train/__MACOSX/cat/1.png",
            "train/dog/a.HEIC", "train/dog/b.HEIC", "train/5.png", "val/cat/6.png", "train/cat/.x.png"]  # fmt: skip
    for name in [*files, *left]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    (tmp_path / "more").mkdir()
    (tmp_path / "more/7.png").write_bytes(b"train/cat/linked/7.png")
    (folder / "train/cat/linked").symlink_to(tmp_path / "more")
    (folder / "train/cat/gone.png").symlink_to("nowhere")
    (folder / "train/cat/round").symlink_to(folder)
    asked = config(dataset="image_folder", image_folder=str(folder))
    fetch(asked, raw)
    (listing,) = (raw / "image_folder").iterdir()
    names = sorted([*files, "train/cat/linked/7.png"])
    rows = [f"{name},{len(name)},{hashlib.sha256(name.encode()).hexdigest()}" for name in names]
    assert listing.read_text().splitlines() == ["path,size_bytes,sha256", *rows]
    assert capsys.readouterr().err.splitlines() == [
        "fetch.image_folder: left out 1 x dangling link or special file",
        "fetch.image_folder: left out 2 x file of type .HEIC",
        "fetch.image_folder: left out 1 x file that is not in train/CLASS or test/CLASS",
        "fetch.image_folder: left out 2 x folder .ipynb_checkpoints",
        "fetch.image_folder: left out 1 x folder __MACOSX",
        "fetch.image_folder: left out 1 x folder val",
        "fetch.image_folder: left out 1 x hidden file",
        "fetch.image_folder: left out 1 x link to a folder that contains it",
        "listed 5 files of fetch.image_folder",
    ]
    (folder / "train/bird").mkdir()
    (folder / "train/fish").mkdir()
    (folder / "train/fish/1.heic").touch()
    with pytest.raises(DataError, match=r"fetch\.image_folder: no image in train/bird, train/fish; .*, or remove it"):
        fetch(asked, raw)


def test_an_image_folder_without_images_says_what_is_expected(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"fetch\.image_folder: found '.*', which has no directory 'train'; expected"):
        fetch(config(dataset="image_folder", image_folder=str(tmp_path)), raw)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match=f"expected train/CLASS/.* Did you mean '{tmp_path}'"):
        fetch(config(dataset="image_folder", image_folder=str(tmp_path / "train")), raw)
    with pytest.raises(DataError, match="holds no image; expected train/CLASS/NAME"):
        fetch(config(dataset="image_folder", image_folder=str(tmp_path)), raw)


def test_an_unreadable_image_is_named_and_nothing_is_left(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "1.png").touch()

    error = PermissionError(13, "Permission denied", str(tmp_path / "train/cat/1.png"))
    monkeypatch.setattr(own_files, "file_sha256", Mock(side_effect=error))
    with pytest.raises(PermissionError, match=r"Permission denied: .*/train/cat/1\.png"):
        fetch(config(dataset="image_folder", image_folder=str(tmp_path)), raw)
    assert list((raw / "image_folder").iterdir()) == []
