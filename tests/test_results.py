from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from pipeline import results
from pipeline.comparison.comparison_file import Compared, Comparison
from pipeline.gate.decision import Gated
from pipeline.params import Variant
from pipeline.profiling.steps import Profile
from pipeline.results import Arm, Bench, Record, Result, ResultError, Run, SameJob, Window, summarise
from pipeline.tools.inference import Inference
from pipeline.training import checkpoints
from tests.factories import make_bench, make_comparison, make_history, make_params, make_result, make_run
from tests.nets import conv_net


def test_a_summary_holds_medians_and_the_largest_peak() -> None:
    figures: list[dict[str, Any]] = [
        {"test_correct": 9000, "samples_per_second": 100.0, "step_p50_ms": 4.0, "train_seconds": 7.0},
        {"test_correct": 9100, "samples_per_second": 400.0, "step_p50_ms": 1.0, "train_seconds": 2.0},
        {"test_correct": 9500, "samples_per_second": 200.0, "step_p50_ms": 2.0, "train_seconds": 3.0},
    ]
    peaks = (10, 30, 20)
    summary = summarise([make_run(seed, peak_memory_bytes=peaks[seed], **row) for seed, row in enumerate(figures)])
    assert summary == {
        "test_accuracy_mean_fraction": pytest.approx(0.92),
        "test_accuracy_spread_fraction": pytest.approx(((0.02**2 + 0.01**2 + 0.03**2) / 2) ** 0.5),
        **{"samples_per_second": 200.0, "step_p50_ms": 2.0, "peak_memory_bytes": 30, "train_seconds": 3.0},
    }


def test_what_one_seed_lacks_the_summary_lacks() -> None:
    unknown: dict[str, Any] = dict.fromkeys(("samples_per_second", "step_p50_ms", "peak_memory_bytes"))
    summary = summarise([make_run(0), make_run(1, **unknown), make_run(2)])
    assert {name: summary[name] for name in unknown} == unknown
    assert summarise([make_run(0)])["test_accuracy_spread_fraction"] is None


def test_a_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path, result = results.result_file("ddp", tmp_path), make_result("ddp")
    results.write(result, path)
    assert results.read(path, make_params([result])) == result
    assert [file.name for file in tmp_path.iterdir()] == ["ddp.json"]


def test_every_file_begins_with_its_schema() -> None:
    for document, version in ((make_result(), 4), (make_comparison(), 2), (make_bench(), 4)):
        assert next(iter(json.loads(document.to_json()).items())) == ("schema", version)
    assert {next(iter(model.model_fields)) for model in (Gated, Inference, Profile)} == {"schema_"}


@pytest.mark.parametrize("changes", [{"schema": 1}, {"runs": "none"}, {"speed": 1.0}])
def test_another_content_is_no_result(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ddp.json"
    path.write_text(json.dumps(json.loads(make_result("ddp").to_json()) | changes))
    with pytest.raises(ResultError, match=r"ddp\.json is not a file .*`dvc repro train@ddp`") as refused:
        results.read(path, make_params([make_result("ddp")]))
    assert f"\n{next(iter(changes))}\n" in str(refused.value), "the message must name the key"


DDP = make_result("ddp")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config": DDP.config | {"train": DDP.config["train"] | {"model": "torch.hub:load"}}},
         'train.model is "torch.hub:load" in the result and "small_cnn" in params.yaml'),
        ({"config": DDP.config | {"train": DDP.config["train"] | {"model_options": {"source": "local"}}}},
         'train.model_options.source is "local" in the result and null in params.yaml'),
        ({"config": DDP.config | {"variant": DDP.config["variant"] | {"precision": "bf16"}}},
         'variants.ddp.precision is "bf16" in the result and "fp32" in params.yaml'),
        ({"config": {}}, "train is null in the result"),
        ({"config": {"train": {"\x1b[2J\n": 1}}}, "train.\\u001b[2J\\n is 1 in the result"),  # safe for a terminal
        ({"variant": "baseline"}, "it holds the result of variant 'baseline'"),
        ({"runs": (make_run(0), make_run(2))}, "it holds runs of the seeds [0, 2], not of train.seeds [0, 1, 2]"),
    ],
)  # fmt: skip
def test_a_result_of_another_job_or_variant_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = results.result_file("ddp", tmp_path)
    results.write(DDP.model_copy(update=changes), path)
    with pytest.raises(ResultError) as refused:
        results.read(path, make_params([DDP]))
    assert f"{path} does not match the present params.yaml: " in str(refused.value)
    assert says in str(refused.value)
    assert "dvc repro --single-item --force train@ddp" in str(refused.value)


def test_a_result_outlives_new_techniques(tmp_path: Path) -> None:
    path = results.result_file("ddp", tmp_path)
    older = {key: value for key, value in DDP.config["variant"].items() if key != "cudnn_benchmark"}
    result = DDP.model_copy(update={"config": DDP.config | {"variant": older}})
    results.write(result, path)
    train = DDP.config["train"] | {"checkpoint_every_steps": 7}
    assert results.read(path, make_params([DDP], train=train)) == result
    with pytest.raises(ResultError, match=r"variants\.ddp is \{.*\} in the result and null in params\.yaml"):
        results.read(path, make_params([make_result("baseline")]))


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/b", "..", "", "x.json", "ddp\n", "DDP", 7])
@pytest.mark.parametrize(
    ("record", "field"),
    [(record, "variant") for record in (Result, Arm, Compared, Inference, Profile)]
    + [(Bench, "baseline"), (Comparison, "baseline")],
)
def test_a_variant_is_named_as_in_params_yaml(record: type[Record], field: str, name: object) -> None:
    with pytest.raises(ValidationError) as refused:
        record.model_validate({field: name})
    assert {error["type"] for error in refused.value.errors() if error["loc"] == (field,)} & {
        "string_pattern_mismatch",
        "string_type",
    }


