from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from pipeline import results
from pipeline.comparison import (
    Comparison,
    ComparisonError,
    compare,
    read_all,
    read_environment,
    techniques,
    time_to_target,
)
from pipeline.config import Compare
from pipeline.results import HistoryRow, Result
from tests.factories import ENVIRONMENT, make_history, make_result, make_run

BASELINE = make_result("baseline")


def compared(
    *measured: Result, histories: dict[str, list[HistoryRow]] | None = None, target: float = 0.85
) -> Comparison:
    known = {result.variant: make_history([run.seed for run in result.runs]) for result in measured}
    return compare(measured, known | (histories or {}), Compare(target_accuracy=target), ENVIRONMENT)


def test_ratios_are_the_variant_over_the_baseline() -> None:
    runs = [make_run(seed, samples_per_second=speed, peak_memory_bytes=memory * 2**20, train_seconds=6.0)
            for seed, speed, memory in ((0, 29_000.0, 60), (1, 30_000.0, 50), (2, 40_000.0, 40))]  # fmt: skip
    baseline, fast = compared(BASELINE, make_result("fast", runs)).variants
    assert fast.throughput_ratio == 30_000 / 20_000  # of the medians
    assert fast.peak_memory_ratio == 60 / 200  # of the largest
    assert fast.train_time_ratio == 6.0 / 9.0
    assert (fast.samples_per_second_min, fast.samples_per_second_max) == (29_000.0, 40_000.0)
    assert (baseline.throughput_ratio, baseline.peak_memory_ratio, baseline.time_to_target_ratio) == (1.0, 1.0, 1.0)
    assert fast.verdict is None


def test_accuracy_is_paired_by_seed_not_by_position() -> None:
    baseline = make_result(
        "baseline", [make_run(seed, test_correct=n) for seed, n in ((0, 9000), (1, 9100), (2, 9200))]
    )
    other = make_result("other", [make_run(seed, test_correct=n) for seed, n in ((2, 9210), (0, 9030), (1, 9080))])
    first, second = compared(baseline, other).variants
    difference = second.accuracy_difference
    assert difference is not None
    assert {each.seed: each.difference_fraction for each in difference.seeds} == {0: 0.003, 1: -0.002, 2: 0.001}
    assert difference.mean_fraction == pytest.approx(0.002 / 3)
    assert difference.spread_fraction == pytest.approx(statistics.stdev([0.003, -0.002, 0.001]))
    assert (difference.min_fraction, difference.max_fraction) == (-0.002, 0.003)
    assert (second.test_correct_count, second.test_count) == (27_320, 30_000)
    assert first.accuracy_difference is None


def test_one_seed_has_no_spread() -> None:
    one = [make_run(0)]
    difference = compared(make_result("baseline", one), make_result("other", one)).variants[1].accuracy_difference
    assert difference is not None
    assert difference.spread_fraction is None


def test_step_times_and_cold_times() -> None:
    runs = [
        make_run(seed, step_p50_ms=10.0 + seed, step_p90_ms=20.0 + seed, step_p99_ms=30.0 + seed,
                 input_wait_fraction=0.1 * seed)
        for seed in (0, 1, 2)
    ]  # fmt: skip
    (each,) = compared(make_result("baseline", runs)).variants
    assert (each.step_p50_ms, each.step_p90_ms, each.step_p99_ms, each.input_wait_fraction) == (11.0, 21.0, 31.0, 0.1)
    assert (each.startup_seconds, each.first_step_seconds) == (2.4, 0.12)  # of the first seed


