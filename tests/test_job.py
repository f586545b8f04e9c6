from __future__ import annotations

import csv
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from pipeline import environment, models, results
from pipeline.errors import PipelineError
from pipeline.params import Config, load, parse
from pipeline.processes import age_seconds
from pipeline.results import Result
from pipeline.training import checkpoints, job
from pipeline.training.checkpoints import checkpoint_file, state_sha256
from tests.commands import Command, executable, printed
from tests.conftest import ROOT, Terminal
from tests.factories import of_the_job
from tests.workspaces import CPU_ONLY, PARAMS, PREPARED, command, variables

pytestmark = pytest.mark.usefixtures("workspace")


def configure(*, live: bool = False, **train: Any) -> Config:
    """Write params.yaml with changes in ``train``; return the parsed config."""
    params = PARAMS | {"train": PARAMS["train"] | train, "publish": {"live": live}}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    return parse(params)


def train(variant: str, **changes: Any) -> Result:
    config = configure(**changes)
    job.run(config, variant, CPU_ONLY, PREPARED)
    return results.read(results.result_file(variant), config)


def until(condition: Callable[[], object], running: Command) -> None:
    """Wait until the condition holds or the command has ended, but at most two minutes."""
    deadline = time.monotonic() + 120
    while not condition() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def resumed(variant: str) -> tuple[str, Result]:
    """Run the command again; return its output and the result."""
    again = command(variant)
    output = again.communicate(timeout=300)
    assert again.returncode == 0, output
    return output, results.read(results.result_file(variant), load())


def kill(running: Command) -> None:
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()


