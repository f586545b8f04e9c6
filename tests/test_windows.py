from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pynvml
import pytest
import torch

from pipeline.measurement import windows
from pipeline.measurement.detectors.figures import of_memory
from pipeline.measurement.windows import Clock, Memory, driver_bytes, own_peak_bytes, percentile_ms
from tests.drivers import plug

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MIB = 2**20


class FakeTime:
    """A clock that only the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(windows, "perf_counter", lambda: self.seconds)

    def pass_(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return FakeTime(monkeypatch)


def _run_window(clock: Clock, fake_time: FakeTime, steps: list[tuple[float, float]], *, measured: bool) -> None:
    def inputs() -> Iterator[float]:
        for wait, _ in steps:
            fake_time.pass_(wait)
            yield wait

    clock.open()
    watched = clock.watch(inputs())
    for _, work in steps:
        next(watched)
        fake_time.pass_(work)
        clock.step()
    clock.close(measured=measured)


def test_clock_adds_up_known_times(fake_time: FakeTime) -> None:
    clock = Clock(CPU)
    _run_window(clock, fake_time, [(1.0, 9.0)], measured=False)
    fake_time.pass_(50.0)  # time between windows does not count
    _run_window(clock, fake_time, [(0.5, 1.5), (0.25, 0.75)], measured=True)
    assert clock.first_step_seconds == pytest.approx(10.0)
    assert clock.train_seconds == pytest.approx(13.0)
    assert clock.measured_seconds == pytest.approx(3.0)
    assert clock.step_seconds == pytest.approx([2.0, 1.0])
    assert clock.input_seconds == pytest.approx(0.75)
    assert clock.disagreement() is None


def test_clock_sees_time_that_no_step_accounts_for(fake_time: FakeTime) -> None:
    clock = Clock(CPU)
    clock.open()
    fake_time.pass_(1.0)
    clock.step()
    fake_time.pass_(0.2)
    clock.close(measured=True)
    assert "step times add up to 1.000 s, but the wall clock around them shows 1.200 s" in str(clock.disagreement())


def test_a_restored_clock_goes_on_counting_in_its_open_window_too(fake_time: FakeTime) -> None:
    clock, resumed = Clock(CPU), Clock(CPU)
    _run_window(clock, fake_time, [(0.5, 1.5)], measured=True)
    resumed.restore(clock.state())
    _run_window(resumed, fake_time, [(0.5, 0.5)], measured=True)
    assert resumed.train_seconds == pytest.approx(3.0)
    assert resumed.step_seconds == pytest.approx([2.0, 1.0])
    assert resumed.first_step_seconds == pytest.approx(2.0)
    resumed.open()
    fake_time.pass_(3.0)
    assert resumed.train_seconds_now() == pytest.approx(6.0)


def test_percentiles_are_interpolated_milliseconds() -> None:
    seconds = [0.001 * n for n in range(1, 102)]
    assert percentile_ms(seconds, 50) == pytest.approx(51.0)
    assert percentile_ms(seconds, 90) == pytest.approx(91.0)
    assert percentile_ms(seconds, 99) == pytest.approx(100.0)
    assert percentile_ms([], 50) is None


needs_linux = pytest.mark.skipif(own_peak_bytes() is None, reason="this system does not report the resident peak")


@needs_linux
def test_memory_keeps_the_highest_peak_of_its_measured_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "imported_bytes", 0)
    memory, later = Memory(CPU), Memory(CPU)
    peaks = []
    for used, mebibytes, measured in (
        (memory, 1, True),
        (memory, 256, True),
        (memory, 1, True),
        (memory, 512, False),
        (later, 1, True),
    ):
        used.open()
        # Without malloc: if an earlier test of this process kept freed memory, malloc may keep this block too.
        with mmap.mmap(-1, mebibytes * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
            np.frombuffer(block, np.uint8)[:] = 1
        used.close(measured=measured)
        assert used.peak_bytes is not None
        peaks.append(used.peak_bytes)
    before, large, *same, after = peaks
    assert large - before == pytest.approx(255 * MIB, rel=0.1)
    assert same == [large, large]
    assert after - before < 50 * MIB, "a later window forgets an earlier peak"


@needs_linux
def test_pages_of_a_mapped_file_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(b"1" * 64 * MIB)
    before = own_peak_bytes()
    mapped = np.memmap(file, dtype=np.uint8, mode="r")
    assert int(mapped.max()) == ord("1")
    after = own_peak_bytes()
    assert before is not None
    assert after is not None
    assert after - before < 16 * MIB


def test_memory_is_unknown_if_the_system_does_not_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "imported_bytes", None)
    memory = Memory(CPU)
    memory.open()
    memory.close(measured=True)
    assert memory.peak_bytes is None


def _running(monkeypatch: pytest.MonkeyPatch, *processes: tuple[int, int | None]) -> None:
    """Simulate a driver that lists ``processes`` on GPU a: pairs of process id and bytes."""

    def listed(handle: str) -> list[Any]:
        assert handle == "GPU-a"
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]

    plug(monkeypatch, nvmlDeviceGetComputeRunningProcesses=listed)


def test_the_figure_of_the_driver_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    _running(monkeypatch, (1, 9 * MIB), (os.getpid(), 500 * MIB))
    assert driver_bytes(GPU) == 500 * MIB
    for silent in ([], [(1, 9 * MIB)], [(os.getpid(), None)]):  # in a container, the list has no own process id
        _running(monkeypatch, *silent)
        assert driver_bytes(GPU) is None

    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    assert driver_bytes(GPU) is None


def test_allocator_and_driver_have_peaks_of_their_own_and_retries_void_them(monkeypatch: pytest.MonkeyPatch) -> None:
    retries = 4
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": retries})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 120 * MIB)
    memory = Memory(GPU)
    for used, measured in ((500, True), (900, False), (400, True)):
        _running(monkeypatch, (os.getpid(), used * MIB))
        memory.open()
        memory.close(measured=measured)
    assert (memory.peak_bytes, memory.reserved_bytes, memory.driver_bytes) == (100 * MIB, 120 * MIB, 500 * MIB)
    assert not [*of_memory(memory)]
    _running(monkeypatch)
    memory.open()
    retries += 2
    memory.close(measured=True)
    assert memory.driver_bytes == 500 * MIB, "the highest figure is lost when the driver stops reporting"
    [rejection] = of_memory(memory)
    assert "the allocator ran out of memory and flushed its cache 2 times" in rejection.reason
    assert rejection.voids_memory


def test_a_clock_that_the_user_s_code_replaces_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(CPU)
    before = clock.now()
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    assert clock.now() >= before > 0