@pytest.mark.parametrize(
    ("field", "unknown"),
    [
        ("samples_per_second", ["samples_per_second", "samples_per_second_min", "throughput_ratio"]),
        ("peak_memory_bytes", ["peak_memory_bytes", "peak_memory_ratio"]),
        ("step_p99_ms", ["step_p99_ms"]),
        ("input_wait_fraction", ["input_wait_fraction"]),
    ],
)
@pytest.mark.parametrize("side", ["baseline", "other"])
def test_a_number_unknown_in_one_run_is_unknown(field: str, unknown: list[str], side: str) -> None:
    refused_run = make_run(1, refusals=("the GPU throttled",)).model_copy(update={field: None})
    runs = [make_run(0), refused_run, make_run(2)]
    known = {"baseline": make_result("baseline"), "other": make_result("other")}
    variants = compared(*(known | {side: make_result(side, runs)}).values()).variants
    refused = next(each for each in variants if each.variant == side)
    assert [getattr(refused, name) for name in unknown] == [None] * len(unknown)
    for name in unknown:
        if name.endswith("_ratio"):  # unknown if either side is
            assert getattr(variants[1], name) is None
    assert refused.train_time_ratio == 1.0  # other numbers stay


def test_time_to_target_is_the_first_evaluation_at_or_above_it() -> None:
    history = make_history((0, 1, 2), (0.80, 0.85, 0.90), seconds_per_epoch=4.0)
    found = time_to_target(BASELINE, history, 0.85)
    assert [each.train_seconds for each in found.seeds] == [8.0, 8.0, 8.0]
    assert (found.train_seconds, found.reached_count) == (8.0, 3)


def test_time_to_target_when_no_seed_reached_it() -> None:
    found = time_to_target(BASELINE, make_history(), 0.95)
    assert (found.train_seconds, found.reached_count) == (None, 0)


def test_time_to_target_has_no_median_when_some_seeds_reached_it() -> None:
    history = [*make_history((0, 2), (0.80, 0.90)), *make_history((1,), (0.80, 0.84))]
    found = time_to_target(BASELINE, history, 0.85)
    assert [each.train_seconds for each in found.seeds] == [6.0, None, 6.0]
    assert (found.train_seconds, found.reached_count) == (None, 2)


def test_the_ratio_of_times_to_target() -> None:
    histories = {"baseline": make_history(seconds_per_epoch=4.0), "late": make_history(accuracies=(0.7, 0.8, 0.9))}
    both = compared(BASELINE, make_result("late"), histories=histories)
    assert both.variants[1].time_to_target_ratio == 9.0 / 8.0
    assert compared(BASELINE, make_result("late"), target=0.95).variants[1].time_to_target_ratio is None


@pytest.mark.parametrize(
    ("applied", "names"),
    [
        ({}, ()),
        ({"parallelism": "ddp", "processes": 4}, ("ddp",)),
        ({"precision": "bf16", "activation_checkpointing": True}, ("bf16", "activation_checkpointing")),
        ({"gradient_accumulation": 4}, ("gradient_accumulation=4",)),
    ],
)
def test_techniques_are_what_differs_from_a_plain_run(applied: dict[str, Any], names: tuple[str, ...]) -> None:
    assert techniques(make_result(applied=applied).applied) == names


def test_what_was_left_out_and_refused_is_carried_over() -> None:
    runs = [make_run(seed, refusals=("something recompiled",)) for seed in (0, 1, 2)]
    memory = make_result("memory", runs, left_out={"bf16": "this CPU would emulate it"})
    each = compared(BASELINE, memory).variants[1]
    assert each.left_out == {"bf16": "this CPU would emulate it"}
    assert each.runs[0].refusals == ("something recompiled",)


def test_the_baseline_comes_first() -> None:
    names = [each.variant for each in compared(make_result("b"), BASELINE, make_result("a")).variants]
    assert names == ["baseline", "b", "a"]


def test_the_comparison_is_plain_json() -> None:
    values = json.loads(compared(BASELINE, make_result("other")).to_json())
    assert next(iter(values)) == "schema"
    assert values["schema"] == 1
    assert values["environment"] == ENVIRONMENT
    assert values["variants"][1]["verdict"] is None


def refusal(*measured: Result, **changes: Any) -> str:
    with pytest.raises(ComparisonError) as raised:
        compared(*measured, **changes)
    return str(raised.value)


