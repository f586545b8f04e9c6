"""``make gpu-check`` on two simulated GPUs, from its doctor step to its verify step."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_check, transfers
from benchmarks.gpu_check import Step
from benchmarks.pairs import Checkout
from pipeline import params
from tests.as_if_cuda import NAME, as_if_cuda
from tests.commands import executable
from tests.conftest import ROOT

PYTHON = """#!/bin/sh
# A python whose pipeline sees two GPUs, and starts further processes with "$0".
case "$1 $2" in
    "-m pipeline"*) shift; exec {python} -m tests.rehearsal.played "$0" "$@";;
esac
exec {python} "$@"
"""


@pytest.mark.slow
def test_what_is_copied_to_gpus_arrives() -> None:
    with as_if_cuda(2):
        rows = transfers.measure("cuda", 2, sizes=(4, 4096))
    assert [row.what for row in rows] == [*("copy, device to device", "copy, host to device") * 2]


@pytest.mark.rehearsal
def test_all_holds_on_two_gpus_but_what_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps "GPU tests", which `make rehearse` runs separately, and "transfers" are left out."""
    work, report, python = tmp_path / "work", tmp_path / "report.md", tmp_path / "bin" / "python"
    Checkout(work, ["."]).commit()
    executable(python, PYTHON.format(python=sys.executable))
    with as_if_cuda(2), monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        values = gpu_check.settings(params.load(ROOT / "params.yaml"), rehearse=True)
        planned = list(gpu_check.steps_of(values, {"fsdp": {"parallelism": "fsdp"}}, rehearse=True))
        steps = [replace(step, limit=3600) for step in planned if step.name not in ("GPU tests", "transfers")]
        steps.insert(-1, Step("variant unknown", (str(python), "-m", "pipeline", "train", "unknown"), 3600))
        failed = gpu_check.check(steps, work, report, rehearse=True)
    text = report.read_text(encoding="utf-8")
    assert failed == 1, text
    assert [line.split(" |")[0].strip("| ") for line in text.splitlines() if "| no " in line] == ["variant unknown"]
    assert "## verify\n" in text
    assert text.count(NAME) > 1
    assert "energy counter needs windows of at least 1 s" in text, "the rehearsal measures energy in shorter windows"
