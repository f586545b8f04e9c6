"""Events that end a job or keep it from writing: nothing is lost, and the user is told."""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.benchmark import stage as benchmark
from pipeline.cli import main
from tests import chaos, workspaces
from tests.commands import Command
from tests.factories import make_bench
from tests.jobs import write_job
from tests.workspaces import enter, fill, remount


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_killed_jobs_end_with_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short form of `make chaos`."""
    monkeypatch.setenv("PYTHONPATH", str(chaos.ROOT))
    [trial] = chaos.trials(seed=1, jobs=("ddp",), minutes=10, rounds=1)
    assert trial["broken"] == []
    assert trial["tried"]["kills"] >= 1


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small disk as the current directory, furnished like a checkout."""
    with workspaces.disk(tmp_path / "disk") as place:
        enter(place, monkeypatch, chaos.PARAMS)
        yield place


@pytest.mark.slow
def test_a_job_that_cannot_write_continues_later(disk: Path) -> None:
    """One process that cannot write is tried below, at each write."""
    job = "ddp"
    chaos.complete(job)
    expected = chaos.outcome(job)
    remount(disk, "ro")
    command = Command("train", job, variables=dict(os.environ))
    output = command.communicate(chaos.JOB_SECONDS)
    assert (command.returncode, "Traceback" in output) == (2, False), output
    assert "Read-only file system; let this user " in output
    remount(disk, "rw")

    chaos.forget(job)
    for free_bytes in (0, 1 << 14, 1 << 17, 3 << 17, 3 << 18):  # a checkpoint has about 1 << 18
        fill(disk, free_bytes)
        command = Command("train", job, variables=dict(os.environ))
        output = command.communicate(chaos.JOB_SECONDS)
        chaos.assert_whole(disk)
        if command.returncode == 0:
            break
        assert (command.returncode, "Traceback" in output) == (2, False), output
        assert "No space left on device; make room " in output
    fill(disk, 1 << 24)
    chaos.complete(job)
    assert chaos.outcome(job) == expected


@dataclass(frozen=True)
class Stage:
    """A stage that the tests run where it cannot write."""

    command: tuple[str, ...]
    edited: str = "none"
    """A glob pattern of output files. They are edited first, so that the stage has to write them again."""
    fetch: Mapping[str, Any] = field(default_factory=lambda: {"dataset": "digits"})


ROWS = {"dataset": "arrays", "arrays": "own_rows:samples"}
MADE_UP = {"dataset": "synthetic", "synthetic": {"train": 20, "test": 10, "shape": [1, 4, 4]}}
STAGES = {
    "environment": Stage(("environment",), "environment.json"),
    "fetch": Stage(("fetch",)),
    "fetch, arrays of a function": Stage(("fetch",), "data/raw/arrays/*.csv", ROWS),
    "fetch, made-up samples": Stage(("fetch",), "data/raw/synthetic/*", MADE_UP),
    "prepare": Stage(("prepare",), "data/prepared/*.json"),
    "bench": Stage(("bench",), "bench.json"),
    "bench --again": Stage(("bench", "--again"), "sessions/*"),
    "profile": Stage(("profile", "baseline"), "profiles/baseline/*"),
    "infer": Stage(("infer", "baseline"), "inference/*"),
    "compare": Stage(("compare",), "reports/**/*.*"),
}
SMALL: dict[str, Any] = {
    "train": {"device": "cpu", "seeds": [0], "epochs": 1, "batch_size": 10, "warmup_steps": 2, "deterministic": False},
    "profile": {"steps": 2},
    "infer": {"forms": ["exported"], "batch_sizes": [1], "rounds": 1, "window_seconds": 0.001},
    "publish": {"live": False},
    "variants": {"baseline": {}},
}
KINDS = {
    "full": "No space left on device; make room there and run the command again: finished work is kept.",
    "read-only": "Read-only file system; let this user read and write there, and run the command again.",
}
OWN_ROWS = """
import numpy as np

def samples(split):
    yield {"inputs": np.arange(60, dtype=np.uint8).reshape(20, 3), "targets": np.arange(20) % 2}
"""


def begin(stage: Stage, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Make ``folder`` the current directory, run the stage there once, and edit its files; return ``contents()``."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(benchmark, "measured", lambda *_, **__: make_bench())  # a ready-made result
    if stage.command == ("compare",):
        write_job(folder)
    else:
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "own_rows", raising=False)
        Path("own_rows.py").write_text(OWN_ROWS, encoding="utf-8")
        enter(folder, monkeypatch, SMALL | {"fetch": stage.fetch})
    if "infer" in stage.command:
        assert main(["train", "baseline"]) == 0
    assert main(stage.command) == 0
    for path in Path().glob(stage.edited):
        path.write_text("{}", encoding="utf-8")
    return contents()


def contents() -> dict[str, bytes]:
    """Return path -> content of the files below the current directory, without caches."""
    files = {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    return {name: files[name] for name in files if not name.startswith((".cache/", "__pycache__/"))}


@contextmanager
def unwritable(kind: str, written: int) -> Iterator[list[str]]:
    """Simulate a full or a read-only disk below the current directory. On a full disk, only the first ``written`` files
    can be written. On a read-only disk, no file can be written and no directory made. Yield the list to which each
    refused path is added."""
    directory, opened, refused, real = Path.cwd(), itertools.count(), list[str](), io.open

    def is_here(file: Any) -> bool:
        path = Path.cwd() / file
        return path.is_relative_to(directory) and not path.is_relative_to(directory / ".cache")

    def refuse(file: Any) -> None:
        refused.append(str(file))
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))

    def opening(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if not isinstance(file, int) and set("wax+") & set(mode) and is_here(file):
            if kind == "read-only":
                refuse(file)
            if next(opened) >= written:
                refused.append(str(file))
                real(file, mode).close()
                file = "/dev/full"
        return real(file, mode, *arguments, **named)

    def making(file: Any, *arguments: Any, **named: Any) -> None:
        if is_here(file) and not Path(file).exists():
            refuse(file)
        mkdir(file, *arguments, **named)

    mkdir = os.mkdir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", opening)
        patch.setattr(io, "open", opening)
        if kind == "read-only":
            patch.setattr(os, "mkdir", making)
        yield refused


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has it")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [pytest.param(stage, marks=[pytest.mark.slow] * (stage == "infer")) for stage in STAGES]
)
def test_a_stage_that_cannot_write_loses_nothing(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk is full at the first write, then at the second, and so on."""
    stage = STAGES[name]
    before = begin(stage, tmp_path, monkeypatch)
    for written in range(1 if kind == "read-only" else 100):
        capfd.readouterr()
        with unwritable(kind, written) as refused:
            code = main(stage.command)
        if not refused:
            break
        said = capfd.readouterr().err
        assert (code, "Traceback" in said) == (2, False), said
        error = re.search(rf"^error: (.+): {re.escape(KINDS[kind])}$", said, re.MULTILINE)
        assert error, said
        assert refused[0].startswith(error[1])
        after = contents()
        assert {name: after.get(name) for name in before} == before
        assert not [name for name in after if ".partial" in name]
        chaos.assert_whole(tmp_path)
    assert written or kind == "read-only"
    assert main(stage.command) == 0
    assert contents().keys() == before.keys()
