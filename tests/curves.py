"""A measured scaling curve with known answers."""

from __future__ import annotations

import math
from typing import Any

from pipeline.results import Arithmetic, Window
from pipeline.scaling.curves import Measured, Place
from pipeline.scaling.probe import OPERATIONS, Probe, Timing
from tests.factories import make_bench, make_result, make_window

BATCH, ROUNDS = 256, 8
MILLISECOND, MEGABYTE = 1e-3, 10**6


def make_alone(milliseconds: float, late_ms: float = 0.0, jitter_ms: float = 0.0, buckets: Any = None) -> Arithmetic:
    """Two ranks whose mean step takes so long. The second, on host b, takes ``late_ms`` longer, and the slowest rank of
    a step ``jitter_ms`` longer than that. The only bucket, of 10 MB, is ready after nine tenths."""
    ranks = [milliseconds - late_ms, milliseconds + late_ms]
    values = {
        "hosts": ("a", "b"), "rank_seconds": [MILLISECOND * rank for rank in ranks],
        "latest_seconds": MILLISECOND * (max(ranks) + jitter_ms),
        "buckets": buckets or ((0.9 * MILLISECOND * milliseconds, 10 * MEGABYTE),),
    }  # fmt: skip
    return Arithmetic.model_validate(values)


def make_probe(processes: int, latency_ms: float = 1.0, per_megabyte_ms: float = 1.0) -> Probe:
    """All-reduces that take the latency and the time for the bytes of a ring; the other operations take half."""
    share = 2 * (processes - 1) / processes
    timings = [
        Timing(
            operation=operation, processes=processes, hosts=1, size_bytes=size,
            seconds=(part * MILLISECOND * (latency_ms + share * per_megabyte_ms * size / MEGABYTE),),
        )
        for operation, part in zip(OPERATIONS, (1.0, 0.5, 0.5), strict=True)
        for size in (1000, MEGABYTE, 100 * MEGABYTE)
    ]  # fmt: skip
    return Probe(device="cpu", backend="gloo", host_names=("a",), timings=tuple(timings))


def samples(milliseconds: float, **changes: Any) -> tuple[Window, ...]:
    """Rounds of a step of so many milliseconds, which vary by 1% alike in all arms."""
    speeds = [BATCH / MILLISECOND / milliseconds * (1 + 0.01 * math.sin(number)) for number in range(ROUNDS)]
    return tuple(make_window(samples_per_second=speed, **{"input_wait_fraction": 0.0} | changes) for speed in speeds)


def make_measured(step_ms: float = 61.0, late_ms: float = 0.0, buckets: Any = None) -> Measured:
    """One device takes 100 ms. Two take 50 ms of arithmetic, and 11 ms for 10 MB that are ready at their end."""
    places = [
        Place(
            name=f"ddp-{number}", variant="ddp", mode="strong", processes=number, hosts=1, batch_size=BATCH,
            devices=number, replicas=1, alone=f"ddp-{number}-alone" if number > 1 else None, measured=number < 4,
        )
        for number in (1, 2, 4)
    ]  # fmt: skip
    alone = {"ddp-2-alone": make_alone(50, late_ms, buckets=buckets or ((50e-3, 10 * MEGABYTE),)),
             "ddp-4-alone": make_alone(25, buckets=buckets or ((25e-3, 10 * MEGABYTE),))}  # fmt: skip
    steps = {"ddp-1": 100.0, "ddp-2": step_ms, "ddp-2-alone": 50.0, "ddp-4-alone": 50.0}  # the last with half the batch
    bench = make_bench([make_result(name) for name in steps], rounds=ROUNDS)
    rounds = {name: samples(step, arithmetic=alone.get(name)) for name, step in steps.items()}
    arms = (arm.model_copy(update={"samples": rounds[arm.variant], "batch_size": BATCH}) for arm in bench.arms)
    bench = bench.model_copy(update={"arms": tuple(arms)})
    return Measured(bench=bench, places=tuple(places), probe=make_probe(2), jobs={"ddp": "job"}, epoch_samples=2560)
