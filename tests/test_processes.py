"""The processes of a world, observed from outside: on which addresses they listen, and that none outlives its job."""

from __future__ import annotations

import gc
import os
import platform
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest

from pipeline import processes, results
from pipeline.benchmark.rounds import calibrate
from pipeline.benchmark.server import ArmSpec, Server
from pipeline.distributed import forked, launch, world
from pipeline.distributed.worlds import STORE
from pipeline.params import Config
from pipeline.training import job
from tests.chaos import session
from tests.commands import printed
from tests.servers import LO
from tests.workspaces import CPU_ONLY, PREPARED, enter

ROOT = Path(__file__).parent.parent
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
    hosts = set()
    with suppress(psutil.Error):
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):  # the process has ended
                listening = [port for port in member.net_connections("tcp") if port.status == psutil.CONN_LISTEN]
                hosts |= {port.laddr.ip for port in listening}
    return hosts


@contextmanager
def watched() -> Iterator[set[str]]:
    """Collect the addresses on which this process and its descendants listen while the block runs."""
    seen: set[str] = set()
    over = Event()

    def look() -> None:
        while not over.wait(0.02):
            seen.update(addresses(psutil.Process()))

    looking = Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        over.set()
        looking.join()


def _train(config: Config) -> None:
    job.run(config, "ddp", CPU_ONLY, PREPARED)


def _measure_as_bench_and_gate_do(_: Config) -> None:
    with Server() as server:
        arm = ArmSpec.of_variant("ddp", server, server.plan("ddp", DDP))
        assert calibrate(arm, 20).answer["world_size"] == 2


@pytest.mark.parametrize("do", [_train, pytest.param(_measure_as_bench_and_gate_do, marks=pytest.mark.slow)])
def test_ranks_of_one_host_listen_to_nobody_else(config: Config, do: Callable[[Config], None]) -> None:
    with watched() as addresses_seen:
        do(config)
    assert addresses_seen, "the world was never seen"
    assert addresses_seen <= LOOPBACK


def _interfaces() -> tuple[str | None, str | None]:
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


def _joined_with(variables: dict[str, str]) -> Generator[Any, Any, None]:
    os.environ.update(variables)
    with world("cpu") as joined:
        inside = _interfaces()
        assert joined.size == 2
        joined.barrier()  # otherwise, one rank could end while the other still connects
    yield inside, _interfaces()


@pytest.mark.parametrize(
    ("variables", "inside", "after"),
    [
        ({}, (LO, f"={LO}"), (None, None)),
        ({"LOCAL_WORLD_SIZE": "1"}, (None, None), (None, None)),  # two hosts: only the user knows the interface
        ({"GLOO_SOCKET_IFNAME": LO}, (LO, f"={LO}"), (LO, None)),
        ({"NCCL_SOCKET_IFNAME": "eth7"}, (LO, "eth7"), (None, "eth7")),
    ],
)
def test_ranks_of_one_host_meet_on_loopback(
    variables: dict[str, str], inside: tuple[str | None, ...], after: tuple[str | None, ...]
) -> None:
    with forked(_joined_with, (variables,), 2, preload=["pipeline.training.loop"]) as ask:
        assert ask(None) == [(inside, after)] * 2


def _where_they_meet() -> Generator[Path, Any, None]:
    with world("cpu"):
        yield Path(os.environ[STORE])


def test_the_ranks_meeting_file_is_private() -> None:
    with forked(_where_they_meet, (), 2, preload=["pipeline.training.loop"]) as ask:
        [file, same] = ask(None)
        assert file == same
        assert file.exists()
        assert file.parent.stat().st_mode & 0o777 == 0o700
    assert not file.parent.exists()


def test_ranks_end_with_a_signalled_block() -> None:
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


