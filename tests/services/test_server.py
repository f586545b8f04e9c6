"""The services of compose.yaml in Docker: a training that logs to them while each is killed, volumes, backups."""

from __future__ import annotations

import base64
import csv
import json
import os
import subprocess
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
from tests.pages import blocks
from tests.services.compose import ROOT, Services
from tests.test_gate import written_gate

pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),  # warnings of MLflow
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
    "train.epochs": 40,  # long enough to kill and restart each service
    "train.batch_size": 32,
    "train.learning_rate": 0.05,
    "bench.max_rounds": 1,
    "bench.window_seconds": 0.05,
    "variants.ddp": None,
    "variants.memory.precision": "fp32",  # many CPUs only emulate bf16
}
VARIANTS = ("baseline", "memory")
EXPERIMENT = "training-performance"
PUBLISH = ("python", "-m", "pipeline", "publish")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    started = Services(SECRETS, tmp_path_factory.mktemp("services"))
    try:
        started.start()
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A checkout that the pipeline's containers mount. Its job is trained once, by the first test that needs it."""
    return Clone(tmp_path_factory.mktemp("checkout"), PARAMS)


@pytest.fixture
def client(services: Services, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """A client outside of the containers, which knows only the server's address and a password."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", services.uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    for name, value in (stores.DEFAULTS | {"MLFLOW_HTTP_REQUEST_TIMEOUT": "120"}).items():  # a busy machine is slow
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRETS["MLFLOW_PASSWORD"])
    return MlflowClient(services.uri)


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until ``condition`` is true. Fails if the process ends. The test's time limit ends an endless wait."""
    while not condition():
        assert process.poll() is None, f"it ended too early:\n{log.read_text()}"
        time.sleep(0.2)


def runs_of(client: MlflowClient) -> list[Run]:
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return list(client.search_runs([experiment.experiment_id])) if experiment else []


def forget(client: MlflowClient) -> None:
    """Empty the experiment, so that `publish` has everything to do."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment
    client.rename_experiment(experiment.experiment_id, f"earlier {experiment.experiment_id}")  # frees the name
    client.delete_experiment(experiment.experiment_id)


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

    # The artifacts are in the object store, seen with the rights of MLflow's server. No client knows its address.
    listing = "import os, boto3; pages = boto3.client('s3', endpoint_url=os.environ['MLFLOW_S3_ENDPOINT_URL'])" \
        ".get_paginator('list_objects_v2').paginate(Bucket='mlflow'); " \
        "print(*(item['Key'] for page in pages for item in page.get('Contents', ())), sep='\\n')"  # fmt: skip
    objects = services("exec", "--no-TTY", "mlflow", "python", "-c", listing).splitlines()
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
    def status(host: str, password: str = SECRETS["MLFLOW_PASSWORD"], origin: str = "") -> int:
        search = f"{services.uri}/api/2.0/mlflow/experiments/search"
        request = urllib.request.Request(search, json.dumps({"max_results": 1}).encode())
        request.add_header("Content-Type", "application/json")
        request.add_header("Host", host)
        request.add_header("Authorization", f"Basic {base64.b64encode(f'admin:{password}'.encode()).decode()}")
        if origin:
            request.add_header("Origin", origin)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    for host in ("mlflow:5000", "mlflow", "localhost:5000", "127.0.0.1:8080", "localhost", "mlflow.example.org"):
        assert status(host) == 200, host
    for host in ("example.org", "example.org:5000", "evil.example.org"):
        assert status(host) == 403, host
    for password in ("", "password1234", SECRETS["MLFLOW_SECRET_KEY"]):
        assert status("localhost", password) == 401, password
    assert status("mlflow.example.org", origin="https://mlflow.example.org") == 200
    assert status("mlflow.example.org", origin="https://evil.example.org") == 403


def test_a_client_reaches_the_server_and_neither_the_database_nor_the_objects(
    services: Services, checkout: Clone
) -> None:
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
    services.inside(checkout.path, "python", "-c", reach, "mlflow", "5000")
    for name, port in (("postgres", "5432"), ("s3", "7070")):
        identity = services("ps", "--quiet", name).strip()
        found = ["docker", "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", identity]
        address = subprocess.run(found, check=True, capture_output=True, text=True).stdout.strip()
        assert services("exec", "--no-TTY", "mlflow", "python", "-c", reach, address, port) == ""
        for host in (name, address):
            output = services.inside(checkout.path, "python", "-c", reach, host, port, code=1)
            assert "Name or service not known" in output or "name resolution" in output or "time" in output, output


def test_each_service_may_be_killed_in_the_middle_of_a_training(
    checkout: Clone, services: Services, client: MlflowClient, tmp_path: Path
) -> None:
    log = tmp_path / "output"

    def rows() -> int:
        histories = checkout.path.glob("results/*/history.csv")
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in histories)

    training = services.background(checkout.path, log, "dvc", "repro")
    wait_until(lambda: any(LIVE in run.data.tags and "history/train_loss" in run.data.metrics
                           for run in runs_of(client)), training, log)  # fmt: skip
    for name in ("s3", "postgres", "mlflow"):
        before = rows()
        services("kill", name)
        wait_until(lambda: rows() > before + 2, training, log)  # noqa: B023
        services.start()
    assert training.wait() == 0, log.read_text()
    assert "warning: MLflow at" in log.read_text()
    assert "is up to date with 4 runs" in services.inside(checkout.path, *PUBLISH)
    check_complete(client, services, checkout)


@pytest.mark.parametrize("name", ["s3", "postgres", "mlflow"])
def test_each_service_may_be_killed_in_the_middle_of_publish_which_then_catches_up(
    name: str, checkout: Clone, services: Services, client: MlflowClient, tmp_path: Path
) -> None:
    forget(client)
    log = tmp_path / "output"
    publishing = services.background(checkout.path, log, *PUBLISH)
    wait_until(lambda: runs_of(client), publishing, log)
    services("kill", name)
    assert publishing.wait() == 0, log.read_text()
    assert "warning: MLflow at" in log.read_text()
    services.start()
    assert "holds 4 runs" in services.inside(checkout.path, *PUBLISH)
    check_complete(client, services, checkout)


def test_the_champion_is_a_model_of_the_server(checkout: Clone, services: Services, client: MlflowClient) -> None:
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
    promoted = services.inside(checkout.path, "python", "-m", "pipeline", "promote")
    assert f"its champion: http://mlflow:5000/#/models/{EXPERIMENT}" in promoted
    champion = client.get_model_version_by_alias(EXPERIMENT, "champion")
    assert champion.tags["commit"] == head["commit"]
    images = np.load(checkout.path / "data/prepared/test_inputs.npy")
    assert len(mlflow.pyfunc.load_model(f"models:/{EXPERIMENT}@champion").predict(images)) == len(images)


def test_a_restart_a_backup_and_an_upgrade_lose_nothing(
    checkout: Clone, services: Services, client: MlflowClient
) -> None:
    """The commands are those of the documentation."""
    services("down")
    services.start()
    check_complete(client, services, checkout)
    backup, restore, upgrade = blocks(ROOT / "docs" / "mlflow.md", "bash")
    services.shell(backup)
    services("down", "--volumes")
    services.shell(restore)
    check_complete(client, services, checkout)
    services.shell(upgrade)
    check_complete(client, services, checkout)
