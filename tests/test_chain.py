"""A job's files are accepted only if they are unchanged, fit together, and have figures that can have been measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import cli, gate
from pipeline.files import file_sha256
from pipeline.params import load, parse
from pipeline.results import Result, contradictions, contradictions_of_history
from pipeline.tracking import comparisons
from tests.factories import DESCRIBED, known, make_history, make_result, make_run
from tests.jobs import PARAMS, record, save

RESULT, HISTORY, BENCH, DATA, HERE, PARAMETERS, REPORT = (
    "results/ddp.json", "results/ddp/history.csv", "bench.json", "data/prepared/dataset.json", "environment.json",
    "params.yaml", "reports/comparison.json",
)  # fmt: skip
PAGE = "reports/comparison.html"


def at(path: str, value: Any) -> Callable[[Any], None]:
    """Return a function that sets the value at a dotted path; if ``value`` is a function, it is given the old value."""

    def change(content: Any) -> None:
        *parents, last = [int(key) if key.lstrip("-").isdigit() else key for key in path.split(".")]
        for key in parents:
            content = content[key]
        content[last] = value(content[last]) if callable(value) else value

    return change


def copied(from_: int, to: int) -> Callable[[Any], None]:
    def change(bench: Any) -> None:
        bench["arms"][to]["samples"] = bench["arms"][from_]["samples"]

    return change


def repeated(bench: Any) -> None:
    for arm in bench["arms"]:
        arm["samples"] *= 2


def more_right(result: Any) -> None:
    """Count more correct answers in one run, in all fields of the result that depend on them."""
    run = result["runs"][1]
    run.update(test_correct=9061, test_accuracy=0.9061)


def of_equal_weights(result: Any) -> None:
    for run in result["runs"]:
        run["model_sha256"] = "0" * 64


def of_other_classes(description: Any) -> None:
    relabelled = DESCRIBED.model_copy(update={"classes": tuple("abcdefghij")})
    description.update(classes=relabelled.classes, sha256=relabelled.digest())


def edit(file: str, change: Callable[[Any], None]) -> None:
    path = Path(file)
    text = path.read_text(encoding="utf-8")
    content = yaml.safe_load(text) if file == PARAMETERS else json.loads(text)
    change(content)
    path.write_text(yaml.safe_dump(content) if file == PARAMETERS else json.dumps(content), encoding="utf-8")


def ends_before_its_start(bench: Any) -> None:
    """Also a bench that is shorter than clocks may disagree."""
    bench["seconds"] = 50.0
    bench["session"]["end_utc"] = bench["session"]["start_utc"].replace("08:00:00", "07:59:55")


OF_OTHERS: list[tuple[str, str, Callable[[Any], None], str]] = [
    ("training parameters", PARAMETERS, at("train.epochs", 3), "train.epochs is 2 in the result and 3"),
    ("a variant's parameters", PARAMETERS, at("variants.ddp.bucket_mb", 5), "bucket_mb is null in the result"),
    ("code of the training", RESULT, at("key", "0" * 64), "(stages.train, variants.ddp)"),
    ("its environment", RESULT, at("environment", "0" * 64), "was measured in environment 000000000000"),
    ("content under an old hash", HERE, at("software.torch", "9.9"), "was measured in environment"),
    ("a data set", DATA, of_other_classes, "not on the data set of data/prepared/dataset.json"),
    ("a data set's sum", DATA, at("sha256", "0" * 64), "dataset.json was changed after it was written"),
    ("a data set in the result", RESULT, at("dataset.sha256", "0" * 64), "SHA-256 000000000000"),
    ("a data set's mean", DATA, at("statistics.inputs.mean.0", 0.4), "dataset.json was changed after it was written"),
    ("words for a section", RESULT, at("config.train", "accuracy"), "config.train"),
    ("an older schema", RESULT, at("schema", 1), "schema"),
    ("no data set", DATA, at("sha256", None), "dataset.json is not a description"),
    ("a history", RESULT, at("history_sha256", "0" * 64), "history.csv is not the history that was written together"),
    ("an accuracy", RESULT, more_right, "seed 1: test_accuracy is 0.9061, but its history ends with 0.9011"),
    ("a loss", RESULT, at("runs.2.test_loss", 0.1), "seed 2: test_loss is 0.1, but its history ends with 0.28"),
    ("another score", RESULT, at("score.name", "f1"), "its score is 'f1', not train.metric 'accuracy'"),
    ("a direction of no score", RESULT, at("score.direction", "lower is better"), "score.direction"),
    ("equal weights", RESULT,
     lambda it: it["runs"][0].update(model_sha256=it["runs"][2]["model_sha256"]), "seeds 0, 2 ended in the same"),
    ("a job that ignores its seed", RESULT, of_equal_weights, "set train.seeds: [0]"),
    ("no window", RESULT, at("runs.0.measured_steps", 0), "a speed, although no steps were measured"),
    ("a short window", RESULT, at("runs.1.measured_steps", 3), "3 of 468 steps were measured; expected 463"),
    ("a short job", RESULT, at("runs.1.steps", 46), "46 steps, but the job has 468"),
    ("more right than tested", RESULT, at("runs.0.test_correct", 10_001), "10001 of only 10000 test samples are right"),
    ("a score of its own", RESULT, at("runs.0.test_accuracy", 0.99), "test_accuracy is 0.99"),
    ("a score above 1", RESULT, at("runs.0.test_accuracy", 1.01), "runs.0.test_accuracy"),
    ("fewer tested", RESULT, at("runs.0.test_count", 9_999), "9999 samples were tested"),
    ("a negative speed", RESULT, at("runs.0.samples_per_second", -1.0), "runs.0.samples_per_second"),
    ("a huge speed", RESULT, at("runs.0.samples_per_second", 1e14), "1e+14 samples/s, although half of the steps"),
    ("an endless speed", RESULT, at("runs.0.samples_per_second", 1e300), "runs.0.samples_per_second"),
    ("no run", RESULT, at("runs", []), "runs of the seeds []"),
]  # fmt: skip
OF_BENCH: list[tuple[str, str, Callable[[Any], None], str]] = [
    ("parameters", PARAMETERS, at("bench", {"turns": 3}), "stages.bench.settings.turns changed since environment.json"),
    ("code here", HERE, lambda here: here["stages"]["train"]["code"].popitem(), "(stages.train, variants.ddp)"),
    ("stages", HERE, at("stages", []), "(stages.train, variants.ddp)"),
    ("code", BENCH, at("keys.ddp", "0" * 64), "(stages.bench, variants.ddp)"),
    ("no keys", BENCH, at("keys", {}), "(stages.bench, variants.baseline)"),
    ("environment", BENCH, at("environment", "0" * 64), "measured in environment 000000000000"),
    ("data set", BENCH, at("dataset.sha256", "0" * 64), "bench.json was measured on"),
    ("a control that is a copy", BENCH, copied(0, -1), "are equal in every sample"),
    ("a round twice", BENCH, repeated, "rounds 1 and 13 are equal in every figure, so one is a copy"),
    ("two arms", BENCH, copied(0, 1), "baseline and ddp are equal in every sample"),
    ("threads", BENCH, at("arms.2.threads_per_process", 1), "computed with 1 thread per process, but baseline"),
    ("a millisecond", BENCH, at("seconds", 0.001), "the bench took 0.001 s, although its windows alone took 47.4"),
    ("an early end", BENCH, at("session.end_utc", "2026-11-20T07:59:00+00:00"), "to 2026-11-20T07:59:00+00:00"),
    ("an end before the start", BENCH, ends_before_its_start, "to 2026-11-20T07:59:55+00:00, although it took 50 s"),
    ("an end within a minute", BENCH, at("session.end_utc", "2026-11-20T08:01:00+00:00"), "although it took 178 s"),
    ("no end", BENCH, at("session.end_utc", "noon"), "session.end_utc"),
    ("few steps", BENCH, at("arms.1.samples.2.measured_steps", 3), "ddp, round 3: only 3 of 120 steps were measured"),
    ("no window", BENCH, at("arms.1.samples.2.step_p50_ms", 0.0), "arms.1.samples.2.step_p50_ms"),
    ("a negative speed", BENCH, at("arms.1.samples.2.samples_per_second", -2.0), "arms.1.samples.2.samples_per_second"),
    ("a huge speed", BENCH, at("arms.1.samples.2.samples_per_second", 1e12), "ddp, round 3: 1e+12 samples/s"),
    ("falling percentiles", BENCH, at("arms.1.samples.2.step_p99_ms", 0.001), "percentiles"),
    ("no arm", BENCH, at("arms", []), "arms"),
    ("rounds", BENCH, at("arms.0.samples", lambda all_: all_[:3]), "fewer samples of the baseline than"),
]  # fmt: skip


@pytest.mark.usefixtures("job")
def test_a_copy_of_the_bench_is_no_further_session() -> None:
    bench = json.loads(Path(BENCH).read_text(encoding="utf-8"))
    bench["session"].update(start_utc="2026-11-23T08:00:00+00:00", boot_id="another")
    for arm in bench["arms"]:
        for number, sample in enumerate(arm["samples"]):
            sample["peak_memory_bytes"] += 4096 * (number % 3)
    save(Path("sessions/20261123T080000.json"), bench)
    assert cli.main(["compare"]) == 0
    assert len(json.loads(Path(REPORT).read_text(encoding="utf-8"))["sessions"]) == 1


def refused(command: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main([command]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert named in said


@pytest.mark.usefixtures("job")
def test_files_that_fit_are_compared_and_published(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(REPORT).read_bytes()
    assert cli.main(["compare"]) == 0
    assert Path(REPORT).read_bytes() == before
    assert not capsys.readouterr().err
    assert comparisons.wanted(load(), Path())
    Path(BENCH).unlink()  # then the report is one of another bench
    wanted = known(comparisons.wanted(load(), Path()))
    assert wanted.stale == [BENCH]
    assert wanted.comparison is None
    for path in (REPORT, HERE, DATA, "dvc.lock"):
        Path(path).unlink()
    assert comparisons.wanted(load(), Path())


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("name", "file", "change", "named"), [*OF_OTHERS, *OF_BENCH])
def test_results_and_bench_are_of_this_job(
    name: str, file: str, change: Callable[[Any], None], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(file, change)
    record(Path())
    refused("compare", named, capsys)
    if (name, file, change, named) in OF_OTHERS:  # the store holds no bench
        refused("publish", named, capsys)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("file", [RESULT, HISTORY, BENCH, REPORT, PAGE])
def test_what_dvc_recorded_is_as_it_was(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(file).open("a", encoding="utf-8") as opened:
        opened.write("\n")
    named = f"{file} differs from the version that DVC recorded in dvc.lock"
    refused("publish", named, capsys)
    if file in (REPORT, PAGE):  # compare writes them again
        assert cli.main(["compare"]) == 0
    else:
        refused("compare", named, capsys)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("text", ["[]", "stages: [", "[" * 100_000, "stages: {a: {outs: [1]}}", "stages: 7", "\x00"])
def test_a_lock_that_cannot_be_read_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("dvc.lock").write_text(text, encoding="utf-8")
    refused("compare", "dvc.lock cannot be read", capsys)


@pytest.mark.usefixtures("job")
def test_what_is_promoted_is_of_what_is_here_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "output", lambda *_: "{}")
    edit(PARAMETERS, at("bench", {"turns": 3}))
    refused("promote", "bench.settings.turns", capsys)


def test_a_history_ends_as_its_runs_did() -> None:
    """A seed missing from the history would be read as never having reached the target."""
    result, rows = make_result(), make_history(make_result().runs)
    assert contradictions_of_history(result, rows) == []
    cut = [row for row in rows if (row.seed, row.step) != (2, 468)]
    (first, *_) = contradictions_of_history(result, cut)
    assert first.startswith("seed 2: steps is 468, but its history ends with ")
    missing = contradictions_of_history(result, [row for row in rows if row.seed])
    assert [sentence.partition(" is ")[0] for sentence in missing] == [
        f"seed 0: {key}" for key in ("steps", "test_accuracy", "test_loss")
    ]


@pytest.mark.usefixtures("job")
def test_a_comparison_is_stale_after_another_setting() -> None:
    edit(PARAMETERS, at("compare", {"margins": {"throughput": 0.2}, "max_spread": 0.5}))
    changed = ["compare.margins.throughput in params.yaml", "compare.max_spread in params.yaml"]
    for file, stale in ((BENCH, changed), (REPORT, [*changed, BENCH]), (None, [])):
        wanted = known(comparisons.wanted(load(), Path()))
        assert wanted.stale == stale
        if file:
            Path(file).unlink()


def test_resumes_say_how_many_steps_are_warm() -> None:
    def measured(steps: int, resumes: int) -> Result:
        return make_result(runs=[make_run(0, measured_steps=steps, resumes=resumes)])

    train = parse(PARAMS | {"train": {"seeds": [0]}}).train
    wrong = [contradictions(measured(*case), train) for case in ((463, 0), (455, 2), (452, 2), (464, 2))]
    assert [len(messages) for messages in wrong] == [0, 0, 1, 1]


@pytest.mark.usefixtures("job")
def test_unreadable_files_hide_no_other_problem(capsys: pytest.CaptureFixture[str]) -> None:
    Path(DATA).write_text("[]", encoding="utf-8")
    Path(HISTORY).write_text("seed,epoch\n0,one\n", encoding="utf-8")
    edit(RESULT, at("history_sha256", file_sha256(Path(HISTORY))))
    for command in ("compare", "publish"):
        refused(command, "dataset.json is not a description", capsys)
        refused(command, "is not a history", capsys)
        refused(command, f"{RESULT} differs from the version that DVC recorded", capsys)
