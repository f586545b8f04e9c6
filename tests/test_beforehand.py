"""``python -m pipeline plan``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.params import Machine, parse
from pipeline.tools import beforehand
from tests.workspaces import PREPARED

CPU = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=False)
JOB = {
    "fetch": {"dataset": "digits"},
    "train": {"batch_size": 64, "learning_rate": 0.2, "device": "cpu", "epochs": 1, "clip_norm": 1.0},
    "variants": {
        "baseline": {},
        "many": {"precision": "bf16", "gradient_accumulation": "auto", "activation_checkpointing": True,
                 "channels_last": True, "data_loading": "streamed"},
        "weak": {"parallelism": "ddp", "processes": 2, "scaling": "weak"},
        "staged": {"parallelism": "pipeline", "processes": 2, "gradient_accumulation": 4},
    },
}  # fmt: skip
Shown = Callable[[str], list[str]]


@pytest.fixture
def shown(workspace: Path, capfd: pytest.CaptureFixture[str]) -> Shown:  # noqa: ARG001
    def show(name: str) -> list[str]:
        beforehand.show_plan(parse(JOB), name, CPU, PREPARED)
        return capfd.readouterr().out.splitlines()

    return show


def applied(lines: list[str]) -> dict[str, str]:
    """Return technique -> what it changes, read from ``lines``, in their order."""
    return {line.split()[0]: line.split("[")[-1].split("]")[0] for line in lines if line.startswith("  ")}


def test_techniques_stand_in_the_order_they_apply(shown: Shown) -> None:
    first, job, *rest = shown("many")
    assert first == "many: 1 process on CPU, 1 micro-batch of 64 samples a process"
    assert "a learning rate of 0.2, 64 samples a step" in job
    assert list(applied(rest).items()) == [
        ("channels_last", "model, step.forward"),
        ("activation_checkpointing", "model, step.whole"),
        ("auto_micro_batch", "step.forward"),
        ("streamed_data", "input"),
    ]
    assert any(line.startswith("skipped: bf16: ") for line in rest)
    assert "of the job: train.clip_norm [step.update]" in rest
    assert any(line.startswith("decided: auto_micro_batch: 1 micro-batch of 64 samples") for line in rest)


def test_processes_and_step_are_those_of_training(shown: Shown) -> None:
    """A pipeline runs the micro-batches itself, so gradient accumulation changes nothing."""
    first, *rest = shown("staged")
    assert first == "staged: 2 processes on CPU, 4 micro-batches of 16 samples a process"
    assert applied(rest) == {"pipeline": "model, checkpoint, step.criterion, step.accumulate"}
    first, job, *rest = shown("weak")
    assert "a learning rate of 0.4, 128 samples a step" in job
    assert list(applied(rest)) == ["ddp", "weak_scaling"]
    assert applied(rest)["ddp"] == "model, step.no_sync, step.accumulate"


def test_without_a_name_the_variants_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    beforehand.show_plan(parse(JOB), None, CPU, PREPARED)
    baseline, many, *_, how = capsys.readouterr().out.splitlines()
    assert baseline == "baseline: no technique"
    assert many.startswith("many: ")
    assert {"bf16", "channels_last", "auto_micro_batch"} <= set(many.removeprefix("many: ").split(", "))
    assert how.endswith("plan VARIANT")


def test_the_baseline_is_the_plain_step(shown: Shown) -> None:
    assert "applied: no technique; the training runs the plain step" in shown("baseline")
    with pytest.raises(ConfigError, match=r"variants\.none: no such variant"):
        shown("none")
