"""Each detector reports its disturbance if the disturbance occurs, and reports nothing otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch

from pipeline.measurement import detectors as module
from pipeline.measurement.detectors import (
    CpuThrottling,
    Detector,
    ForeignLoad,
    GpuThrottling,
    Recompilation,
    SharedGpu,
    detectors,
)
from pipeline.results.rejections import Advice, Rejection, advised, rejection
from tests.drivers import plug

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def only(detector: Detector) -> Rejection:
    """Return the detector's only rejection."""
    (rejection,) = detector.rejections()
    return rejection


def watched(detector: Detector, during: Callable[[], object], *, measured: bool = True) -> None:
    """Run ``during`` in a window of the detector."""
    detector.open()
    during()
    detector.close(measured=measured)


# Recompilation


def _step(values: torch.Tensor) -> torch.Tensor:
    return (values * 2).relu().sum()


@pytest.fixture
def compiled() -> Any:
    torch._dynamo.reset()
    return torch.compile(_step, backend="eager", dynamic=False)


def test_a_recompile_in_a_measured_window_alone_is_refused(compiled: Any) -> None:
    detector = Recompilation()
    watched(detector, lambda: compiled(torch.ones(3)), measured=False)
    compiled(torch.ones(4))  # between windows
    for size in (3, 4):
        watched(detector, lambda size=size: compiled(torch.ones(size)))  # type: ignore[misc]
    assert not [*detector.rejections()]
    watched(detector, lambda: compiled(torch.ones(5)))
    assert only(detector) == rejection("recompiled", seconds=detector.seconds)
    assert 0 < detector.seconds < 60


def test_a_recompile_is_seen_when_the_compiler_was_reset(compiled: Any) -> None:
    for size in (3, 4, 5):
        compiled(torch.ones(size))
    detector = Recompilation()
    detector.open()
    torch._dynamo.reset()
    compiled(torch.ones(3))
    detector.close(measured=True)
    assert detector.seconds > 0


def test_the_compiler_is_not_loaded_to_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    detector = Recompilation()
    watched(detector, lambda: None)
    assert not [*detector.rejections()]
    assert "torch._dynamo.utils" not in sys.modules


# Foreign load


