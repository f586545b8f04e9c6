"""Events that end a job or keep it from writing: nothing is lost, and the user is told."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.data import prepared
from pipeline.params import parse
from tests import chaos
from tests.commands import Command
from tests.conftest import Clone
from tests.workspaces import enter, furnish


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
    """A disk of 32 MiB as the current directory, furnished like a checkout."""
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
    """Fill the disk until ``free_bytes`` are left."""
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


@pytest.fixture
def limited() -> Iterator[Path]:
    """A cgroup limited to 256 MiB of memory: the file to which a process writes its pid to join."""
    for root, limits in (
        ("/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")),  # version 1
        ("/sys/fs/cgroup", ("memory.max", "memory.swap.max")),
    ):
        place = Path(root, f"chaos-{os.getpid()}")
        with suppress(OSError):
            place.mkdir()
            if all((place / limit).exists() for limit in limits[:1]):
                for limit in limits:
                    (place / limit).write_text(str(1 << 28), encoding="ascii")
                yield place / "cgroup.procs"
                place.rmdir()
                return
            place.rmdir()
    pytest.skip("root alone may make a cgroup, and not everywhere")


def ask_for_too_much(limited: Path) -> None:
    """Let rank 1 evaluate in the cgroup, and ask for more memory than the limit."""

    def want() -> None:
        if os.environ.get("RANK") == "1":
            limited.write_text(str(os.getpid()), encoding="ascii")
            assert b"x" * (1 << 30)

    chaos.upon("pipeline.training.evaluation.evaluate", want)


@pytest.mark.slow
def test_a_rank_that_hits_its_cgroups_limit_ends_the_job_which_says_so_and_goes_on_later(
    limited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path, monkeypatch, chaos.PARAMS | {"publish": {"live": False}})
    variables, first = dict(os.environ), functools.partial(ask_for_too_much, limited)
    command = Command("train", "ddp", variables=variables, first=first)
    output = command.communicate(chaos.HANG_SECONDS)
    assert chaos.ended(command.pid) == []
    assert (command.returncode, "Traceback" in output) == (2, False), output
    assert "rank 1: the process was killed, most likely because memory ran out" in output
    assert "train.batch_size" in output
    chaos.assert_whole(tmp_path)
    assert "resuming after step" in chaos.complete("ddp")


DVC = {"fetch.dataset": "digits", "train.device": "cpu"}


@pytest.mark.slow
def test_of_two_dvc_repro_at_once_the_second_says_so_and_nothing_is_broken(clone: Callable[..., Clone]) -> None:
    shared = clone(DVC)
    locks = shared.path / ".dvc/tmp/rwlock"
    first = subprocess.Popen(
        ["dvc", "repro", "prepare"], cwd=shared.path, env=shared.environment({}), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while not (locks.exists() and "write" in locks.read_text(encoding="utf-8")):
        assert first.poll() is None
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGSTOP)  # in the middle of a stage
    second = shared.run("dvc", "repro", "prepare", fails=True)
    os.killpg(first.pid, signal.SIGCONT)
    output, _ = first.communicate()
    assert first.returncode == 0, output
    assert str(first.pid) in second or "another DVC process" in second, second
    assert "Traceback" not in second
    assert "up to date" in shared.run("dvc", "status", "fetch", "prepare")
    shared.run("dvc", "repro", "prepare")
    assert len(prepared.read(shared.path / "data/prepared").train) == 1438


@pytest.mark.slow
def test_a_read_only_cache_of_dvc_is_named_and_it_goes_on_later(clone: Callable[..., Clone]) -> None:
    tried = clone(DVC)
    cache = tried.path / ".dvc/cache"
    cache.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(cache)], capture_output=True).returncode:
        pytest.skip("root alone may mount a disk")
    try:
        output = tried.run("dvc", "repro", "prepare", fails=True)
        assert "Read-only file system" in output
        assert str(cache) in output
        chaos.assert_whole(tried.path)
        subprocess.run(["mount", "-o", "remount,rw", str(cache)], check=True)
        tried.run("dvc", "repro", "prepare")
        assert len(prepared.read(tried.path / "data/prepared").train) == 1438
    finally:
        subprocess.run(["umount", "--lazy", str(cache)], check=True)
