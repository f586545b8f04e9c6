"""The services of compose.yaml in Docker: a training that logs to them while each is killed, volumes, backups."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import requests
import torch
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from pipeline import environment, files, results
from pipeline.environment import stages
from pipeline.tracking import stores
from pipeline.tracking.comparisons import LIVE, PARENT
from tests.conftest import ROOT, Clone
from tests.factories import known
from tests.pages import blocks
from tests.servers import free_port
from tests.test_gate import written_gate
from tests.workflows.runner import SHORT

pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore"),  # warnings of MLflow
]

PASSWORD = "another-p@ss/word:2"
SECRETS = {
    "POSTGRES_PASSWORD": "p@ss/word:1", "S3_ROOT_KEY": "a-root-key", "S3_SECRET_KEY": "a-secret-key",
    "MLFLOW_PASSWORD": PASSWORD, "MLFLOW_SECRET_KEY": "another-secret-key",
}  # fmt: skip
PARAMS: dict[str, Any] = SHORT | {
    "train.device": "cpu",
    "train.seeds": [0, 1],
    "train.epochs": 40,  # long enough to kill and restart each service
    "train.learning_rate": 0.05,
    "variants.ddp": None,
    "variants.memory.precision": "fp32",  # many CPUs only emulate bf16
}
VARIANTS = ("baseline", "memory")
EXPERIMENT = "training-performance"
ROWS = {results.history_file: "history/train_loss", results.system_file: "system/cpu_utilization_percentage"}
"""A file of a variant's rows -> a metric that has a point for each row."""
PUBLISH = ("python", "-m", "pipeline", "publish")
RUN = ("run", "--rm", "--no-deps", "--no-TTY", "pipeline-cpu")


