"""The pipeline with the services of compose.yaml: PostgreSQL, an object store, and MLflow, killed and restarted."""

from __future__ import annotations

import base64
import csv
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from pipeline import environment, files, results
from pipeline.environment import stages
from pipeline.tracking import stores
from pipeline.tracking.comparisons import LIVE, PARENT
from tests.conftest import Clone
from tests.services.compose import Services
from tests.test_gate import written_gate

pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),  # warnings of MLflow and boto3
]

SECRETS = {
    "POSTGRES_PASSWORD": "p@ss/word:1",
    "S3_ROOT_KEY": "a-root-key",
    "S3_SECRET_KEY": "a-secret-key",
    "MLFLOW_PASSWORD": "another-p@ss/word:2",
    "MLFLOW_SECRET_KEY": "another-secret-key",
}
PARAMS: dict[str, Any] = {
    "fetch.dataset": "digits",
    "train.device": "cpu",
    "train.seeds": [0, 1],
    "train.epochs": 40,  # about ten seconds per seed: long enough to kill and restart a server
    "train.batch_size": 32,
    "train.learning_rate": 0.05,
    "bench.max_rounds": 1,
    "bench.window_seconds": 0.05,
    "variants.ddp": None,
}
VARIANTS = ("baseline", "memory")
EXPERIMENT = "training-performance"


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)  # PostgreSQL's own user must be able to enter it
    started = Services(directory, SECRETS)
    try:
        started.start()
        yield started
    finally:
        started.stop()
        shutil.rmtree(directory)


