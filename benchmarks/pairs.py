"""Copies of the project in which stages can run, and ratios measured in pairs: one arm runs right after the other, so
that a busy machine affects both arms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.comparison import stats
from pipeline.gate.copies import copy_files
from pipeline.params import parse

ROOT = Path(__file__).parent.parent


def ratio(
    numerator: Callable[[], float], denominator: Callable[[], float], pairs: int, *, warm_up: bool = False
) -> dict[str, Any]:
    """Call each of the two arms ``pairs`` times, in the order A B B A ...; return the ratios of what they return, the
    median ratio, and its 95% interval."""
    if warm_up:
        numerator(), denominator()
    above: list[float] = []
    below: list[float] = []
    for pair in range(pairs):
        order = ((numerator, above), (denominator, below))
        for arm, values in order if pair % 2 == 0 else order[::-1]:
            values.append(arm())
    interval = stats.paired_ratio(above, below)
    return {
        "ratios": [a / b for a, b in zip(above, below, strict=True)],
        "median_ratio": interval.estimate,
        "interval": [interval.low, interval.high],
        "numerators": above,
        "denominators": below,
    }


FILES = ("pipeline", "dvc.yaml", ".dvc", ".dvcignore", ".gitignore", ":(glob)*/README.md")
"""Files that the stages need."""


class Checkout:
    """A copy of the project's ``files`` in ``path``, with its own params.yaml, in which stages can run."""

    def __init__(self, path: Path, files: Sequence[str] = FILES, **sections: dict[str, Any]) -> None:
        self.path = path
        copy_files(ROOT, path, *files)
        defaults = parse({"variants": {"baseline": {}}}).model_dump(mode="json")  # dvc.yaml needs every section
        values = {
            key: (content or {}) | sections.get(key, {})
            for key, content in (defaults | {"variants": {}}).items()
            if content is not None or key in sections
        }
        (path / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")

    def use(self, packed: Path) -> None:
        """Link the prepared data set ``packed`` into the copy, and write this machine's fingerprint."""
        (self.path / "data").mkdir()
        (self.path / "data" / "prepared").symlink_to(packed)
        self.stage("environment")

    def run(self, *command: str) -> float:
        """Run a command in the copy; return its wall seconds. If the command fails, print its output and raise
        CalledProcessError."""
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        started = time.perf_counter()
        done = subprocess.run(command, cwd=self.path, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            done.check_returncode()
        return seconds

    def stage(self, *arguments: str) -> float:
        """Run one of the pipeline's commands; return its wall seconds."""
        return self.run(sys.executable, "-m", "pipeline", *arguments)

    def result(self) -> dict[str, Any]:
        """Return the baseline's result."""
        values: dict[str, Any] = json.loads((self.path / "results" / "baseline.json").read_text(encoding="utf-8"))
        return values

    def commit(self) -> None:
        """Make the copy a git repository with one commit, which DVC needs."""
        given = ("-c", "user.name=bench", "-c", "user.email=bench@example.org", "-c", "commit.gpgsign=false")
        self.run("git", "init", "--quiet")
        self.run("git", "add", "--all")
        self.run("git", *given, "commit", "--quiet", "--message", "benchmark")