class Machine:
    """A simulated /proc with two cores, which count 100 ticks per second, and a clock. Only the test advances them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.seconds = root, 50.0
        self.cores = [[0] * 10, [0] * 10]
        monkeypatch.setattr(module, "PROC", root)
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(root))
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)
        monkeypatch.setattr(os, "sysconf", lambda _: 100)
        self.process(1, parent=0)
        self.work(0)

    def work(self, core: int, *, busy: float = 0, idle: float = 0, stolen: float = 0) -> None:
        """Add seconds to the times of one core."""
        times = self.cores[core]
        times[0] += round(busy * 75)
        times[6] += round(busy * 25)  # user, softirq
        times[3] += round(idle * 50)
        times[4] += round(idle * 50)  # idle, iowait
        times[7] += round(stolen * 100)
        times[8] += round(busy * 75)  # guest: part of user
        lines = [f"cpu{index} {' '.join(map(str, ticks))}" for index, ticks in enumerate(self.cores)]
        (self.root / "stat").write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *lines, "intr 1 2 3", ""]))

    def process(
        self, pid: int, parent: int, *, own: float = 0, ended: float = 0, waits: dict[int, float] | None = None,
        name: str = "a) 7 name",
    ) -> None:  # fmt: skip
        """Write the times of a process: its ``own`` CPU seconds, and those of its ``ended`` children. ``waits``: thread
        -> seconds in which the thread waited for a core."""
        directory = self.root / str(pid)
        directory.mkdir(exist_ok=True)
        times = [round(own * 60), round(own * 40), round(ended * 60), round(ended * 40)]
        fields = ["S", parent, *[0] * 9, *times, *[7] * 30]
        (directory / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))}\n")
        for thread, wait in (waits or {}).items():
            (directory / "task" / str(thread)).mkdir(parents=True, exist_ok=True)
            (directory / "task" / str(thread) / "schedstat").write_text(f"123 {round(wait * 1e9)} 5\n")

    def end(self, pid: int) -> None:
        (self.root / str(pid) / "stat").unlink()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def foreign_load(limit: float = 0.1, cores: tuple[int, ...] = (0, 1)) -> ForeignLoad:
    return ForeignLoad(set(cores), root_pid=10, limit=limit)


def window(
    machine: Machine, detector: ForeignLoad, *, own: float, waits: dict[int, float] | None, **second: float
) -> ForeignLoad:
    """Measure a window of two seconds in which both cores are busy, unless ``second`` sets other times for the second
    core. The job uses ``own`` CPU seconds, and its threads wait as long as ``waits`` says."""

    def work() -> None:
        machine.seconds += 2
        machine.work(0, busy=2)
        machine.work(1, **{"busy": 2} | second)
        machine.process(10, parent=1, own=5 + own, waits=waits and {thread: 1 + wait for thread, wait in waits.items()})

    machine.process(10, parent=1, own=5, waits=waits and dict.fromkeys(waits, 1.0))
    watched(detector, work)
    return detector


@pytest.mark.parametrize(
    ("cores", "own", "waits", "taken"),
    [
        ((0, 1), 1.5, {10: 0.5}, 0.5),  # the job's only thread gets three quarters of a core, foreign load the rest
        ((0, 1), 2, {10: 0.01}, 0.01),  # load on a core that the job leaves idle takes nothing from the job
        ((0,), 2, {10: 1, 11: 1}, 0),  # two threads of the job wait for each other
        ((0, 1), 0.1, {10: 0.1}, 0.1),  # a job that uses little CPU time loses 5% of the window
    ],
)
def test_cpu_time_of_others_is_rejected(
    machine: Machine, cores: tuple[int, ...], own: float, waits: dict[int, float], taken: float
) -> None:
    detector = window(machine, foreign_load(cores=cores), own=own, waits=waits)
    assert [detector.seconds["own"], detector.taken_seconds] == pytest.approx([own, taken])
    assert detector.figures() == pytest.approx({"foreign_load_fraction": taken / max(2, own + taken)})
    if taken < 0.5:
        assert not [*detector.rejections()]
    else:
        taken_of_due = {"taken_seconds": 0.5, "due_seconds": 2.0, "share": 0.25, "limit": 0.1}
        rejection = only(detector)
        assert rejection.code == "foreign_load"
        assert rejection.facts == pytest.approx(taken_of_due)
        assert rejection.advice == Advice(setting="bench.max_foreign_load", value=0.4)


def test_the_advised_limit_has_headroom_for_later_loads(machine: Machine) -> None:
    """The loads of a look at a real machine, and of the bench that followed it after some minutes."""

    def rejections(load: float, limit: float) -> list[Rejection]:
        machine.process(11, parent=1)
        detector = window(machine, foreign_load(limit), own=2 - 2 * load, waits={10: 2 * load})
        return [*detector.rejections()]

    seen = 0.17, 0.18, 0.20, 0.22, 0.41, 0.42, 0.46, 0.47
    later = 0.41, 0.42, 0.47, 0.48, 0.49, 0.51, 0.52, 0.53, 0.54, 0.54, 0.56, 0.59, 0.61, 0.63
    values = advised(reason for load in seen for reason in rejections(load, 0.1))
    assert values == {"bench.max_foreign_load": 0.8}
    assert not any(rejections(load, values["bench.max_foreign_load"]) for load in (*seen, *later))


def test_the_jobs_own_processes_are_not_foreign(machine: Machine) -> None:
    """One of two ranks has children. One child exists before the window and ends in it; another exists only in it."""
    machine.process(10, parent=1, own=1)
    machine.process(11, parent=10, own=3, waits={11: 0})
    machine.process(12, parent=10, own=3, waits={12: 0})
    machine.process(13, parent=12, own=0.5, waits={13: 0})
    detector = foreign_load()
    detector.open()
    machine.seconds += 2
    machine.work(0, busy=2)
    machine.work(1, busy=2)
    machine.process(11, parent=10, own=4.8, waits={11: 0.2, 111: 0.1})
    machine.process(12, parent=10, own=4.4, ended=0.5 + 0.4 + 0.4, waits={12: 0.6})
    machine.end(13)
    detector.close(measured=True)
    assert detector.seconds["own"] == pytest.approx(1.8 + 1.4 + 0.8)
    assert detector.taken_seconds == pytest.approx(0)


def test_what_the_hypervisor_steals_counts_by_the_jobs_share(machine: Machine) -> None:
    machine.process(10, parent=1, waits={10: 0})
    detector = foreign_load()
    detector.open()
    machine.seconds += 2
    machine.work(0, busy=1.5, stolen=0.5)
    machine.work(1, busy=0.5, idle=1.5)
    machine.process(10, parent=1, own=1.5, waits={10: 0})
    detector.close(measured=True)
    assert detector.taken_seconds == pytest.approx(0.5 * 1.5 / 2)
    assert only(detector).facts["share"] == pytest.approx(0.375 / 2)


@pytest.mark.parametrize("waits", [None, "0 0 0\n"])
def test_without_counted_waits_load_beyond_idle_time_counts(machine: Machine, waits: str | None) -> None:
    if waits:
        (machine.root / "10" / "task" / "10").mkdir(parents=True)
        (machine.root / "10" / "task" / "10" / "schedstat").write_text(waits)
    detector = window(machine, foreign_load(), own=2, waits=None, busy=1.5, idle=0.5)
    assert detector.taken_seconds == pytest.approx(1.0)


def test_only_measured_windows_count_and_they_add_up(machine: Machine) -> None:
    detector = foreign_load()
    waited, own = 0.0, 0.0
    for taken, measured in ((1.0, False), (0.25, True), (0.0, True), (1.0, False), (0.5, True)):
        machine.process(10, parent=1, own=own, waits={10: waited})
        detector.open()
        machine.seconds += 1
        machine.work(0, busy=1)
        machine.work(1, idle=1)
        waited, own = waited + taken, own + 1 - taken
        machine.process(10, parent=1, own=own, waits={10: waited})
        detector.close(measured=measured)
    assert [detector.seconds["window"], detector.seconds["own"], detector.taken_seconds] == pytest.approx(
        [3, 2.25, 0.75]
    )
    assert [only(detector).facts[name] for name in ("taken_seconds", "due_seconds")] == pytest.approx([0.75, 3])


needs_linux = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs /proc/self/schedstat")


@contextmanager
def busy_processes(count: int, core: int) -> Iterator[list[int]]:
    """Start ``count`` processes that keep ``core`` busy; yield their ids."""
    program = "print('busy', flush=True)\nwhile True: pass"
    processes = []
    try:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
            processes.append(process)
            os.sched_setaffinity(process.pid, {core})
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@needs_linux
def test_busy_processes_of_others_are_seen() -> None:
    core = min(os.sched_getaffinity(0))
    with busy_processes(3, core) as (job, *_):
        beside, whole = (ForeignLoad({core}, root_pid, limit=0.1) for root_pid in (job, os.getpid()))
        deadline = time.monotonic() + 60
        while beside.seconds["own"] < 0.1 and time.monotonic() < deadline:
            watched(beside, lambda: watched(whole, lambda: time.sleep(0.5)))
    assert only(beside).code == "foreign_load"
    # Other load on this machine takes as much time from the three processes together as from the single one.
    others = whole.seconds["own"] - beside.seconds["own"]
    assert others > beside.seconds["own"]
    assert beside.taken_seconds - whole.taken_seconds > others / 2


# Throttling


def _heated(tmp_path: Path, *windows: tuple[tuple[int, int], tuple[int, int], bool]) -> CpuThrottling:
    """Measure windows of almost no length. Each of ``windows`` has the milliseconds of throttling of a core and of its
    package at the window's start, the same at its end, and whether the window is measured."""
    files = [tmp_path / "core_throttle_total_time_ms", tmp_path / "package_throttle_total_time_ms"]

    def write(counts: tuple[int, int]) -> None:
        for file, count in zip(files, counts, strict=True):
            file.write_text(f"{count}\n")

    detector = CpuThrottling(files)
    for before, after, measured in windows:
        write(before)
        watched(detector, lambda after=after: write(after), measured=measured)  # type: ignore[misc]
    return detector


