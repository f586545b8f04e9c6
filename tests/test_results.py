from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import results
from pipeline.results import ResultError, summarise
from tests.factories import make_history, make_result, make_run


def test_a_summary_holds_mean_spread_medians_and_the_largest_peak() -> None:
    figures: list[dict[str, Any]] = [
        {"test_correct": 9000, "samples_per_second": 100.0, "step_p50_ms": 4.0, "train_seconds": 7.0},
        {"test_correct": 9100, "samples_per_second": 400.0, "step_p50_ms": 1.0, "train_seconds": 2.0},
        {"test_correct": 9500, "samples_per_second": 200.0, "step_p50_ms": 2.0, "train_seconds": 3.0},
    ]
    peaks = (10, 30, 20)
    summary = summarise([make_run(seed, peak_memory_bytes=peaks[seed], **each) for seed, each in enumerate(figures)])
    assert summary.test_accuracy_mean_fraction == pytest.approx(0.92)
    assert summary.test_accuracy_spread_fraction == pytest.approx(((0.02**2 + 0.01**2 + 0.03**2) / 2) ** 0.5)
    assert (summary.samples_per_second, summary.step_p50_ms, summary.train_seconds) == (200.0, 2.0, 3.0)
    assert summary.peak_memory_bytes == 30


@pytest.mark.parametrize("field", ["samples_per_second", "step_p50_ms", "peak_memory_bytes"])
def test_what_one_seed_does_not_know_the_summary_does_not_know(field: str) -> None:
    unknown: dict[str, Any] = {field: None}
    summary = summarise([make_run(0), make_run(1, **unknown), make_run(2)])
    assert getattr(summary, field) is None


def test_one_seed_has_no_spread() -> None:
    assert summarise([make_run(0)]).test_accuracy_spread_fraction is None


def test_a_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path, result = results.result_file("ddp", tmp_path), make_result("ddp")
    results.write(result, path)
    assert results.read(path) == result
    assert list(json.loads(path.read_text()))[:2] == ["schema", "variant"]
    assert [file.name for file in tmp_path.iterdir()] == ["ddp.json"]


@pytest.mark.parametrize("changes", [{"schema": 2}, {"runs": "none"}, {"speed": 1.0}])
def test_another_content_is_no_result(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ddp.json"
    path.write_text(json.dumps(json.loads(make_result("ddp").to_json()) | changes))
    with pytest.raises(ResultError, match=r"ddp\.json is not a result this version can read; run `dvc repro` again"):
        results.read(path)


def test_a_bench_that_is_missing_or_broken_says_what_measures_it(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    with pytest.raises(ResultError, match=r"bench\.json is missing; run `dvc repro bench`"):
        results.read_bench(path)
    path.write_text("[]")
    with pytest.raises(ResultError, match=r"bench\.json is not a bench this version can read; run `dvc repro bench`"):
        results.read_bench(path)


def test_history_comes_back_row_by_row(tmp_path: Path) -> None:
    path, rows = results.history_file("ddp", tmp_path), make_history((0, 1))
    assert {row.test_accuracy is None for row in rows} == {True, False}, "blank fields too"
    results.write_history(rows[:5], path)
    for row in rows[5:]:
        results.append_history(row, path)
    assert results.read_history(path) == rows


def test_equal_records_alone_share_a_digest() -> None:
    assert results.digest(make_run(0)) == results.digest(make_run(0)) != results.digest(make_run(0, resumes=1))
