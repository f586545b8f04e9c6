"""Measure how much of a ratio's variance comes from servers, processes and turns, and how long each level takes.

    python -m benchmarks.levels NAME
    setarch --addr-no-randomize python -m benchmarks.levels NAME    # or PYTHONHASHSEED=0, taskset, OMP_NUM_THREADS

Arms of a bench are forked from one server, so they share its random properties: the memory layout and the hash seed.
The design is nested: each server starts fresh processes a few times, and the processes take turns. The components of
variance come from a balanced nested analysis of variance of the logarithms of ratios. Each ratio compares an arm's turn
with the baseline's turn. Source: Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM 2013.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.processes import set_openmp_spins

set_openmp_spins(measures=True)  # as in `python -m pipeline`

from benchmarks import machines
from benchmarks.pairs import ROOT, Checkout
from benchmarks.stages import fashion_mnist
from pipeline import params
from pipeline.benchmark.rounds import calibrate
from pipeline.benchmark.server import ArmSpec, Server

LEVELS = ("servers", "processes", "turns")
STEPS = 10
"""Steps per turn."""


def components(logs: np.ndarray[tuple[int, int, int], np.dtype[np.float64]]) -> dict[str, float]:
    """Return level -> standard deviation; 0 if the estimated variance is negative. ``logs``: [servers, processes of
    each, turns of each]."""
    servers, processes, turns = logs.shape
    by_process = logs.mean(axis=2)
    by_server = by_process.mean(axis=1)
    within = ((logs - by_process[..., None]) ** 2).sum() / (servers * processes * (turns - 1))
    between = turns * ((by_process - by_server[:, None]) ** 2).sum() / (servers * (processes - 1))
    above = processes * turns * ((by_server - by_server.mean()) ** 2).sum() / (servers - 1)
    variances = ((above - between) / (processes * turns), (between - within) / turns, within)
    return {level: float(max(0.0, variance)) ** 0.5 for level, variance in zip(LEVELS, variances, strict=True)}


def nested(servers: int, processes: int, turns: int, rehearsals: int = 2) -> dict[str, Any]:
    """Measure every variant of the default job, and the baseline twice, at all levels.

    ``rehearsals``: number of turns that each process takes before its turns are timed.
    """
    config = params.load(ROOT / params.PARAMS_FILE)
    baseline, took = config.compare.baseline, dict.fromkeys(LEVELS, 0.0)
    seconds: dict[str, np.ndarray[tuple[int, int, int], np.dtype[np.float64]]] = {}

    def timed(level: str, began: float) -> float:
        took[level] += (elapsed := time.perf_counter() - began)
        return elapsed

    with tempfile.TemporaryDirectory() as folder:
        _, packed = fashion_mnist(Path(folder))
        checkout = Checkout(Path(folder, "checkout"), **config.model_dump(mode="json"))
        checkout.use(packed)
        for index in range(servers):
            began = time.perf_counter()
            with Server(checkout.path) as server:
                variants = {name: server.plan(name, values) for name, values in server.describe()["variants"].items()}
                arms = {**variants, f"{baseline} again": variants[baseline]}
                first = ArmSpec.of_variant(baseline, server, variants[baseline])
                calibrate(first, STEPS)  # starts the process from which arms are forked
                timed("servers", began)
                for again in range(processes):
                    began = time.perf_counter()
                    for name, plan in arms.items():
                        server.open(name, plan, STEPS * (turns + rehearsals))
                    timed("processes", began)
                    for turn in range(-rehearsals, turns):
                        names = list(arms)[turn % len(arms) :] + list(arms)[: turn % len(arms)]
                        for name in names[:: 1 if again % 2 == 0 else -1]:
                            began = time.perf_counter()
                            server.turn(name, STEPS)
                            if turn >= 0:
                                times = seconds.setdefault(name, np.empty((servers, processes, turns)))
                                times[index, again, turn] = timed("turns", began)
                    began = time.perf_counter()
                    for name in arms:
                        server.close(name)
                    timed("processes", began)
    reference = np.log(seconds[baseline])
    logs = {name: reference - np.log(times) for name, times in seconds.items() if name != baseline}
    cost = dict(zip(LEVELS, (servers, servers * processes, servers * processes * turns * len(seconds)), strict=True))
    return {
        "levels": {"servers": servers, "processes": processes, "turns": turns, "steps": STEPS},
        "seconds_each": {level: took[level] / count for level, count in cost.items()},
        "ratios": {
            name: {
                "throughput": float(np.exp(differences.mean())),
                "deviations": components(differences),
                "by_server": [round(float(value), 4) for value in np.exp(differences.mean(axis=(1, 2)))],
            }
            for name, differences in logs.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.levels", description=__doc__)
    parser.add_argument("name", help="the name of these figures in the file, such as aslr-off")
    for level, default in zip(LEVELS, (6, 4, 6), strict=True):
        parser.add_argument(f"--{level}", type=int, default=default)
    requested = parser.parse_args()
    figure = nested(requested.servers, requested.processes, requested.turns)
    path, _ = machines.keep(machines.FIGURES, "levels-", "levels", requested.name, figure)
    for name, row in figure["ratios"].items():
        shown = ", ".join(f"{level} {deviation:.1%}" for level, deviation in row["deviations"].items())
        print(f"{name:20} {row['throughput']:.3f}  {shown}")
    print(f"in {path}")


if __name__ == "__main__":
    main()
