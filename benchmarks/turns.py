"""Measure how much the ratio of the baseline to itself varies over rounds, with short turns and without turns."""

from __future__ import annotations

import statistics
import tempfile
from math import log
from pathlib import Path
from typing import Any

from benchmarks.pairs import ROOT, Checkout
from benchmarks.stages import fashion_mnist
from pipeline import params
from pipeline.benchmark.rounds import measure, steps_of
from pipeline.benchmark.server import ArmSpec, Server


def noise(rounds: int = 10) -> dict[str, Any]:
    """Return the standard deviation of the A/A ratio's logarithm in rounds with turns, divided by that without turns.

    Rounds of both kinds, with all variants of the default job, alternate, so that they run in the same conditions.
    ``samples_per_second``: turns per round -> arm -> one speed per round; a rejected speed is None.
    """
    config = params.load(ROOT / params.PARAMS_FILE)
    by_turns: dict[int, dict[str, list[float | None]]] = {1: {}, config.bench.turns: {}}
    with tempfile.TemporaryDirectory() as folder:
        _, packed = fashion_mnist(Path(folder))
        checkout = Checkout(Path(folder, "checkout"), **config.model_dump(mode="json"))
        checkout.use(packed)
        with Server(checkout.path) as server:
            variants, baseline = server.describe()["variants"], config.compare.baseline
            plans = {name: server.plan(name, values) for name, values in variants.items()}
            arms = [ArmSpec.of_variant(name, server, plan) for name, plan in plans.items()]
            control = ArmSpec.of_variant(baseline, server, plans[baseline]).control()
            arms.append(control)
            steps, _ = steps_of(arms[-1], config.bench.window_seconds)
            for turns in list(by_turns) * rounds:
                for arm in measure(arms, seconds=0.0, max_rounds=1, steps=steps, turns=turns).arms:
                    by_turns[turns].setdefault(arm.name, []).append(arm.samples[0].samples_per_second)
    deviations = {turns: _deviation(values[control.name], values[baseline]) for turns, values in by_turns.items()}
    return {
        "median_ratio": deviations[config.bench.turns] / deviations[1],
        "target_ratio": 0.5,
        "lower_is_better": True,
        "deviations": deviations,
        "steps": steps,
        "samples_per_second": by_turns,
    }


def _deviation(control: list[float | None], baseline: list[float | None]) -> float:
    return statistics.stdev(log(a / b) for a, b in zip(control, baseline, strict=True) if a and b)
