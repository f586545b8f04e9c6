"""Jobs that a real Slurm runs. `make slurm-check` starts Slurm and runs these tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import results
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif("SLURM_CHECK" not in os.environ, reason="needs Slurm: make slurm-check")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a clone of the project with a short job."""
    monkeypatch.chdir(clone(tmp_path))
    change(launch={"slurm": {"cpus": 1}})
    return Path.cwd()


def clone(folder: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "checkout")], check=True)
    return folder / "checkout"


def change(**sections: Any) -> None:
    params = yaml.safe_load(Path("params.yaml").read_text())
    for name, values in sections.items():
        params[name] = values if name == "variants" else params.get(name, {}) | values
    Path("params.yaml").write_text(yaml.safe_dump(params))


class Submitted:
    """A running ``submit slurm``. ``printed``: what it has printed so far."""

    def __init__(self, *command: str) -> None:
        self.file = Path(f"../printed-{time.monotonic_ns()}")
        with self.file.open("w") as output:
            words = [sys.executable, "-m", "pipeline", "submit", "slurm", "--", *command]
            self.process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)

    @property
    def printed(self) -> str:
        return self.file.read_text()

    def job(self) -> str:
        """Return the job's id, as soon as it runs."""
        found: re.Match[str] = until(lambda: re.search(r"job (\d+): RUNNING", self.printed))
        return found[1]


def until(condition: Callable[[], Any], seconds: float = 300) -> Any:
    end = time.monotonic() + seconds
    while not (met := condition()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return met


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_job_s_own(code: int) -> None:
    submitted = Submitted("bash", "-c", f"echo said; exit {code}")
    assert submitted.process.wait() == code
    assert "said\n" in submitted.printed


@pytest.mark.usefixtures("checkout")
def test_a_name_runs_once() -> None:
    command = ["bash", "-c", "touch ../ready; sleep 8; echo x >>../runs; exit 4"]
    first = Submitted(*command)
    until(Path("../ready").exists)
    second = Submitted(*command)
    assert (first.process.wait(), second.process.wait()) == (4, 4)
    assert "is active for this commit and command" in second.printed
    assert Path("../runs").read_text() == "x\n"


@pytest.mark.usefixtures("checkout")
def test_ctrl_c_leaves_the_job_to_be_cancelled() -> None:
    command = ["bash", "-c", "sleep 300"]
    first = Submitted(*command)
    job = first.job()
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait() == 130
    assert f"to cancel it: scancel {job}" in first.printed
    second = Submitted(*command)
    assert second.job() == job
    subprocess.run(["scancel", job], check=True)
    assert second.process.wait() not in (0, 130)


@pytest.mark.usefixtures("checkout")
def test_another_job_in_the_checkout_is_refused() -> None:
    first = Submitted("bash", "-c", "touch ../ready; sleep 20")
    until(Path("../ready").exists)
    second = Submitted("bash", "-c", "touch ../ran")
    assert second.process.wait() == 2
    assert f"job {first.job()} on " in second.printed
    assert not Path("../ran").exists()
    assert first.process.wait() == 0


@pytest.mark.usefixtures("checkout")
def test_a_job_whose_time_is_nearly_over_starts_again() -> None:
    change(launch={"slurm": {"cpus": 1, "time": "00:03:00"}})
    stage = "trap 'sleep 5; touch ../saved; exit 1' TERM; echo start $SLURM_RESTART_COUNT; sleep 400 & wait"
    submitted = Submitted("bash", "-c", f"test -e ../saved || {{ {stage}; }}")
    assert submitted.process.wait() == 0
    assert Path("../saved").exists()


@pytest.mark.usefixtures("checkout")
def test_a_training_and_a_bench_go_on_after_requeues() -> None:
    change(
        launch={"slurm": {"cpus": 1, "nodes": 2}},
        fetch={"dataset": "digits"},
        train={"seeds": [0], "epochs": 20, "batch_size": 32, "device": "cpu", "checkpoint_every_steps": 1000},
        bench={"max_minutes": 0.1, "window_seconds": 0.2, "max_foreign_load": 1.0},
        variants={"baseline": {}, "ddp": {"parallelism": "ddp"}},
        profile={"variants": []},
        publish={"live": False},
    )
    submitted = Submitted("dvc", "repro")
    job = submitted.job()
    for begun in (Path("checkpoints/ddp/seed-0.pt").exists, lambda: list(results.KEPT_BENCHES.glob("*.json"))):
        until(begun)
        subprocess.run(["scontrol", "requeue", job], check=True)
    assert submitted.process.wait() == 0, submitted.printed
    assert "resuming after step" in submitted.printed
    assert re.search(r"bench: adds to the \d+ rounds? of ", submitted.printed)
    assert results.read_bench().session.hosts == ("n1", "n2")
    resumed = json.loads(Path("results/ddp.json").read_text())["runs"][0]
    assert Submitted("dvc", "repro", "--force", "--single-item", "train@ddp").process.wait() == 0
    whole = json.loads(Path("results/ddp.json").read_text())["runs"][0]
    assert (resumed["resumes"], whole["resumes"]) == (1, 0)
    assert resumed["model_sha256"] == whole["model_sha256"]
