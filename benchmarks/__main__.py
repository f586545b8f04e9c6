"""``python -m benchmarks [NAME ...]`` runs benchmarks and prints a line for each.

The command also writes the figures to ``<figures>/<machine>.json``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.processes import set_openmp_spins

set_openmp_spins(measures=True)  # as in `python -m pipeline`; both arms of every pair inherit this

from benchmarks import beyond_memory, data_path, ledgers, machines, own_job, own_script, parts, stages, turns

BENCHMARKS: dict[str, Callable[[], dict[str, Any]]] = {
    "data_path": lambda: data_path.ratio_of("plain"),
    "data_path_augmented": lambda: data_path.ratio_of("augmented"),
    "ledgers": ledgers.predictions,
    "evaluations": ledgers.evaluations,
    "textbook": stages.textbook,
    "textbook_in_memory": lambda: stages.textbook(in_memory=True),
    "bare_loop": stages.bare_loop,
    "tracking": stages.tracking,
    "nothing_to_do": stages.nothing_to_do,
    "fixed_cost": stages.fixed_cost,
    "turns": turns.noise,
    "default_job": stages.default_job,
}
BY_NAME = {
    "beyond_memory": beyond_memory.training,
    "beyond_memory_heavier": lambda: beyond_memory.training(pool=1),
    "own_job": own_job.decided,
    "own_script": own_script.agreement,
    "gpt_example": stages.gpt_example,
    "parts_default": lambda: parts.costs_of("default"),
    "parts_resnet18": lambda: parts.costs_of("resnet18"),
}
"""Benchmarks that need root's rights or ten minutes. They run only if the user names them."""


def main() -> None:
    every = BENCHMARKS | BY_NAME
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of {', '.join(every)}; default: all but {', '.join(BY_NAME)}"
    )
    parser.add_argument(
        "--figures", type=Path, default=machines.FIGURES, metavar="DIRECTORY", help="write figures to this directory"
    )
    arguments = parser.parse_args()
    names = arguments.names or list(BENCHMARKS)
    if unknown := set(names) - set(every):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")

    for name in names:
        started = time.perf_counter()
        figure = every[name]()
        machines.keep(arguments.figures, "", "benchmarks", name, figure)
        lower = figure.get("lower_is_better", False)
        value = figure["worst_ratio"] if "worst_ratio" in figure else figure["median_ratio"]
        against = "no target"
        if target := figure.get("target_ratio"):
            met = value <= target if lower else value >= target
            against = f"target {'at most' if lower else 'at least'} {target:g}  {'met' if met else 'MISSED'}"
        print(f"{name:20} {value:8.3f}  {against}  ({time.perf_counter() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
