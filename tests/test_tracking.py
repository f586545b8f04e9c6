"""MLflow holds exactly what the files say, whatever happened before, and no failure of MLflow stops the pipeline."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
import yaml
from mlflow.data import get_source
from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from torch import nn

from pipeline import environment, models, report, results, tracking
from pipeline.comparison.comparison_file import Comparison
from pipeline.comparison.stats import Decision
from pipeline.data.prepared import Dataset
from pipeline.environment import hash_of
from pipeline.files import file_sha256, write_text
from pipeline.params import Config, parse
from pipeline.results import ResultError
from pipeline.scaling import command as scale
from pipeline.tools.advised import Advice
from pipeline.tracking import comparisons, contents, live, logged_models, promoting, publishing, stores
from pipeline.tracking.comparisons import COMPLETE, LIVE, PARENT, Wanted
from pipeline.tracking.publishing import reconcile
from pipeline.tracking.stores import Store
from pipeline.training import checkpoints
from tests import workspaces
from tests.commands import printed
from tests.curves import make_measured
from tests.factories import (
    DESCRIBED,
    ENVIRONMENT,
    PLANTED,
    SECRETS,
    known,
    make_bench,
    make_comparison,
    make_history,
    make_params,
    make_ratio,
    make_result,
    make_results,
    make_run,
    with_changes,
)
from tests.nets import task_of
from tests.pages import blocks
from tests.servers import Reply, answers, free_port, hang, serving

pytestmark = [  # warnings of MLflow's own modules during their import
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]

PROJECT = Path(__file__).parents[1]
SEEDS = (0, 1)
VARIANTS = ("baseline", "ddp")
DECISIONS: tuple[Decision, ...] = ("better", "worse", "untrusted")
"""Of the ratios in three sessions; two sessions count."""
SIDE = 8
"""Side of the images of ``DESCRIBED``."""


def config_of(*, models: bool = False, **sections: Any) -> Config:
    variants: dict[str, Any] = {name: {} for name in VARIANTS}
    values = {"train": {"seeds": list(SEEDS)}, "publish": {"models": models}, "variants": variants}
    return parse(values | sections)


def wanted_of(root: Path, config: Config | None = None) -> Wanted:
    return known(comparisons.wanted(config or config_of(), root))


def write_result(root: Path, variant: str, speed: float = 20_000.0, **changes: Any) -> None:
    """Write one variant's files as training does, with 3 epochs of history and 4 samples of the machine per seed.

    If weights are present, the result contains their digests.
    """
    files = {seed: results.model_file(variant, seed, root / "models") for seed in SEEDS}
    digests: dict[int, dict[str, Any]] = {
        seed: {"model_sha256": checkpoints.state_sha256(torch.load(file, weights_only=True))}
        for seed, file in files.items()
        if file.exists()
    }
    runs = [make_run(seed, samples_per_second=speed + seed, **digests.get(seed, {})) for seed in SEEDS]
    results.write_history(make_history(runs, rows_per_epoch=2), results.history_file(variant, root / "results"))
    lines = ["seed,seconds,cpu_utilization_percentage,gpu_0_power_usage_watts"]
    lines += [
        f"{seed},{1_700_000_000 + 100 * seed + n}.5,{50 + n},{'' if n == 3 else 200 + n}"
        for seed in SEEDS
        for n in range(4)
    ]
    write_text(results.system_file(variant, root / "results"), "\n".join(lines) + "\n")
    written = {"history_sha256": file_sha256(results.history_file(variant, root / "results"))}
    results.write(make_result(variant, runs, **written | changes), results.result_file(variant, root / "results"))


def write_report(root: Path, note: str = "# Compared") -> None:
    """Write the pages of a report, but no comparison."""
    write_text(root / "reports/comparison.md", note)
    write_text(root / "reports/comparison.html", "<h1>Compared</h1>")


def comparison_of(root: Path, rejected: int = 0) -> Comparison:
    """Return a comparison of the results, in which ddp pays. If most of its 12 samples are ``rejected``, ddp is
    untrusted."""
    measured = [results.read(results.result_file(variant, root / "results"), config_of()) for variant in VARIANTS]
    reason = "other processes took 31% of the CPU's time"
    bench = make_bench(measured, throughput={"ddp": 1.6}, rejected={"ddp": dict.fromkeys(range(rejected), reason)})
    return make_comparison(measured, bench)


def write_comparison(root: Path, comparison: Comparison | None = None) -> Comparison:
    """Write the report of ``comparison`` (default: ``comparison_of(root)``), and return the comparison."""
    comparison = comparison or comparison_of(root)
    write_report(root)
    write_text(root / "reports/comparison.json", comparison.to_json())
    for compared in comparison.variants:
        write_text(root / f"reports/metrics/{compared.variant}.json", json.dumps(report.metrics(compared)))
    return comparison


def write_models(root: Path) -> None:
    """Write each run's weights, and the prepared data from which shape and normalisation are read."""
    for variant in VARIANTS:
        for seed in SEEDS:
            torch.manual_seed(seed)
            model = models.small_cnn(channels=1, height=SIDE, width=SIDE, classes=10)
            path = results.model_file(variant, seed, root / "models")
            checkpoints.save(model.state_dict(), path)
        write_result(root, variant)
    (root / "data/prepared").mkdir(parents=True)
    for split, count in (("train", DESCRIBED.train_count), ("test", DESCRIBED.test_count)):
        for name, dtype, shape in (("inputs", np.uint8, (1, SIDE, SIDE)), ("targets", np.int64, ())):
            file = root / f"data/prepared/{split}_{name}.npy"
            rows = np.lib.format.open_memmap(file, "w+", np.dtype(dtype), (count, *shape))
            rows[:5] = np.random.default_rng(0).integers(0, 10, (5, *shape))
    (root / "data/prepared/dataset.json").write_text(DESCRIBED.model_dump_json())


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in stores.DEFAULTS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def root(tmp_path: Path, empty_database: Path) -> Path:
    """A checkout with results of two variants and a fresh store."""
    root = tmp_path / "a checkout"
    write_checkout(root)
    shutil.copy(empty_database, root / "mlflow.db")
    return root


def write_checkout(root: Path) -> None:
    for variant in VARIANTS:
        write_result(root, variant)
    write_report(root)
    (root / "environment.json").write_text(json.dumps(ENVIRONMENT))


def client_of(root: Path) -> MlflowClient:
    return MlflowClient(stores.address(root))


def runs_of(root: Path) -> list[MlflowRun]:
    client = client_of(root)
    experiment = client.get_experiment_by_name("training-performance")
    return list(client.search_runs([experiment.experiment_id], order_by=["start_time"])) if experiment else []


def family(root: Path) -> tuple[MlflowRun, dict[str, MlflowRun]]:
    """Return the parent, and its children by name. Fails if the store holds anything else, or anything half-written."""
    runs = runs_of(root)
    parents = [run for run in runs if PARENT not in run.data.tags]
    children = [run for run in runs if PARENT in run.data.tags]
    assert len(parents) == 1
    assert {run.data.tags[PARENT] for run in children} == {parents[0].info.run_id}
    assert sorted(run.info.run_name for run in children) == sorted(f"{v}-seed{s}" for v in VARIANTS for s in SEEDS)
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert all(COMPLETE in run.data.tags for run in runs)
    return parents[0], {run.info.run_name: run for run in children}


def agrees(root: Path, config: Config) -> bool:
    """Return whether the store itself holds what the files say; the stamp file is not read."""
    wanted = wanted_of(root, config)
    store = stores.open_store(stores.address(root), root, config.publish.experiment)
    return not reconcile(wanted, store.runs(wanted.key), stores.checkout(root))


def stamp_agrees(root: Path) -> bool:
    return publishing.agreeing(stores.address(root), "training-performance", wanted_of(root)) is not None


def start(root: Path, call: str, *arguments: Any, yielding: bool = False, **keywords: Any) -> subprocess.Popen[str]:
    """Start ``pipeline.tracking.<call>`` in a process of its own, as the command line does."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom pipeline import params, tracking\n"
        "from pipeline.tracking import live\n"
        "live.FIRST_PAUSE_SECONDS = 0.1\n"
        # On a busy machine, a process that yields could wait very long. One test checks that it yields.
        f"{'' if yielding else 'live._yield_to_training = lambda: None'}\n"
        f"values = {config_of().model_dump(mode='json')!r}\n"
        f"done = tracking.{call}(params.parse(values), *{arguments!r}, root=Path({str(root)!r}))\n"
        "sys.exit(done if isinstance(done, int) else done.failed)"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, text=True, stderr=subprocess.PIPE, **keywords)


def wait_for(condition: Callable[[], Any]) -> Any:
    """Wait for a true value of ``condition``, and return it. The test's time limit ends an endless wait."""
    while not (value := condition()):
        time.sleep(0.2)
    return value


