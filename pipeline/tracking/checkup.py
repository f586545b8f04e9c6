"""Check whether ``publish`` can use the tracking store. The check uses MLflow's own client and changes nothing."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlsplit

from pipeline.errors import first_line, redacted
from pipeline.tracking import stores

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


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
    the timeouts and retries in ``stores.DEFAULTS``, or after the user's own."""
    uri = stores.address(root)
    embedded = uri.startswith(stores.SQLITE)
    path = Path(uri.removeprefix(stores.SQLITE))
    where = "the embedded store mlflow.db" if path == root.resolve() / stores.DATABASE else f"the store {path}"
    if embedded and not path.exists():
        return Health(True, f"{where}, which the first training or publish creates")
    if not embedded and not uri.startswith(("http://", "https://")):
        return Health(None, f"{redacted(uri).split(':')[0]} store; only servers and SQLite stores are checked")
    try:
        open_client = stores.client_class()
    except ImportError as error:
        return Health(False, f"MLflow cannot be imported ({error})", "install requirements.lock into this environment")
    if not embedded:
        return _server(open_client, uri, experiment)
    try:
        stored = open_client(_read_only(path)).get_experiment_by_name(experiment)
    except Exception as error:  # an error of SQLAlchemy or MLflow
        return _unreadable(error, where, path)
    if stored and stores.is_misplaced(uri, root, stored.artifact_location):
        return Health(
            False,
            f"{where} was made in another directory: its artifacts are in {stored.artifact_location}",
            f"move {stores.DATABASE} and {stores.ARTIFACTS} away and run: {_NEW_STORE}",
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
        f"cp {path.name} {path.name}.old; mlflow db upgrade {stores.SQLITE}{path}; if that fails, move {path.name} "
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
