from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check, transfers
from benchmarks.gpu_check import Step
from benchmarks.pairs import Checkout
from pipeline import cli, environment, params
from pipeline.errors import PipelineError
from pipeline.params import Machine
from tests.conftest import ROOT
from tests.workspaces import CPU_ONLY

ONE_GPU = Machine(gpus=1, gpu_native_bf16=True, gpu_tf32=True, cpu_native_bf16=False)
FOUR_OLD_GPUS = Machine(gpus=4, gpu_native_bf16=False, cpu_native_bf16=False)


def shell(name: str, script: str, limit: float = 60.0, params: dict[str, Any] | None = None, says: str = "") -> Step:
    return Step(name, ("sh", "-c", script), limit, params, says)


def test_the_check_continues_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "hunter2-hunter2")
    steps = [
        shell("passes", "echo 1.5 GB/s"),
        shell("fails", 'echo "it broke: $STORE_PASSWORD https://me:mine@store/x?signed=ours"; exit 3'),
        shell("hangs", "echo begun; sleep 60 & sleep 60", limit=0.5),
        shell("misses", "echo 0.7 MISSED", says="met"),
        shell("works in the copy", "test -e params.yaml", params={"fetch": {}}),
    ]
    report, work = tmp_path / "report.md", tmp_path / "work"
    work.mkdir()
    assert gpu_check.check(steps, work, report) == 3
    printed = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    held = dict.fromkeys(("passes", "works in the copy"), "yes") | dict.fromkeys(("fails", "hangs", "misses"), "no")
    assert {cells[0]: cells[1] for cells in printed[:5]} == held
    assert printed[1][3].startswith("exit 3: it broke")
    assert printed[2][3] == "not finished after 0.5 s: begun"
    text = report.read_text(encoding="utf-8")
    assert all(part in text for part in ("3 of 5 steps failed", "| passes", "1.5 GB/s", '"torch": '))
    assert not [secret for secret in ("hunter2", "mine@", "ours") if secret in text]


def test_what_a_step_started_ends_with_it(tmp_path: Path) -> None:
    left = tmp_path / "left"
    gpu_check.done(shell("leaves", f"(sleep 1; touch {left}) & sleep 60", limit=0.2), tmp_path)
    gpu_check.done(shell("waits", "sleep 1.2"), tmp_path)
    assert not left.exists()


def test_the_copy_is_a_repository_of_its_own(tmp_path: Path) -> None:
    Checkout(tmp_path, ["."]).commit()
    assert (tmp_path / "dvc.yaml").read_bytes() == (ROOT / "dvc.yaml").read_bytes()
    output = gpu_check.done(shell("git", "git status --short && git rev-list --count HEAD"), tmp_path)
    assert output.output == "1"


def test_the_check_refuses_a_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "machine", lambda *_: CPU_ONLY)
    assert gpu_check.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no GPU" in line
    assert "--rehearse" in line


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (ONE_GPU, {"checkpointing", "activation-offload", "bf16", "fp16", "tf32", "compiled", "graphed"}),
        (
            FOUR_OLD_GPUS,
            {"data-parallel", "ddp", "pipeline-1f1b", "zero1", "fsdp", "tensor"}
            | {"checkpointing", "activation-offload", "fp16", "compiled", "graphed"},
        ),
    ],
)
def test_every_possible_kind_has_a_variant(machine: Machine, expected: set[str]) -> None:
    values = gpu_check.settings(params.load(ROOT / "params.yaml"), rehearse=False)
    assert set(gpu_check.variants_of_each_kind(values, machine, (ROOT / "variants").glob("*.yaml"))) == expected


@pytest.mark.parametrize("rehearse", [False, True])
def test_the_default_job_measures_energy_too(rehearse: bool) -> None:
    assert gpu_check.settings(params.load(ROOT / "params.yaml"), rehearse)["bench"]["energy"] is True


def test_every_step_is_a_command_line_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "machine", lambda: FOUR_OLD_GPUS)
    values = gpu_check.settings(params.load(ROOT / "params.yaml"), rehearse=False)
    commands = [step.command for step in gpu_check.steps_of(values, {"bf16": {}}, rehearse=False)]
    ours = [command[3:] for command in commands if command[1:3] == ("-m", "pipeline")]
    assert {"probe", "scale", "verify"} <= {words[0] for words in ours}
    for words in ours:
        cli._parser().parse_args(words)  # ends the test at a wrong option


def test_a_transfer_that_arrives_wrong_is_an_error() -> None:
    row = transfers.Transfer("copy, host to device", 4, 1.0)
    transfers._demand(True, row)
    with pytest.raises(PipelineError, match="copy, host to device of 4 bytes"):
        transfers._demand(False, row)


@pytest.mark.slow
def test_transfers_of_two_processes() -> None:
    rows = transfers.measure("cpu", 2, sizes=(4, 4096))
    copies = [(f"copy, {side} to device", size) for size in (4, 4096) for side in ("device", "host")]
    assert [(row.what, row.size) for row in rows] == copies
    assert all(row.seconds > 0 for row in rows)
