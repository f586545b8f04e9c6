"""Compare two trainings on a data set: from disk with little memory, and from memory without a limit.

The data set is three times as large as the memory limit. Only root can make the control group that limits a process's
memory, including its page cache. The limit also applies to ``prepare``. As in the bench, both arms run in fresh
processes and take turns, so that a disturbance hits both. Each arm has its own copy of the data set, because a page
that one process has read is in memory for the other one too. Each round reads other samples, because the limited group
keeps in memory the samples that it read last. The job leaves the placement of the data to the pipeline: the limited arm
streams them from disk, and the other arm holds them in memory.

``beyond_memory`` trains the net ``small_cnn`` behind a pooling layer. This model is so light that the data path takes
most of a step. ``beyond_memory_heavier`` trains ``small_cnn`` on the images as they are.

    python -m benchmarks beyond_memory beyond_memory_heavier
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from pipeline import environment, models, params, plans
from pipeline.comparison import stats
from pipeline.data import packing, sources
from pipeline.distributed import forked
from pipeline.errors import count
from pipeline.params import Config
from pipeline.plans import Plan
from pipeline.processes.malloc import keep_freed_memory
from pipeline.training.assembly import assembled

LIMIT_BYTES = 1 << 30
SHAPE = (3, 64, 64)
BATCH_SIZE = 64
TURNS, TURN_STEPS = 6, 32
"""Turns of an arm in each round, and steps of a turn. A turn has many more steps than the few batches that an arm reads
ahead while it waits."""
PAGE_BYTES = 4096
Taken = tuple[float, float, float]
"""Seconds, bytes that the process read from disk, and seconds of processor time."""
PRELOAD = ("pipeline.training.assembly", "torch._dynamo")


def pooled(*, pool: int, channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return the net ``small_cnn`` behind a pooling layer that divides the images' height and width by ``pool``."""
    small = models.small_cnn(channels=channels, height=height // pool, width=width // pool, classes=classes)
    return nn.Sequential(nn.AvgPool2d(pool), small)


def training(rounds: int = 10, limit_bytes: int = LIMIT_BYTES, pool: int = 4) -> dict[str, Any]:
    """Return the samples per second with limited memory, divided by those without a limit.

    ``pool``: as in ``pooled``. In the result, ``disk_bytes`` has the bytes that the limited arm read from disk in each
    round, and ``cpu_seconds`` has the processor time of the limited arm and of the other arm in each round.
    """
    config = _job(3 * limit_bytes // math.prod(SHAPE), pool)
    plan = plans.plan(config, "baseline", environment.machine())
    numerators: list[float] = []
    denominators: list[float] = []
    disk_bytes: list[float] = []
    cpu_seconds: list[list[float]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, limited(limit_bytes) as group:
        beyond, within = Path(name, "beyond"), Path(name, "within")
        with forked(_prepare, (config, Path(name, "raw"), beyond, group), 1, preload=PRELOAD) as ask:
            (prepare_seconds,) = ask(None)
        shutil.copytree(beyond, within)
        arrays = [folder / "train_inputs.npy" for folder in (beyond, within)]
        _forget(arrays[0])  # copytree has read the file outside the group
        for number in range(rounds):
            _read(arrays[1])
            with (
                forked(_train, (plan, beyond, group, number), 1, preload=PRELOAD) as limited_arm,
                forked(_train, (plan, within, None, number), 1, preload=PRELOAD) as free_arm,
            ):
                limited_arm(None), free_arm(None)
                taken: dict[Any, list[Taken]] = {limited_arm: [], free_arm: []}
                for turn in range(TURNS):
                    for arm in (limited_arm, free_arm)[:: 1 if turn % 2 == 0 else -1]:
                        taken[arm] += arm(TURN_STEPS)
            for arm, speeds in ((limited_arm, numerators), (free_arm, denominators)):
                speeds.append(TURNS * TURN_STEPS * BATCH_SIZE / sum(seconds for seconds, *_ in taken[arm]))
            disk_bytes.append(sum(read for _, read, _ in taken[limited_arm]))
            cpu_seconds.append([sum(used for *_, used in taken[arm]) for arm in (limited_arm, free_arm)])
            print(f"{count(number + 1, 'round')}: {numerators[-1] / denominators[-1]:.3f}", flush=True)
        set_bytes = arrays[0].stat().st_size
    interval = stats.paired_ratio(numerators, denominators)
    return {
        "target_ratio": 0.9,
        "limit_bytes": limit_bytes,
        "set_bytes": set_bytes,
        "read_bytes": TURNS * TURN_STEPS * BATCH_SIZE * math.prod(SHAPE),
        "disk_bytes": disk_bytes,
        "cpu_seconds": cpu_seconds,
        "prepare_seconds": prepare_seconds,
        "ratios": [a / b for a, b in zip(numerators, denominators, strict=True)],
        "median_ratio": interval.estimate,
        "interval": [interval.low, interval.high],
        "numerators": numerators,
        "denominators": denominators,
    }


def _job(count: int, pool: int) -> Config:
    requested = {"train": count, "test": 100, "shape": list(SHAPE), "classes": 10}
    train = {
        "model": "benchmarks.beyond_memory:pooled",
        "model_options": {"pool": pool},
        "batch_size": BATCH_SIZE,
    }
    fetch = {"dataset": "synthetic", "synthetic": requested}
    return params.parse({"fetch": fetch, "train": train, "variants": {"baseline": {}}})


@contextmanager
def limited(limit_bytes: int) -> Iterator[Path]:
    """Make a control group with ``limit_bytes`` of memory. Yield the file to which a process writes its id to join."""
    version_1 = Path("/sys/fs/cgroup/memory")
    place = (version_1 if version_1.is_dir() else version_1.parent) / f"beyond-memory-{os.getpid()}"
    place.mkdir()
    try:
        limit = place / ("memory.limit_in_bytes" if version_1.is_dir() else "memory.max")
        limit.write_text(str(limit_bytes), encoding="ascii")
        yield place / "cgroup.procs"
    finally:
        place.rmdir()


def _forget(path: Path) -> None:
    """Drop the file's pages from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> None:
    """Bring the file's pages into the page cache."""
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass


def _join(group: Path | None) -> None:
    if group:
        group.write_text(str(os.getpid()), encoding="ascii")


def _prepare(config: Config, raw: Path, prepared: Path, group: Path) -> Generator[float, None, None]:
    """Yield the seconds that ``prepare`` took in the control group."""
    _join(group)
    sources.fetch(config.fetch, raw)
    started = time.perf_counter()
    packing.prepare(config, raw, prepared)
    yield time.perf_counter() - started


def _train(plan: Plan, prepared: Path, group: Path | None, seed: int) -> Generator[Taken, int, None]:
    """Take the steps of each turn; yield what they took."""
    _join(group)
    keep_freed_memory()  # as in a training; without it, each step would request its pages from the group again
    with assembled(plan, prepared) as assembly, assembly.training(seed) as run:
        if assembly.placement == "resident":  # map all pages, as the first epoch of a long training does
            assembly.task.dataset.train.inputs.view(-1)[::PAGE_BYTES].sum()
        run.advance(3)
        steps = yield 0.0, 0.0, 0.0
        while steps:
            before = _taken()
            run.advance(steps)
            seconds, read, used = (now - then for now, then in zip(_taken(), before, strict=True))
            steps = yield seconds, read, used


def _taken() -> Taken:
    """Return what this process has taken so far, apart from a constant."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return time.perf_counter(), float(fields["read_bytes"]), time.process_time()
