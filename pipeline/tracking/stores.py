"""The store in which MLflow keeps its runs: its address, and access to it with MLflow's own client.

``health`` checks for a person whether ``publish`` can use the store, and changes nothing.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import logging
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlsplit

from filelock import FileLock

from pipeline.errors import first_line, redacted, say
from pipeline.processes import importing
from pipeline.results import ResultError
from pipeline.tracking.comparisons import COMPARISON, COMPLETE, LIVE
from pipeline.tracking.contents import Point

if TYPE_CHECKING:
    from mlflow.entities import Experiment
    from mlflow.tracking import MlflowClient

ARTIFACTS = "mlartifacts"
DATABASE = "mlflow.db"
MOST_RUNS = 50_000
"""The most runs that MLflow returns at once."""
LOCAL = "http://127.0.0.1:5000"
"""The address at which `make ui` shows the embedded store."""
SQLITE = "sqlite:///"
LOCK_SECONDS = 60.0

DVC_OBJECT = re.compile(r"/files/md5/[0-9a-f]{2}/[0-9a-f]{30}$")
"""Matches the end of a file's path in a DVC cache; the cache can be in any directory."""

DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD": "false",
    "MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""With these settings, a server that is down or hangs delays a command by seconds instead of minutes. Artifacts go
through the server, which would otherwise send clients to its object store, which they may not reach. MLflow sends no
telemetry, and does not print an address for every run. A user's own setting takes precedence."""


EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # otherwise MLflow shows its page for language models
    "mlflow.note.content": (
        "Under *Columns*, tick the tags verdict, speed, memory and accuracy for a table of the variants. "
        "Each `comparison-...` run compares all variants of one job; its child runs hold one variant and seed each. "
        "The result files are the source: `python -m pipeline publish` rebuilds these runs from the files."
    ),
}

OF_SQLITE = re.compile(r"\(sqlite3\.\w+\) (.+?)(?: \[SQL: |$)")
"""Matches the reason in an SQLAlchemy error's message, without the SQL statement and values that follow."""

_WAIT = "Another process uses the store: end that process, or wait."
REMEDIES = {
    "could not be acquired": _WAIT,
    "database is locked": _WAIT,
    "disk is full": "Make room there.",
    os.strerror(errno.ENOSPC): "Make room there.",
    "readonly database": "Let this user write there.",
    "unable to open database file": "Let this user write there.",
    os.strerror(errno.EROFS): "Let this user write there.",
    os.strerror(errno.EACCES): "Let this user write there.",
}
"""Part of an error's message -> what to do."""


class MisplacedStore(Exception):
    """The default store belongs to another directory. The message says what to do."""


def address(root: Path) -> str:
    """Return the value of MLFLOW_TRACKING_URI or, if it is not set, the address of this checkout's embedded store."""
    return os.environ.get("MLFLOW_TRACKING_URI") or SQLITE + str(root.resolve() / DATABASE)


def page(uri: str, experiment_id: str = "") -> str:
    """Return the address of the store's page, or of an experiment's page, without a name or password."""
    parts = urlsplit(uri)
    local = parts.scheme not in ("http", "https")
    top = LOCAL if local else f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
    return f"{top}/#/experiments/{experiment_id}/runs" if experiment_id else top


def checkout(root: Path) -> str:
    """Return an identifier of this directory on this machine, which marks the live runs of this checkout."""
    return hashlib.sha256(f"{socket.gethostname()}:{root.resolve()}".encode()).hexdigest()[:16]


def set_defaults() -> None:
    """Apply DEFAULTS to this process, before it imports MLflow."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def warn(message: str) -> None:
    """Print ``message`` as a warning on stderr, without secrets."""
    say(f"warning: {redacted(message)}", file=sys.stderr)


def describe(uri: str, error: Exception) -> str:
    """Return one line, without secrets, that says what failed and, for a known error, what to do."""
    reason = redacted(" ".join(str(error).split()))
    if of_sqlite := OF_SQLITE.search(reason):
        reason = f"{of_sqlite[1]}."
    elif not isinstance(error, MisplacedStore):
        reason = f"{type(error).__name__}: {reason}"
    shown = reason if len(reason) <= 400 else reason[:397] + "..."
    return " ".join([f"MLflow at {redacted(uri)}: {shown}", *(REMEDIES[key] for key in REMEDIES if key in reason)])


@dataclass(frozen=True)
class StoredRun:
    """What ``reconcile`` needs to know about a run in the store. There is no such record for a deleted run."""

    run_id: str
    status: str
    start_ms: int
    tags: Mapping[str, str]
    intact: bool = True
    """False if the run's artifacts should be on this machine but are missing."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    """The latest value of each metric."""

    @property
    def is_complete(self) -> bool:
        return COMPLETE in self.tags and self.intact


Texts = Mapping[str, str] | None


