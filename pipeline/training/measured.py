"""Turn a training's measurements into the records of results, the bench and profiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from pipeline import results
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.measurement.detectors import of_clock, of_memory, of_steps
from pipeline.measurement.windows import Clock, Memory, percentile_ms
from pipeline.results import RunConditions, Window
from pipeline.results.figures import (
    ARITHMETIC,
    EXCHANGE,
    FIGURES,
    FOREIGN_LOAD,
    INPUT_WAIT,
    MEMORY,
    QUANTITIES,
    RANK_WAIT,
    THROUGHPUT,
    Figure,
)
from pipeline.results.rejections import Rejection
from pipeline.training.loop import Training


def dataset_of(dataset: Dataset) -> results.DatasetFacts:
    """Describe the data set for a result."""
    counts = dataset.test_class_counts
    return results.DatasetFacts(
        name=dataset.name,
        sha256=dataset.sha256,
        train_count=len(dataset.train),
        test_count=len(dataset.test),
        test_in_train_count=dataset.test_in_train_count,
        test_repeated_count=dataset.test_repeated_count,
        most_frequent_fraction=max(counts) / max(sum(counts), 1) if counts else None,
    )


def device_name_of(world: World, environment: dict[str, Any]) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return str(environment["hardware"]["cpu"]["model"])


def conditions_of(training: Training, device_name: str) -> RunConditions:
    """Describe how the training's variant runs on this machine."""
    plan, world, trained = training.plan, training.world, training.setup.trained_count
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
        hosts=plan.hosts,
        threads_per_process=torch.get_num_threads(),
        placement=training.batches.placement,
        parameter_count=training.parameter_count,
        trained_count=None if trained == training.parameter_count else trained,
    )


def of_rank(
    clock: Clock, memory: Memory, batch_size: int, arithmetic_seconds: float | None = None
) -> dict[str, float | None]:
    """Return the figures of a process, by field. ``FIGURES`` says how the processes' values are joined.
    ``batch_size``: the global batch size. ``arithmetic_seconds``: ``Training.arithmetic_seconds``."""
    steps, seconds = clock.step_seconds, clock.measured_seconds
    return {
        "samples_per_second": len(steps) * batch_size / seconds if seconds else None,
        "step_p50_ms": percentile_ms(steps, 50),
        "step_p90_ms": percentile_ms(steps, 90),
        "step_p99_ms": percentile_ms(steps, 99),
        "input_wait_fraction": clock.input_seconds / seconds if seconds else None,
        **({} if arithmetic_seconds is None else {ARITHMETIC.field: arithmetic_seconds * 1e3}),
        "peak_memory_bytes": memory.peak_bytes,
        "peak_reserved_bytes": memory.reserved_bytes,
        "driver_memory_bytes": memory.driver_bytes,
        "allocator_retries": memory.retries,
    }


class OfRank(NamedTuple):
    """What one process measured."""

    figures: dict[str, float | None]
    """``of_rank``; a figure that is missing on one process is missing on all, except FOREIGN_LOAD."""
    steps: int
    seconds: float
    rejections: list[Rejection]
    host: str = ""
    """The name of the process's host; empty if all processes are on one host."""


def window_of(
    training: Training,
    *,
    requested_steps: int,
    max_input_wait: float | None,
    seen: Iterable[Rejection] = (),
    memory: Memory | None = None,
    arithmetic_seconds: float | None = None,
) -> Window:
    """Combine the measurements of all ranks and windows so far into one record, which is the same on every rank.

    Rejected figures are None. For example, figures are rejected if fewer than ``requested_steps`` steps were measured.
    They are also rejected if the share of time spent waiting for input is above ``max_input_wait`` (None: any share is
    allowed). ``seen``: rejections found earlier. ``memory``: the measurement of memory, if memory was measured in other
    windows than speed; by default the training's own. ``arithmetic_seconds``: ``Training.arithmetic_seconds``.
    """
    clock, memory, world = training.clock, memory or training.memory, training.world
    mine = [*seen, *(rejection for detector in training.detectors for rejection in detector.rejections())]
    mine += of_clock(clock, max_input_wait, resident=training.batches.placement == "resident")
    mine += of_memory(memory)
    figures = of_rank(clock, memory, training.train.batch_size, arithmetic_seconds)
    for detector in training.detectors:
        figures |= detector.figures()
    host = world.host if training.plan.hosts > 1 else ""
    ranks = world.gather(OfRank(figures, len(clock.step_seconds), clock.measured_seconds, mine, host))
    more = [work.rejection] if (work := training.work()) and work.missing else []
    warmup = training.train.warmup_steps
    return joined(ranks, more, requested_steps=requested_steps, warmup=warmup, on_cpu=memory.reserved_bytes is None)


