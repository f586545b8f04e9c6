from __future__ import annotations

import json
from pathlib import Path

from pipeline import report
from pipeline.report import html, markdown
from pipeline.results import Unit
from pipeline.tracking import labels
from tests.factories import make_results
from tests.report.conftest import Made, made, plain
from tests.report.golden import alone
from tests.report.reader import Page


def test_the_same_comparison_gives_the_same_bytes(usual: Made, tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        report.write(*usual, tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == [
        "accuracy.csv",
        "comparison.html",
        "comparison.json",
        "comparison.md",
        "loss.csv",
        "metrics/baseline.json",
        "metrics/ddp.json",
        "metrics/memory.json",
        "ratios.csv",
        "verdicts/baseline.json",
        "verdicts/ddp.json",
        "verdicts/memory.json",
    ]
    assert contents[0]["comparison.json"].decode() == usual.comparison.to_json()


def test_what_cannot_be_told_is_still_a_report(silent: Made, tmp_path: Path) -> None:
    report.write(*silent, tmp_path)
    assert (tmp_path / "comparison.html").exists()


def test_a_report_speaks_in_the_words_of_its_task() -> None:
    texts = []
    for metric in ("token_accuracy", "accuracy"):
        measured = [
            each.model_copy(
                update={
                    "config": each.config | {"train": each.config["train"] | {"metric": metric}},
                    "unit": Unit(name="tokens", per_sample=256) if metric == "token_accuracy" else Unit(),
                    "directions": {"perplexity": "lower is better"} if metric == "token_accuracy" else {},
                    "runs": tuple(
                        run.model_copy(update={"findings": {"perplexity": 7.0 + run.seed}}) for run in each.runs
                    ),
                }
            )
            for each in make_results()
        ]
        found = made(measured)
        said = labels.columns(found.comparison.model_dump(mode="json"))["baseline"]
        page = Page(html(found.comparison, found.histories)).heard
        texts.append(plain("\n".join([markdown(found.comparison), page, *said.values()])))
    of_text, of_images = texts
    for words in (
        "5,175,054 tokens/s",
        "Tokens (256 a sample) of the global batch",
        "90.07% test token accuracy",
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


def test_what_dvc_shows_are_the_verdict_and_a_few_figures(usual: Made, tmp_path: Path) -> None:
    report.write(*usual, tmp_path)
    shown, known = (json.loads((tmp_path / name / "memory.json").read_text()) for name in ("verdicts", "metrics"))
    assert list(shown)[:3] == ["verdict", "throughput_ratio", "peak_memory_ratio"]
    assert len(shown) <= 6 < len(known)
    assert shown.items() <= known.items()


def test_metrics_of_a_variant_that_is_gone_are_removed(usual: Made, tmp_path: Path) -> None:
    report.write(*usual, tmp_path)
    report.write(*alone(), tmp_path)
    for name in ("metrics", "verdicts"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["baseline.json"]