# publish


def test_the_store_holds_all_that_the_files_say(root: Path) -> None:
    comparison = write_comparison(root)
    done = tracking.publish(config_of(), root)
    assert done == tracking.Published(children=4, written=4)
    parent, children = family(root)
    client, child = client_of(root), children["ddp-seed1"]
    run_id, result = child.info.run_id, results.read(root / "results/ddp.json", config_of())

    assert child.data.params["train.model"] == "small_cnn"
    assert child.data.params["variant.precision"] == "fp32"
    assert child.data.params["world_size"] == "1"
    assert child.data.params["applied.gradient_accumulation"] == "1"
    assert child.data.metrics["samples_per_second"] == 20_001.0
    assert child.data.metrics["peak_memory_bytes"] == 200 * 2**20
    assert "peak_reserved_bytes" not in child.data.metrics  # unknown, so not logged
    assert child.data.tags["model_sha256"] == result.runs[1].model_sha256
    assert child.data.tags["environment"] == ENVIRONMENT["hash"]
    began_ms = 1_700_000_100_500
    losses = client.get_metric_history(run_id, "history/train_loss")
    rows = make_history([result.runs[1]], rows_per_epoch=2)
    assert [(point.step, point.value) for point in losses] == [(row.step, row.train_loss) for row in rows]
    assert [point.timestamp for point in losses] == [began_ms + round(row.train_seconds * 1000) for row in rows]
    assert len(client.get_metric_history(run_id, "history/test_accuracy")) == 3
    power = client.get_metric_history(run_id, "system/gpu_0_power_usage_watts")
    watts = [(point.step, point.timestamp, point.value) for point in power]
    assert watts == [(n, began_ms + 1000 * n, 200 + n) for n in range(3)]
    [given] = known(child.inputs).dataset_inputs
    assert (given.dataset.name, given.dataset.digest) == ("fashion_mnist", DESCRIBED.sha256[:16])
    assert [(tag.key, tag.value) for tag in given.tags] == [("mlflow.data.context", "training")]
    assert get_source(given.dataset).to_dict() == {"uri": "data/prepared"}
    assert {file.path for file in client.list_artifacts(run_id)} == {"ddp.json", "history.csv"}

    # The tag is spelled out here, because older stores contain it under this name.
    assert parent.info.run_name == f"comparison-{parent.data.tags['pipeline.comparison'][:8]}"
    assert parent.data.metrics == {
        f"{compared.variant}/{name}": value
        for compared in comparison.variants
        for name, value in report.metrics(compared).items()
        if isinstance(value, int | float)
    }
    assert parent.data.tags[contents.NOTE] == "# Compared"
    assert parent.data.params["train.model"] == "small_cnn"
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert files == {"comparison.html", "comparison.json", "comparison.md", "environment.json", "results"}


def test_scaling_curves_stand_beside_the_report(root: Path) -> None:
    config, measured = config_of(), make_measured()

    def write_curves(job: dict[str, Any], **of_bench: Any) -> None:
        bench = measured.bench.model_copy(update={"config": measured.bench.config | {"train": job}, **of_bench})
        of_job = measured.model_copy(update={"bench": bench})
        scale.write(scale.reported(config, of_job, [], scale.Options()), root / "reports")

    other_data = known(measured.bench.dataset).model_copy(update={"train_count": 9})
    for job, of_bench in (config.job | {"epochs": 100}, {}), (config.job, {"dataset": other_data}):
        write_curves(job, **of_bench)
        tracking.publish(config, root)
        assert not [key for key in family(root)[0].data.metrics if "/scale/" in key]
    write_curves(config.job)
    tracking.publish(config, root)
    parent, _ = family(root)
    assert parent.data.metrics["ddp/scale/strong_2/speedup_estimate"] == pytest.approx(100 / 61, rel=1e-3)
    assert "ddp/scale/strong_2/price" not in parent.data.metrics
    kept = [file.path for file in client_of(root).list_artifacts(parent.info.run_id, "scaling")]
    assert kept == [f"scaling/scaling.{ending}" for ending in ("html", "json", "md")]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"benches": 3}', '{"benches": [{"config": {}}]}'])
def test_a_page_that_is_no_report_is_named(root: Path, text: str) -> None:
    (root / "reports/scaling.json").write_text(text, encoding="utf-8")
    with pytest.raises(ResultError, match=r"reports/scaling.json is no report of this version .*: measure again"):
        tracking.publish(config_of(), root)


def test_advice_of_the_job_stands_beside_the_report(root: Path) -> None:
    config, bench = config_of(), make_bench()
    advice = Advice(
        baseline="baseline", compare=config.compare, candidates={},
        benches=(bench.model_copy(update={"config": bench.config | {"train": config.job}}),),
        ratios={
            "bf16 + compile": {"samples_per_second": make_ratio(1.2, 1.1, 1.3)},
            "compile": {"samples_per_second": make_ratio(1.2, 1.1, 1.3).model_copy(update={"why_untrusted": "noise"})},
        },
    )  # fmt: skip
    for ending in ("json", "md"):
        (root / "reports" / f"advice.{ending}").write_text(advice.to_json(), encoding="utf-8")
    tracking.publish(config, root)
    parent, _ = family(root)
    ratio = {
        name.rpartition("_")[2]: value
        for name, value in parent.data.metrics.items()
        if name.startswith("advice/bf16 _ compile/samples_per_second_ratio_")
    }
    assert ratio == {"estimate": 1.2, "low": 1.1, "high": 1.3}
    assert not [name for name in parent.data.metrics if name.startswith("advice/compile/")]
    kept = [file.path for file in client_of(root).list_artifacts(parent.info.run_id, "advice")]
    assert kept == ["advice/advice.json", "advice/advice.md"]


