"""What ``tracking.health`` says of a store: a server's, or the embedded one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from pipeline import tracking
from tests.servers import hang, serving


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own settings are not what the tests are about."""
    names = [f"MLFLOW_TRACKING_{name}" for name in ("URI", "USERNAME", "PASSWORD", "TOKEN")]
    for name in (*names, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


MISSING_EXPERIMENT = '{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "..."}'


def health(monkeypatch: pytest.MonkeyPatch, uri: str, seconds: float = 20) -> tracking.Health:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return tracking.health(Path(), "training", seconds)


@pytest.mark.parametrize("reply", [(200, '{"experiment": {}}'), (404, MISSING_EXPERIMENT)])
def test_a_server_that_is_well(reply: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: reply) as uri:
        assert health(monkeypatch, uri) == (True, f"{uri} answers", "")


def test_a_server_whose_files_are_where_this_machine_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "boto3" else object())
    with serving(lambda _: (200, '{"experiment": {"artifact_location": "s3://bucket/1"}}')) as uri:
        found = health(monkeypatch, uri)
        monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
        assert health(monkeypatch, uri).well
    assert not found.well
    assert found.found.endswith("runs keep their files in s3://bucket/1, for which boto3 is missing")
    assert found.remedy.startswith("python -m pip install boto3")


@pytest.mark.parametrize(
    ("reply", "found", "remedy"),
    [
        ((403, "Invalid Host header - possible DNS rebinding attack detected"), "rejects the host name", "add to MLFL"),
        ((401, "who are you"), "wants other credentials (401)", "export MLFLOW_TRACKING_USERNAME"),
        ((500, MISSING_EXPERIMENT), "the server fails (500)", "read the server's log"),
        ((200, "<html>welcome</html>"), "what answers (200) is not MLflow", "set MLFLOW_TRACKING_URI"),
    ],
)
def test_a_server_that_is_not(reply: tuple[int, str], found: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: reply) as uri:
        seen = health(monkeypatch, uri)
    assert not seen.well
    assert seen.found.startswith(uri)
    assert found in seen.found
    assert seen.remedy.startswith(remedy)
    if reply[0] == 403:
        name = uri.removeprefix("http://")
        assert seen.remedy.endswith(f": {name},127.0.0.1"), "with and without the port"


def test_a_server_that_hangs_or_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(hang) as uri:
        hanging = health(monkeypatch, uri, seconds=0.3)
    assert (hanging.well, hanging.found) == (False, f"{uri}: no answer within 0.3 s")
    assert "unset MLFLOW_TRACKING_URI" in hanging.remedy
    assert "in a container, this name is the container itself" in hanging.remedy
    down = health(monkeypatch, "http://127.0.0.1:1")
    assert down.well is False
    assert "cannot be reached" in down.found


def test_credentials_are_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def reply(request: BaseHTTPRequestHandler) -> tuple[int, str]:
        seen.append(request.headers["Authorization"])
        return 500, ""

    with serving(reply) as uri:
        found = health(monkeypatch, uri.replace("://", "://me:secret@"))
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc")
        health(monkeypatch, uri)
        queried = health(monkeypatch, uri.replace("://", "://secret@") + "?token=secret")
    assert seen[:2] == ["Basic bWU6c2VjcmV0", "Bearer abc"]
    assert "://***@" in found.found
    assert "secret" not in f"{found} {queried}"


def test_the_embedded_store(tmp_path: Path) -> None:
    first = tracking.health(tmp_path, "training", 1)
    assert first.well
    assert first.found == "the embedded store mlflow.db; the first training or publish makes it"
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("CREATE TABLE experiments (name, artifact_location)")
        database.execute("INSERT INTO experiments VALUES ('training', '/home/me/checkout/mlartifacts')")
        database.commit()
    moved = tracking.health(tmp_path, "training", 1)
    assert not moved.well
    assert moved.found.endswith("was made in another directory: its artifacts are in /home/me/checkout/mlartifacts")
    assert moved.remedy.startswith("rm -r mlflow.db mlartifacts; python -m pipeline publish")
    (tmp_path / "mlflow.db").write_text("no database", encoding="utf-8")
    assert "cannot be read" in tracking.health(tmp_path, "training", 1).found


def test_a_store_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = health(monkeypatch, "postgresql://me:secret@db/mlflow")
    assert found.well is None
    assert "secret" not in found.found