@pytest.fixture
def client(services: Services, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """A client that knows only the server's address and a password. The experiment is empty."""
    for name, value in (stores.DEFAULTS | services.environment("pipeline")).items():
        monkeypatch.setenv(name, value)
    mlflow.set_tracking_uri(services.uri)
    client = MlflowClient(services.uri)
    if found := client.get_experiment_by_name(EXPERIMENT):
        client.rename_experiment(found.experiment_id, f"earlier {found.experiment_id}")  # frees the name
        client.delete_experiment(found.experiment_id)
    return client


class Training:
    """Runs compose.yaml's command of the pipeline in a clone, in the background."""

    def __init__(self, checkout: Clone, services: Services) -> None:
        self.checkout = checkout
        environment = services.environment("pipeline")
        assert environment["MLFLOW_TRACKING_URI"] == services.uri
        assert {name.partition("_TRACKING_")[0] for name in environment} == {"MLFLOW"}
        self._log = checkout.path.parent / "output"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                services.command("pipeline"),
                cwd=checkout.path,
                env=checkout.environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Wait until ``condition`` is true. Fails if the pipeline ends. The test's time limit ends an endless wait."""
        while not condition():
            assert self._process.poll() is None, f"it ended too early:\n{self._log.read_text()}"
            time.sleep(0.2)

    def output(self) -> str:
        """Wait until the pipeline has ended, assert that it succeeded, and return its output."""
        code = self._process.wait()
        output = self._log.read_text()
        assert code == 0, output
        return output


def runs_of(client: MlflowClient) -> list[Run]:
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return list(client.search_runs([experiment.experiment_id])) if experiment else []


def is_followed(client: MlflowClient) -> bool:
    """Return whether a live run contains some of its history."""
    return any(LIVE in run.data.tags and "history/train_loss" in run.data.metrics for run in runs_of(client))


def check_complete(client: MlflowClient, services: Services, checkout: Clone) -> None:
    """Assert that the store holds each run once, with every row of its history once, and a model that can be loaded."""
    runs = runs_of(client)
    children = [run for run in runs if PARENT in run.data.tags]
    [parent] = [run for run in runs if PARENT not in run.data.tags]
    assert {run.data.tags[PARENT] for run in children} == {parent.info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    expected = [f"{variant}-seed{seed}" for variant in VARIANTS for seed in PARAMS["train.seeds"]]
    assert sorted(run.info.run_name for run in children) == expected

    weights = set()
    for run in children:
        variant, seed = run.data.tags["variant"], run.data.tags["seed"]
        folder = checkout.path / "results"
        for file, metric in ((results.history_file(variant, folder), "history/train_loss"),
                             (results.system_file(variant, folder), "system/cpu_utilization_percentage")):  # fmt: skip
            with file.open(newline="") as rows:
                steps = Counter(row["seed"] for row in csv.DictReader(rows))[seed]
            points = client.get_metric_history(run.info.run_id, metric)
            assert len(points) == len({point.step for point in points}) == steps, (run.info.run_name, metric)
        assert {file.path for file in client.list_artifacts(run.info.run_id)} == {f"{variant}.json", "history.csv"}
        weights.add(run.data.tags["model"])
    assert len(weights) == len(children)

    # The artifacts are in the object store, whose address the clients do not know.
    pages = services.object_store().get_paginator("list_objects_v2").paginate(Bucket="mlflow")
    objects = {item["Key"] for page in pages for item in page.get("Contents", ())}
    for run in children:
        model = run.data.tags["model"].removeprefix("models:/")
        assert any(f"{model}/artifacts/MLmodel" in name for name in objects)
        assert any(f"{run.info.run_id}/artifacts/history.csv" in name for name in objects)
    assert any(f"{parent.info.run_id}/artifacts/comparison.html" in name for name in objects)
    assert not {"AWS_ACCESS_KEY_ID", "MLFLOW_S3_ENDPOINT_URL"} & os.environ.keys()

    images = np.load(checkout.path / "data/prepared/test_inputs.npy")
    labels = np.load(checkout.path / "data/prepared/test_targets.npy")
    [run] = [run for run in children if run.info.run_name == "baseline-seed0"]
    for logits in (
        mlflow.pytorch.load_model(run.data.tags["model"])(torch.from_numpy(images)).detach().numpy(),
        mlflow.pyfunc.load_model(run.data.tags["model"]).predict(images),
    ):
        assert (logits.argmax(axis=1) == labels).sum() == run.data.metrics["test_correct"]


def test_names_that_compose_gives_are_let_in_and_others_are_not(services: Services) -> None:
    def status(host: str, password: str = SECRETS["MLFLOW_PASSWORD"]) -> int:
        request = urllib.request.Request(
            f"{services.uri}/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
        )
        request.add_header("Host", host)
        request.add_header("Authorization", f"Basic {base64.b64encode(f'admin:{password}'.encode()).decode()}")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    inside = services.services["pipeline"]["environment"]["MLFLOW_TRACKING_URI"].removeprefix("http://")
    for host in (inside, "mlflow", "localhost:5000", "127.0.0.1:8080", "localhost"):
        assert status(host) == 200, host
    for host in ("example.org", "example.org:5000", "mlflow.example.org"):
        assert status(host) == 403, host
    for password in ("", "password1234", SECRETS["MLFLOW_SECRET_KEY"]):
        assert status("localhost", password) == 401, password


def test_a_server_that_dies_in_training_and_stays_away_costs_nothing(
    clone: Callable[..., Clone], services: Services, client: MlflowClient
) -> None:
    checkout = clone(PARAMS)
    training = Training(checkout, services)
    training.wait_until(lambda: is_followed(client))
    services.kill("mlflow")
    try:
        output = training.output()
    finally:
        services.start_mlflow()
    assert output.count("warning: MLflow at") >= 2  # from the mirror, and from the stage publish
    assert "nothing is lost" in output
    assert "is up to date" not in output

    published = checkout.run("python", "-m", "pipeline", "publish", MLFLOW_TRACKING_URI=services.uri)
    assert "holds 4 runs" in published
    check_complete(client, services, checkout)
    again = checkout.run("python", "-m", "pipeline", "publish", MLFLOW_TRACKING_URI=services.uri)
    assert "is up to date with 4 runs" in again

    checkout.commit()
    head = {"commit": checkout.run("git", "rev-parse", "HEAD").strip()}
    measured = json.loads((checkout.path / "results/baseline.json").read_text(encoding="utf-8"))
    content = environment.read(checkout.path / environment.ENVIRONMENT_FILE)
    gate = written_gate(*VARIANTS) | {"dataset": measured["dataset"]}
    gate["head"] |= head | {
        "environment": environment.hash_of(content, "variants", *VARIANTS),
        "made_of": stages.made_of(content),
    }
    files.write_text(checkout.path / "reports/gate.json", json.dumps(gate))
    promoted = checkout.run("python", "-m", "pipeline", "promote", MLFLOW_TRACKING_URI=services.uri)
    assert f"its champion: {services.uri}/#/models/{EXPERIMENT}" in promoted
    champion = client.get_model_version_by_alias(EXPERIMENT, "champion")
    assert champion.tags["commit"] == head["commit"]
    images = np.load(checkout.path / "data/prepared/test_inputs.npy")
    assert len(mlflow.pyfunc.load_model(f"models:/{EXPERIMENT}@champion").predict(images)) == len(images)


def test_a_server_that_dies_in_training_and_comes_back_costs_nothing_either(
    clone: Callable[..., Clone], services: Services, client: MlflowClient
) -> None:
    checkout = clone(PARAMS)
    training = Training(checkout, services)
    training.wait_until(lambda: is_followed(client))
    services.kill("mlflow")
    try:
        training.wait_until(lambda: (checkout.path / "results/baseline/history.csv").read_text().count("\n1,") > 2)
    finally:
        services.start_mlflow()
    output = training.output()
    assert "warning: MLflow at" in output
    assert "holds 4 runs" in output
    check_complete(client, services, checkout)