def test_profiles_and_inference_results_stand_beside_the_report(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists: dict[str, Any] = {"profile": {"variants": ["ddp", "baseline"]}, "infer": {"variants": ["ddp"]}}
    config = config_of(**lists)
    directory = results.profile_directory("ddp", root / "profiles")

    def write_profile(finding: str) -> None:
        ranks = [{"step_ms": 10.0, "input_ms": 4.0, "communication_hidden_ms": 1.0}, {"step_ms": 8.0, "input_ms": 2.0}]
        record = {"variant": "ddp", "ranks": ranks, "findings": [{"text": finding}, {"text": "And more."}]}
        write_text(directory / "profile.json", json.dumps(record))
        write_text(directory / "trace.json.gz", "a trace")
        write_text(directory / "id_rsa", "a file that is not logged")

    write_profile("40% of the step waits for input.")
    measured = {
        "latency": {"p50_ms": 0.5, "p99_ms": None},
        "throughput": [{"batch_size": 64, "samples_per_second": 4000.0}],
        "agreement": {"correct_count": 80, "equal_count": 99, "test_count": 100},
        "model_bytes": 1234,
    }
    forms: list[dict[str, Any]] = [{"name": "int8", "device_type": "cpu", "measured": measured}]
    forms.append({"name": "fp16", "device_type": "cpu", "measured": None})
    write_text(root / "inference/ddp.json", json.dumps({"variant": "ddp", "forms": forms}))
    write_text(root / "inference/ddp.md", "# Inference")
    write_text(root / "profiles/memory/profile.json", "of a variant that is not listed")

    tracking.publish(config, root)
    parent, _ = family(root)
    client, run_id = client_of(root), parent.info.run_id
    assert parent.data.tags["finding.ddp"] == "40% of the step waits for input.\nAnd more."
    figures = {key: value for key, value in parent.data.metrics.items() if "/profile/" in key or "/inference/" in key}
    assert figures == {
        "ddp/profile/rank_0/input_fraction": 0.4,
        "ddp/profile/rank_0/communication_hidden_fraction": 0.1,
        "ddp/profile/rank_1/input_fraction": 0.25,
        "ddp/inference/cpu_int8/latency_p50_ms": 0.5,
        "ddp/inference/cpu_int8/batch_64_samples_per_second": 4000.0,
        "ddp/inference/cpu_int8/test_accuracy": 0.8,
        "ddp/inference/cpu_int8/equal_fraction": 0.99,
        "ddp/inference/cpu_int8/model_bytes": 1234,
    }
    assert [file.path for file in client.list_artifacts(run_id, "profiles")] == ["profiles/ddp"]
    kept = [file.path for file in client.list_artifacts(run_id, "profiles/ddp")]
    assert kept == ["profiles/ddp/profile.json", "profiles/ddp/trace.json.gz"]
    kept = [file.path for file in client.list_artifacts(run_id, "inference")]
    assert kept == ["inference/ddp.json", "inference/ddp.md"]

    with monkeypatch.context() as patched:
        patched.setattr(stores, "open_store", lambda *_: pytest.fail("opened the store"))
        assert tracking.publish(config, root) == tracking.Published(children=4)
    write_profile("21% of the step is the optimizer.")
    assert tracking.publish(config, root) == tracking.Published(children=4)
    assert family(root)[0].data.tags["finding.ddp"].startswith("21% of the step is the optimizer.")
    assert family(root)[0].info.run_id == run_id


def test_nothing_new_is_found_out_without_importing_mlflow(root: Path) -> None:
    write_comparison(root)
    tracking.publish(config_of(), root)
    before = {run.info.run_id: run.to_dictionary() for run in runs_of(root)}
    code = (
        "import sys\nfrom pathlib import Path\nfrom pipeline import params, tracking\n"
        f"done = tracking.publish(params.parse({config_of().model_dump(mode='json')!r}), Path({str(root)!r}))\n"
        "heavy = {'mlflow', 'sqlalchemy', 'torch', 'numpy', 'scipy', 'requests'} & set(sys.modules)\n"
        "sys.exit(f'{done} {heavy}' if heavy or done.children != 4 else 0)"
    )
    page = "http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning (after"
    assert f"is up to date with 4 runs: {page}" in printed(code)
    assert {run.info.run_id: run.to_dictionary() for run in runs_of(root)} == before


def replace_file(path: Path) -> None:
    """Replace the file by another of the same content and time."""
    shutil.copy2(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: replace_file(root / "mlflow.db"),
        lambda root: os.utime(root / "mlflow.db", ns=(0, 0)),
        lambda root: (root / "mlflow.db").unlink(),
        lambda root: (root / "mlartifacts/a run").rmdir(),
        lambda root: shutil.rmtree(root / "mlartifacts"),
        lambda root: (root / "mlartifacts").rename(root / "elsewhere"),
        lambda root: (root / "mlflow.db.published").unlink(),
        lambda root: (root / "mlflow.db.published").write_text("{"),
        lambda root: (root / "mlflow.db.published").write_text("[]"),
        lambda root: (root / "mlflow.db.published").write_text('{"experiment_id": "1", "artifacts": 1}'),
        lambda root: write_report(root, note="# Other words"),
        lambda root: write_result(root, "ddp", speed=30_000.0),
    ],
)
def test_the_stamp_counts_only_while_nothing_has_changed(root: Path, change: Callable[[Path], Any]) -> None:
    (root / "mlartifacts/a run").mkdir(parents=True)
    experiment: Any = SimpleNamespace(experiment_id="1", artifact_location=str(root / "mlartifacts"))
    client: Any = None
    publishing.record(Store(client, stores.address(root), root, experiment), "training-performance", wanted_of(root))
    assert stamp_agrees(root)
    change(root)
    assert not stamp_agrees(root)


def test_a_moved_checkout_s_stamp_does_not_count(root: Path) -> None:
    tracking.publish(config_of(), root)
    assert stamp_agrees(root)
    moved = root.rename(root.with_name("moved"))  # all files are the same, but the store names them by their old paths
    assert not stamp_agrees(moved)


@pytest.mark.slow
def test_two_publishers_rebuild_a_deleted_store_once(root: Path) -> None:
    tracking.publish(config_of(), root)
    shutil.rmtree(root / "mlartifacts")
    (root / "mlflow.db").unlink()
    (root / "mlflow.db.new").write_bytes(b"the rest of a creation that was killed")
    publishers = [start(root, "publish", stdout=subprocess.PIPE) for _ in range(2)]
    for publisher in publishers:
        output, errors = publisher.communicate()
        assert (publisher.returncode, errors) == (0, ""), output
    assert stamp_agrees(root)
    moved = root.with_name("moved")  # at another address, because MLflow keeps connections to the deleted file
    moved.mkdir()
    shutil.copy(root / "mlflow.db", moved)
    family(moved)


def test_a_locked_store_holds_nobody_up(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stores, "LOCK_SECONDS", 0.2)
    with stores.locked(stores.address(root)):
        assert tracking.publish(config_of(), root).failed
    said = capsys.readouterr().err
    assert "mlflow.db.lock' could not be acquired. Another process uses the store: " in said
    assert "The result files are complete" in said
    assert tracking.publish(config_of(), root).written == 4


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("database or disk is full", "Make room there."),
        ("attempt to write a readonly database", "Let this user write there."),
        ("unable to open database file", "Let this user write there."),
        ("database is locked", "Another process uses the store: end that process, or wait."),
    ],
)
def test_what_sqlite_refuses_is_said_without_its_statement(said: str, remedy: str) -> None:
    statement = "[SQL: INSERT INTO tags (key, value) VALUES (?, ?)] [parameters: [('a', 'database is locked')]]"
    error = MlflowException(
        f"(raised as a result of Query-invoked autoflush) (sqlite3.OperationalError) {said}\n{statement}"
    )
    assert stores.describe("sqlite:///mlflow.db", error) == f"MLflow at sqlite:///mlflow.db: {said}. {remedy}"
    statementless = MlflowException("(psycopg2.OperationalError) gone")
    assert stores.describe("postgresql:", statementless).endswith(": MlflowException: (psycopg2.OperationalError) gone")


@pytest.mark.slow
def test_a_disk_that_cannot_be_written_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))

    def publish(checkout: Path) -> str:
        command = [sys.executable, "-m", "pipeline", "publish"]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr, done.stderr.count("\n") <= 1) == (0, False, True), done
        return done.stderr

    with workspaces.disk(tmp_path / "disk") as place:
        checkout = place / "a checkout"
        write_checkout(checkout)
        (checkout / "params.yaml").write_text(yaml.safe_dump(config_of().model_dump(mode="json")))
        before = {file: file.read_bytes() for file in checkout.rglob("*.*") if file.is_file()}
        workspaces.remount(place, "ro")
        assert "mlflow.db.lock' Let this user write there. The result files are complete" in publish(checkout)
        workspaces.remount(place, "rw")
        for free_bytes in (0, 1 << 16, 3 << 18, 1 << 20, 5 << 18, 3 << 19, 1 << 22):  # the database takes about 3 << 18
            workspaces.fill(place, free_bytes)
            if not (said := publish(checkout)):
                break
            assert ("disk is full. Make room there." in said) or ("No space left on device" in said), said
            assert " Make room there. The result files are complete" in said
            assert {file: file.read_bytes() for file in before} == before
        assert free_bytes > 3 << 18
        workspaces.fill(place, 1 << 24)
        assert publish(checkout) == ""
        family(checkout)


def delete_run(root: Path, name: str) -> None:
    [victim] = [run.info.run_id for run in runs_of(root) if run.info.run_name.startswith(name)]
    client_of(root).delete_run(victim)


@pytest.mark.parametrize(
    ("damage", "written"),
    [
        (lambda root: delete_run(root, "ddp-seed1"), 1),
        (lambda root: delete_run(root, "comparison"), 4),
        (lambda root: client_of(root).delete_experiment("1"), 0),
        (lambda root: shutil.rmtree(root / "mlartifacts"), 4),
    ],
)
def test_what_was_damaged_by_hand_comes_back(root: Path, damage: Callable[[Path], Any], written: int) -> None:
    tracking.publish(config_of(), root)
    damage(root)
    assert tracking.publish(config_of(), root).written == written
    parent, children = family(root)
    for run in (parent, *children.values()):
        assert client_of(root).list_artifacts(run.info.run_id)
    assert stamp_agrees(root)


