from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline import files
from pipeline.errors import PipelineError, said
from pipeline.training import checkpoints

FULL = Path("/dev/full")
"""A device that refuses every write, as a full disk does."""


@pytest.mark.skipif(not FULL.exists(), reason="Linux alone has it")
@pytest.mark.parametrize(
    "write",
    [
        lambda path: files.write_text(path, "x" * 10_000),
        lambda path: checkpoints.save({"weights": torch.zeros(10_000)}, path),
    ],
)
def test_a_full_disk_keeps_the_old_file(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("before")
    path.with_name("kept.partial").symlink_to(FULL)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write(path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert path.read_text() == "before"
    assert str(path) in str(said(caught.value))


@pytest.mark.skipif(not FULL.exists(), reason="Linux alone has it")
def test_of_several_files_all_or_none_are_written(tmp_path: Path) -> None:
    texts = {tmp_path / name: name for name in ("a", "in/b", "c")}
    (tmp_path / "a").write_text("before")
    (tmp_path / "c.partial").symlink_to(FULL)
    with pytest.raises(OSError, match="No space left on device") as caught:
        files.write_texts(texts)
    left = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"a": "before"}
    assert caught.value.filename == str(tmp_path / "c")
    files.write_texts(texts)
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == texts


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "in" / "made"

    def write(name: str, error: OSError | None = None) -> None:
        with files.whole_directory(path) as work:
            assert list(work.iterdir()) == []
            (work / name).touch()
            if error:
                raise error

    for name in ("first", "second"):
        write(name)
        assert [member.name for member in path.iterdir()] == [name]
    with pytest.raises(OSError, match="No space") as caught:
        write("third", OSError(errno.ENOSPC, "No space left on device"))
    assert caught.value.filename == str(path)
    assert [str(member.relative_to(tmp_path)) for member in tmp_path.rglob("*")] == ["in", "in/made", "in/made/second"]


def test_content_reaches_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []

    def synced(number: int) -> None:
        seen.append((Path(f"/proc/self/fd/{number}").readlink().name, [path.name for path in tmp_path.iterdir()]))

    monkeypatch.setattr(os, "fsync", synced)
    files.write_text(tmp_path / "kept", "x")
    assert seen == [("kept.partial", ["kept.partial"]), (tmp_path.name, ["kept"])]


def test_only_errors_with_remedies_are_said() -> None:
    assert said(PipelineError("a mistake")) == "a mistake"
    assert "make room" in str(said(OSError(errno.ENOSPC, "No space left on device")))
    assert "'" not in str(said(OSError(errno.EROFS, "Read-only file system", "results")))
    assert "make room" in str(said(OSError(errno.EFBIG, "File too large")))
    assert "move it away" in str(said(OSError(errno.EISDIR, "Is a directory", "results/ddp.json")))
    assert "memory" in str(said(MemoryError()))
    assert said(OSError(errno.ESPIPE, "Illegal seek")) is None
    assert said(ValueError("a fault of ours")) is None


def test_a_missing_temporary_folder_names_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.mkdtemp()
    expected = "No usable temporary directory found in ['/proc']; make room in one of these directories, or set TMPDIR"
    assert str(said(caught.value)).startswith(expected)