def assert_none_left(leader: subprocess.Popen[bytes]) -> None:
    """Kill ``leader``, and assert that all processes of its session end."""
    leader.kill()
    leader.wait()
    deadline = time.monotonic() + 50
    while (left := session(leader.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
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


def test_a_process_knows_its_age() -> None:
    before = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", "from pipeline.processes import age_seconds; input(); print(age_seconds())"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    started = time.monotonic()
    time.sleep(0.2)
    asked = time.monotonic()
    age = float(process.communicate("\n")[0])
    assert asked - started - 0.02 <= age <= time.monotonic() - before + 0.02


def test_imports_collect_no_garbage() -> None:
    code = """
import gc
from pipeline.processes import importing
before = gc.get_threshold()
with importing():
    print(gc.get_threshold()[0])
    import wave
    brought = []
    brought.append(brought)
    gc.disable()  # as a user's module can
print(gc.get_threshold() == before, gc.isenabled(), any(each is brought for each in gc.get_objects()))
"""
    assert printed(code).split() == ["0", "True", "False", "False"]


@pytest.mark.parametrize(("module", "frozen"), [("wave", "True"), ("triton", "False")])
def test_python_s_end_scans_no_imports(module: str, frozen: str, tmp_path: Path) -> None:
    """Beside much other work, this scan took half a minute."""
    (tmp_path / "triton.py").touch()
    code = f"""
import atexit, gc, sys
from pipeline.processes import importing
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # called last
sys.path.insert(0, {str(tmp_path)!r})
with importing():
    import {module}
"""
    assert printed(code).strip() == frozen


def test_python_s_end_writes_out_the_files_of_the_user_s_code(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "class Net:\n    def make(self=None):\n        Net.log = open('log.txt', 'w')\n"
        "        Net.log.write('last words')\n\nmake = Net.make\n",
        encoding="utf-8",
    )
    code = """
from pipeline import factories
from pipeline.processes import importing
with importing():
    make = factories.find("net:make", "train.model", "a model", example="net:make", error=Exception)
make()
"""
    printed(code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert (tmp_path / "log.txt").read_text("utf-8") == "last words"


def test_garbage_of_earlier_work_is_still_found() -> None:
    class Work:
        def __init__(self) -> None:
            self.own = self

    work = weakref.ref(Work())
    with processes.importing():
        import gc
    gc.collect()
    assert work() is None


def test_collecting_goes_on_after_an_import_that_failed() -> None:
    before = gc.get_threshold()
    with pytest.raises(ModuleNotFoundError), processes.importing():
        import nowhere_to_be_found  # type: ignore[import-not-found]  # noqa: F401
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    ("set_by_user", "busy_ticks", "measures", "spins"),
    [
        pytest.param({}, 3, True, "300000", id="idle"),
        pytest.param({}, 20, True, "1000", id="busy"),
        pytest.param({}, 3, False, "1000", id="measures nothing"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2"}, 3, True, "1000", id="beside the other ranks of a launcher"),
        pytest.param({"GOMP_SPINCOUNT": "7"}, 3, True, "7", id="the user's count"),
        pytest.param({"OMP_WAIT_POLICY": "active"}, 3, True, None, id="the user's policy"),
    ],
)
def test_threads_spin_long_only_beside_no_other_load(
    set_by_user: dict[str, str],
    busy_ticks: int,
    measures: bool,
    spins: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stat, now = tmp_path / "stat", [0.0]

    def proceed(seconds: float) -> None:
        now[0] += seconds
        # user, nice, system, idle, iowait, irq, softirq, steal; the third core is busy, but is not the process's
        rows = [[1, 0, 0, 25, 9, 0, 0, busy_ticks - 1], [0, 0, 0, 25, 0, 0, 0, 0], [25, 0, 0, 0, 0, 0, 0, 0]]
        write(*([(now[0] > 0) * ticks for ticks in row] for row in rows))

    def write(*rows: list[int]) -> None:
        lines = [f"cpu{core} {' '.join(map(str, row))} 0 0" for core, row in enumerate(rows)]
        stat.write_text("\n".join(["cpu  1 2 3", *lines, "ctxt 5", ""]))

    proceed(0.0)
    monkeypatch.setattr(processes, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", proceed)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores the variable after the test
        monkeypatch.delenv(name)
    for name, value in set_by_user.items():
        monkeypatch.setenv(name, value)
    processes.set_openmp_spins(measures=measures)
    assert os.environ.get("GOMP_SPINCOUNT") == spins


RESIDENT_AFTER_FREEING = """
import sys
import psutil
from pipeline.processes import malloc
for how in sys.argv[3:]:
    getattr(malloc, f"{how}_freed_memory")()
before = psutil.Process().memory_info().rss
bytes(b"1") * (int(sys.argv[1]) * 2**20)
if sys.argv[2] == "trim":
    malloc.trim()
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc's malloc")
def test_freed_memory_is_kept_or_returned() -> None:
    def resident(*how: str, mib: int = 24, then: str = "") -> int:
        return int(printed(RESIDENT_AFTER_FREEING, str(mib), then, *how))

    assert resident("keep") > 20 * 2**20
    assert resident("keep", mib=40) > 36 * 2**20, "glibc's largest threshold is 32 MiB"
    assert resident("keep", then="trim") < 4 * 2**20
    assert resident("return") < 4 * 2**20
    assert resident("keep", "return") < 4 * 2**20
    assert resident() < 8 * 2**20
