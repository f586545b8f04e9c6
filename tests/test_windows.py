"""The figures of a window: known answers for ranks that differ."""

from __future__ import annotations

import csv
import itertools
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pynvml
import pytest
import torch

from pipeline.measurement import windows
from pipeline.measurement.detectors import of_clock, of_memory
from pipeline.measurement.sampling import SystemSampler
from pipeline.measurement.windows import Clock, Memory, driver_bytes, own_peak_bytes, percentile_ms
from pipeline.results.rejections import rejection
from tests import drivers
from tests.drivers import plug
from tests.factories import foreign_load
from tests.trainings import MIB, rank, window

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
    assert not [*of_clock(clock, None, resident=True)]


def test_clock_sees_time_that_no_step_accounts_for(fake_time: FakeTime) -> None:
    clock = Clock(CPU)
    clock.open()
    fake_time.pass_(1.0)
    clock.step()
    fake_time.pass_(0.2)
    clock.close(measured=True)
    (why,) = of_clock(clock, None, resident=True)
    assert (why.code, why.facts["steps_seconds"]) == ("clocks_disagree", 1.0)
    assert why.facts["wall_seconds"] == pytest.approx(1.2)


def test_a_restored_clock_goes_on_counting(fake_time: FakeTime) -> None:
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
    system = subprocess.run(["stat", "-f", "-c", "%T", file], stdout=subprocess.PIPE, text=True, check=True).stdout
    if system.strip() == "tmpfs":
        pytest.skip("the temporary files are in memory, where a mapped file is shared memory")
    before = own_peak_bytes()
    mapped = np.memmap(file, dtype=np.uint8, mode="r")
    assert int(mapped.max()) == ord("1")
    after = own_peak_bytes()
    assert before is not None
    assert after is not None
    assert after - before < 16 * MIB


def test_memory_that_is_not_reported_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_driver_s_figure_is_this_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    _running(monkeypatch, (1, 9 * MIB), (os.getpid(), 500 * MIB))
    assert driver_bytes(GPU) == 500 * MIB
    for silent in ([], [(1, 9 * MIB)], [(os.getpid(), None)]):  # in a container, the list has no own process id
        _running(monkeypatch, *silent)
        assert driver_bytes(GPU) is None

    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    assert driver_bytes(GPU) is None


def test_allocator_and_driver_have_own_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [*of_memory(memory)] == [rejection("allocator_retried", retries=2)]


def test_a_clock_that_code_replaces_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(CPU)
    before = clock.now()
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    assert clock.now() >= before > 0


SPEEDS = ("samples_per_second", "step_p50_ms", "step_p90_ms", "step_p99_ms", "input_wait_fraction")


def test_throughput_is_the_slowest_rank_s() -> None:
    quick, slow = rank([0.1] * 4), rank([0.1, 0.1, 0.1, 0.5])
    for sample in (window(quick, slow), window(slow, quick)):
        assert sample.samples_per_second == pytest.approx(4 * 256 / 0.8)
        assert sample.step_p50_ms == pytest.approx(100.0)
        assert sample.step_p99_ms == pytest.approx(100 + 0.97 * 400)
        assert sample.measured_steps == 4
        assert sample.rejections == ()


def test_processes_of_one_cpu_share_its_memory() -> None:
    sample = window(rank([0.1] * 4, peak=108 * MIB), rank([0.1] * 4, peak=100 * MIB))
    assert (sample.peak_memory_bytes, sample.peak_memory_rank_bytes) == (208 * MIB, (108 * MIB, 100 * MIB))


def test_the_memory_of_the_fullest_host_counts() -> None:
    ranks = [rank([0.1] * 4, peak=peak * MIB) for peak in (60, 60, 70, 40)]
    assert window(*ranks, hosts=("one", "one", "two", "two")).peak_memory_bytes == 120 * MIB


def test_the_load_of_the_busiest_host_counts() -> None:
    ranks = [rank([0.1] * 4) for _ in range(3)]
    assert window(*ranks, loads=(0.1, 0.3)).model_dump()["foreign_load_fraction"] == 0.3  # the last does not look
    assert "foreign_load_fraction" not in window(*ranks).model_dump()


def test_arithmetic_input_exchange_and_wait_fill_a_step() -> None:
    ranks = [rank([0.1] * 4, wait=0.04), rank([0.1] * 4)]
    sample = window(*ranks, arithmetic=(0.03, 0.055))
    assert sample.arithmetic_rank_ms == pytest.approx((30.0, 55.0))
    figures = [sample.model_dump()[name] for name in ("arithmetic_ms", "exchange_fraction", "rank_wait_fraction")]
    assert figures == pytest.approx([55.0, 1 - 0.1 - 0.55, 0.25])
    assert "arithmetic_ms" not in window(*ranks).model_dump()
    noisy = window(*ranks, arithmetic=(0.03, 0.055), seen=[rejection("energy_stands")])
    assert noisy.arithmetic_rank_ms == ()


def test_a_rejection_names_its_host() -> None:
    seen = rejection("energy_stands")
    sample = window(rank([0.1] * 4), rank([0.1] * 4), seen=[seen], hosts=("one", "two"))
    assert [found.happened for found in sample.rejections] == [f"rank 0 on one: {seen.happened}"]


def test_input_and_memory_are_the_largest_rank_s() -> None:
    sample = window(
        rank([0.1] * 4, wait=0.1, peak=300 * MIB, retries=0), rank([0.2] * 4, wait=0.04, peak=200 * MIB, retries=0)
    )
    assert sample.input_wait_fraction == pytest.approx(0.25)
    assert (sample.peak_memory_bytes, sample.peak_memory_rank_bytes) == (300 * MIB, (300 * MIB, 200 * MIB))
    assert (sample.peak_reserved_bytes, sample.driver_memory_bytes) == (600 * MIB, 900 * MIB)
    assert sample.allocator_retries == 0