def test_a_cpu_that_got_too_hot_is_refused(tmp_path: Path) -> None:
    assert not [*_heated(tmp_path, ((7, 40), (8, 41), False), ((9, 50), (9, 50), True)).rejections()]
    detector = _heated(tmp_path, ((7, 40), (7, 44), True), ((9, 50), (10, 51), True))
    assert only(detector).code == "cpu_throttled"
    assert only(detector).facts["throttled_seconds"] == pytest.approx(0.005)
    detector.window_seconds = 0.11  # 5 ms of throttling are less than a twentieth
    assert not [*detector.rejections()]


SLOW = pynvml.nvmlClocksEventReasonHwSlowdown


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake driver. ``answers``: the reasons for reduced clocks, as bits, or an error, for each query. Later queries
    get no reason."""
    driver = SimpleNamespace(answers=iter(()), asked=0, pids=[], clients=[])

    def clocks(_: str) -> int:
        driver.asked += 1
        answer = next(driver.answers, 0)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    plug(
        monkeypatch,
        nvmlDeviceGetCurrentClocksEventReasons=clocks,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=pid) for pid in driver.pids],
        nvmlDeviceGetMPSComputeRunningProcesses=lambda _: driver.clients,
    )
    monkeypatch.setattr(module, "GPU_SAMPLE_SECONDS", 0.001)
    return driver


def watch_clocks(driver: SimpleNamespace, *answers: int | Exception, measured: bool = True) -> GpuThrottling:
    """Return the detector after a window in which the driver is queried at least once for each of ``answers``."""
    detector = GpuThrottling("this one")
    driver.answers, driver.asked = iter(answers), 0
    deadline = time.monotonic() + 60

    def wait() -> None:
        while driver.asked < len(answers) and time.monotonic() < deadline:
            time.sleep(0.001)

    watched(detector, wait, measured=measured)
    return detector


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, "software thermal slowdown"),
        (SLOW | pynvml.nvmlClocksEventReasonHwThermalSlowdown, "hardware slowdown, hardware thermal slowdown"),
        (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown | pynvml.nvmlClocksEventReasonGpuIdle, "power brake"),
        (pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonSyncBoost, None),
        (pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonApplicationsClocksSetting, None),
    ],
)
def test_a_gpu_that_throttled_is_refused(driver: SimpleNamespace, bits: int, words: str | None) -> None:
    detector = watch_clocks(driver, 0, bits, 0, bits, 0)
    assert detector.looks >= 5
    detector.looks = 10
    if words:
        facts: dict[str, Any] = {"gpu": "the GPU", "slowdowns": words, "slow": 2, "queries": 10, "limit": 0.05}
        assert only(detector) == rejection("gpu_throttled", **facts)
    else:
        assert not [*detector.rejections()]


def test_heat_outside_of_windows_is_not_refused(driver: SimpleNamespace) -> None:
    assert not [*watch_clocks(driver, SLOW, measured=False).rejections()]
    silent = pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
    detector = watch_clocks(driver, silent, SLOW, silent)
    for looks, refused in ((20, False), (19, True)):
        detector.looks = looks
        assert bool([*detector.rejections()]) is refused


def test_a_gpu_that_wakes_up_is_not_looked_at(driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GPU_SAMPLE_SECONDS", 60)
    detector = GpuThrottling("this one")
    driver.answers = iter([SLOW])
    watched(detector, lambda: setattr(driver, "answers", iter(())))
    assert (detector.looks, detector.slow_looks) == (1, 0)  # the only query is at the window's end


# Another process on the GPU


def shared_gpu(driver: SimpleNamespace, before: list[int], after: list[int], *, measured: bool = True) -> SharedGpu:
    """Return the detector after a window, with the processes that are on the GPU ``before`` and ``after`` the window.

    Process 10 is the job's root."""
    detector = SharedGpu("this one", root_pid=10)
    driver.pids = before
    watched(detector, lambda: setattr(driver, "pids", after), measured=measured)
    return detector