def test_a_job_writes_a_result_that_fits_its_files() -> None:
    environment.write(environment.fingerprint({"variants": {"baseline": {"bitsandbytes"}}}))
    before = age_seconds()
    result = train("baseline")
    history = results.read_history(results.history_file("baseline"))
    description = json.loads((PREPARED / "dataset.json").read_text())
    fingerprint = json.loads(environment.ENVIRONMENT_FILE.read_text())
    assert (result.variant, result.backend, result.world_size) == ("baseline", None, 1)
    assert result.environment == environment.hash_of(fingerprint, "variants", "baseline") != fingerprint["hash"]
    assert result.device == fingerprint["hardware"]["cpu"]["model"]
    assert result.dataset
    assert result.dataset.sha256 == description["sha256"]
    assert [run.seed for run in result.runs] == [0, 1]
    assert result.parameter_count == 5 * 5 * 20 + 20 + 5 * 5 * 20 * 20 + 20 + 80 * 50 + 50 + 50 * 10 + 10
    for run in result.runs:
        rows = [row for row in history if row.seed == run.seed]
        assert run.test_accuracy == run.test_correct / run.test_count == rows[-1].test_accuracy
        assert run.test_accuracy > 0.8
        assert run.test_count == description["test_count"]
        assert run.steps == rows[-1].step == 2 * (description["train_count"] // 32)
        assert run.measured_steps == run.steps - 5
        assert of_the_job(run.rejections) == ()
        assert bool(run.samples_per_second) is not bool(run.rejections)
        assert run.rejections or 0 < (run.step_p50_ms or 0) <= (run.step_p99_ms or 0)
        model = models.small_cnn(channels=1, height=8, width=8, classes=10)
        model.load_state_dict(torch.load(results.model_file("baseline", run.seed), weights_only=True))
        assert state_sha256(model.state_dict()) == run.model_sha256
    assert result.runs[0].model_sha256 != result.runs[1].model_sha256
    assert result.runs[0].startup_seconds
    trained = result.runs[0].train_seconds + result.runs[0].evaluate_seconds
    # The tolerance is needed because age_seconds counts hundredths of a second.
    assert before <= result.runs[0].startup_seconds <= age_seconds() - trained + 0.02
    assert result.runs[1].startup_seconds is None
    assert not checkpoint_file("baseline", 0).exists()
    with results.system_file("baseline").open() as file:
        assert {"seed", "seconds", "cpu_utilization_percentage"} <= set(next(csv.DictReader(file)))


def test_extra_state_is_trained_saved_and_read() -> None:
    result = train("baseline", seeds=[0], epochs=1, model="tests.nets:Counting")
    [run] = result.runs
    state: dict[str, Any] = checkpoints.weights(result, 0)
    assert state["_extra_state"]["batches"] == run.steps
    assert state_sha256(state) == run.model_sha256


def test_no_duration_depends_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    set_back = itertools.count(1e9, -1e6)
    monkeypatch.setattr(time, "time", lambda: next(set_back))
    [run] = train("baseline", seeds=[0], epochs=1).runs
    assert run.startup_seconds
    assert 0 < run.startup_seconds < age_seconds()
    assert 0 < run.train_seconds < age_seconds()


def test_what_the_machine_lacks_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    result = train("memory", seeds=[0], epochs=1)
    assert result.config["variant"]["precision"] == "bf16"
    assert result.applied["precision"] == "fp32"
    assert result.applied["activation_checkpointing"] is True
    assert list(result.skipped) == ["bf16"]
    assert "memory: bf16 is skipped: this CPU has no native bf16" in capsys.readouterr().out


def test_a_run_within_its_warm_up_reports_no_speed() -> None:
    result = train("baseline", seeds=[0], epochs=1, warmup_steps=100)
    [run] = result.runs
    assert run.measured_steps == 0
    figures = (run.samples_per_second, run.step_p50_ms, run.input_wait_fraction, run.peak_memory_bytes)
    assert figures == (None,) * 4
    assert [rejection.code for rejection in run.rejections] == ["no_step"]


@pytest.mark.parametrize(
    "variant",
    ["baseline", pytest.param("fsdp", marks=pytest.mark.slow)],
)
def test_a_killed_job_ends_with_the_same_weights(variant: str) -> None:
    whole = train(variant, epochs=3, ema_decay=0.9, clip_norm=0.5)
    results.result_file(variant).unlink()

    killed = command(variant)
    second_seed = checkpoint_file(variant, 1)
    until(second_seed.exists, killed)
    kill(killed)
    if results.result_file(variant).exists():
        pytest.skip("the job was done before it could be killed")

    output, result = resumed(variant)
    assert f"{variant} seed 0: complete in" in output
    assert [run.model_sha256 for run in result.runs] == [run.model_sha256 for run in whole.runs]
    assert [run.test_loss for run in result.runs] == [run.test_loss for run in whole.runs]
    assert [run.resumes for run in result.runs] == [0, 1]
    for run in result.runs:  # the average, whether the run was complete or resumed
        assert state_sha256(checkpoints.weights(result, run.seed)) == run.model_sha256
    history = results.read_history(results.history_file(variant))
    assert [(row.seed, row.step) for row in history] == sorted({(row.seed, row.step) for row in history})
    assert not second_seed.exists()


def test_another_seed_is_trained_without_repeating_the_finished_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """DVC deletes the outputs of a stage before it runs; with the same seeds, everything is trained anew."""

    def trained(*seeds: int) -> tuple[Result, str]:
        for file in (*results.MODELS.rglob("*.pt"), *results.RESULTS.rglob("*.*")):
            file.unlink()
        result = train("baseline", seeds=list(seeds), epochs=1, ema_decay=0.9)
        return result, capsys.readouterr().out

    two, _ = trained(0, 1)
    three, said = trained(0, 1, 2)
    assert re.findall(r"seed (\d): complete in", said) == ["0", "1"]
    assert three.runs[:2] == two.runs
    history = results.read_history(results.history_file("baseline"))
    assert list(dict.fromkeys(row.seed for row in history)) == [0, 1, 2]
    for run in three.runs:
        weights = torch.load(results.model_file("baseline", run.seed), weights_only=True)
        assert state_sha256(weights) == run.model_sha256
    anew, said = trained(0, 1, 2)
    assert "complete in" not in said
    assert [run.model_sha256 for run in anew.runs] == [run.model_sha256 for run in three.runs]
    fewer, said = trained(0, 2)
    assert fewer.runs == (anew.runs[0], anew.runs[2])
    assert [file.name for file in sorted(Path("checkpoints/baseline").glob("seed-*"))] == [
        "seed-0.finished",
        "seed-2.finished",
    ]


def test_one_process_at_a_time_trains_a_variant() -> None:
    configure(seeds=[0], epochs=1, batch_size=8, history_every_steps=1)
    first, history = command("baseline"), results.history_file("baseline")
    until(history.exists, first)
    os.kill(first.pid, signal.SIGSTOP)
    second = command("baseline")
    output = second.communicate(timeout=300)
    assert second.returncode == 2, output
    assert "error: another training of variants.baseline is running in" in output
    kill(first)
    assert not results.result_file("baseline").exists()
    train("baseline", seeds=[0], epochs=1)


@pytest.mark.parametrize(
    ("variant", "asks", "code"),
    [
        ("baseline", lambda job: os.kill(job.pid, signal.SIGTERM), 143),
        # The launcher passes the signal on to its ranks.
        pytest.param("ddp", lambda job: os.kill(job.pid, signal.SIGTERM), 143, marks=pytest.mark.slow),
        # A terminal and a container's init signal all processes.
        pytest.param("ddp", lambda job: os.killpg(job.pid, signal.SIGINT), 130, marks=pytest.mark.slow),
    ],
)
def test_a_job_asked_to_end_saves_its_place(variant: str, asks: Callable[[Command], None], code: int) -> None:
    long: dict[str, Any] = {"seeds": [0], "epochs": 1, "batch_size": 8, "history_every_steps": 1}
    whole = train(variant, **long)
    results.result_file(variant).unlink()

    asked = command(variant)
    history = results.history_file(variant)
    history.unlink()
    until(lambda: history.exists() and history.read_text().count("\n") > 1, asked)
    asks(asked)
    output = asked.communicate(timeout=300)
    assert asked.returncode == code, output
    assert "Traceback" not in output, output
    said = re.search(rf"{variant} seed 0: interrupted after step (\d+); run the same .* from (\S+)", output)
    assert said, output
    assert Path(said[2]) == checkpoint_file(variant, 0)
    assert not results.result_file(variant).exists()

    output, result = resumed(variant)
    assert f"{variant} seed 0: resuming after step {said[1]} " in output
    [run], [expected] = result.runs, whole.runs
    assert (run.model_sha256, run.test_loss, run.resumes) == (expected.model_sha256, expected.test_loss, 1)


@pytest.mark.parametrize("variant", ["baseline", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_diverging_job_ends_with_one_clear_message(variant: str) -> None:
    configure(learning_rate=1e30, seeds=[0])
    diverging = command(variant)
    output = diverging.communicate(timeout=300)
    assert diverging.returncode == 2
    assert f"variant {variant}, seed 0, epoch 1, step " in output
    assert "Lower train.learning_rate" in output
    assert not results.result_file(variant).exists()


EPOCH = r"baseline seed 0: epoch {}/2, loss \d\.\d{{4}}, test accuracy \d\d\.\d\d%, [\d,]+ samples/s"


def test_a_log_gets_a_line_an_epoch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "FORETOLD_SECONDS", 0.0)
    train("baseline", seeds=[0], history_every_steps=1)  # so that a row of history is one step
    out, err = capsys.readouterr()
    assert len(re.findall(r"baseline seed 0: expect (\d+\.\d) to \d+\.\d more minutes for all seeds\n", out)) == 1
    assert "\r" not in out + err
    lines = [line for line in out.splitlines() if "epoch" in line]
    rows = results.read_history(results.history_file("baseline"))
    step, seconds = 0, 0.0
    for number, (line, row) in enumerate(zip(lines, [row for row in rows if row.test_accuracy], strict=True), 1):
        assert re.fullmatch(EPOCH.format(number), line)
        assert line.endswith(f" {(row.step - step) * 32 / (row.train_seconds - seconds):,.0f} samples/s")
        step, seconds = row.step, row.train_seconds


def test_a_terminal_gets_a_bar_and_lines(
    open_terminal: Callable[[], Terminal], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = open_terminal()
    [run] = train("baseline", seeds=[0]).runs
    assert re.search(rf"baseline seed 0: 100%\|.*\| {run.steps}/{run.steps} \[", terminal.getvalue())
    assert re.search(EPOCH.format(2), capsys.readouterr().out)


FOLLOWER = """
import os, sys
if sys.orig_argv[2:4] == ["pipeline", "follow"]:
    with open("followed", "a") as file:
        print(sys.orig_argv[4], repr(sys.stdin.read()), file=file)
    os._exit(0)
"""
"""As sitecustomize.py, this code replaces the live mirror: it records the variant, and what standard input says."""


@pytest.mark.parametrize(
    ("variant", "rate", "code", "heard"),
    [
        ("baseline", 0.05, 0, r"finished\n"),
        pytest.param("ddp", 0.05, 0, r"finished\n", marks=pytest.mark.slow),
        pytest.param("baseline", 1e30, 2, "", marks=pytest.mark.slow),
    ],
)
def test_one_process_follows_a_job(workspace: Path, variant: str, rate: float, code: int, heard: str) -> None:
    (workspace / "sitecustomize.py").write_text(FOLLOWER)
    configure(live=True, learning_rate=rate)
    command = [sys.executable, "-m", "pipeline", "train", variant]
    followed = subprocess.run(command, env=variables(), capture_output=True, text=True)
    assert followed.returncode == code, followed.stderr
    assert (workspace / "followed").read_text() == f"{variant} '{heard}'\n"


def test_a_mirror_that_hangs_holds_no_job_up(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executable(workspace / "sleeper", "#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(sys, "executable", str(workspace / "sleeper"))
    monkeypatch.setattr(job, "FOLLOWER_PATIENCE_SECONDS", 0.2)
    before = set(psutil.Process().children())  # servers of earlier tests, perhaps
    with job._live_mirror("baseline"):
        [hanging] = set(psutil.Process().children()) - before
        assert os.getpgid(hanging.pid) == hanging.pid, "Ctrl-C in a terminal must not reach the mirror"
    assert not hanging.is_running()
    assert "MLflow does not show all of this training yet; the stage publish completes it." in capsys.readouterr().err


@pytest.mark.slow
def test_memory_holds_no_imports() -> None:
    script = (
        "import sys; from tests.test_job import *; from pipeline.measurement.windows import Memory\n"
        "noted = []; note = Memory.note_imports\n"
        "Memory.note_imports = lambda: (note(), noted.append(len(sys.modules)))\n"
        "train('baseline', seeds=[0], epochs=1)\n"
        "print(noted, len(sys.modules))\n"
        "assert len(sys.modules) - noted[0] < 40\n"
    )
    printed(script, cwd=Path.cwd(), PYTHONPATH=str(ROOT))


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_not_used(workspace: Path) -> None:
    def write(width: int) -> None:
        (workspace / "own_model.py").write_text(
            "from torch import nn\n"
            "def net(channels, height, width, classes):\n"
            f"    return nn.Sequential(nn.Flatten(), nn.Linear(64, {width}), nn.ReLU(), nn.Linear({width}, classes))\n"
        )

    write(16)
    configure(model="own_model:net", epochs=50)
    killed = command("baseline")
    until(checkpoint_file("baseline", 0).exists, killed)
    kill(killed)
    write(17)
    configure(model="own_model:net", epochs=1)
    output, result = resumed("baseline")
    assert "resuming" not in output
    assert result.parameter_count == 64 * 17 + 17 + 17 * 10 + 10


def test_memory_counts_for_its_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointed blocks contain reference cycles, so only the garbage collector frees them."""
    built: list[Any] = []
    alive: list[bool] = []

    def build(*arguments: Any, **options: Any) -> torch.nn.Module:
        alive.append(any(reference() is not None for reference in built))
        model = original(*arguments, **options)
        built.append(weakref.ref(model))
        return model

    original = models.build
    monkeypatch.setattr(models, "build", build)
    train("memory", epochs=1)
    assert alive == [False, False]


def test_without_a_fingerprint_nothing_is_trained(workspace: Path) -> None:
    (workspace / "environment.json").unlink()
    with pytest.raises(PipelineError, match="run `dvc repro`, or `python -m pipeline environment`"):
        train("baseline")
