"""Trainings and benches over the two nodes of a job. `make slurm-check` runs these tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.slurm.test_jobs import Submitted, change, checkout, until

__all__ = ["checkout"]

pytestmark = [
    pytest.mark.skipif("SLURM_CHECK" not in os.environ, reason="needs Slurm: make slurm-check"),
    pytest.mark.usefixtures("checkout"),
]


def job(nodes: int, **train: Any) -> None:
    change(
        launch={"slurm": {"cpus": 1, "nodes": nodes}},
        fetch={"dataset": "digits"},
        train={"seeds": [0], "epochs": 3, "batch_size": 32, "device": "cpu"} | train,
        bench={"max_minutes": 0.1, "window_seconds": 0.2, "max_foreign_load": 1.0},
        profile={"variants": []},
        variants={"baseline": {}, "ddp": {"parallelism": "ddp"}},
    )


def trained() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(Path("results/ddp.json").read_text())
    return result


def test_dvc_repro_gives_a_verdict_over_two_nodes() -> None:
    job(2)
    submitted = Submitted("dvc", "repro")
    assert submitted.process.wait() == 0, submitted.printed
    assert "environment: 2 hosts: n1, n2" in submitted.printed
    assert "2 processes on 2 hosts" in Path("reports/comparison.html").read_text()
    over_two = trained()
    assert (over_two["hosts"], over_two["world_size"]) == (2, 2)
    job(1)
    assert Submitted("dvc", "repro", "train@ddp").process.wait() == 0
    alone = trained()
    assert ("hosts" not in alone, alone["world_size"]) == (True, 2)
    assert alone["runs"][0]["model_sha256"] == over_two["runs"][0]["model_sha256"]


def running(*words: str) -> list[psutil.Process]:
    """Return the processes of this checkout whose command is Python's, and ends with ``words``."""
    mine = (process for process in psutil.process_iter(["cmdline", "cwd"]) if process.info["cwd"] == str(Path.cwd()))
    return [process for process in mine if tuple((process.info["cmdline"] or [])[1:]) == ("-m", "pipeline", *words)]


@pytest.mark.parametrize("victim", ["rank", "helper", "command"])
def test_the_end_of_a_part_ends_all(victim: str) -> None:
    job(2, epochs=2000)
    submitted = Submitted("dvc", "repro", "train@ddp")
    until(lambda: "epoch 1/" in submitted.printed)
    (helper,), command = running("host"), running("train", "ddp")[0]
    ranks = [child for child in helper.children(recursive=True) if not child.children()]
    {"rank": ranks[-1], "helper": helper, "command": command}[victim].kill()
    assert submitted.process.wait() != 0
    assert not psutil.wait_procs([helper, command, *ranks], timeout=60)[1]
    if victim != "command":
        assert "error: rank 1 on n2: " in submitted.printed
