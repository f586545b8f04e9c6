"""Where MLflow keeps its runs: the address, a look without importing MLflow, and the opened store."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import logging
import os
import socket
import sqlite3
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.tracking.comparisons import COMPARISON, LIVE
from pipeline.tracking.contents import Point, batches
from pipeline.tracking.reconciliation import StoredRun

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

ARTIFACTS = "mlartifacts"
DATABASE = "mlflow.db"
PAGE = 1000
METRICS_PER_BATCH = 1000
PARAMS_PER_BATCH = 100
SQLITE = "sqlite:///"

DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""A server that is down or hangs costs seconds, not MLflow's minutes; a user's own setting wins. Nothing is reported
to MLflow's makers, and no address printed for every run, unless the user asks for it."""


EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # else MLflow's page opens as one for language models
    "mlflow.note.content": (
        "Each `comparison-...` run compares all variants of one job; its child runs hold one variant and seed each. "
        "Result files are the truth: `python -m pipeline publish` rebuilds these runs from them."
    ),
}


class Unreachable(Exception):
    """The server did not answer. The message says why."""


class MisplacedStore(Exception):
    """The default store belongs to another directory. The message says what to do."""


def address(root: Path) -> str:
    """MLFLOW_TRACKING_URI, else the embedded SQLite store of this checkout."""
    return os.environ.get("MLFLOW_TRACKING_URI") or SQLITE + str(root.resolve() / DATABASE)


def checkout(root: Path) -> str:
    """Stands for this directory on this machine: whose live runs are ours."""
    return hashlib.sha256(f"{socket.gethostname()}:{root.resolve()}".encode()).hexdigest()[:16]


def set_defaults() -> None:
    """Apply DEFAULTS to this process, before it imports MLflow."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def warn(message: str) -> None:
    """One line for a person."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def describe(uri: str, error: Exception) -> str:
    """What failed, in one line, without a password."""
    reason = " ".join(str(error).split())
    if not isinstance(error, Unreachable | MisplacedStore):
        reason = f"{type(error).__name__}: {reason}"
    return f"MLflow at {without_password(uri)}: {reason if len(reason) <= 400 else reason[:397] + '...'}"


def without_password(uri: str) -> str:
    """The address as it may be shown."""
    password = urllib.parse.urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri


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


class Seen(NamedTuple):
    """What a look at a store finds."""

    experiment_id: str
    runs: list[StoredRun]


def glance(uri: str, root: Path, experiment: str, comparison: str) -> Seen | None:
    """``Store.runs`` without importing MLflow, which takes seconds; None whenever anything is not as expected.

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
        StoredRun(run_id, status, start_ms, found, _is_intact(uri, artifacts))
        for (run_id, status, start_ms, artifacts), found in tags.items()
    ]
    return Seen(str(experiments[0][0]), runs)


def _glance_server(uri: str, root: Path, experiment: str, comparison: str) -> Seen:
    timeout = float(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", DEFAULTS["MLFLOW_HTTP_REQUEST_TIMEOUT"]))

    def answer_to(asked: urllib.request.Request) -> Any:
        with urllib.request.urlopen(asked, timeout=timeout) as answer:
            return json.load(answer)

    experiment_id = answer_to(experiment_request(uri, experiment))["experiment"]["experiment_id"]
    found: dict[str, StoredRun] = {}
    for condition in _conditions(root, comparison):
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


class Store:
    """One experiment of a store, opened with MLflow's client: runs are named by id, nothing is global."""

    def __init__(self, client: MlflowClient, uri: str, root: Path, experiment_id: str) -> None:
        self.client, self.uri, self.root, self.experiment_id = client, uri, root, experiment_id

    def runs(self, comparison: str) -> list[StoredRun]:
        """Runs of the comparison with this key, and live runs of this checkout; deleted ones are not among them."""
        found = {}
        for condition in _conditions(self.root, comparison):
            token = None
            while True:
                page = self.client.search_runs(
                    [self.experiment_id], filter_string=condition, max_results=PAGE, page_token=token
                )
                for run in page:
                    info = run.info
                    intact = _is_intact(self.uri, info.artifact_uri)
                    found[info.run_id] = StoredRun(info.run_id, info.status, info.start_time, run.data.tags, intact)
                token = page.token
                if not token:
                    break
        return list(found.values())

    def log_points(self, run_id: str, points: Iterable[Point]) -> None:
        from mlflow.entities import Metric

        for batch in batches(points, METRICS_PER_BATCH):
            self.client.log_batch(run_id, metrics=[Metric(*point) for point in batch])

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        listed = [Param(key, value) for key, value in params.items()]
        for start in range(0, len(listed), PARAMS_PER_BATCH):
            self.client.log_batch(run_id, params=listed[start : start + PARAMS_PER_BATCH])

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def delete(self, run_id: str) -> None:
        """Delete a run and its models: MLflow would keep showing those."""
        self.delete_models(run_id)
        self.client.delete_run(run_id)

    def delete_models(self, run_id: str) -> None:
        models = self.client.search_logged_models([self.experiment_id], filter_string=f"source_run_id = '{run_id}'")
        for model in models:
            self.client.delete_logged_model(model.model_id)


