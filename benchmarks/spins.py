"""Measure how long OpenMP's threads should spin before they sleep: a small model's speed at several GOMP_SPINCOUNT,
and how much of the machine other processes used meanwhile.

    python -m benchmarks.spins [--windows N] [--busy N]

One process per count trains the same model in short windows, in a random order. Windows are grouped by the cores that
other processes used, so one call on a machine whose load changes shows both what sleeping costs on an idle machine and
what spinning costs on a busy one. ``--busy`` adds processes that never wait.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import psutil

from benchmarks import machines

COUNTS = (300_000, 1_000, 3_000, 10_000, 30_000)
"""Values of GOMP_SPINCOUNT. libgomp's own, 300,000, is the reference."""
WINDOW_SECONDS = 0.3
LOADS = (0.15, 0.5, 1.0, 2.0, float("inf"))
"""Upper bounds, in cores, of the groups of windows."""


def train() -> None:
    """Answer each line of stdin by a line with the steps per second of a window, and the cores that others used."""
    import torch
    import torch.nn.functional as F

    from pipeline.models import small_cnn

    model = small_cnn(channels=1, height=28, width=28, classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images, labels = torch.randn(128, 1, 28, 28), torch.randint(0, 10, (128,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    for _ in range(20):
        step()
    print(flush=True)
    for _ in sys.stdin:
        began, others, steps = time.perf_counter(), _used() - time.process_time(), 0
        while (seconds := time.perf_counter() - began) < WINDOW_SECONDS:
            step()
            steps += 1
        print(steps / seconds, max(0.0, _used() - time.process_time() - others) / seconds, flush=True)


def _used() -> float:
    """Return the CPU seconds that all processes have used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def speeds(windows: int, busy: int) -> dict[str, Any]:
    """Return count -> (steps per second, cores that others used) of each window."""
    values: dict[int, list[tuple[float, float]]] = {count: [] for count in COUNTS}
    with ExitStack() as stack:
        for _ in range(busy):
            spinner = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(spinner.kill)
        trainings = {
            count: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", "from benchmarks.spins import train; train()"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"GOMP_SPINCOUNT": str(count)},
                )
            )
            for count in COUNTS
        }
        for training in trainings.values():
            _answer(training)
        for _ in range(windows):
            for count in random.sample(COUNTS, len(COUNTS)):
                questions = trainings[count].stdin
                assert questions
                questions.write("\n")
                questions.flush()
                speed, others = map(float, _answer(trainings[count]).split())
                values[count].append((speed, others))
        for training in trainings.values():
            training.kill()
    return {"windows": values}


def _answer(training: subprocess.Popen[str]) -> str:
    assert training.stdout
    return training.stdout.readline()


def lines(windows: dict[int, Sequence[tuple[float, float]]]) -> list[str]:
    """Return a line for each load and count: the median speed, and its ratio to that of the reference."""
    shown = []
    for low, high in zip((0.0, *LOADS), LOADS, strict=False):
        medians = {
            count: statistics.median(speeds)
            for count, values in windows.items()
            if (speeds := [speed for speed, others in values if low <= others < high])
        }
        for count, median in medians.items():
            ratio = f"{median / medians[COUNTS[0]]:.2f}" if COUNTS[0] in medians else "no reference"
            number = sum(low <= others < high for _, others in windows[count])
            shown.append(
                f"others {low:g} to {high:g} cores, {count:7,} spins: {median:7.1f} steps/s, {ratio} ({number})"
            )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spins", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--windows", type=int, default=60, help="windows of each count")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that never wait")
    requested = parser.parse_args()
    figure = speeds(requested.windows, requested.busy)
    print(*lines(figure["windows"]), sep="\n")
    path, _ = machines.keep(machines.FIGURES, "spins-", "spins", f"{requested.busy} busy", figure)
    print(f"in {path}")


if __name__ == "__main__":
    main()
