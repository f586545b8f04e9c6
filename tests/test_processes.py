"""The processes of a world, observed from outside: on which addresses they listen, and that none outlives its job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest

from pipeline import results
from pipeline.benchmark.server import Server
from pipeline.distributed import forked, launch, world
from pipeline.distributed.worlds import STORE
from pipeline.params import Config, Machine
from pipeline.training import job
from tests.workspaces import PREPARED, enter

ROOT = Path(__file__).parent.parent
CPU_ONLY = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=False)
DDP = {"parallelism": "ddp"}
PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "train": {"device": "cpu", "seeds": [0], "epochs": 1, "batch_size": 32},
    "publish": {"live": False},
    "variants": {"baseline": {}, "ddp": DDP},
}
LOOPBACK = {"127.0.0.1", "::1"}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the configuration in params.yaml; the current directory is like a checkout with prepared data."""
    return enter(tmp_path, monkeypatch, PARAMS)


def addresses(process: psutil.Process) -> set[str]:
    """Return the addresses on which the process and its descendants listen now."""
    found = set()
    with suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):  # the process has ended
                listening = [one for one in each.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
                found |= {one.laddr.ip for one in listening}
    return found


@contextmanager
def watched() -> Iterator[set[str]]:
    """Collect the addresses on which this process and its descendants listen while the block runs."""
    found: set[str] = set()
    over = Event()

    def look() -> None:
        while not over.wait(0.02):
            found.update(addresses(psutil.Process()))

    looking = Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        over.set()
        looking.join()


def _train(config: Config) -> None:
    job.run(config, "ddp", CPU_ONLY, PREPARED)


def _measure_as_bench_and_gate_do(_: Config) -> None:
    with Server() as server:
        assert server.measure("ddp", server.plan("ddp", DDP), 20)["world_size"] == 2


@pytest.mark.parametrize("do", [_train, pytest.param(_measure_as_bench_and_gate_do, marks=pytest.mark.slow)])
def test_ranks_of_one_host_listen_to_nobody_else(config: Config, do: Callable[[Config], None]) -> None:
    with watched() as found:
        do(config)
    assert found, "the world was never seen"
    assert found <= LOOPBACK


def _interfaces() -> tuple[str | None, str | None]:
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


def _joined_with(variables: dict[str, str]) -> Generator[Any, Any, None]:
    os.environ.update(variables)
    with world("cpu") as joined:
        inside = _interfaces()
        assert joined.size == 2
        joined.barrier()  # otherwise, one rank could end while the other still connects
    yield inside, _interfaces()


LO = next(name for name, each in psutil.net_if_addrs().items() if "127.0.0.1" in {one.address for one in each})


@pytest.mark.parametrize(
    ("variables", "inside", "after"),
    [
        ({}, (LO, f"={LO}"), (None, None)),
        ({"LOCAL_WORLD_SIZE": "1"}, (None, None), (None, None)),  # two hosts: only the user knows the interface
        ({"GLOO_SOCKET_IFNAME": LO}, (LO, f"={LO}"), (LO, None)),
        ({"NCCL_SOCKET_IFNAME": "eth7"}, (LO, "eth7"), (None, "eth7")),
    ],
)
def test_ranks_of_one_host_meet_on_loopback_unless_the_user_says_where(
    variables: dict[str, str], inside: tuple[str | None, ...], after: tuple[str | None, ...]
) -> None:
    with forked(_joined_with, (variables,), 2, preload=["pipeline.training.loop"]) as ask:
        assert ask(None) == [(inside, after)] * 2


def _where_they_meet() -> Generator[Path, Any, None]:
    with world("cpu"):
        yield Path(os.environ[STORE])


def test_the_file_by_which_ranks_meet_is_nobody_elses_and_goes_with_them() -> None:
    with forked(_where_they_meet, (), 2, preload=["pipeline.training.loop"]) as ask:
        [file, same] = ask(None)
        assert file == same
        assert file.exists()
        assert file.parent.stat().st_mode & 0o777 == 0o700
    assert not file.parent.exists()


def test_ranks_end_with_a_block_that_a_signal_leaves_while_they_run_to_their_end() -> None:
    def leave(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, leave)
    try:
        with (  # noqa: PT012  it is the block's end that raises
            pytest.raises(TimeoutError),
            forked(_sleep_at_the_end, (), 2, preload=["pipeline.training.loop"]) as ask,
        ):
            pids = ask(None)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not any(map(psutil.pid_exists, pids))


def _sleep_at_the_end() -> Generator[int, None, None]:
    yield os.getpid()
    time.sleep(600)


@pytest.mark.slow
def test_under_another_launcher_the_command_is_a_worker(config: Config) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, "-m", "pipeline", "train", "ddp"], check=True)
    assert results.read(results.result_file("ddp"), config).world_size == 2


def launch_and_wait() -> None:
    launch(_wait, (), 2)


def _wait() -> None:
    with world("cpu"):
        time.sleep(600)


MEASURE = f"""
from pipeline.benchmark.server import Server
with Server() as server:
    server.open("ddp", server.plan("ddp", {DDP}), 10**7)
    print("open", flush=True)
    server.turn("ddp", 10**7)
"""


def session(leader: int) -> list[int]:
    """Return the ids of the running processes of the session that ``leader`` began, whoever their parents are now."""
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                members.append(pid)
    return members


def assert_none_left(leader: subprocess.Popen[bytes]) -> None:
    """Kill ``leader``, and assert that all processes of its session end."""
    leader.kill()
    leader.wait()
    deadline = time.monotonic() + 50
    while (left := session(leader.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize(
    "moment",
    [pytest.param(4, marks=pytest.mark.slow), "joined"],
)
def test_ranks_end_with_a_launcher_that_is_killed(moment: int | str) -> None:
    """The launcher is killed at a ``moment``: when so many processes run (the launcher, two that multiprocessing
    starts, and the first rank), or when the ranks have joined a world and listen on an address."""
    code = "from tests.test_processes import launch_and_wait; launch_and_wait()"
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    while (
        len(session(launcher.pid)) < moment if isinstance(moment, int) else not addresses(psutil.Process(launcher.pid))
    ):
        assert launcher.poll() is None
        time.sleep(0.01)
    assert_none_left(launcher)


@pytest.mark.slow
def test_ranks_end_with_a_bench_that_is_killed(config: Config) -> None:  # noqa: ARG001
    bench = subprocess.Popen([sys.executable, "-c", MEASURE], stdout=subprocess.PIPE, start_new_session=True)
    assert bench.stdout is not None
    with bench.stdout:
        assert bench.stdout.readline() == b"open\n"
    assert_none_left(bench)