def test_another_environment_is_refused() -> None:
    message = refusal(BASELINE, make_result("ddp", environment="a" * 64))
    assert "'ddp'" in message
    assert "'baseline'" not in message
    assert "aaaaaaaaaaaa" in message
    assert "eeeeeeeeeeee" in message
    assert "dvc repro" in message


def test_a_baseline_of_another_environment_is_refused_too() -> None:
    assert "'baseline'" in refusal(make_result("baseline", environment="a" * 64), make_result("ddp"))


def test_other_seeds_are_refused() -> None:
    message = refusal(BASELINE, make_result("ddp", [make_run(0), make_run(1)]))
    assert "'ddp' ran seeds [0, 1], the baseline 'baseline' [0, 1, 2]" in message


def test_other_data_is_refused() -> None:
    data = BASELINE.dataset.model_copy(update={"sha256": "c" * 64})
    message = refusal(BASELINE, make_result("ddp", dataset=data))
    assert "cccccccccccc" in message
    assert "dddddddddddd" in message


def test_another_job_is_refused_with_the_key_that_differs() -> None:
    config = {**BASELINE.config, "train": {**BASELINE.config["train"], "epochs": 9}}
    assert "'ddp' trained with train.epochs 9, the baseline 'baseline' with 3" in refusal(
        BASELINE, make_result("ddp", config=config)
    )


def test_a_history_without_a_seed_is_refused_rather_than_read_as_not_reached() -> None:
    assert "no evaluation of seed 2" in refusal(BASELINE, histories={"baseline": make_history((0, 1))})


def test_all_problems_are_listed_at_once() -> None:
    message = refusal(BASELINE, make_result("ddp", environment="a" * 64), make_result("memory", environment="b" * 64))
    assert "'ddp'" in message
    assert "'memory'" in message


def test_a_missing_baseline_is_named_with_what_there_is() -> None:
    message = refusal(make_result("ddp"), make_result("memory"))
    assert "'baseline'" in message
    assert "ddp, memory" in message


def save(result: Result, root: Path, name: str | None = None) -> None:
    results.write(result, results.result_file(name or result.variant, root))
    results.write_history(make_history(), results.history_file(name or result.variant, root))


def test_files_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    save(make_result("ddp"), tmp_path)
    save(BASELINE, tmp_path)
    found, histories = read_all(["baseline", "ddp"], tmp_path)
    assert found == [BASELINE, make_result("ddp")]
    assert histories == {"baseline": make_history(), "ddp": make_history()}


def test_every_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    save(BASELINE, tmp_path)
    save(make_result("other"), tmp_path, name="renamed")
    save(make_result("cut"), tmp_path)
    results.result_file("cut", tmp_path).write_text('{"schema": 1', encoding="utf-8")
    results.history_file("cut", tmp_path).write_text("seed,epoch\n0,one\n", encoding="utf-8")
    results.history_file("baseline", tmp_path).unlink()
    with pytest.raises(ComparisonError) as raised:
        read_all(["baseline", "ddp", "renamed", "cut"], tmp_path)
    lines = str(raised.value).splitlines()
    message = str(raised.value)
    assert f"{tmp_path / 'ddp.json'} is missing" in message
    assert f"{tmp_path / 'ddp' / 'history.csv'} is missing" in message
    assert f"{tmp_path / 'baseline' / 'history.csv'} is missing" in message
    assert f"{tmp_path / 'renamed.json'} holds the result of variant 'other'" in message
    assert f"{tmp_path / 'cut.json'} is not a result" in message
    assert f"{tmp_path / 'cut' / 'history.csv'} is not a history" in message
    assert sum("dvc repro" in line for line in lines) == 6


@pytest.mark.parametrize("content", [None, "{", "[]", '{"hardware": {}}'])
def test_an_environment_that_cannot_be_read_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ComparisonError, match=r"environment\.json .*dvc repro"):
        read_environment(path)


def test_an_environment_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    path.write_text(json.dumps(ENVIRONMENT), encoding="utf-8")
    assert read_environment(path) == ENVIRONMENT