class Store:
    """One experiment of a store, opened with MLflow's client. Each call names its run by id, so there is no active run
    or other global state."""

    def __init__(self, client: MlflowClient, uri: str, root: Path, experiment: Experiment) -> None:
        self.client, self.uri, self.root = client, uri, root
        self.experiment_id, self.artifacts = str(experiment.experiment_id), str(experiment.artifact_location)

    def runs(self, comparison: str) -> list[StoredRun]:
        """Return the runs of the comparison with this key, and the live runs of this checkout, without deleted runs."""
        stored = {}
        for condition in (f"tags.`{COMPARISON}` = '{comparison}'", f"tags.`{LIVE}` = '{checkout(self.root)}'"):
            for run in self.client.search_runs([self.experiment_id], condition, max_results=MOST_RUNS):
                info, data = run.info, run.data
                intact = (
                    not self.uri.startswith(SQLITE) or "://" in info.artifact_uri or Path(info.artifact_uri).is_dir()
                )
                stored[info.run_id] = StoredRun(
                    info.run_id, info.status, info.start_time, data.tags, intact, data.metrics
                )
        return list(stored.values())

    def log(self, run_id: str, points: Iterable[Point] = (), params: Texts = None, tags: Texts = None) -> None:
        """Log metrics, parameters and tags of a run."""
        from mlflow.entities import Metric, Param, RunTag

        named = [Param(*item) for item in (params or {}).items()], [RunTag(*item) for item in (tags or {}).items()]
        self.client.log_batch(run_id, [Metric(*point) for point in points], *named)

    def log_file(self, run_id: str, file: Path, folder: str | None = None) -> None:
        """Log ``file`` as an artifact. Raises ResultError for a link that does not lead into DVC's cache, because
        such a link could publish any file of this machine."""
        if file.is_symlink() and not DVC_OBJECT.search(file.resolve().as_posix()):
            raise ResultError(
                f"{file} is a link to {file.resolve()}, which is not in DVC's cache, so it is not logged: replace the "
                "link by the file itself."
            )
        self.client.log_artifact(run_id, str(file), folder)

    def delete(self, run_id: str) -> None:
        """Delete a run and its models. MLflow itself would keep showing the models of a deleted run."""
        models = self.client.search_logged_models([self.experiment_id], filter_string=f"source_run_id = '{run_id}'")
        for model in models:
            self.client.delete_logged_model(model.model_id)
        self.client.delete_run(run_id)


def client_class() -> type[MlflowClient]:
    """Import MLflow with ``DEFAULTS`` and return its client class. The import takes seconds."""
    set_defaults()
    with importing():
        from mlflow.tracking import MlflowClient

    # This logger announces each migration of a new database, and prints tracebacks of errors that are also raised.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    return MlflowClient


def open_store(uri: str, root: Path, experiment: str) -> Store:
    """Open the store; the first use creates the database and the experiment. Call this while holding ``locked(uri)``.

    Raises MisplacedStore and MLflow's errors.
    """
    open_client = client_class()
    if uri.startswith(SQLITE) and not (database := Path(uri.removeprefix(SQLITE))).exists():
        # The database is created under another name, then renamed, because MLflow cannot continue a killed migration.
        unborn = database.with_name(f"{database.name}.new")
        unborn.unlink(missing_ok=True)
        open_client(SQLITE + str(unborn))
        unborn.rename(database)
    client = open_client(uri)
    return Store(client, uri, root, _experiment(client, uri, root, experiment))


def locked(uri: str) -> AbstractContextManager[object]:
    """Keep other processes of this project out of an SQLite store; a server needs no lock.

    Without the lock, MLflow would fail if two processes created the same SQLite file, and two publishers would both
    write. The block raises TimeoutError if the lock is not free within ``LOCK_SECONDS``.
    """
    if not uri.startswith(SQLITE):
        return nullcontext()
    path = Path(uri.removeprefix(SQLITE) + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, LOCK_SECONDS)


def _experiment(client: MlflowClient, uri: str, root: Path, name: str) -> Experiment:
    """Return the experiment ``name``. It is created if it does not exist, and restored if it was deleted."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        place = None if uri.startswith(("http://", "https://")) else str(root.resolve() / ARTIFACTS)
        return client.get_experiment(client.create_experiment(name, artifact_location=place, tags=EXPERIMENT_TAGS))
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    if is_misplaced(uri, root, experiment.artifact_location):
        raise MisplacedStore(
            f"this store was made for another directory and keeps its artifacts in {experiment.artifact_location}. "
            f"Move {DATABASE} and {ARTIFACTS} out of this directory, and run `python -m pipeline publish`, which "
            "writes the runs of the present results into a new store. Earlier comparisons stay in the old store only."
        )
    return experiment


def is_misplaced(uri: str, root: Path, artifacts: str) -> bool:
    """Return True if the checkout's own store was copied or moved, so that the store's absolute paths are wrong."""
    return uri == SQLITE + str(root.resolve() / DATABASE) and artifacts != str(root.resolve() / ARTIFACTS)


_STRANGE = "the server at this address is not MLflow"
_OTHER_ADDRESS = "set MLFLOW_TRACKING_URI to the MLflow server's address, or unset it"
_NEW_STORE = "python -m pipeline publish (it writes the runs of the present results into a new store)"


class Health(NamedTuple):
    well: bool | None
    """None if the check gave no answer."""
    fact: str
    remedy: str = ""


def health(root: Path, experiment: str) -> Health:
    """Return the state of the store that ``publish`` would use. If a server does not answer, the check ends after
    the timeouts and retries in ``DEFAULTS``, or after the user's own."""
    uri = address(root)
    embedded = uri.startswith(SQLITE)
    path = Path(uri.removeprefix(SQLITE))
    where = "the embedded store mlflow.db" if path == root.resolve() / DATABASE else f"the store {path}"
    if embedded and not path.exists():
        return Health(True, f"{where}, which the first training or publish creates")
    if not embedded and not uri.startswith(("http://", "https://")):
        return Health(None, f"{redacted(uri).split(':')[0]} store; only servers and SQLite stores are checked")
    try:
        open_client = client_class()
    except ImportError as error:
        return Health(False, f"MLflow cannot be imported ({error})", "install requirements.lock into this environment")
    if not embedded:
        return _server(open_client, uri, experiment)
    try:
        stored = open_client(_read_only(path)).get_experiment_by_name(experiment)
    except Exception as error:  # an error of SQLAlchemy or MLflow
        return _unreadable(error, where, path)
    if stored and is_misplaced(uri, root, stored.artifact_location):
        return Health(
            False,
            f"{where} was made in another directory: its artifacts are in {stored.artifact_location}",
            f"move {DATABASE} and {ARTIFACTS} away and run: {_NEW_STORE}",
        )
    if not os.access(path, os.W_OK):
        return Health(False, f"{where} is read-only for this user", f"chown $(id -u) {path.name}")
    return Health(True, where)


