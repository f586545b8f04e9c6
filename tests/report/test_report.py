from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import report
from pipeline.report import html, markdown
from pipeline.results import Unit
from pipeline.tracking import labels
from tests.conftest import Clone
from tests.factories import make_results
from tests.report.conftest import Made, made, plain
from tests.report.golden import alone
from tests.report.reader import Page

FIGURES = ("1_verdict", "2_throughput_ratio", "3_peak_memory_ratio", "4_accuracy_difference_mean_fraction")


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


def test_a_report_is_written_even_if_memory_and_flops_are_unknown(silent: Made, tmp_path: Path) -> None:
    report.write(*silent, tmp_path)
    assert (tmp_path / "comparison.html").exists()


def test_a_report_uses_the_unit_and_the_metric_of_its_task() -> None:
    def said(metric: str, **changes: Any) -> str:
        measured = [
            each.model_copy(
                update={
                    "config": each.config | {"train": each.config["train"] | {"metric": metric}},
                    "runs": tuple(run.model_copy(update={"findings": {"perplexity": 8.0}}) for run in each.runs),
                    **changes,
                }
            )
            for each in make_results()
        ]
        found = made(measured)
        labelled = labels.columns(found.comparison.model_dump(mode="json"))["baseline"]
        page = Page(html(found.comparison, found.histories)).heard
        return plain("\n".join([markdown(found.comparison), page, *labelled.values()]))

    tokens, perplexity = Unit(name="tokens", per_sample=256), {"perplexity": "lower is better"}
    of_text, of_images = said("token_accuracy", unit=tokens, directions=perplexity), said("accuracy")
    for words in (
        "5,175,054 tokens/s",
        "Tokens (256 a sample) of the global batch",
        "test token accuracy 90.07%",
        "Test token accuracy over training time",
        "| Perplexity |",
        "| 8.00 |",
        "lower is better",
    ):
        assert words in of_text
        assert words not in of_images
    for words in ("samples/s", "test accuracy", "Test accuracy"):
        assert words not in of_text
        assert words in of_images


@pytest.mark.slow
def test_dvc_metrics_diff_begins_with_verdicts_and_ratios(
    usual: Made, mixed: Made, clone: Callable[..., Clone]
) -> None:
    tried = clone()
    report.write(*usual, tried.path / "reports")
    tried.commit()
    report.write(*alone(), tried.path / "reports")
    first, last = tried.run("dvc", "metrics", "diff").splitlines(), tried.run("dvc", "metrics", "show").split()
    assert [row.split()[1] for row in first] == [
        "Metric",
        *(f"{figure}.{variant}" for figure in FIGURES for variant in ("ddp", "memory")),
    ]
    assert first[1].split() == ["reports/verdicts.json", "1_verdict.ddp", "pays", "-", "-"]
    assert last == ["Path", "reports/verdicts.json"]
    report.write(*mixed, tried.path / "reports")
    untrusted = [row for row in tried.run("dvc", "metrics", "diff").splitlines() if ".untrusted" in row]
    assert [row.split()[1].split(".")[0] for row in untrusted] == [FIGURES[0], *FIGURES[2:]]


def test_metrics_of_a_variant_that_is_gone_are_removed(usual: Made, tmp_path: Path) -> None:
    report.write(*usual, tmp_path)
    report.write(*alone(), tmp_path)
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == ["baseline.json"]
