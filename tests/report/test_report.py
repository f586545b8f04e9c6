from __future__ import annotations

from pathlib import Path

from pipeline import report
from pipeline.results import Unit
from pipeline.tracking import contents
from tests.factories import make_result, make_run
from tests.report.conftest import Made
from tests.report.golden import alone, student

TOKENS, PERPLEXITY = Unit(name="tokens", per_sample=256), {"perplexity": "lower is better"}


def test_the_same_comparison_gives_the_same_bytes(usual: Made, tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        report.write(*usual, tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert " ".join(sorted(contents[0])) == (
        "accuracy.csv comparison.html comparison.json comparison.md loss.csv metrics/baseline.json metrics/ddp.json "
        "metrics/memory.json ratios.csv verdicts.json"
    )
    assert contents[0]["comparison.json"].decode() == usual.comparison.to_json()


def test_a_report_needs_neither_memory_nor_flops(silent: Made, tmp_path: Path) -> None:
    report.write(*silent, tmp_path)
    assert (tmp_path / "comparison.html").exists()


def test_tags_count_in_the_unit_of_the_task() -> None:
    comparison = student().comparison
    assert "tokens/s" in contents.columns(comparison)["baseline"]["speed"]


def test_mlflow_has_the_units_and_directions_of_figures() -> None:
    run = make_run(0).model_copy(update={"findings": {"perplexity": 8.0}})
    result = make_result("baseline", [run], unit=TOKENS, directions=PERPLEXITY)
    params = contents.child_params(result)
    assert (params["unit.name"], params["directions.perplexity"]) == ("tokens", "lower is better")
    assert ("findings/perplexity", 8.0) in [(point.key, point.value) for point in contents.final_points(run, 0)]


def test_metrics_of_a_variant_that_is_gone_are_removed(usual: Made, tmp_path: Path) -> None:
    report.write(*usual, tmp_path)
    report.write(*alone(), tmp_path)
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == ["baseline.json"]