class Services:
    """The services of compose.yaml, under a project name of their own, for the checkout in whose folder Compose runs:
    the pipeline's containers mount it. `docker/check compose` sets COMPOSE_FILE, and the image as SERVICES_IMAGE.
    """

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.uri = f"http://127.0.0.1:{port}"
        shutil.copy(ROOT / "compose.yaml", folder)
        shutil.copytree(ROOT / "docker", folder / "docker")
        self._folder = folder
        self._environment = os.environ | SECRETS | {
            "COMPOSE_PROJECT_NAME": f"services-{os.getpid()}",
            "IMAGE": os.environ["SERVICES_IMAGE"],
            "MLFLOW_PORT": str(port),
            "MLFLOW_NAME": "mlflow.example.org",
            "PIPELINE_USER": f"{os.getuid()}:{os.getgid()}",
        }  # fmt: skip

    def start(self, *names: str) -> None:
        """Start these services, or all, and wait until they are healthy."""
        self("up", "--detach", "--wait", "--no-build", *names)

    def end(self) -> None:
        """Remove the services, their volumes, and containers of the pipeline that a failed test left."""
        left = 'docker ps --quiet --filter label=com.docker.compose.project="$COMPOSE_PROJECT_NAME"'
        self.shell(f"{left} | xargs --no-run-if-empty docker rm --force")
        self("down", "--volumes")

    def background(self, checkout: Path, log: Path, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the pipeline's container, on ``checkout``."""
        with log.open("w") as file:
            return subprocess.Popen(
                ["docker", "compose", *RUN, *command], cwd=checkout, env=self._environment, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def inside(self, checkout: Path, *command: str, code: int = 0) -> str:
        """Run a command in the pipeline's container, on ``checkout``; return what it printed."""
        return self(*RUN, *command, folder=checkout, code=code)

    def shell(self, script: str) -> None:
        """Run a script of the documentation in the folder of compose.yaml."""
        subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=self._folder, env=self._environment, check=True)

    def __call__(self, *arguments: str, folder: Path | None = None, code: int = 0) -> str:
        command, where = ["docker", "compose", *arguments], folder or self._folder
        done = subprocess.run(command, cwd=where, env=self._environment, capture_output=True, text=True)
        assert done.returncode == code, f"docker compose {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    started = Services(tmp_path_factory.mktemp("services"))
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
    known = {"URI": services.uri, "USERNAME": "admin", "PASSWORD": PASSWORD}
    variables = stores.DEFAULTS | {f"MLFLOW_TRACKING_{name}": value for name, value in known.items()}
    for name, value in (variables | {"MLFLOW_HTTP_REQUEST_TIMEOUT": "120"}).items():  # a busy machine is slow
        monkeypatch.setenv(name, value)
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
    experiment = known(client.get_experiment_by_name(EXPERIMENT))
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
        for file_of, metric in ROWS.items():
            with file_of(variant, checkout.path / "results").open(newline="") as rows:
                steps = Counter(row["seed"] for row in csv.DictReader(rows))[seed]
            points = client.get_metric_history(run.info.run_id, metric)
            assert len(points) == len({point.step for point in points}) == steps, (run.info.run_name, metric)
        assert {file.path for file in client.list_artifacts(run.info.run_id)} == {f"{variant}.json", "history.csv"}
        weights.add(run.data.tags["model"])
    assert len(weights) == len(children)

    # The artifacts are in the object store, seen with the rights of MLflow's server. No client knows its address.
    listing = """if True:
        import os, boto3
        store = boto3.resource("s3", endpoint_url=os.environ["MLFLOW_S3_ENDPOINT_URL"])
        print(*(item.key for item in store.Bucket("mlflow").objects.all()))"""
    objects = services("exec", "--no-TTY", "mlflow", "python", "-c", listing)
    for run in children:
        assert f"{run.data.tags['model'].removeprefix('models:/')}/artifacts/MLmodel" in objects
        assert f"{run.info.run_id}/artifacts/history.csv" in objects
    assert f"{parent.info.run_id}/artifacts/comparison.html" in objects
    assert not {"AWS_ACCESS_KEY_ID", "MLFLOW_S3_ENDPOINT_URL"} & os.environ.keys()

    images = np.load(checkout.path / "data/prepared/test_inputs.npy")
    labels = np.load(checkout.path / "data/prepared/test_targets.npy")
    [run] = [run for run in children if run.info.run_name == "baseline-seed0"]
    model = run.data.tags["model"]
    logits = mlflow.pytorch.load_model(model)(torch.from_numpy(images)).detach().numpy()
    for scores in (logits, mlflow.pyfunc.load_model(model).predict(images)):
        assert (scores.argmax(axis=1) == labels).sum() == run.data.metrics["test_correct"]


def test_only_known_host_names_are_let_in(services: Services) -> None:
    def status(host: str, password: str = PASSWORD, **more: str) -> int:
        search = f"{services.uri}/api/2.0/mlflow/experiments/search"
        headers = {"Host": host, **more}
        asked = requests.post(search, json={"max_results": 1}, headers=headers, auth=("admin", password), timeout=30)
        return asked.status_code

    known = ("mlflow:5000", "mlflow", "localhost:5000", "127.0.0.1:8080", "localhost", "mlflow.example.org")
    assert {host: status(host) for host in known} == dict.fromkeys(known, 200)
    others = ("example.org", "example.org:5000", "evil.example.org")
    assert {host: status(host) for host in others} == dict.fromkeys(others, 403)
    assert [status("localhost", word) for word in ("", "password1234", SECRETS["MLFLOW_SECRET_KEY"])] == [401] * 3
    assert status("mlflow.example.org", Origin="https://mlflow.example.org") == 200
    assert status("mlflow.example.org", Origin="https://evil.example.org") == 403


def test_a_client_reaches_neither_database_nor_objects(services: Services, checkout: Clone) -> None:
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
    services.inside(checkout.path, "python", "-c", reach, "mlflow", "5000")
    for name, port in (("postgres", "5432"), ("s3", "7070")):
        address = services("exec", "--no-TTY", "mlflow", "getent", "hosts", name).split()[0]
        assert services("exec", "--no-TTY", "mlflow", "python", "-c", reach, address, port) == ""
        for host in (name, address):
            output = services.inside(checkout.path, "python", "-c", reach, host, port, code=1)
            assert "Name or service not known" in output or "name resolution" in output or "time" in output, output


def test_a_training_survives_the_kill_of_each_service(
    checkout: Clone, services: Services, client: MlflowClient, tmp_path: Path
) -> None:
    log = tmp_path / "output"

    def rows() -> int:
        histories = checkout.path.glob("results/*/history.csv")
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in histories)

    training = services.background(checkout.path, log, "dvc", "repro")
    started = {LIVE, "history/train_loss"}
    wait_until(lambda: any(started < {*run.data.tags, *run.data.metrics} for run in runs_of(client)), training, log)
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
def test_publish_catches_up_after_a_kill(
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
    commit = checkout.run("git", "rev-parse", "HEAD").strip()
    measured = json.loads((checkout.path / "results/baseline.json").read_text(encoding="utf-8"))
    content = environment.read(checkout.path / environment.ENVIRONMENT_FILE)
    gate = written_gate(*VARIANTS) | {"dataset": measured["dataset"]}
    measured_in = environment.hash_of(content, "variants", *VARIANTS)
    gate["head"] |= {"commit": commit, "environment": measured_in, "made_of": stages.made_of(content)}
    files.write_text(checkout.path / "reports/gate.json", json.dumps(gate))
    promoted = services.inside(checkout.path, "python", "-m", "pipeline", "promote")
    assert f"its champion: http://mlflow:5000/#/models/{EXPERIMENT}" in promoted
    champion = client.get_model_version_by_alias(EXPERIMENT, "champion")
    assert champion.tags["commit"] == commit
    images = np.load(checkout.path / "data/prepared/test_inputs.npy")
    assert len(mlflow.pyfunc.load_model(f"models:/{EXPERIMENT}@champion").predict(images)) == len(images)


def test_restart_backup_and_upgrade_lose_nothing(checkout: Clone, services: Services, client: MlflowClient) -> None:
    """The commands are those of the documentation."""
    services("down")
    services.start()
    check_complete(client, services, checkout)
    backup, restore, _ = blocks(ROOT / "docs" / "mlflow.md", "bash")
    services.shell(backup)
    services("down", "--volumes")
    services.shell(restore)
    check_complete(client, services, checkout)


OLDER = ("mlflow==2.22.2", "sqlalchemy==2.0.43")  # this MLflow knows no SQLAlchemy 2.1
MAKE_A_RUN = """if True:
    from mlflow import MlflowClient, __version__
    client = MlflowClient("postgresql+psycopg2://mlflow@postgres:5432/mlflow")
    experiment = client.create_experiment("older", "mlflow-artifacts:/older")
    run = client.create_run(experiment, run_name="a run", tags={"by": __version__})
    for step in range(3):
        client.log_metric(run.info.run_id, "loss", 0.5**step, step=step)
    client.set_terminated(run.info.run_id)"""


def test_an_upgrade_keeps_what_an_older_mlflow_wrote(services: Services, client: MlflowClient, tmp_path: Path) -> None:
    """MLflow 2.22 makes the tables of an empty database, and a run; then the documentation's upgrade."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={tmp_path / 'older'}", *OLDER]
    subprocess.run(pip, check=True)
    services("down", "--volumes")
    services.start("postgres")

    def version() -> str:
        ask = ("psql", "--username=mlflow", "--tuples-only", "--command=SELECT version_num FROM alembic_version")
        return services("exec", "--no-TTY", "postgres", *ask).strip()

    older = ("--no-deps", f"--volume={tmp_path / 'older'}:/older:ro", "--env=PYTHONPATH=/older", "--workdir=/tmp")
    services("run", "--rm", "--no-TTY", *older, "mlflow", "python", "-c", MAKE_A_RUN)
    before = version()
    _, _, upgrade = blocks(ROOT / "docs" / "mlflow.md", "bash")
    services.shell(upgrade)
    assert version() != before
    experiment = known(client.get_experiment_by_name("older"))
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["by"]) == ("a run", "FINISHED", "2.22.2")
    points = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in points] == [(0, 1.0), (1, 0.5), (2, 0.25)]
