"""Turn a training's measurements into the records of results, the bench and profiles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pipeline import results
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.measurement.detectors.base import Rejection
from pipeline.measurement.detectors.figures import of_clock, of_memory, of_ranks, of_steps
from pipeline.measurement.windows import Memory, percentile_ms
from pipeline.results import RunConditions, Window
from pipeline.training.loop import Training


def dataset_of(dataset: Dataset) -> results.Dataset:
    """Describe the data set for a result."""
    return results.Dataset(
        name=dataset.name,
        sha256=dataset.sha256,
        train_count=len(dataset.train),
        test_count=len(dataset.test),
        test_in_train_count=dataset.test_in_train_count,
        test_repeated_count=dataset.test_repeated_count,
    )


def device_name_of(world: World, environment: dict[str, Any]) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return str(environment["hardware"]["cpu"]["model"])


def conditions_of(training: Training, device_name: str) -> RunConditions:
    """Describe how the training's variant runs on this machine."""
    plan, world = training.plan, training.world
    return RunConditions(
        applied=plan.applied.model_dump(mode="json"),
        skipped=plan.skipped,
        decided=plan.decided,
        batch_size=training.train.batch_size,
        learning_rate=training.train.learning_rate,
        micro_batches=plan.micro_batches,
        device=device_name,
        backend=world.backend,
        world_size=world.size,
        threads_per_process=torch.get_num_threads(),
        placement=training.batches.placement,
        parameter_count=training.parameter_count,
    )


def window_of(
    training: Training,
    *,
    requested_steps: int,
    max_input_wait: float | None,
    seen: Iterable[Rejection] = (),
    memory: Memory | None = None,
) -> Window:
    """Combine the measurements of all ranks and windows so far into one record, which is the same on every rank.

    Rejected figures are None. For example, figures are rejected if fewer than ``requested_steps`` steps were measured.
    They are also rejected if the share of time spent waiting for input is above ``max_input_wait`` (None: any share is
    allowed). ``seen``: rejections found earlier. ``memory``: the measurement of memory, if memory was measured in other
    windows than speed; by default the training's own.
    """
    clock, memory, world = training.clock, memory or training.memory, training.world
    mine = [*seen, *(rejection for detector in training.detectors for rejection in detector.rejections())]
    mine += of_clock(clock, max_input_wait, resident=training.batches.placement == "resident")
    mine += of_memory(memory)
    ranks = world.gather((clock.state(), memory.state(), mine))
    clocks, memories, rejections = zip(*ranks, strict=True)
    steps = [len(each["step_seconds"]) for each in clocks]
    rejected = [*of_steps(steps, requested=requested_steps, warmup=training.train.warmup_steps), *of_ranks(rejections)]
    if (work := training.work()) and work.missing:
        rejected.append(Rejection(f"{work}, so the measured speed cannot be compared", voids_memory=True))
    slowest = max(clocks, key=lambda each: each["measured_seconds"])
    peaks = tuple(each["peak_bytes"] for each in memories)
    held = [each["driver_bytes"] for each in memories]
    unknown = None in peaks or any(rejection.voids_memory for rejection in rejected)
    seconds = slowest["measured_seconds"]
    over_ranks = sum if memory.reserved_bytes is None else max  # processes on a CPU share its memory, so peaks add up

    def trusted(value: float | None) -> float | None:
        return None if rejected else value

    return Window(
        measured_steps=min(steps),
        samples_per_second=trusted(min(steps) * training.train.batch_size / seconds if seconds else None),
        step_p50_ms=trusted(percentile_ms(slowest["step_seconds"], 50)),
        step_p90_ms=trusted(percentile_ms(slowest["step_seconds"], 90)),
        step_p99_ms=trusted(percentile_ms(slowest["step_seconds"], 99)),
        input_wait_fraction=trusted(
            max(each["input_seconds"] / each["measured_seconds"] for each in clocks) if seconds else None
        ),
        peak_memory_bytes=None if unknown else over_ranks(peaks),
        peak_memory_rank_bytes=peaks,
        peak_reserved_bytes=(
            None if memory.reserved_bytes is None else max(each["reserved_bytes"] for each in memories)
        ),
        driver_memory_bytes=None if None in held else max(held),
        allocator_retries=None if memory.retries is None else sum(each["retries"] for each in memories),
        rejections=tuple(rejection.reason for rejection in rejected),
    )