@pytest.mark.parametrize("field", ["ledgers", "flops", "not_ablated"])
def test_what_a_bench_keeps_is_named_by_variant(field: str) -> None:
    with pytest.raises(ValidationError, match="pattern"):
        Bench.model_validate(make_bench().model_dump() | {field: {"../x": {}}})


def test_only_declared_figures_are_read() -> None:
    window = make_bench().arms[0].samples[0].model_dump()
    assert Window.model_validate(window | {"joules_per_sample": 1.0}).model_dump()["joules_per_sample"] == 1.0
    with pytest.raises(ValidationError, match="miles_per_hour: extra inputs are not permitted"):
        Window.model_validate(window | {"miles_per_hour": 1.0})
    compared = make_comparison().variants[1].model_dump()
    with pytest.raises(ValidationError, match="miles: extra inputs are not permitted"):
        Compared.model_validate(compared | {"miles": compared["throughput"]})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"equal_bits": True}, "equal the baseline's to the bit"),
        ({"difference": None}, "cannot be compared with the baseline's"),
        ({"difference": 0.0123}, "differ from the baseline's by 1.2% of their update, which rounding can explain"),
        (
            {"difference": 0.5, "parameter": "weight"},
            "differ from the baseline's by 50% of their update (most in weight), more than rounding explains: a lower "
            "precision, other data or random numbers, or another method",
        ),
    ],
)
def test_what_a_script_s_arm_computes_is_said_beside_the_baseline(found: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"steps": 3, "equal_bits": False, "difference": 0.0, "rounding": 0.02}
    assert SameJob(**usual | {"samples_per_step": None} | found).in_words == words


@pytest.mark.parametrize("seed", [-1, 2**32, "../0"])
def test_a_seed_is_one_of_params_yaml(seed: object) -> None:
    with pytest.raises(ValidationError, match="seed"):
        Run.model_validate(make_run().model_dump() | {"seed": seed})


def test_weights_are_those_that_the_result_is_about(tmp_path: Path) -> None:
    state = {"weight": torch.arange(6.0).view(2, 3), "steps": torch.tensor(7)}
    result = make_result("ddp", [make_run(3, model_sha256=checkpoints.state_sha256(state))])
    path = results.model_file("ddp", 3, tmp_path)
    with pytest.raises(ResultError, match=r"seed-3\.pt is missing; run `dvc repro train@ddp` first"):
        checkpoints.weights(result, 3, tmp_path)
    checkpoints.save(state, path)
    assert torch.equal(checkpoints.weights(result, 3, tmp_path)["weight"], state["weight"])

    zeroed = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoints.save(zeroed, path)
    with pytest.raises(ResultError) as refused:
        checkpoints.weights(result, 3, tmp_path)
    message = f"expected model_sha256 {result.runs[0].model_sha256}, found {checkpoints.state_sha256(zeroed)}"
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)
    for content in ("no zip", {"weight": object()}, [state], conv_net()):
        if isinstance(content, str):
            path.write_text(content)
        else:
            torch.save(content, path)
        with pytest.raises(ResultError, match=r"seed-3\.pt cannot be read as weights"):
            checkpoints.weights(result, 3, tmp_path)


def test_a_missing_bench_says_what_measures_it(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    with pytest.raises(ResultError, match=r"bench\.json is missing; run `dvc repro bench`"):
        results.read_bench(path)
    for content in ("[]", make_bench().to_json().replace('"schema": 4', '"schema": 1', 1)):
        path.write_text(content)
        with pytest.raises(ResultError, match=r"bench\.json is not a file .*`dvc repro bench`"):
            results.read_bench(path)


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        (None, "train@tried"),
        ({}, "train@tried"),
        ({"distillation": None}, "train@tried"),
        ({"distillation": {"teacher": "other"}}, "distil@tried"),
        ({"distillation": {"teacher": "./weights"}}, "train@tried"),
    ],
)
def test_only_a_learning_variant_has_the_stage_distil(settings: dict[str, Any] | None, stage: str) -> None:
    assert results.stage_of("tried", settings) == stage
    if settings is not None:
        assert results.stage_of("tried", Variant.model_validate(settings)) == stage


def test_history_comes_back_row_by_row(tmp_path: Path) -> None:
    path, rows = results.history_file("ddp", tmp_path), make_history((0, 1))
    assert {row.test_accuracy is None for row in rows} == {True, False}, "some rows must have blank fields"
    with results.adding_to_history(path) as add:
        results.write_history(rows[:5], path)
        for count, row in enumerate(rows[5:], 6):
            add(row)
            assert results.read_history(path) == rows[:count], "a row must not wait: a kill would lose it"
    with path.open("a", encoding="utf-8") as file:
        file.write('"' + "0" * (csv.field_size_limit() + 1))  # a quote makes the rest of the file one field
    with pytest.raises(ResultError, match=r"history\.csv is not a history"):
        results.read_history(path)


def test_equal_records_alone_share_a_digest() -> None:
    assert results.digest(make_run(0)) == results.digest(make_run(0)) != results.digest(make_run(0, resumes=1))