@pytest.fixture
def rank(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process one of the two ranks 11 and 12 of job 10. Process 20 and its child 21 do not belong to the job,
    and process 30 is the server of MPS."""
    for pid, parent in ((10, 1), (11, 10), (12, 10), (20, 1), (21, 20)):
        machine.process(pid, parent)
    machine.process(30, parent=1, name="nvidia-cuda-mps")
    (machine.root / "30" / "cmdline").write_text("nvidia-cuda-mps-server\0")
    monkeypatch.setattr(os, "getpid", lambda: 11)


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(
    ("before", "after", "clients", "others"),
    [
        ([11], [11], [], 0),
        ([11, 12], [11, 12], [], 0),
        ([11, 20, 21], [11], [], 2),
        ([11], [20, 11], [], 1),
        # In a container, the driver lists the host's process ids.
        ([7001], [7001], [], 0),
        ([], [], [], 0),
        ([7001], [7001, 7002], [], 1),
        # The server of MPS is not another process.
        ([30, 11, 12], [30, 11, 12], [11, 12], 0),
        ([30, 11, 20], [30, 11, 20], [11, 20], 1),  # a foreign client
        ([30], [30], [11], 0),  # on a GPU older than Volta, only the server is listed
        # In a container, the names of the host's processes cannot be read.
        ([7000, 7001], [7000, 7001], [7001], 0),
        ([7000, 7001, 7002], [7000, 7001, 7002], [7001, 7002], 1),
    ],
)
def test_other_processes_on_the_gpu_are_refused(
    driver: SimpleNamespace, before: list[int], after: list[int], clients: list[int], others: int
) -> None:
    driver.clients = clients
    detector = shared_gpu(driver, before, after)
    assert detector.others == others
    rejections = [*detector.rejections()]
    assert rejections == ([rejection("gpu_shared", others=others, gpu="the GPU")] if others else [])
    assert not [*shared_gpu(driver, before, after, measured=False).rejections()], "in the warm-up"


@pytest.mark.usefixtures("rank")
def test_every_gpu_of_a_process_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(uuid: str) -> str:
        if uuid == "GPU-gone":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    uuids = ["0", "1", "gone", "3"]
    plug(
        monkeypatch,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetCurrentClocksEventReasons=lambda gpu: SLOW if gpu == "GPU-1" else 0,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [
            SimpleNamespace(pid=pid) for pid in ([11, 20] if gpu == "GPU-3" else [11])
        ],
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    gpus = [torch.device("cuda", index) for index in range(4)]
    active_detectors = detectors(gpus, root_pid=10, max_foreign_load=None)
    for detector in active_detectors:
        watched(detector, lambda: None)
    rejections = [rejection for detector in active_detectors for rejection in detector.rejections()]
    assert [(rejection.code, rejection.facts["gpu"]) for rejection in rejections] == [
        ("gpu_throttled", "GPU 1"),
        ("gpu_shared", "GPU 3"),
    ]


@pytest.mark.usefixtures("rank")
def test_a_driver_that_knows_no_mps_is_believed(driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMPSComputeRunningProcesses", unknown)
    assert shared_gpu(driver, [7001, 7002], [7001, 7002]).others == 1


# All together


@pytest.mark.usefixtures("machine")
def test_a_resumed_run_remembers_what_was_seen(driver: SimpleNamespace, tmp_path: Path) -> None:
    for seen, resumed in (
        (watch_clocks(driver, SLOW), GpuThrottling("this one")),
        (_heated(tmp_path, ((0, 0), (0, 1), True)), CpuThrottling([])),
    ):
        torch.save(seen.state(), tmp_path / "state")
        resumed.restore(torch.load(tmp_path / "state", weights_only=True))
        assert [*resumed.rejections()] == [*seen.rejections()] != []


def test_only_what_this_machine_offers_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    active_detectors = detectors([CPU], root_pid=os.getpid(), max_foreign_load=None)
    assert [type(detector) for detector in active_detectors] == [Recompilation]
    for core in (0, 1, 3):
        (tmp_path / f"cpu{core}" / "thermal_throttle").mkdir(parents=True)
        (tmp_path / f"cpu{core}" / "thermal_throttle" / "core_throttle_total_time_ms").write_text("3\n")
    monkeypatch.setattr(module, "PROC", tmp_path)
    (tmp_path / "stat").write_text("")
    active_detectors = detectors([CPU], root_pid=os.getpid(), max_foreign_load=0.1)
    assert [type(detector) for detector in active_detectors] == [Recompilation, ForeignLoad, CpuThrottling]
    for core, refused in ((1, False), (3, True)):  # core 1 does not count, because this process may not use it
        file = tmp_path / f"cpu{core}" / "thermal_throttle" / "core_throttle_total_time_ms"
        watched(active_detectors[2], lambda file=file: file.write_text("400\n"))  # type: ignore[misc]
        assert bool([*active_detectors[2].rejections()]) is refused


@pytest.mark.gpu("a driver that reports slowdowns")
def test_an_idle_gpu_is_watched_in_silence() -> None:
    left = torch.randn(2048, 2048, device=GPU)
    active_detectors = detectors([GPU], root_pid=os.getpid(), max_foreign_load=None)
    assert {GpuThrottling, SharedGpu} <= {type(detector) for detector in active_detectors}
    for measured in (False, True, True):
        for detector in active_detectors:
            detector.open()
        for _ in range(50):
            left = (left @ left).clamp(-1, 1)
        torch.cuda.synchronize()
        for detector in active_detectors:
            detector.close(measured=measured)
    assert [rejection for detector in active_detectors for rejection in detector.rejections()] == []
    [throttling] = [detector for detector in active_detectors if isinstance(detector, GpuThrottling)]
    assert throttling.looks >= 2
