"""Time the same steps of one loop with the history's clock, Lightning's Throughput and torch's benchmark Timer."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.throughput import Throughput
from torch.utils.benchmark import Timer

from benchmarks.stages import Steady, fashion_mnist
from pipeline import results
from pipeline.comparison import stats

BATCH_SIZE = 64
STEPS, TURNS = 10, 30
"""Steps per call of the timed function, and number of measured calls. Each call adds one row to the history. All calls,
warm-ups included, fit into an epoch of Fashion-MNIST."""
CALLS = 3
"""Calls of the timed function per measured call: the Timer calls the function twice before the measured call."""


def measured(packed: Path | None = None, turns: int = TURNS) -> dict[str, Any]:
    """Return the samples per second by each clock, one value per turn, and the ratios of our clock to each other clock.

    A ratio is a median with its 95% interval. ``packed``: a prepared data set of 28x28x1, whose epoch has more steps
    than all turns together; None: Fashion-MNIST.
    """
    ratios: dict[str, list[float]] = {"Lightning's Throughput": [], "torch.utils.benchmark": []}
    with tempfile.TemporaryDirectory() as folder:
        history = Path(folder, "history.csv")
        training = Steady(packed or fashion_mnist(Path(folder))[1], history, BATCH_SIZE)
        training.train = training.train.model_copy(update={"history_every_steps": STEPS})
        loop, rates = training.steps(), [0.0]

        def turn() -> None:
            watch, began = Throughput(window_size=STEPS + 1), time.perf_counter()
            for step in range(STEPS + 1):
                if step:
                    next(loop)
                watch.update(time=time.perf_counter() - began, batches=step, samples=step * BATCH_SIZE)
            rates[0] = float(watch.compute()["device/samples_per_sec"])

        for _ in range(turns):
            timer = Timer("turn()", globals={"turn": turn}, num_threads=torch.get_num_threads())
            ratios["torch.utils.benchmark"].append(STEPS * BATCH_SIZE / timer.timeit(1).mean)
            ratios["Lightning's Throughput"].append(rates[0])
        rows = [row.samples_per_second for row in results.read_history(history)]
    ours = [float(rate or 0) for rate in rows[CALLS - 1 :: CALLS]]
    assert len(ours) == turns, f"{len(rows)} rows of {turns} turns"
    intervals = {name: stats.paired_ratio(ours, values) for name, values in ratios.items()}
    return {
        "samples_per_second": {"ours": ours, **ratios},
        "ours_over": {name: [interval.estimate, interval.low, interval.high] for name, interval in intervals.items()},
    }
