"""``python -m pipeline plan``."""

from __future__ import annotations

import pytest

from pipeline.errors import ConfigError
from pipeline.params import Machine, parse
from pipeline.tools import composition

CPU = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=False)
JOB = {
    "train": {"batch_size": 64, "learning_rate": 0.2},
    "variants": {
        "baseline": {},
        "many": {"precision": "bf16", "gradient_accumulation": 2, "activation_checkpointing": True, "scaling": "weak",
                 "parallelism": "ddp", "data_loading": "streamed"},
    },
}  # fmt: skip


def test_techniques_stand_in_the_order_in_which_they_apply_with_what_they_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    composition.show(parse(JOB), "many", CPU)
    said = capsys.readouterr().out
    first, job, *rest = said.splitlines()
    assert first == "many: 2 process(es) on CPU, 2 micro-batch(es) of 32 samples a process"
    assert "a learning rate of 0.4, 128 samples a step" in job
    applied = {line.split()[0]: line.split("[")[-1].split("]")[0] for line in rest if line.startswith("  ")}
    assert set(applied) == {"activation_checkpointing", "ddp", "gradient_accumulation", "streamed_data", "weak_scaling"}
    assert list(applied).index("activation_checkpointing") < list(applied).index("ddp")  # the buckets are around all
    assert (applied["activation_checkpointing"], applied["ddp"]) == ("model", "model, step")
    assert (applied["gradient_accumulation"], applied["streamed_data"]) == ("step", "input")
    assert any(line.startswith("left out: bf16: ") for line in rest)


def test_without_a_name_the_variants_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    composition.show(parse(JOB), None, CPU)
    baseline, many, how = capsys.readouterr().out.splitlines()
    assert baseline == "baseline: no technique"
    assert many.startswith("many: ")
    assert {"bf16", "ddp", "weak_scaling"} <= set(many.removeprefix("many: ").split(", "))
    assert how.endswith("plan VARIANT")


def test_the_baseline_is_the_plain_step(capsys: pytest.CaptureFixture[str]) -> None:
    composition.show(parse(JOB), "baseline", CPU)
    assert "applied: nothing, it is the plain step" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"variants\.none: no such variant"):
        composition.show(parse(JOB), "none", CPU)
