"""Train, measure and compare over both nodes of a job; then kill parts of trainings at random instants.

    tests/slurm/check python -m tests.slurm.kills --kills 10 --seed 1

First, `dvc repro` in a batch script of one line must give a report over two nodes, and weights of one host. Then the
command, the helper or a rank are killed, as by ``tests.hosts_kills``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, suppress
from pathlib import Path

import psutil

from pipeline import results
from pipeline.params import Config, load
from tests.hosts_kills import Command, check_kills, drawn
from tests.slurm.test_jobs import change, clone

TRAIN = ["dvc", "repro", "--force", "--single-item", "train@ddp"]


def check_verdict() -> None:
    """Check that a batch script of one line compares over both nodes, and trains as one host does."""
    done = subprocess.run(["sbatch", "--wait", "-N2", "--output=../printed", "--wrap", "dvc repro"])
    printed = Path("../printed").read_text(encoding="utf-8")
    assert done.returncode == 0, printed
    assert "environment: 2 hosts: n1, n2" in printed
    page, text = ((results.REPORTS / f"comparison.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))
    assert "2 processes on 2 hosts over gloo" in page
    assert all(f"**ddp**<br>on {node} | " in text for node in ("n1", "n2"))
    compared = json.loads((results.REPORTS / "comparison.json").read_text(encoding="utf-8"))["variants"]
    print("verdicts over two nodes:", {variant["variant"]: variant["verdict"] for variant in compared}, flush=True)
    over_two, alone = weights(2), weights(1)
    assert over_two == alone, "weights differ from those of one host"
    print("equal weights on one host and on two nodes", flush=True)


def weights(hosts: int) -> str:
    """Return the weights of ddp; first train anew in this process's checkout if one host is asked for."""
    if hosts == 1:
        subprocess.run([sys.executable, "-m", "pipeline", "train", "ddp"], check=True, stdout=subprocess.DEVNULL)
    result = results.read(results.result_file("ddp"), load())
    assert (result.hosts, result.world_size) == (hosts, 2)
    return result.runs[0].model_sha256


def begin() -> tuple[Config, Command]:
    words = [sys.executable, "-m", "pipeline", "submit", "slurm", "--", *TRAIN]
    return load(), subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def in_checkout() -> Iterator[psutil.Process]:
    """Yield the processes whose directory is this checkout, without this one."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.cwd() == str(Path.cwd()):
                yield process


def main(kills: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder, chdir(clone(Path(folder).resolve())):
        change(
            launch={"slurm": {"cpus": 1, "nodes": 2}},
            fetch={"dataset": "digits"},
            train={"seeds": [0], "epochs": 12, "batch_size": 32, "device": "cpu", "checkpoint_every_steps": 20},
            bench={"max_minutes": 0.1, "window_seconds": 0.2, "max_foreign_load": 1.0},
            profile={"variants": []},
            publish={"live": False},
            variants={"baseline": {}, "ddp": {"parallelism": "ddp"}},
        )
        check_verdict()
        check_kills(kills, seed, begin, in_checkout)


if __name__ == "__main__":
    main(*drawn("tests.slurm.kills", __doc__))
