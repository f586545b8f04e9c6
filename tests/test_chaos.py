"""What ends a job, or keeps it from writing: nothing is lost, and the person is told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.params import parse
from tests import chaos
from tests.commands import Command
from tests.workspaces import furnish


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [("baseline",), ("ddp",)])
def test_jobs_that_are_killed_end_as_if_they_had_not_been(
    jobs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short form of `make chaos`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(chaos.ROOT))
    found = list(chaos.trials(seed=1, jobs=jobs, minutes=10, rounds=1))
    assert [each["broken"] for each in found] == [[] for _ in jobs]
    assert sum(each["tried"]["kills"] for each in found) >= 1


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 32 MiB, furnished like a checkout; the current directory."""
    place = tmp_path / "disk"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(place)]
    if subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("root alone may mount a disk")
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", str(chaos.ROOT))
    furnish(parse(chaos.PARAMS))
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path, free_bytes: int) -> None:
    """Leave so much room there."""
    filler = place / "filler"
    filler.unlink(missing_ok=True)
    filler.write_bytes(bytes(max(0, os.statvfs(place).f_bavail * os.statvfs(place).f_frsize - free_bytes)))


@pytest.mark.slow
@pytest.mark.parametrize("job", ["baseline", "ddp"])
def test_a_job_that_cannot_write_says_so_and_ends_with_the_same_weights_once_it_can(job: str, disk: Path) -> None:
    chaos.complete(job)
    expected = chaos.outcome(job)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    command = Command("train", job, variables=dict(os.environ))
    output = command.communicate(chaos.JOB_SECONDS)
    assert (command.returncode, "Traceback" in output) == (2, False), output
    assert "Read-only file system; let this user " in output
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)

    chaos.forget(job)
    for free_bytes in (0, 1 << 14, 1 << 17, 3 << 17, 3 << 18):  # the checkpoint has about 1 << 18
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