@pytest.mark.parametrize(
    ("owner", "act", "call"),
    [
        (Store, "log", 2),  # the second run with nothing but its tags
        (MlflowClient, "set_terminated", 2),  # the second run, which lacks only its tag COMPLETE
        (Store, "log", 5),  # the parent, whose children are all there
        (Store, "log", 6),  # the last call for the parent
    ],
)
def test_a_killed_publish_leaves_nothing_that_counts(
    root: Path, monkeypatch: pytest.MonkeyPatch, owner: type, act: str, call: int
) -> None:
    calls = 0
    original = getattr(owner, act)

    def killed(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(owner, act, killed)
        with pytest.raises(KeyboardInterrupt):
            tracking.publish(config_of(), root)
    assert not stamp_agrees(root)
    tracking.publish(config_of(), root)
    _, children = family(root)
    for run in children.values():
        assert len(client_of(root).get_metric_history(run.info.run_id, "history/train_loss")) == 6
    assert agrees(root, config_of())


def test_training_again_makes_a_new_comparison(root: Path) -> None:
    tracking.publish(config_of(), root)
    old, _ = family(root)
    write_result(root, "ddp", speed=30_000.0)
    assert tracking.publish(config_of(), root).written == 4
    parents = [run for run in runs_of(root) if PARENT not in run.data.tags]
    [new] = [run for run in parents if run.info.run_id != old.info.run_id]
    assert len(parents) == 2
    for parent, speed in ((old, 20_000.0), (new, 30_000.0)):
        mine = [run for run in runs_of(root) if run.data.tags.get(PARENT) == parent.info.run_id]
        assert len(mine) == 4
        speeds = {run.info.run_name: run.data.metrics["samples_per_second"] for run in mine}
        assert (speeds["baseline-seed0"], speeds["ddp-seed0"]) == (20_000.0, speed)
    write_result(root, "ddp")  # the old result restored, as by `dvc checkout`
    assert tracking.publish(config_of(), root) == tracking.Published(children=4)


def test_a_new_report_replaces_the_old_one(root: Path) -> None:
    tracking.publish(config_of(), root)
    old, _ = family(root)
    write_report(root, note="# Better words " + "and many more " * 1000)
    assert tracking.publish(config_of(), root) == tracking.Published(children=4)
    parent, _ = family(root)
    assert parent.info.run_id == old.info.run_id
    assert parent.data.tags[contents.NOTE].startswith("# Better words")
    assert len(parent.data.tags[contents.NOTE]) <= 8000
    assert agrees(root, config_of())


def test_a_report_of_other_results_is_not_published(root: Path) -> None:
    write_comparison(root)
    tracking.publish(config_of(), root)
    before, _ = family(root)
    write_result(root, "ddp", speed=30_000.0)
    tracking.publish(config_of(), root)
    runs = [run for run in runs_of(root) if PARENT not in run.data.tags]
    [parent] = [run for run in runs if run.info.run_id != before.info.run_id]
    assert (parent.data.metrics, parent.data.tags.get(contents.NOTE)) == ({}, None)
    files = {file.path for file in client_of(root).list_artifacts(parent.info.run_id)}
    assert files == {"environment.json", "results"}
    renewed = write_comparison(root)
    tracking.publish(config_of(), root)
    metrics = client_of(root).get_run(parent.info.run_id).data.metrics
    assert metrics["ddp/samples_per_second"] == renewed.variants[1].figures["samples_per_second"]


def test_the_parent_counts_the_sessions_that_are_trusted(root: Path) -> None:
    def said() -> str:
        return contents.parent_tags(config_of(), wanted_of(root), root)["sessions"]

    comparison = write_comparison(root)
    assert said() == "1; in other sessions these ratios may differ by an unknown amount"
    parts = {str(day): make_ratio(1.0, 0.9, 1.1, decision=decision) for day, decision in enumerate(DECISIONS)}
    write_comparison(root, with_changes(comparison, "ddp", memory=make_ratio(1.0, parts=parts)))
    assert said() == "2"
    write_comparison(root, comparison_of(root, rejected=8))
    assert said() == "1; in other sessions these ratios may differ by an unknown amount"  # its memory is trusted


def test_another_verdict_replaces_the_old_one_everywhere(root: Path) -> None:
    comparison = write_comparison(root)
    tracking.publish(config_of(), root)
    old, children = family(root)
    assert children["ddp-seed1"].data.tags["verdict"] == "pays"
    low, ratio, high = (old.data.metrics[f"ddp/throughput_ratio{end}"] for end in ("_low", "", "_high"))
    assert 1.5 < low < ratio < high < 1.7
    assert old.data.metrics["ddp/throughput_pairs"] == 12
    measured = {compared.variant: compared.figures for compared in comparison.variants}
    for name, child in children.items():
        for figure in ("samples_per_second", "peak_memory_bytes"):
            value = child.data.metrics[f"bench/{figure}"]
            assert value == measured[name.partition("-")[0]][figure] != child.data.metrics[figure]
        assert child.data.metrics["median/train_seconds"] == 9.0
    write_comparison(root, comparison_of(root, rejected=8))
    for file in filter(Path.is_file, (root / "reports").rglob("*")):
        os.utime(file, (0, 0))  # as a link into a cache
    assert tracking.publish(config_of(), root) == tracking.Published(children=4)
    new, children = family(root)
    assert new.info.run_id == old.info.run_id
    assert (new.data.tags["champion"], new.data.tags["champion.gain"]) == ("baseline", "none")
    assert new.data.tags["rejections.baseline"] == "none"
    reasons = new.data.tags["rejections.ddp"].splitlines()
    assert (len(reasons), reasons[7]) == (8, "round 8: other processes took 31% of the CPU's time")
    assert new.data.tags["verdict.ddp"].startswith("untrusted: throughput: ")
    assert children["ddp-seed0"].data.tags["verdict"] == "untrusted", "a column has room for few words"
    assert children["baseline-seed0"].data.tags["verdict"] == "baseline"
    assert math.isnan(children["ddp-seed0"].data.metrics["bench/samples_per_second"]), "most rounds were rejected"
    assert new.data.metrics["ddp/throughput_pairs"] == 4  # the smaller value, because it is newer
    assert math.isnan(new.data.metrics["ddp/throughput_ratio"])
    assert agrees(root, config_of())


def test_without_results_there_is_nothing_to_publish(tmp_path: Path) -> None:
    assert tracking.publish(config_of(), tmp_path) == tracking.Published()
    assert not list(tmp_path.iterdir())


def test_a_copied_checkout_does_not_write_into_the_original(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracking.publish(config_of(), root)
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    assert tracking.publish(config_of(), copy).failed
    assert "Move mlflow.db and mlartifacts out of this directory" in capsys.readouterr().err


# live runs


def live_run(root: Path, variant: str = "ddp", *, status: str = "FINISHED", tags: dict[str, str] | None = None) -> str:
    """Create a live run of seed 0, as a follower of this checkout leaves it. Return its id."""
    store = stores.open_store(stores.address(root), root, "training-performance")
    own = {LIVE: stores.checkout(root), "variant": variant, "seed": "0"} | (tags or {})
    run_id: str = store.client.create_run(store.experiment_id, tags=own, run_name=f"{variant}-seed0").info.run_id
    if status != "RUNNING":
        store.client.set_terminated(run_id, status)
    return run_id


def test_live_runs_give_way_to_their_files(root: Path) -> None:
    ended = {
        live_run(root, status="FINISHED"),
        live_run(root, status="KILLED"),
        live_run(root, "baseline", status="RUNNING"),
    }
    os.utime(root / "results/baseline.json", (time.time() + 5, time.time() + 5))  # a result newer than its live run
    stay = {
        live_run(root, status="RUNNING"),  # started after the present result was written
        live_run(root, "memory", status="KILLED"),  # interrupted: it has no result
        live_run(root, tags={LIVE: "another checkout"}),
    }
    assert tracking.publish(config_of(), root) == tracking.Published(children=4, written=4, deleted=3)
    assert {run.info.run_id for run in runs_of(root)} & (ended | stay) == stay


# the follower


def histories(root: Path, variant: str, count: int) -> None:
    """Replace the history by its first ``count`` rows, as training does."""
    rows = make_history([make_run(seed) for seed in SEEDS], rows_per_epoch=2)[:count]
    results.write_history(rows, results.history_file(variant, root / "results"))


def live_runs(root: Path) -> dict[str, MlflowRun]:
    return {run.info.run_name: run for run in runs_of(root) if LIVE in run.data.tags}


def go_on(root: Path) -> None:
    """Refresh the times of the training's files: the follower ignores files older than itself."""
    for file in (root / "results/ddp").iterdir():
        file.touch()


def logged(root: Path, name: str, metric: str) -> int:
    """Return the number of values of a metric in a live run, while the training goes on."""
    go_on(root)
    run = live_runs(root).get(name)
    return len(client_of(root).get_metric_history(run.info.run_id, metric)) if run else 0


def test_a_followed_training_is_seen_live(root: Path) -> None:
    finished = (root / "results/ddp.json").read_text()
    samples = (root / "results/ddp/system.csv").read_text().splitlines(keepends=True)
    shutil.rmtree(root / "results/ddp")
    (root / "results/ddp.json").unlink()
    with start(root, "follow", "ddp", stdin=subprocess.PIPE) as follower:
        write_text(root / "results/ddp/system.csv", "".join(samples[:3]) + samples[3][:5])  # a line half-written
        histories(root, "ddp", 2)
        wait_for(lambda: logged(root, "ddp-seed0", "history/train_loss") == 2)
        assert logged(root, "ddp-seed0", "system/cpu_utilization_percentage") == 2
        histories(root, "ddp", 8)
        wait_for(lambda: logged(root, "ddp-seed1", "history/train_loss") == 2)
        assert live_runs(root)["ddp-seed0"].info.status == "RUNNING"
        histories(root, "ddp", 12)
        (root / "results/ddp/system.csv").write_text("".join(samples))
        (root / "results/ddp.json").write_text(finished)
        _, errors = follower.communicate("finished\n")
    assert (follower.returncode, errors) == (0, "")
    live = live_runs(root)
    assert {run.info.status for run in live.values()} == {"FINISHED"}
    for name in live:
        assert logged(root, name, "history/train_loss") == 6
        assert logged(root, name, "system/gpu_0_power_usage_watts") == 3

    assert tracking.publish(config_of(), root) == tracking.Published(children=4, written=4, deleted=2)
    _, children = family(root)
    seen, written = live["ddp-seed0"].info, children["ddp-seed0"].info
    assert seen.run_id != written.run_id
    assert (seen.start_time, seen.end_time) == (written.start_time, written.end_time)


@pytest.mark.slow
def test_a_training_that_dies_leaves_killed_runs(root: Path) -> None:
    (root / "results/ddp.json").unlink()
    with start(root, "follow", "ddp", stdin=subprocess.PIPE) as follower:
        histories(root, "ddp", 3)
        wait_for(lambda: logged(root, "ddp-seed0", "history/train_loss") == 3)
        assert follower.communicate()[1] == ""
    assert live_runs(root)["ddp-seed0"].info.status == "KILLED"


def test_each_row_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n0,0\n")  # of an earlier training
    os.utime(path, (0, 0))
    tail = live._Tail(path)
    assert tail.read() == []
    for content, rows in (
        ("1,2\n3,", [{"a": "1", "b": "2"}]),  # the last line is half-written
        ("1,2\n3,", []),
        ("1,2\n3,4\n", [{"a": "3", "b": "4"}]),
        ("1,9\n", [{"a": "1", "b": "9"}]),
    ):
        path.write_text(f"a,b\n{content}")
        os.utime(path, (time.time() + 5, time.time() + 5))  # later, whatever the file system's clock
        assert tail.read() == rows


class Waits(threading.Event):
    """Never waits, notes how long it was asked to, and is set at the seventh time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout)
        return len(self.asked) > 6


def test_what_mlflow_did_not_take_is_sent_after_longer_pauses(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "results/ddp/history.csv").unlink()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    left = {live_run(root, status="RUNNING"), live_run(root, "baseline", status="RUNNING")}
    mirror, waits = live._Mirror(config_of(), "ddp", root), Waits()
    assert mirror.update(), "there is nothing to send"
    histories(root, "ddp", 12)
    with monkeypatch.context() as down:
        down.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
        mirror.run(waits)
    assert waits.asked == [1, 10, 1, 20, 1, 40, 1]
    assert capsys.readouterr().err.count("Training goes on without a live view") == 1
    assert mirror.update("FINISHED")
    before = {run.data.tags["variant"]: run.info.status for run in runs_of(root) if run.info.run_id in left}
    assert before == {"ddp": "KILLED", "baseline": "RUNNING"}, "an earlier follower of ddp did not end its run"
    sent = [run.info for run in runs_of(root) if run.info.run_id not in left]
    assert sorted((run.run_name, run.status) for run in sent) == [(f"ddp-seed{n}", "FINISHED") for n in SEEDS]
    losses = (client_of(root).get_metric_history(run.run_id, "history/train_loss") for run in sent)
    assert [len(of_run) for of_run in losses] == [6, 6]


@pytest.mark.slow
def test_the_follower_keeps_trying_and_warns_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def junk(request: BaseHTTPRequestHandler) -> tuple[int, str]:
        requests.append(request.path)
        return JUNK

    with serving(junk) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with start(root, "follow", "ddp", stdin=subprocess.PIPE) as follower:
            histories(root, "ddp", 12)

            def tried_often() -> bool:
                go_on(root)
                return len(requests) > 2

            wait_for(tried_often)
            _, errors = follower.communicate("finished\n")
    [warning] = errors.splitlines()
    assert warning.startswith(f"warning: MLflow at {uri}: ")
    assert "Training goes on" in warning


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has a scheduling policy for idle processes")
def test_the_follower_takes_only_what_the_training_leaves(root: Path) -> None:
    with start(root, "follow", "ddp", yielding=True, stdin=subprocess.PIPE) as follower:
        wait_for(lambda: os.sched_getscheduler(follower.pid) == os.SCHED_IDLE)
        follower.communicate()


def test_a_short_training_does_not_wait_for_mlflow(root: Path) -> None:
    with start(root, "follow", "ddp", stdin=subprocess.PIPE) as follower:
        _, errors = follower.communicate("finished\n")
    assert (follower.returncode, errors) == (0, "")
    assert runs_of(root) == []


# servers that do not work


JUNK = 200, "<html>Welcome to the coffee machine</html>"


@pytest.mark.parametrize("reply", [hang, lambda _: JUNK, None], ids=["silent", "of something else", "down"])
def test_a_server_that_does_not_work_costs_one_warning(
    reply: Reply | None, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with serving(reply) if reply else nullcontext(f"http://127.0.0.1:{free_port()}") as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert tracking.publish(config_of(), root) == tracking.Published(failed=True)
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: MLflow at {uri}: ")
    assert "run `python -m pipeline publish`" in warning


@pytest.mark.parametrize(
    "uri", ["http://me:secret@host:5000", "http://secret@host:5000", "http://host:5000/mlflow?token=secret"]
)
def test_a_secret_in_the_address_is_not_shown(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "secret" not in stores.describe(uri, RuntimeError("no"))
    assert "secret" not in stores.describe("http://host", RuntimeError(f"{'x' * 380} no answer from {uri}"))
    stores.warn(f"no answer from {uri}.")
    assert "secret" not in capsys.readouterr().err


def test_secrets_of_the_environment_do_not_reach_the_store(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    digest = environment.write(environment.fingerprint(), root / "environment.json")
    for variant in VARIANTS:
        write_result(root, variant, environment=digest)
    tracking.publish(config_of(), root)
    tags = [run.data.tags for run in client_of(root).search_runs(["1"])]
    assert {tag["image"] for tag in tags} == {"https://***@registry.example/pipeline?***"}
    files = [path for path in root.rglob("*") if path.is_file()]
    assert any(path.name == "environment.json" and "mlartifacts" in path.parts for path in files)
    assert not [(path, secret) for path in files for secret in SECRETS if secret.encode() in path.read_bytes()]


@pytest.mark.slow
def test_a_server_is_a_store_like_any_other(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", stores.address(root), "--artifacts-destination", str(root / "server")]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, start_new_session=True, **quiet) as server:
        try:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            wait_for(lambda: server.poll() is not None or answers(port))
            assert tracking.publish(config_of(), root).written == 4
            assert len(capsys.readouterr().out.splitlines()) == 2
            family(root)
            assert tracking.publish(config_of(), root) == tracking.Published(children=4)
            assert capsys.readouterr().out.startswith("MLflow: comparison-")
            assert not list(root.glob("*.published"))
            assert (root / "server").is_dir()
        finally:
            os.killpg(server.pid, 15)


# models


@pytest.mark.slow
def test_a_logged_model_predicts_like_the_trained_one_anywhere(root: Path, tmp_path: Path) -> None:
    write_models(root)
    assert tracking.publish(config_of(models=True), root).written == 4
    _, children = family(root)
    run = children["ddp-seed1"]
    images = np.random.default_rng(1).integers(0, 256, (7, 1, SIDE, SIDE), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    code = (
        "import sys, numpy as np, torch, mlflow\n"
        "sys.modules['pipeline'] = None\n"  # the model needs none of this project's code
        f"mlflow.set_tracking_uri({stores.address(root)!r})\n"
        "images = np.load('images.npy')\n"
        f"np.save('pyfunc.npy', mlflow.pyfunc.load_model({run.data.tags['model']!r}).predict(images))\n"
        f"module = mlflow.pytorch.load_model('runs:/{run.info.run_id}/ddp-seed1')\n"
        "np.save('pytorch.npy', module(torch.from_numpy(images)).detach().numpy())\n"
    )
    printed(code, cwd=tmp_path, MLFLOW_ALLOW_PICKLE_DESERIALIZATION="false")

    model = models.small_cnn(channels=1, height=SIDE, width=SIDE, classes=10)
    model.load_state_dict(torch.load(root / "models/ddp/seed-1.pt", weights_only=True))
    with torch.no_grad():
        expected = model.eval()((torch.from_numpy(images) / 255 - 0.3) / 0.4).numpy()
    for loaded in ("pyfunc.npy", "pytorch.npy"):
        np.testing.assert_allclose(np.load(tmp_path / loaded), expected, rtol=1e-5, atol=1e-6)

    client = client_of(root)
    [output] = known(run.outputs).model_outputs
    logged_model = client.get_logged_model(output.model_id)
    assert str(logged_model.status) == "READY"
    about = mlflow.models.Model.load(logged_model.artifact_location)
    [given], [returned] = (side.inputs for side in (known(about.signature).inputs, known(about.signature).outputs))
    assert (given.type, given.shape) == (np.dtype(np.uint8), (-1, 1, SIDE, SIDE))
    assert (returned.type, returned.shape) == (np.dtype(np.float32), (-1, 10))
    example = about.load_input_example(logged_model.artifact_location)
    np.testing.assert_array_equal(example, np.load(root / "data/prepared/test_inputs.npy")[:2])
    requirements = (Path(logged_model.artifact_location) / "requirements.txt").read_text()
    description = (Path(logged_model.artifact_location) / "MLmodel").read_text()
    assert "device: cpu" in description  # an exported program does not move to the GPU that pyfunc would take
    assert f"torch=={torch.__version__.partition('+')[0]}" in requirements.splitlines()
    assert agrees(root, config_of(models=True))

    client.delete_run(run.info.run_id)  # unlike this call, ``Store.delete`` deletes the run's models, too
    stores.open_store(stores.address(root), root, "training-performance").delete(children["ddp-seed0"].info.run_id)
    left = client.search_logged_models([run.info.experiment_id])
    assert children["ddp-seed0"].info.run_id not in {model.source_run_id for model in left}


class Rows(nn.Module):
    """Reads the rows of an image one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.LSTM(8, 10, batch_first=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.read(images[:, 0])[0][:, -1]
        return outputs


def test_no_warning_of_an_export_is_printed(digits: Dataset, tmp_path: Path) -> None:
    """A warning would be an error here, such as that of torch about LSTM's own attributes."""
    logged_models._save(task_of(digits), Rows(), tmp_path / "model", mlflow.models.Model())
    assert (tmp_path / "model/MLmodel").exists()


def test_a_model_that_cannot_be_logged_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_models(root)
    np.save(root / "data/prepared/test_inputs.npy", np.zeros((1, 1, SIDE, SIDE), np.uint8))
    tracking.publish(config_of(models=True), root)
    _, children = family(root)
    assert children["ddp-seed0"].data.tags["model"].startswith("not logged: DataError: ")
    names = ", ".join(f"{variant}-seed{seed}" for variant in VARIANTS for seed in SEEDS)
    assert f"MLflow has no model of {names}: DataError: " in capsys.readouterr().err
    assert agrees(root, config_of(models=True))


def test_without_room_for_models_no_run_is_complete(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_models(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert tracking.publish(config_of(models=True), root).failed
    assert "No space left on device: '/" in (said := capsys.readouterr().err)
    assert "' Make room there. The result files are complete" in said
    assert not any(COMPLETE in run.data.tags for run in runs_of(root))


# promote


COMMIT = "c" * 40


@pytest.fixture
def one_session_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promoting, "FEWEST_SESSIONS", 1)


def write_gate(root: Path, outcome: str = "passed", commit: str = COMMIT) -> None:
    head, base = {"commit": commit}, {"commit": "b" * 40}
    variants = [{"variant": name} for name in ("baseline", "ddp")]
    decided = {"outcome": outcome, "against": "main", "dataset": {"sha256": DESCRIBED.sha256}, "variants": variants}
    gate = decided | {"head": head, "base": base}
    write_text(root / "reports/gate.json", json.dumps(gate))
    write_text(root / "reports/gate.md", "**Nothing got worse.**\n")


@pytest.fixture
def promotable(root: Path) -> Path:
    """The checkout with a comparison in which ddp pays, and a gate that passed."""
    write_comparison(root)
    write_gate(root)
    return root


@pytest.mark.parametrize(
    ("outcome", "judged", "here", "says"),
    [
        ("worse", COMMIT, COMMIT, "the gate did not pass against main: worse. reports/gate.md says why"),
        ("untrusted", COMMIT, COMMIT, "the gate did not pass against main: untrusted"),
        ("passed", "d" * 40, COMMIT, f"the gate judged commit {'d' * 40}, but {COMMIT} is checked out"),
        ("passed", COMMIT, f"{COMMIT}+", f"the gate judged commit {COMMIT}, but"),
        ("passed", f"{COMMIT}+", f"{COMMIT}+", f"files differ from commit {COMMIT}: commit them"),
        ("passed", COMMIT, None, "no commit is checked out here"),
        (None, COMMIT, COMMIT, "reports/gate.json is missing"),
    ],
)
def test_only_what_passed_the_gate_is_promoted(
    root: Path, outcome: str | None, judged: str, here: str | None, says: str
) -> None:
    write_comparison(root)
    if outcome:
        write_gate(root, outcome, judged)
    with pytest.raises(tracking.PromotionError, match=re.escape(says)):
        tracking.promote(config_of(), here, root)
    assert client_of(root).search_registered_models() == []


def test_promote_switches_telemetry_off_before_it_imports_mlflow(root: Path) -> None:
    write_models(root)
    write_comparison(root)
    write_gate(root)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom pipeline import params, tracking\n"
        "from pipeline.tracking import promoting\npromoting.FEWEST_SESSIONS = 1\n"
        "class Import:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'mlflow':\n"
        "            sys.exit(os.environ.get('MLFLOW_DISABLE_TELEMETRY', 'not set'))\n"
        "sys.meta_path.insert(0, Import())\n"
        f"values = {config_of(models=True).model_dump(mode='json')!r}\n"
        f"tracking.promote(params.parse(values), {COMMIT!r}, Path({str(root)!r}))\n"
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    ended = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, env=own, capture_output=True, text=True)
    assert ended.stderr.strip() == "true"


@pytest.mark.usefixtures("one_session_is_enough")
def test_an_undecided_best_of_many_is_not_promoted(promotable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = comparison_of(promotable)
    champion = known(comparison.champion)
    gain = known(champion.ratio).model_copy(update={"decision": "undecided"})
    best = champion.model_copy(update={"among": 2, "ratio": gain})
    write_comparison(promotable, comparison.model_copy(update={"champion": best}))
    assert tracking.promote(config_of(), COMMIT, promotable) == promoting.TOO_FEW
    assert "2 variants pay by throughput. If some sessions choose the best variant" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sides_are_equal", "says"),
    [
        (False, "ddp pays in 1 session of the bench, but 3 sessions are required"),
        (True, "not promoted: main has the same code and settings. Run `python -m pipeline gate"),
    ],
)
def test_few_sessions_or_equal_sides_promote_nothing(
    sides_are_equal: bool, says: str, promotable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(promotable / "reports/gate.json", sides_are_equal=sides_are_equal)
    assert tracking.promote(config_of(), COMMIT, promotable) == promoting.TOO_FEW
    assert says in capsys.readouterr().err
    assert client_of(promotable).search_registered_models() == []


def test_a_session_counts_if_trusted_with_enough_pairs() -> None:
    parts = {str(day): make_ratio(1.0, 0.9, 1.1, decision=decision) for day, decision in enumerate(DECISIONS)}
    ratio = make_ratio(1.0, decision="better", parts=parts | {"too few pairs": make_ratio(1.0)})
    comparison = make_comparison().model_copy(update={"champion": None})
    assert promoting.sessions_of(with_changes(comparison, "ddp", throughput=ratio, memory=None), "ddp") == 2


@pytest.mark.usefixtures("one_session_is_enough")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dataset": {"sha256": "0" * 64}}, r"the gate measured on another data set than that of .*ddp\.json"),
        ({"variants": [{"variant": "baseline"}]}, r"gate measured baseline, but not ddp: set gate\.variants"),
    ],
)
def test_what_the_gate_did_not_measure_is_not_promoted(promotable: Path, changes: dict[str, Any], says: str) -> None:
    forge(promotable / "reports/gate.json", **changes)
    with pytest.raises(tracking.PromotionError, match=says):
        tracking.promote(config_of(), COMMIT, promotable)


def test_a_report_of_other_settings_is_not_promoted(promotable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracking.publish(config_of(), promotable)
    assert not capsys.readouterr().err
    edited = config_of(compare={"margins": {"memory": 0.2}})
    tracking.publish(edited, promotable)
    said = "warning: the report was made from other files or settings (compare.margins.memory in params.yaml)"
    assert said in capsys.readouterr().err
    with pytest.raises(tracking.PromotionError, match=r"other inputs: compare\.margins\.memory in params\.yaml"):
        tracking.promote(edited, COMMIT, promotable)


@pytest.mark.usefixtures("one_session_is_enough")
def test_what_is_missing_is_not_promoted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gate(root)
    with pytest.raises(tracking.PromotionError, match="no comparison of the results that are here"):
        tracking.promote(config_of(models=True), COMMIT, root)
    write_comparison(root)
    with pytest.raises(tracking.PromotionError, match=r"ddp-seed0 cannot be made here.* publish\.models must be true"):
        tracking.promote(config_of(models=True), COMMIT, root)
    write_models(root)
    write_comparison(root)
    with pytest.raises(tracking.PromotionError, match=r"publish\.models must be true"):
        tracking.promote(config_of(), COMMIT, root)
    with pytest.raises(tracking.PromotionError, match="python -m pipeline publish"):
        tracking.promote(config_of(models=True), COMMIT, root)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(tracking.PromotionError, match="MLflow at http://127"):
        tracking.promote(config_of(models=True), COMMIT, root)


@pytest.mark.usefixtures("one_session_is_enough")
def test_the_champion_carries_its_evidence(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_models(root)
    write_comparison(root)
    write_gate(root)
    config = config_of(models=True)
    tracking.publish(config, root)
    parent, children = family(root)
    run = children["ddp-seed0"]  # ddp pays; of its seeds, the first
    capsys.readouterr()
    tracking.promote(config, COMMIT, root)
    said = capsys.readouterr().out
    assert said.startswith("MLflow: ddp-seed0 is version 1 of training-performance and its champion: http://")

    client = client_of(root)
    [version] = client.search_model_versions("name = 'training-performance'")
    assert client.get_model_version_by_alias("training-performance", "champion").version == version.version
    assert version.run_id == run.info.run_id
    assert version.tags["commit"] == COMMIT
    assert version.tags["gate"] == "passed"
    assert version.tags["gate.against"] == "main"
    assert version.tags["gate.base_commit"] == "b" * 40
    assert version.tags["verdict"] == "pays"
    assert version.tags["champion.gain"].endswith(" the throughput")
    for run_ in (run, parent):
        assert f"/runs/{run_.info.run_id})" in str(version.description)
    assert [file.path for file in client.list_artifacts(parent.info.run_id, "gate")] == [
        "gate/gate.json",
        "gate/gate.md",
    ]
    assert agrees(root, config)

    for variant in VARIANTS:  # trained again, ddp no longer pays: the baseline becomes champion
        write_result(root, variant, speed=21_000)
    write_comparison(root, comparison_of(root, rejected=12))
    tracking.publish(config, root)
    tracking.promote(config, COMMIT, root)
    champion_now = client.get_model_version_by_alias("training-performance", "champion")
    assert (int(champion_now.version), champion_now.tags["variant"]) == (2, "baseline")


# what others may have written into the cache that results come from, or into the store


def forge(file: Path, **changes: Any) -> None:
    """Change values in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def kept(root: Path) -> str:
    """Return all text in the store's artifacts."""
    files = (file for file in (root / "mlartifacts").rglob("*") if file.is_file())
    return "".join(file.read_text(errors="replace") for file in files)


def test_a_result_imports_and_calls_nothing(root: Path) -> None:
    write_models(root)
    (root / "hubconf.py").write_text(f"open({str(root / 'ran')!r}, 'w').close()\ndef net(**_): ...\n")
    options = {"repo_or_dir": str(root), "source": "local", "model": "net"}
    asked = json.loads((root / "results/baseline.json").read_text())["config"]
    forged = asked["train"] | {"model": "torch.hub:load", "model_options": options}
    forge(root / "results/baseline.json", config=asked | {"train": forged})
    with pytest.raises(
        ResultError, match=r'train\.model is "torch\.hub:load" in the result and "small_cnn" in params\.yaml'
    ):
        tracking.publish(config_of(models=True), root)
    assert not (root / "ran").exists()
    assert runs_of(root) == []


@pytest.mark.parametrize("name", ["../../x", "{root}/../x"])
def test_a_result_names_no_file_to_upload(root: Path, name: str) -> None:
    (root.parent / "x.json").write_text('{"auths": "secret"}')
    forge(root / "results/ddp.json", variant=name.format(root=root))
    with pytest.raises(ResultError, match=r"ddp\.json is not a file"):
        tracking.publish(config_of(), root)
    assert "secret" not in kept(root)


def test_no_link_brings_out_a_file_of_this_machine(root: Path) -> None:
    secret, history = root.parent / "config.json", root / "results/ddp/history.csv"
    results.write_history([row.model_copy(update={"epoch": 0.123456}) for row in results.read_history(history)], secret)
    write_result(root, "ddp", history_sha256=file_sha256(secret))
    history.unlink()
    history.symlink_to(secret)
    with pytest.raises(ResultError, match=r"history\.csv is a link to .*/config\.json, which is not in DVC's cache"):
        tracking.publish(config_of(), root)
    assert "0.123456" not in kept(root)


def test_the_links_of_dvc_are_followed(root: Path) -> None:
    """DVC makes such links if its setting ``cache.type`` is symlink."""
    history = root / "results/ddp/history.csv"
    cached = root.parent / "cache/files/md5/0a/1b2c3d4e5f60718293a4b5c6d7e8f9"
    cached.parent.mkdir(parents=True)
    history.rename(cached)
    history.symlink_to(cached)
    tracking.publish(config_of(), root)
    run = family(root)[1]["ddp-seed0"]
    assert Path(run.info.artifact_uri, "history.csv").read_bytes() == cached.read_bytes()


def test_the_record_of_another_variant_is_refused(root: Path) -> None:
    profiled = config_of(profile={"variants": ["ddp"]})
    write_text(root / "profiles/ddp/profile.json", json.dumps({"variant": "baseline", "findings": []}))
    with pytest.raises(ResultError, match=r"profile\.json is not of variant 'ddp'"):
        tracking.publish(profiled, root)
    write_text(root / "inference/ddp.json", json.dumps({"variant": "baseline", "forms": []}))
    write_text(root / "inference/ddp.md", "")
    with pytest.raises(ResultError, match=r"inference/ddp\.json is not of variant 'ddp'"):
        tracking.publish(config_of(infer={"variants": ["ddp"]}), root)


def test_a_comparison_of_an_older_version_is_not_read(root: Path) -> None:
    write_comparison(root)
    forge(root / "reports/comparison.json", schema=1)
    with pytest.raises(ResultError, match=r"comparison\.json is not .* this version can read; run `dvc repro compare`"):
        wanted_of(root)


def test_a_comparison_names_no_file_to_read(root: Path) -> None:
    comparison = write_comparison(root)
    assert wanted_of(root).comparison == comparison
    shutil.copy(root / "results/ddp.json", root / "x.json")
    write_gate(root)
    for forged in (
        with_changes(comparison, "ddp", variant="../x"),
        comparison.model_copy(update={"baseline": "../x", "champion": None}),
    ):
        write_comparison(root, forged)
        with pytest.raises(ResultError, match=r"comparison\.json is not .* this version can read"):
            tracking.promote(config_of(models=True), COMMIT, root)
    write_comparison(root, comparison.model_copy(update={"variants": ()}))  # still names a champion
    assert tracking.promote(config_of(models=True), COMMIT, root) == promoting.TOO_FEW
    write_comparison(root, comparison.model_copy(update={"baseline": "other", "champion": None}))
    with pytest.raises(tracking.PromotionError, match="names 'other', which is not under variants"):
        tracking.promote(config_of(models=True), COMMIT, root)


def test_other_weights_than_the_result_names_are_not_logged(root: Path) -> None:
    write_models(root)
    shutil.copy(root / "models/baseline/seed-1.pt", root / "models/baseline/seed-0.pt")
    with pytest.raises(ResultError, match=r"models/baseline/seed-0\.pt does not hold the weights .* expected .* found"):
        tracking.publish(config_of(models=True), root)
    [experiment] = {run.info.experiment_id for run in runs_of(root)}
    assert not client_of(root).search_logged_models([experiment])
    assert not any(COMPLETE in run.data.tags for run in runs_of(root))


@pytest.mark.usefixtures("one_session_is_enough")
def test_the_champion_has_the_weights_that_are_here(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_models(root)
    write_comparison(root)
    write_gate(root)
    config, client = config_of(models=True), client_of(root)
    with monkeypatch.context() as patched:  # an export takes long, and one is enough
        patched.setattr(logged_models, "log", lambda *_: SimpleNamespace(model_uri="not logged here"))
        tracking.publish(config, root)
    run = family(root)[1]["ddp-seed0"]
    planted = client.create_logged_model(run.info.experiment_id, source_run_id=run.info.run_id)
    (root / "MLmodel").write_text("flavors: {python_function: {loader_module: planted}}")
    client.log_model_artifacts(planted.model_id, str(root / "MLmodel"))
    client.set_tag(run.info.run_id, "model", planted.model_uri)

    tracking.promote(config, COMMIT, root)
    version = client.get_model_version_by_alias("training-performance", "champion")
    assert version.source != planted.artifact_location
    assert (version.tags["model_sha256"], version.model_id != planted.model_id) == (run.data.tags["model_sha256"], True)
    state = torch.export.load(Path(str(version.source), "data/model.pt2")).state_dict
    weights = torch.load(root / "models/ddp/seed-0.pt", weights_only=True)
    assert all(torch.equal(state[f"model.{key}"], tensor) for key, tensor in weights.items())


# where a run came from, and where to look at it


def test_a_run_says_where_it_came_from(root: Path) -> None:
    software = ENVIRONMENT["software"] | {"image": "registry.example.org/pipeline:1"}
    relied_on = {"variants": {"ddp": {"compiler": "g++ 14.1.0"}}, "forms": {}}
    content = ENVIRONMENT | {"software": software, "relied_on": relied_on}
    content["hash"] = hash_of(content, "variants")
    (root / "environment.json").write_text(json.dumps(content))
    for variant in VARIANTS:
        write_result(root, variant, environment=hash_of(content, "variants", variant))
    locked = "schema: '2.0'\nstages:\n  compare:\n    cmd: python -m pipeline compare\n"
    (root / "dvc.lock").write_text(locked)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(root), *identity, "commit", "--quiet", "--allow-empty", "-m", "state"], check=True)
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    tracking.publish(config_of(), root)
    parent, children = family(root)
    shared = {
        "mlflow.source.git.commit": commit.stdout.strip(),
        "image": "registry.example.org/pipeline:1",
        "device": "Example CPU @ 2.0 GHz",
        "environment": content["hash"],
        "dvc_lock_sha256": hashlib.sha256(locked.encode()).hexdigest(),
    }
    assert shared.items() <= parent.data.tags.items()
    own = {"dvc_stage": "train@ddp", "world_size": "1", "seed": "1"}
    assert (shared | own).items() <= children["ddp-seed1"].data.tags.items()


def test_the_lock_s_hash_ignores_the_stage_publish(tmp_path: Path) -> None:
    lock = tmp_path / "dvc.lock"
    before, entry, behind = "schema: '2.0'\nstages:\n  compare:\n    cmd: a\n", "  publish:\n    cmd: {}\n", "  z:\n"
    hashes = []
    for text in (before, before + entry.format("b"), before + entry.format("c"), before + entry.format("c") + behind):
        lock.write_text(text)
        hashes.append(contents.lock_sha256(lock))
    assert hashes[0] == hashes[1] == hashes[2] == hashlib.sha256(before.encode()).hexdigest()
    assert hashes[3] == hashlib.sha256((before + behind).encode()).hexdigest()


def test_a_run_s_tags_have_a_person_s_units(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_comparison(root)
    for command in (f"mlflow ui --backend-store-uri sqlite:///{root / 'mlflow.db'}", "make ui"):
        tracking.publish(config_of(), root)
        assert capsys.readouterr().out.endswith(
            f"/#/experiments/1/runs?workflowType=machine_learning (after `{command}`)\n"
        )
        (root / "pipeline").mkdir(exist_ok=True)  # as in a checkout, which has a Makefile
    _, children = family(root)
    tags = children["ddp-seed0"].data.tags
    assert tags["verdict"] == "pays"
    assert re.fullmatch(r"[\d,]{6} samples/s, .1\.\d+ \(1\.\d+ to 1\.\d+\)", tags["speed"])
    assert re.match(r"\d+ MiB, .1\.0", tags["memory"])
    assert re.fullmatch(r"\d\d\.\d\d%, [+-]\d\.\d\d points", tags["accuracy"])
    assert re.fullmatch(r"[\d,]+ samples/s", children["baseline-seed0"].data.tags["speed"])
    write_comparison(root, comparison_of(root, rejected=12))
    tracking.publish(config_of(), root)
    _, children = family(root)
    assert children["ddp-seed1"].data.tags["speed"] == "unknown"


@pytest.mark.parametrize(
    ("uri", "page"),
    [
        ("sqlite:////a/mlflow.db", "http://127.0.0.1:5000"),
        ("http://mlflow:5000/", "http://mlflow:5000"),
        ("https://me:secret@example.org/mlflow", "https://example.org/mlflow"),
    ],
)
def test_a_link_holds_no_password(uri: str, page: str) -> None:
    assert stores.page(uri) == page


@pytest.mark.slow
def test_the_searches_of_the_docs_find_what_they_say(tmp_path: Path, empty_database: Path) -> None:
    measured = [result.model_copy(update={"device": "AMD EPYC 7B13"}) for result in make_results()]
    for result in measured:
        results.write(result, results.result_file(result.variant, tmp_path / "results"))
    write_text(tmp_path / "reports/comparison.json", make_comparison(measured).to_json())
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    tracking.publish(make_params(measured), tmp_path)

    [block] = [block for block in blocks(PROJECT / "docs" / "mlflow.md", "python") if "search_runs" in block]
    preparation = block.partition("mlflow.search_runs")[0].replace("sqlite:///mlflow.db", stores.address(tmp_path))
    searches = [line for line in block.splitlines() if line.startswith("mlflow.search_runs")]
    program = f"{preparation}\nfound = [{', '.join(searches)}]\n"
    program += "import json\nprint(json.dumps([list(each['tags.mlflow.runName']) for each in found]))"
    names_of = [set(names) for names in json.loads(printed(program, cwd=tmp_path))]
    everything = {f"{variant}-seed{seed}" for variant in ("baseline", "ddp", "memory") for seed in (0, 1, 2)}
    comparison = {name for names in names_of for name in names if name.startswith("comparison-")}
    assert names_of == [
        {"ddp-seed0", "ddp-seed1", "ddp-seed2"},
        {"memory-seed0"},
        everything,
        everything | comparison,
        {"memory-seed0", "memory-seed1", "memory-seed2"},
    ]
