"""Compare training from a set three times as large as a process's memory limit with training from the set in memory.

Only root can make the control group that limits a process's memory, including its page cache. The limit also applies to
``prepare``. Each arm reads twice as many bytes as the limit. ``beyond_memory`` trains a model so light that the data
path takes most of a step. ``beyond_memory_heavier`` trains the same net on four times as many pixels. This net is still
lighter than most models for 64x64 images.

    python -m benchmarks beyond_memory beyond_memory_heavier
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.pairs import ratio
from pipeline import environment, models, params, plans
from pipeline.data import packing, sources
from pipeline.training.assembly import assembled

LIMIT_BYTES = 1 << 30
SHAPE = (3, 64, 64)
SAMPLE_BYTES = math.prod(SHAPE)
BATCH_SIZE = 256


def pooled(*, pool: int, channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return the net ``small_cnn`` behind a pooling layer that divides the images' height and width by ``pool``."""
    small = models.small_cnn(channels=channels, height=height // pool, width=width // pool, classes=classes)
    return nn.Sequential(nn.AvgPool2d(pool), small)


def training(pairs: int = 6, limit_bytes: int = LIMIT_BYTES, pool: int = 4) -> dict[str, Any]:
    """Return the samples per second with limited memory, divided by those without a limit.

    ``pool``: as in ``pooled``. ``disk_bytes`` in the result: bytes that each limited training read from disk.
    """
    disk_bytes: list[int] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, limited(limit_bytes) as group:
        prepared = _run("prepare", folder, limit_bytes, pool, group)
        arrays = Path(folder, "prepared", "train_inputs.npy")

        def beyond() -> float:
            _forget(arrays)
            found = _run("train", folder, limit_bytes, pool, group)
            disk_bytes.append(found["disk_bytes"])
            return float(found["samples_per_second"])

        def within() -> float:
            _forget(arrays)  # the cached pages count for the limited group, which read them first
            with arrays.open("rb") as file:
                while file.read(1 << 24):
                    pass
            return float(_run("train", folder, limit_bytes, pool)["samples_per_second"])

        size = arrays.stat().st_size
        measured = ratio(beyond, within, pairs)
    sizes = {
        "limit_bytes": limit_bytes,
        "set_bytes": size,
        "read_bytes": _steps(limit_bytes) * BATCH_SIZE * SAMPLE_BYTES,
    }
    return {"target_ratio": 0.9, **sizes, "disk_bytes": disk_bytes, **prepared, **measured}


def _steps(limit_bytes: int) -> int:
    """Return the number of steps in which an arm reads twice as many bytes as the limit."""
    return math.ceil(2 * limit_bytes / (BATCH_SIZE * SAMPLE_BYTES))


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


def _run(what: str, folder: str, limit_bytes: int, pool: int, group: Path | None = None) -> dict[str, Any]:
    """Run ``main`` in a process of its own, in the control group if there is one; return what it prints."""
    command = [sys.executable, "-m", "benchmarks.beyond_memory", what, folder, str(limit_bytes), str(pool)]
    command += [str(group)] if group else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(what: str, folder: str, limit: str, pool: str, group: str = "") -> None:
    """Prepare the set in ``folder``, or train from it, and print the figures as JSON."""
    if group:
        Path(group).write_text(str(os.getpid()), encoding="ascii")
    count, steps = 3 * int(limit) // SAMPLE_BYTES, _steps(int(limit))
    requested = {"train": count, "test": 100, "shape": list(SHAPE), "classes": 10}
    config = params.parse(
        {
            "fetch": {"dataset": "synthetic", "synthetic": requested},
            "train": {
                "model": "benchmarks.beyond_memory:pooled",
                "model_options": {"pool": int(pool)},
                "batch_size": BATCH_SIZE,
                "placement": "streamed",
            },
            "variants": {"baseline": {}},
        }
    )
    started = time.perf_counter()
    if what == "prepare":
        sources.fetch(config.fetch, Path(folder, "raw"))
        packing.prepare(config, Path(folder, "raw"), Path(folder, "prepared"))
        print(json.dumps({"prepare_seconds": time.perf_counter() - started}))
        return
    plan = plans.plan(config, "baseline", environment.machine())
    with assembled(plan, Path(folder, "prepared")) as assembly, assembly.training(seed=0) as run:
        run.advance(3)
        started, before = time.perf_counter(), _disk_bytes()
        run.advance(steps)
        speed = steps * BATCH_SIZE / (time.perf_counter() - started)
        print(json.dumps({"samples_per_second": speed, "disk_bytes": _disk_bytes() - before}))


def _disk_bytes() -> int:
    """Return the number of bytes that this process has read from disk."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(fields["read_bytes"])


if __name__ == "__main__":
    main(*sys.argv[1:])