def _read_only(path: Path) -> str:
    """Return a read-only SQLite address for MLflow. With a usual address, MLflow would migrate the store of an older
    version, and add tables to another program's database. If the address began with ``sqlite:`` instead of
    ``sqlite+pysqlite:``, MLflow would create directories."""
    return f"sqlite+pysqlite:///{quote(path.resolve().as_uri())}?mode=ro&uri=true&timeout=1"


def _unreadable(error: Exception, where: str, path: Path) -> Health:
    if "database is locked" in str(error):
        return Health(None, f"{where} is in use: another process has locked it")
    # The cause may be another version of MLflow, an interrupted migration, or a file of another program.
    return Health(
        False,
        f"{where} cannot be read by this version of MLflow ({first_line(error)})",
        f"cp {path.name} {path.name}.old; mlflow db upgrade {SQLITE}{path}; if that fails, move {path.name} "
        f"away and run: {_NEW_STORE}",
    )


def _server(open_client: type[MlflowClient], uri: str, experiment: str) -> Health:
    place = redacted(uri)
    try:
        stored = open_client(uri).get_experiment_by_name(experiment)
    except Exception as error:  # an error of MLflow or of a parser
        return _failure(error, uri, place)
    if stored and stored.name != experiment:
        return Health(False, f"{place}: {_STRANGE}", _OTHER_ADDRESS)
    artifacts = str(stored.artifact_location) if stored else ""
    if artifacts.startswith("s3://") and importlib.util.find_spec("boto3") is None:
        return Health(
            False,
            f"{place} answers, but runs keep their files in {redacted(artifacts)}, for which boto3 is missing",
            "python -m pip install boto3; or let the server transfer files (mlflow server --artifacts-destination)",
        )
    return Health(True, f"{place} answers")


def _failure(error: Exception, uri: str, place: str) -> Health:
    """Return why this machine cannot use MLflow on the server, and the remedy."""
    from mlflow.exceptions import MlflowException
    from requests import exceptions

    address = urlsplit(uri)
    host = address.netloc.rpartition("@")[2]
    status = error.get_http_status_code() if isinstance(error, MlflowException) else None  # type: ignore[no-untyped-call]
    cause = error.__context__  # requests' own error, which MLflow's message repeats
    reason = redacted(str(getattr(next(iter(cause.args), None), "reason", cause))) if cause else ""
    if isinstance(cause, exceptions.SSLError):
        failure = f"its certificate is not trusted ({reason})"
        remedy = "export MLFLOW_TRACKING_SERVER_CERT_PATH=/path/to/ca.pem"
    elif isinstance(cause, exceptions.RetryError):
        failure = f"the server fails ({reason})"
        remedy = "read the server's log; its database or artifact store may be down"
    elif isinstance(cause, exceptions.RequestException):
        failure = f"no answer ({reason})"
        remedy = "start the server, or unset MLFLOW_TRACKING_URI to use the embedded store"
        if address.hostname in ("localhost", "127.0.0.1", "::1"):
            remedy += "; in a container, this address is the container itself: use the server's name or --network host"
    elif status == 403 and "host" in str(error).lower():
        failure = f"the server rejects the host name {host} (403)"
        names = ",".join(dict.fromkeys([host, address.hostname or host]))  # with and without the port
        remedy = f"on the server, restart MLflow with these names added to MLFLOW_SERVER_ALLOWED_HOSTS: {names}"
    elif status in (401, 403):
        failure = f"the server does not accept these credentials ({status})"
        remedy = "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    else:
        failure, remedy = _STRANGE, _OTHER_ADDRESS
    return Health(False, f"{place}: {failure}", remedy)
