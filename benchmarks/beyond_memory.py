"""Training from a set three times as large as the memory a process may use, over training from the same set in memory.

Root alone may make the control group that limits the memory, the page cache included. It also limits ``prepare``.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.pairs import ratio
from pipeline import environment, params, plans
from pipeline.data import packing, sources
from pipeline.training.assembly import assembled

LIMIT_BYTES = 1 << 30
SHAPE = (3, 64, 64)
STEPS = 40


def training(pairs: int = 6) -> dict[str, Any]:
    """Samples a second with the memory limited over those without; ``prepare`` runs within the limit, too."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, limited() as group:
        prepared = _run("prepare", folder, group)
        arrays = Path(folder, "prepared", "train_inputs.npy")

        def beyond() -> float:
            _forget(arrays)
            return float(_run("train", folder, group)["samples_per_second"])

        def within() -> float:
            _forget(arrays)  # pages belong to the group that read them first
            with arrays.open("rb") as file:
                while file.read(1 << 24):
                    pass
            return float(_run("train", folder, None)["samples_per_second"])

        size = arrays.stat().st_size
        measured = ratio(beyond, within, pairs)
    return {"target_ratio": 0.9, "limit_bytes": LIMIT_BYTES, "set_bytes": size, "steps": STEPS, **prepared, **measured}


@contextmanager
def limited() -> Iterator[Path]:
    """A control group with ``LIMIT_BYTES`` of memory: the file to which a process writes its id to join."""
    version_1 = Path("/sys/fs/cgroup/memory")
    place = (version_1 if version_1.is_dir() else version_1.parent) / f"beyond-memory-{os.getpid()}"
    place.mkdir()
    try:
        limit = place / ("memory.limit_in_bytes" if version_1.is_dir() else "memory.max")
        limit.write_text(str(LIMIT_BYTES), encoding="ascii")
        yield place / "cgroup.procs"
    finally:
        place.rmdir()


def _forget(path: Path) -> None:
    """Drop the file's pages from the cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run(what: str, folder: str, group: Path | None) -> dict[str, Any]:
    """Run ``main`` in a process of its own, in the control group if there is one; return what it prints."""
    command = [sys.executable, "-m", "benchmarks.beyond_memory", what, folder, *([str(group)] if group else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(what: str, folder: str, group: str = "") -> None:
    """Prepare the set in ``folder``, or train from it; print the figures as JSON."""
    if group:
        Path(group).write_text(str(os.getpid()), encoding="ascii")
    count = 3 * LIMIT_BYTES // (SHAPE[0] * SHAPE[1] * SHAPE[2])
    asked = {"train": count, "test": 100, "shape": list(SHAPE), "classes": 10}
    config = params.parse(
        {
            "fetch": {"dataset": "synthetic", "synthetic": asked},
            "train": {"model": "resnet18", "batch_size": 32},
            "variants": {"baseline": {}},
        }
    )
    started = time.perf_counter()
    if what == "prepare":
        sources.fetch(config.fetch, Path(folder, "raw"))
        packing.prepare(config, Path(folder, "raw"), Path(folder, "prepared"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        print(json.dumps({"prepare_seconds": time.perf_counter() - started, "prepare_peak_bytes": peak}))
        return
    plan = plans.plan(config, "baseline", environment.machine())
    with assembled(plan, Path(folder, "prepared")) as assembly, assembly.training(seed=0) as run:
        run.advance(3)
        started = time.perf_counter()
        run.advance(STEPS)
        print(json.dumps({"samples_per_second": STEPS * config.train.batch_size / (time.perf_counter() - started)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
