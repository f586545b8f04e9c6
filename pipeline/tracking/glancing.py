"""A look at a store without importing MLflow, which takes seconds: at SQLite's tables, or over a server's REST."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import sqlite3
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.tracking.comparisons import COMPARISON, LIVE
from pipeline.tracking.reconciliation import StoredRun
from pipeline.tracking.stores import DEFAULTS, PAGE, SQLITE, Unreachable, checkout, conditions, is_intact, is_misplaced


class Seen(NamedTuple):
    """What a look at a store finds."""

    experiment_id: str
    runs: list[StoredRun]


def glance(uri: str, root: Path, experiment: str, comparison: str) -> Seen | None:
    """The experiment, and what ``Store.runs`` says of it; None whenever anything is not as expected.

    Raises Unreachable if a server does not answer.
    """
    try:
        if uri.startswith(SQLITE):
            return _glance_sqlite(Path(uri.removeprefix(SQLITE)), uri, root, experiment, comparison)
        if uri.startswith(("http://", "https://")):
            return _glance_server(uri, root, experiment, comparison)
    except (sqlite3.Error, urllib.error.HTTPError, http.client.HTTPException, KeyError, TypeError, ValueError):
        return None
    except OSError as error:  # URLError and time-outs are OSErrors
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ConnectionError | TimeoutError | socket.gaierror):
            raise Unreachable(f"no answer ({reason}).") from error
    return None


@contextmanager
def read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """An embedded store's tables, while the block runs."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1)) as database:
        yield database


def _glance_sqlite(path: Path, uri: str, root: Path, experiment: str, comparison: str) -> Seen | None:
    """Ask MLflow's tables, read-only. They are no interface, so a test compares the answer with MLflow's own."""
    if not path.exists():
        return None
    with read_only(path) as database:
        experiments = database.execute(
            "SELECT experiment_id, artifact_location FROM experiments WHERE name = ? AND lifecycle_stage = 'active'",
            (experiment,),
        ).fetchall()
        if len(experiments) != 1 or is_misplaced(uri, root, experiments[0][1]):
            return None
        rows = database.execute(
            "SELECT runs.run_uuid, status, start_time, artifact_uri, tags.key, tags.value FROM runs "
            "JOIN tags ON tags.run_uuid = runs.run_uuid "
            "WHERE experiment_id = ? AND lifecycle_stage = 'active' AND runs.run_uuid IN "
            "(SELECT run_uuid FROM tags WHERE (key = ? AND value = ?) OR (key = ? AND value = ?))",
            (experiments[0][0], COMPARISON, comparison, LIVE, checkout(root)),
        ).fetchall()
    tags: dict[tuple[str, str, int, str], dict[str, str]] = {}
    for run_id, status, start_ms, artifacts, key, value in rows:
        tags.setdefault((run_id, status, start_ms, artifacts), {})[key] = value
    runs = [
        StoredRun(run_id, status, start_ms, found, is_intact(uri, artifacts))
        for (run_id, status, start_ms, artifacts), found in tags.items()
    ]
    return Seen(str(experiments[0][0]), runs)


def _glance_server(uri: str, root: Path, experiment: str, comparison: str) -> Seen:
    timeout = float(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", DEFAULTS["MLFLOW_HTTP_REQUEST_TIMEOUT"]))

    def answer_to(asked: urllib.request.Request) -> Any:
        with urllib.request.urlopen(asked, timeout=timeout) as response:
            return json.load(response)

    experiment_id = answer_to(experiment_request(uri, experiment))["experiment"]["experiment_id"]
    found: dict[str, StoredRun] = {}
    for condition in conditions(root, comparison):
        body = {"experiment_ids": [experiment_id], "filter": condition, "max_results": PAGE}
        while True:
            answer = answer_to(request(uri, "runs/search", body))
            for run in answer.get("runs", ()):
                info, tags = run["info"], {tag["key"]: tag.get("value", "") for tag in run["data"].get("tags", ())}
                found[info["run_id"]] = StoredRun(info["run_id"], info["status"], int(info["start_time"]), tags)
            if not answer.get("next_page_token"):
                break
            body["page_token"] = answer["next_page_token"]
    return Seen(experiment_id, list(found.values()))


def request(uri: str, path: str, body: Mapping[str, Any] | None = None) -> urllib.request.Request:
    """To the REST interface of the server at ``uri``, with the credentials that MLflow's own client sends: those of the
    address, which urllib would take for a part of the host's name, else those of MLFLOW_TRACKING_*."""
    parts = urllib.parse.urlsplit(uri)
    bare = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    made = urllib.request.Request(
        f"{bare.rstrip('/')}/api/2.0/mlflow/{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    if authorization := _authorization(parts):
        made.add_header("Authorization", authorization)
    return made


def experiment_request(uri: str, name: str) -> urllib.request.Request:
    """For the experiment of that name."""
    return request(uri, f"experiments/get-by-name?experiment_name={urllib.parse.quote(name, safe='')}")


def _authorization(address: urllib.parse.SplitResult) -> str | None:
    user = urllib.parse.unquote(address.username or "") or os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = urllib.parse.unquote(address.password or "") or os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if user and password:
        return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return f"Bearer {token}" if token else None
