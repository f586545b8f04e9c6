"""The figures of a window: known answers for ranks that differ."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipeline.measurement.detectors.base import Rejection
from pipeline.measurement.windows import Clock, Memory
from pipeline.results import Window
from pipeline.training.loop import Training
from pipeline.training.measured import window_of

MIB = 2**20
SPEEDS = ("samples_per_second", "step_p50_ms", "step_p90_ms", "step_p99_ms", "input_wait_fraction")


def rank(
    step_seconds: Sequence[float],
    *,
    wait: float = 0.0,
    unseen: float = 0.0,
    peak: int | None = 100 * MIB,
    retries: int | None = None,
) -> tuple[Clock, Memory]:
    """One rank's measurement: its steps, its total wait for input, its time outside steps, and its peak memory."""
    clock, memory = Clock(torch.device("cpu")), Memory(torch.device("cpu"))
    clock.step_seconds, clock.measured_seconds = list(step_seconds), sum(step_seconds) + unseen
    clock.input_seconds = wait
    memory.peak_bytes, memory.retries = peak, retries
    memory.reserved_bytes = None if retries is None else 2 * (peak or 0)
    memory.driver_bytes = None if retries is None else 3 * (peak or 0)
    return clock, memory


def window(
    *ranks: tuple[Clock, Memory],
    seen: Sequence[Rejection] = (),
    asked: int = 4,
    batch_size: int = 256,
    max_input_wait: float | None = None,
    placement: str = "resident",
) -> Window:
    """The first rank's record of all ranks. ``seen``: the findings of its detectors; the other ranks have none."""
    others: list[Any] = [(clock.state(), memory.state(), []) for clock, memory in ranks[1:]]
    training: Any = SimpleNamespace(
        clock=ranks[0][0],
        memory=ranks[0][1],
        detectors=[SimpleNamespace(rejections=lambda: list(seen))],
        world=SimpleNamespace(gather=lambda mine: [mine, *others]),
        train=SimpleNamespace(warmup_steps=10, batch_size=batch_size),
        batches=SimpleNamespace(placement=placement),
        work=lambda: None,
    )
    return window_of(cast(Training, training), requested_steps=asked, max_input_wait=max_input_wait)


def test_throughput_is_the_global_batch_over_the_slowest_rank() -> None:
    quick, slow = rank([0.1] * 4), rank([0.1, 0.1, 0.1, 0.5])
    for found in (window(quick, slow), window(slow, quick)):
        assert found.samples_per_second == pytest.approx(4 * 256 / 0.8)
        assert found.step_p50_ms == pytest.approx(100.0)
        assert found.step_p99_ms == pytest.approx(100 + 0.97 * 400)
        assert found.measured_steps == 4
        assert found.rejections == ()


def test_processes_of_one_cpu_share_its_memory() -> None:
    found = window(rank([0.1] * 4, peak=108 * MIB), rank([0.1] * 4, peak=100 * MIB))
    assert (found.peak_memory_bytes, found.peak_memory_rank_bytes) == (208 * MIB, (108 * MIB, 100 * MIB))


def test_input_and_gpu_memory_are_those_of_the_rank_that_has_most() -> None:
    found = window(
        rank([0.1] * 4, wait=0.1, peak=300 * MIB, retries=0), rank([0.2] * 4, wait=0.04, peak=200 * MIB, retries=0)
    )
    assert found.input_wait_fraction == pytest.approx(0.25)
    assert (found.peak_memory_bytes, found.peak_memory_rank_bytes) == (300 * MIB, (300 * MIB, 200 * MIB))
    assert (found.peak_reserved_bytes, found.driver_memory_bytes) == (600 * MIB, 900 * MIB)
    assert found.allocator_retries == 0


@pytest.mark.parametrize("voids_memory", [False, True])
def test_what_a_detector_saw_voids_the_speeds_and_stands_in_the_record(voids_memory: bool) -> None:
    found = window(rank([0.1] * 4), seen=[Rejection("the GPU throttled", voids_memory)])
    assert {getattr(found, name) for name in SPEEDS} == {None}
    assert found.rejections == ("the GPU throttled",)
    assert found.peak_memory_bytes == (None if voids_memory else 100 * MIB)
    assert found.peak_memory_rank_bytes == (100 * MIB,)


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        ([rank([0.1] * 3)], {}, "3 of 4 steps were measured"),
        ([rank([0.1] * 4), rank([0.1] * 5)], {}, "the ranks measured different numbers of steps: [4, 5]"),
        ([rank([])], {}, "no step was measured"),
        (
            [rank([0.1] * 4, wait=0.3)],
            {"max_input_wait": 0.5},
            "waited for input 75% of the time (at most 50% is allowed",
        ),
        (
            [rank([0.1] * 4, unseen=1.0)],
            {},
            "step times add up to 0.400 s, but the wall clock around them shows 1.400 s",
        ),
        ([rank([0.1] * 4, retries=2)], {}, "flushed its cache 2 times"),
    ],
)
def test_what_the_figures_say_against_themselves_voids_the_speeds(
    ranks: list[tuple[Clock, Memory]], options: dict[str, Any], words: str
) -> None:
    found = window(*ranks, **options)
    assert {getattr(found, name) for name in SPEEDS} == {None}
    assert words in found.rejections[0]
    assert (found.peak_memory_bytes is None) == ("flushed" in words)


@pytest.mark.parametrize("placement", ["resident", "streamed"])
def test_what_is_resident_already_is_not_advised_to_be(placement: str) -> None:
    found = window(rank([0.1] * 4, wait=0.3), max_input_wait=0.5, placement=placement)
    assert ("train.placement" in found.rejections[0]) == (placement == "streamed")


@pytest.mark.parametrize("limit", [0.8, None])
def test_what_may_wait_for_its_input_is_not_refused(limit: float | None) -> None:
    assert window(rank([0.1] * 4, wait=0.3), max_input_wait=limit).rejections == ()


def test_memory_that_one_rank_cannot_tell_is_unknown() -> None:
    found = window(rank([0.1] * 4), rank([0.1] * 4, peak=None))
    assert (found.peak_memory_bytes, found.driver_memory_bytes, found.rejections) == (None, None, ())
    assert found.samples_per_second is not None
