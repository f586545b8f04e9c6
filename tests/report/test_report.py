from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import report
from pipeline.report import html, markdown, sentences, tables
from pipeline.results import Unit
from pipeline.tracking import labels, metrics
from tests.factories import make_comparison, make_history, make_result, make_results, make_run
from tests.report.conftest import Made, made, plain
from tests.report.golden import alone
from tests.report.reader import Page

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
        sessions = " ".join(map(" ".join, tables.sessions(found.comparison).rows))
        return plain("\n".join([markdown(found.comparison), page, sessions, *labelled.values()]))

    of_text, of_images = said("token_accuracy", unit=TOKENS, directions=PERPLEXITY), said("accuracy")
    for words in (
        "5,175,054 tokens/s",
        "Tokens (256 a sample) of the global batch",
        "| Tokens/s |",
        "| 5,120,000 |",
        "Baseline tokens/s",
        "test token accuracy 90.07%",
        "Test token accuracy over training time",
        "| Perplexity |",
        "| 8.00 |",
        "lower is better",
    ):
        assert words in of_text
        assert words not in of_images
    for words in ("samples/s", "Samples/s", "test accuracy", "Test accuracy"):
        assert words not in of_text
        assert words in of_images


def test_a_task_of_the_user_s_own_is_named(usual: Made) -> None:
    assert not any(part.startswith(("task", "loss")) for part in sentences.job(usual.comparison))
    own = {"task": "my_tasks:Autoencoding", "loss": "loss", "metric": "score"}
    comparison = usual.comparison.model_copy(update={"train": usual.comparison.train | own})
    assert sentences.job(comparison)[5:7] == ["task my_tasks:Autoencoding", "accuracy is the mean of score"]


def test_a_student_is_compared_at_equal_epochs_and_at_equal_time() -> None:
    """The student takes 0.6 of the baseline's steps in the same time, and so ends only the first of three epochs."""
    baseline = make_result("baseline", [make_run(seed, steps=705) for seed in range(3)])
    runs = [make_run(seed, steps=705, test_correct=9300) for seed in range(3)]
    taught = {"model": "resnet9", "distillation": {"teacher": "baseline"}}
    student, other = (make_result("other", runs, applied=each, parameter_count=9) for each in (taught, {}))
    said = []
    for each in (student, other):
        found = made([baseline, each], throughput={"other": 0.6}, noise=0.0)
        said.append([plain(text) for text in (markdown(found.comparison), Page(html(*found)).heard)])
    for of_student, of_other in zip(*said, strict=True):
        assert "+3.00 points" in of_student
        for words in (
            "At equal time",
            "80.00%",
            "baseline 90.00%",
            "trains another model than the baseline: resnet9, 9 parameters.",
            "has a teacher",
        ):
            assert words in of_student
            assert words not in of_other


def test_a_target_that_the_first_evaluation_shows_already_has_no_time() -> None:
    measured = make_results()[:2]
    early = {each.variant: make_history(accuracies=(0.9, 0.91)) for each in measured}
    found = Made(make_comparison(measured, histories=early), early)
    assert [each.time_to_target.train_seconds for each in found.comparison.variants] == [None, None]
    for text in (markdown(found.comparison), Page(html(*found)).heard):
        assert text.count("before the first evaluation") == 2


def test_mlflow_has_the_unit_the_directions_and_the_figures_of_the_task() -> None:
    run = make_run(0).model_copy(update={"findings": {"perplexity": 8.0}})
    result = make_result("baseline", [run], unit=TOKENS, directions=PERPLEXITY)
    params = labels.child_params(result)
    assert (params["unit.name"], params["directions.perplexity"]) == ("tokens", "lower is better")
    assert ("findings/perplexity", 8.0) in [(each.key, each.value) for each in metrics.final_points(run, 0)]


def test_metrics_of_a_variant_that_is_gone_are_removed(usual: Made, tmp_path: Path) -> None:
    report.write(*usual, tmp_path)
    report.write(*alone(), tmp_path)
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == ["baseline.json"]
