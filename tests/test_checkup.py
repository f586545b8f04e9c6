"""What ``tracking.health`` reports about a store: a server's or the embedded one."""

from __future__ import annotations

import importlib.util
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from pipeline import tracking
from pipeline.tracking import stores
from tests.servers import hang, serving

pytestmark = [  # warnings of MLflow's own modules during their import
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove this machine's own settings."""
    names = [f"MLFLOW_TRACKING_{name}" for name in ("URI", "USERNAME", "PASSWORD", "TOKEN")]
    for name in (*names, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (stores.DEFAULTS | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}).items():
        monkeypatch.setenv(name, value)


MISSING_EXPERIMENT = '{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "..."}'


def health(monkeypatch: pytest.MonkeyPatch, uri: str) -> tracking.Health:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return tracking.health(Path(), "training")


@pytest.mark.parametrize("reply", [(200, '{"experiment": {"name": "training"}}'), (404, MISSING_EXPERIMENT)])
def test_a_server_that_is_well(reply: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: reply) as uri:
        assert health(monkeypatch, uri) == (True, f"{uri} answers", "")


def test_a_server_whose_files_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "boto3" else find_spec(name))
    with serving(lambda _: (200, '{"experiment": {"name": "training", "artifact_location": "s3://bucket/1"}}')) as uri:
        problem = health(monkeypatch, uri)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "boto3" or find_spec(name))
        assert health(monkeypatch, uri).well
    assert not problem.well
    assert problem.fact.endswith("runs keep their files in s3://bucket/1, for which boto3 is missing")
    assert problem.remedy.startswith("python -m pip install boto3")


@pytest.mark.parametrize(
    ("reply", "problem", "remedy"),
    [
        ((403, "Invalid Host header - possible DNS rebinding"), "rejects the host name", "on the server"),
        (None, "timed out", "start the server, or unset MLFLOW_TRACKING_URI to use the embedded store; in a container"),
        ((401, "who are you"), "does not accept these credentials (401)", "export MLFLOW_TRACKING_USERNAME"),
        ((500, MISSING_EXPERIMENT), "the server fails (too many 500 error responses)", "read the server's log"),
        ((200, "<html>welcome</html>"), "the server at this address is not MLflow", "set MLFLOW_TRACKING_URI"),
        ((404, "not found"), "the server at this address is not MLflow", "set MLFLOW_TRACKING_URI"),
        ((200, '{"welcome": 1}'), "the server at this address is not MLflow", "set MLFLOW_TRACKING_URI"),
    ],
)
def test_a_server_that_is_not(
    reply: tuple[int, str] | None, problem: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with serving(lambda request: reply or hang(request)) as uri:
        seen = health(monkeypatch, uri)
    assert not seen.well
    assert seen.fact.startswith(f"{uri}: ")
    assert problem in seen.fact
    assert seen.remedy.startswith(remedy)
    if reply and reply[0] == 403:
        name = uri.removeprefix("http://")
        assert seen.remedy.endswith(f": {name},127.0.0.1"), "with and without the port"


def test_a_server_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = health(monkeypatch, "http://127.0.0.1:1")
    assert problem.well is False
    assert "Connection refused" in problem.fact


def test_credentials_are_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def reply(request: BaseHTTPRequestHandler) -> tuple[int, str]:
        seen.append(request.headers["Authorization"])
        return 500, ""

    with serving(reply) as uri:
        problem = health(monkeypatch, uri.replace("://", "://me:secret@"))
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc")
        health(monkeypatch, uri)
        queried = health(monkeypatch, uri.replace("://", "://secret@") + "?token=secret")
    assert seen[:2] == ["Basic bWU6c2VjcmV0", "Bearer abc"]
    assert "://***@" in problem.fact
    assert "secret" not in f"{problem} {queried}"


def test_a_store_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = health(monkeypatch, "postgresql://me:secret@db/mlflow")
    assert problem.well is None
    assert "secret" not in problem.fact


# the embedded store


@pytest.fixture
def root(tmp_path: Path, empty_database: Path) -> Path:
    """A checkout with nothing but an empty store."""
    root = tmp_path / "a checkout"
    root.mkdir()
    shutil.copy(empty_database, root / "mlflow.db")
    return root


def health_of(root: Path) -> tracking.Health:
    """Return the store's health; assert that the check changes nothing in the store."""
    before = (root / "mlflow.db").read_bytes()
    problem = tracking.health(root, "training")
    assert (root / "mlflow.db").read_bytes() == before
    assert not Path("file:").exists(), "MLflow took the address for a path"
    return problem


def test_a_store_that_is_well(root: Path) -> None:
    assert health_of(root) == (True, "the embedded store mlflow.db", "")
    assert stores.open_store(stores.address(root), root, "training")
    assert health_of(root).well
    assert tracking.health(root.parent, "any").fact.endswith("mlflow.db, which the first training or publish creates")


def test_a_store_of_another_directory(root: Path) -> None:
    elsewhere = "/home/me/checkout/mlartifacts"
    MlflowClient(stores.address(root)).create_experiment("training", artifact_location=elsewhere)
    problem = health_of(root)
    assert not problem.well
    assert problem.fact.endswith(f"was made in another directory: its artifacts are in {elsewhere}")
    assert problem.remedy.startswith("move mlflow.db and mlartifacts away and run: python -m pipeline publish")


def test_a_store_that_is_locked_is_not_called_broken(root: Path) -> None:
    with closing(sqlite3.connect(root / "mlflow.db", isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        assert health_of(root) == (None, "the embedded store mlflow.db is in use: another process has locked it", "")


def run_script(database: Path, script: str) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(script)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: run_script(path, "UPDATE alembic_version SET version_num = 'old'"),
        # MLflow would migrate this store without being asked.
        lambda path: run_script(path, "DROP TABLE logged_model_tags; DROP TABLE alembic_version"),
        lambda path: path.write_bytes(b"no database" * 1000),
    ],
)
def test_a_store_that_cannot_be_read_is_not_touched(root: Path, damage: Callable[[Path], object]) -> None:
    damage(root / "mlflow.db")
    problem = health_of(root)
    assert not problem.well
    assert "cannot be read by this version of MLflow" in problem.fact
    assert f"mlflow db upgrade sqlite:///{root / 'mlflow.db'}" in problem.remedy
    assert "move mlflow.db away and run: python -m pipeline publish" in problem.remedy


def test_a_client_that_cannot_be_imported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    problem = health_of(root)
    assert not problem.well
    assert "MLflow cannot be imported" in problem.fact
    assert "requirements.lock" in problem.remedy