@pytest.mark.parametrize("code", ["energy_stands", "samples_repeated"])
def test_what_a_detector_saw_voids_the_speeds(code: str) -> None:
    seen = rejection(code, credited=256)
    sample = window(rank([0.1] * 4), seen=[seen])
    assert {getattr(sample, name) for name in SPEEDS} == {None}
    assert sample.rejections == (seen,)
    assert sample.peak_memory_bytes == (None if code == "samples_repeated" else 100 * MIB)
    assert sample.peak_memory_rank_bytes == (100 * MIB,)


def test_a_disturbed_machine_s_speed_is_kept_aside() -> None:
    quick, slow, load = rank([0.1] * 4), rank([0.1, 0.1, 0.1, 0.5]), foreign_load()
    sample = window(quick, slow, seen=[load])
    assert sample.samples_per_second is None
    assert sample.disturbed_samples_per_second == pytest.approx(4 * 256 / 0.8)
    for seen in ([], [load, rejection("energy_stands")]):
        assert window(quick, slow, seen=seen).disturbed_samples_per_second is None


@pytest.mark.parametrize(
    ("ranks", "options", "code", "facts"),
    [
        ([rank([0.1] * 3)], {}, "few_steps", {"measured": 3, "requested": 4}),
        ([rank([0.1] * 4), rank([0.1] * 5)], {}, "steps_differ", {"steps": "4, 5"}),
        ([rank([])], {}, "no_step", {"warmup": 10}),
        ([rank([0.1] * 4, wait=0.3)], {"max_input_wait": 0.5}, "input_wait", {"share": 0.75, "limit": 0.5}),
        (
            [rank([0.1] * 4, unseen=1.0)], {},
            "clocks_disagree", {"steps_seconds": 0.4, "wall_seconds": 1.4, "limit": 0.05},
        ),
        ([rank([0.1] * 4, retries=2)], {}, "allocator_retried", {"retries": 2}),
    ],
)  # fmt: skip
def test_implausible_figures_void_the_speeds(
    ranks: list[tuple[Clock, Memory]], options: dict[str, Any], code: str, facts: dict[str, Any]
) -> None:
    sample = window(*ranks, **options)
    assert {getattr(sample, name) for name in SPEEDS} == {None}
    why = sample.rejections[0]
    assert (why.code, why.facts) == (code, facts if "steps" in facts else pytest.approx(facts))
    assert (sample.peak_memory_bytes is None) == (code == "allocator_retried")


def test_ranks_are_named_where_there_are_several() -> None:
    full = rank([0.1] * 4, retries=1)
    assert "rank" not in window(full).rejections[0].facts
    (why,) = window(full, rank([0.1] * 4, retries=0)).rejections
    assert (why.facts["rank"], why.text.partition(":")[0]) == (0, "rank 0")


@pytest.mark.parametrize("placement", ["resident", "streamed"])
def test_what_is_resident_already_is_not_advised_to_be(placement: str) -> None:
    sample = window(rank([0.1] * 4, wait=0.3), max_input_wait=0.5, placement=placement)
    advice = sample.rejections[0].advice
    assert (advice and advice.setting) == ("train.placement" if placement == "streamed" else None)


@pytest.mark.parametrize("limit", [0.8, None])
def test_what_may_wait_for_its_input_is_not_refused(limit: float | None) -> None:
    assert window(rank([0.1] * 4, wait=0.3), max_input_wait=limit).rejections == ()


def test_memory_that_one_rank_cannot_tell_is_unknown() -> None:
    sample = window(rank([0.1] * 4), rank([0.1] * 4, peak=None))
    assert (sample.peak_memory_bytes, sample.driver_memory_bytes, sample.rejections) == (None, None, ())
    assert sample.samples_per_second is not None


def test_system_sampler_writes_samples_with_their_seed(tmp_path: Path) -> None:
    path = tmp_path / "results" / "system.csv"
    with SystemSampler(path, [torch.device("cpu")], interval_seconds=0.01) as sampler:
        sampler.seed = 3
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and (not path.exists() or path.read_text().count("\n") < 4):
            time.sleep(0.01)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 3
    assert rows[-1]["seed"] == "3"
    assert abs(float(rows[-1]["seconds"]) - time.time()) < 60
    assert float(rows[-1]["process_resident_megabytes"]) > 50


def power(monkeypatch: pytest.MonkeyPatch, milliwatts: Callable[[str], int]) -> None:
    """Simulate a driver whose GPUs draw the power that ``milliwatts`` returns for a GPU's UUID."""
    drivers.plug(
        monkeypatch,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=50),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=2e6),
        nvmlDeviceGetPowerUsage=milliwatts,
    )


def sampled(path: Path, *gpus: int) -> dict[str, str]:
    """Sample a job that ends at once; return the file's only row."""
    with SystemSampler(path, [torch.device("cuda", index) for index in gpus]):
        pass
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    return row


def test_system_sampler_watches_every_gpu_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    power(monkeypatch, {"GPU-a": 100_000, "GPU-b": 250_000}.__getitem__)
    row = sampled(tmp_path / "system.csv", 0, 1)
    assert (row["gpu_0_power_usage_watts"], row["gpu_1_power_usage_watts"]) == ("100.0", "250.0")
    assert row["gpu_1_memory_usage_megabytes"] == "2.0"


def test_a_figure_no_longer_reported_is_blank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    power(monkeypatch, Mock(side_effect=itertools.chain([100_000], itertools.repeat(error))))
    row = sampled(tmp_path / "system.csv", 0)
    assert (row["gpu_0_utilization_percentage"], row["gpu_0_power_usage_watts"]) == ("50.0", "")
