"""Small, realistic results for tests of what reads them: comparison, report, tracking."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pipeline.config import Train, Variant
from pipeline.results import Dataset, HistoryRow, Result, Run, summarise

ENVIRONMENT: dict[str, Any] = {
    "hash": "e" * 64,
    "hardware": {"cpu": {"model": "Example CPU @ 2.0 GHz", "cores": 2, "flags": ["avx2"]}, "memory_gib": 8, "gpus": []},
    "software": {"system": "Linux x86_64", "image": None, "python": "3.12", "torch": "2.11.0"},
    "settings": {"OMP_NUM_THREADS": "2"},
}
"""The content of an environment.json."""


def make_run(seed: int = 0, *, test_correct: int = 9000, **changes: Any) -> Run:
    """One seed's run; only the first seed (0) knows cold times, as in a real result."""
    values: dict[str, Any] = {
        "seed": seed,
        "test_accuracy": test_correct / 10_000,
        "test_correct": test_correct,
        "test_count": 10_000,
        "test_loss": 0.28,
        "train_loss": 0.25,
        "steps": 705,
        "measured_steps": 695,
        "samples_per_second": 20_000.0,
        "step_p50_ms": 12.5,
        "step_p90_ms": 13.5,
        "step_p99_ms": 18.0,
        "input_wait_fraction": 0.004,
        "startup_seconds": 2.4 if seed == 0 else None,
        "first_step_seconds": 0.12 if seed == 0 else None,
        "train_seconds": 9.0,
        "evaluate_seconds": 0.9,
        "peak_memory_bytes": 200 * 2**20,
        "peak_memory_rank_bytes": (200 * 2**20,),
        "peak_reserved_bytes": None,
        "allocator_retries": None,
        "resumes": 0,
        "refusals": (),
        "model_sha256": hashlib.sha256(str(seed).encode()).hexdigest(),
    }
    return Run(**values | changes)


def make_result(variant: str = "baseline", runs: Sequence[Run] | None = None, **changes: Any) -> Result:
    """A variant's result with three seeds; ``applied`` takes the keys of ``variants.<name>`` in params.yaml."""
    runs = tuple(runs) if runs is not None else tuple(make_run(seed) for seed in (0, 1, 2))
    applied = Variant(**changes.pop("applied", {})).model_dump()
    train = Train(seeds=[run.seed for run in runs]).model_dump()
    values: dict[str, Any] = {
        "variant": variant,
        "environment": ENVIRONMENT["hash"],
        "config": {"train": train, "variant": applied},
        "applied": applied,
        "left_out": {},
        "device": "Example CPU @ 2.0 GHz",
        "backend": None,
        "world_size": 1,
        "threads_per_process": 2,
        "placement": "resident",
        "dataset": Dataset(name="fashion_mnist", sha256="d" * 64, train_count=60_000, test_count=10_000),
        "parameter_count": 21_840,
        "summary": summarise(runs),
        "runs": runs,
    }
    return Result(**values | changes)


def make_history(
    seeds: Sequence[int] = (0, 1, 2),
    accuracies: Sequence[float] = (0.80, 0.86, 0.90),
    *,
    seconds_per_epoch: float = 3.0,
    rows_per_epoch: int = 4,
) -> list[HistoryRow]:
    """History in which each seed ends epoch n with ``accuracies[n - 1]`` after ``n * seconds_per_epoch`` seconds."""
    rows = []
    for seed in seeds:
        for part in range(1, len(accuracies) * rows_per_epoch + 1):
            epoch = part / rows_per_epoch
            ends = part % rows_per_epoch == 0
            rows.append(
                HistoryRow(
                    seed=seed,
                    epoch=epoch,
                    step=round(epoch * 235),
                    train_seconds=epoch * seconds_per_epoch,
                    learning_rate=0.1 * (1 - epoch / (len(accuracies) + 1)),
                    train_loss=2.3 / (1 + 3 * epoch) + 0.01 * seed,
                    samples_per_second=60_000 / seconds_per_epoch,
                    test_loss=0.5 / epoch if ends else None,
                    test_accuracy=accuracies[round(epoch) - 1] if ends else None,
                )
            )
    return rows