def joined(
    ranks: Sequence[OfRank], more: Iterable[Rejection] = (), *, requested_steps: int, warmup: int, on_cpu: bool
) -> Window:
    """Combine what the ranks measured into one record. ``more``: reasons to reject it that concern no single rank."""
    figures, steps, seconds, reasons, hosts = zip(*ranks, strict=True)
    rejected = [*of_steps(steps, requested=requested_steps, warmup=warmup)]
    for rank, rejections in enumerate(reasons):
        named = [rejection.of_rank(rank, hosts[rank]) for rejection in rejections]
        rejected += named if len(ranks) > 1 else rejections
    rejected += more
    void = {figure.margin: bool(rejected) for figure in QUANTITIES}
    void["memory"] = any(rejection.voids_memory for rejection in rejected)  # noise in time does not change a peak
    slowest = seconds.index(max(seconds))
    values: dict[str, Any] = {
        figure.field: None
        if void.get(figure.family)
        else _over_ranks(figure, [own[figure.field] for own in figures], slowest, hosts, on_cpu=on_cpu)
        for figure in FIGURES
        if figure.over_ranks and figure.field in figures[0]
    }
    if loads := [own[FOREIGN_LOAD.field] for own in figures if FOREIGN_LOAD.field in own]:
        values[FOREIGN_LOAD.field] = max(loads)  # one process of each host measures it
    if rejected and all(rejection.of_machine for rejection in rejected):
        values["disturbed_samples_per_second"] = figures[slowest][THROUGHPUT.field]
    arithmetic = () if values.get(ARITHMETIC.field) is None else [own[ARITHMETIC.field] for own in figures]
    if arithmetic:
        values |= waits(arithmetic, 1e3 * max(seconds) / min(steps), values[INPUT_WAIT.field])
    return Window.model_validate(
        values
        | {
            "arithmetic_rank_ms": arithmetic,
            "measured_steps": min(steps),
            "peak_memory_rank_bytes": [own[MEMORY.field] for own in figures],
            "rejections": tuple(rejected),
        }
    )


def waits(arithmetic_ms: Sequence[float], step_ms: float, input_fraction: float) -> dict[str, float]:
    """Return the shares of a step in which no rank computes (the exposed exchange of gradients), and in which the
    fastest rank waits for the slowest. ``arithmetic_ms``: each rank's time to compute a step alone."""
    slowest = max(arithmetic_ms)
    return {
        EXCHANGE.field: max(0.0, 1 - input_fraction - slowest / step_ms),
        RANK_WAIT.field: min(1.0, (slowest - min(arithmetic_ms)) / step_ms),
    }


def _over_ranks(figure: Figure, values: Sequence[Any], slowest: int, hosts: Sequence[str], *, on_cpu: bool) -> Any:
    """Join the values of all ranks, of which ``slowest`` is the slowest. Return None if a value is unknown.
    ``hosts``: the host of each rank."""
    if None in values:
        return None
    if figure.over_ranks == "slowest":
        return values[slowest]
    if figure.over_ranks == "sum on a CPU" and on_cpu:  # a host's ranks share its memory
        return max(sum(value for value, of in zip(values, hosts, strict=True) if of == host) for host in set(hosts))
    return sum(values) if figure.over_ranks == "sum" else max(values)