def open_store(uri: str, root: Path, experiment: str) -> Store:
    """Open the store, making database and experiment on first use. Call it while holding ``locked(uri)``.

    Raises MisplacedStore, and whatever MLflow raises.
    """
    set_defaults()
    from mlflow.tracking import MlflowClient

    # It announces each migration of a new database, and prints the traceback of what it also raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    if uri.startswith(SQLITE) and not (database := Path(uri.removeprefix(SQLITE))).exists():
        # Made beside and moved into place: MLflow cannot go on with migrations that were killed in the middle.
        unborn = database.with_name(f"{database.name}.new")
        unborn.unlink(missing_ok=True)
        MlflowClient(SQLITE + str(unborn))
        unborn.rename(database)
    client = MlflowClient(uri)
    return Store(client, uri, root, _experiment(client, uri, root, experiment))


@contextmanager
def locked(uri: str) -> Iterator[None]:
    """Keep other processes of this project out of an SQLite store; a server needs no such help.

    MLflow's creation of a new SQLite file does not bear a second process, and two publishers would both write.
    """
    if not uri.startswith(SQLITE):
        yield
        return
    import fcntl

    path = Path(uri.removeprefix(SQLITE) + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _experiment(client: MlflowClient, uri: str, root: Path, name: str) -> str:
    """The id of the experiment, which is made, or taken out of the bin, if need be."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        place = None if uri.startswith(("http://", "https://")) else str(root.resolve() / ARTIFACTS)
        try:
            return str(client.create_experiment(name, artifact_location=place, tags=EXPERIMENT_TAGS))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process was first
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    if is_misplaced(uri, root, found.artifact_location):
        raise MisplacedStore(
            f"this store was made for another directory and keeps its artifacts in {found.artifact_location}. "
            f"Delete {DATABASE} and {ARTIFACTS} here, and run `python -m pipeline publish`: it rebuilds them."
        )
    return str(found.experiment_id)


def is_misplaced(uri: str, root: Path, artifacts: str) -> bool:
    """Whether the checkout's own store was copied or moved: MLflow wrote absolute paths into it."""
    return uri == SQLITE + str(root.resolve() / DATABASE) and artifacts != str(root.resolve() / ARTIFACTS)


def _is_intact(uri: str, artifacts: str) -> bool:
    """Whether a run's artifacts are there, as far as this machine can tell."""
    return not uri.startswith(SQLITE) or "://" in artifacts or Path(artifacts).is_dir()


def _conditions(root: Path, comparison: str) -> tuple[str, str]:
    return f"tags.`{COMPARISON}` = '{comparison}'", f"tags.`{LIVE}` = '{checkout(root)}'"
