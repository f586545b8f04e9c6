"""Whether the tracking store can be written to, without importing MLflow."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import sqlite3
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import redacted
from pipeline.tracking import glancing, stores


class Health(NamedTuple):
    well: bool | None
    """None: not looked at."""
    found: str
    remedy: str = ""


def health(root: Path, experiment: str, seconds: float) -> Health:
    """How the store that ``publish`` would use is. A server gets ``seconds`` for each of its answers."""
    uri = stores.address(root)
    if uri.startswith(stores.SQLITE):
        return _embedded(Path(uri.removeprefix(stores.SQLITE)), uri, root, experiment)
    place = redacted(uri)
    if uri.startswith(("http://", "https://")):
        return _server(uri, place, experiment, seconds)
    return Health(None, f"{place.split(':')[0]} store: only servers and SQLite are looked at here")


def _embedded(path: Path, uri: str, root: Path, experiment: str) -> Health:
    where = "the embedded store mlflow.db" if path == root.resolve() / stores.DATABASE else f"the store {path}"
    if not path.exists():
        return Health(True, f"{where}; the first training or publish makes it")
    try:
        with glancing.read_only(path) as database:
            rows = database.execute(
                "SELECT artifact_location FROM experiments WHERE name = ?", (experiment,)
            ).fetchall()
    except sqlite3.Error as error:
        return Health(
            False,
            f"{where} cannot be read ({error})",
            f"move {path.name} away and run: python -m pipeline publish (it writes every run anew)",
        )
    if rows and stores.is_misplaced(uri, root, rows[0][0]):
        return Health(
            False,
            f"{where} was made in another directory: its artifacts are in {rows[0][0]}",
            f"rm -r {stores.DATABASE} {stores.ARTIFACTS}; python -m pipeline publish (it writes every run anew)",
        )
    if not os.access(path, os.W_OK):
        return Health(False, f"{where} is read-only for this user", f"chown $(id -u) {path.name}")
    return Health(True, where)


def _server(uri: str, place: str, experiment: str, seconds: float) -> Health:
    """Ask as a client does. ``/health`` would not do: MLflow answers it under any host name."""
    address = urllib.parse.urlsplit(uri)
    try:
        with urllib.request.urlopen(glancing.experiment_request(uri, experiment), timeout=seconds) as answer:
            status, text = answer.status, answer.read(100_000).decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read(100_000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return Health(
                False,
                f"{place}: its certificate is not trusted ({reason.verify_message})",
                "export MLFLOW_TRACKING_SERVER_CERT_PATH=/path/to/ca.pem, and SSL_CERT_FILE for this check",
            )
        if isinstance(reason, TimeoutError):
            return Health(False, f"{place}: no answer within {seconds:g} s", _start(address))
        return Health(False, f"{place}: cannot be reached ({reason})", _start(address))
    return _judged(status, text, place, address)


def _judged(status: int, text: str, place: str, address: urllib.parse.SplitResult) -> Health:
    if status == 403 and "host" in text.lower():
        host = address.netloc.rpartition("@")[2]
        names = ",".join(dict.fromkeys([host, address.hostname or host]))  # it wants both
        return Health(
            False,
            f"{place}: the server rejects the host name {host} (403)",
            f"add to MLFLOW_SERVER_ALLOWED_HOSTS of the server, and restart it: {names}",
        )
    if status in (401, 403):
        return Health(
            False,
            f"{place}: the server wants other credentials ({status})",
            "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    try:
        answer = json.loads(text)
        is_mlflow = "experiment" in answer or "error_code" in answer
    except (ValueError, TypeError):
        is_mlflow = False
    if status >= 500:
        return Health(
            False,
            f"{place}: the server fails ({status})",
            "read the server's log; its database or artifact store may be down",
        )
    if not is_mlflow:
        return Health(
            False,
            f"{place}: what answers ({status}) is not MLflow",
            "set MLFLOW_TRACKING_URI to the MLflow server's address, or unset it",
        )
    artifacts = str(answer.get("experiment", {}).get("artifact_location", ""))
    if artifacts.startswith("s3://") and importlib.util.find_spec("boto3") is None:
        return Health(
            False,
            f"{place} answers, but runs keep their files in {redacted(artifacts)}, for which boto3 is missing",
            "python -m pip install boto3; or let the server pass files on (mlflow server --artifacts-destination)",
        )
    return Health(True, f"{place} answers")


def _start(address: urllib.parse.SplitResult) -> str:
    remedy = "start the server, or unset MLFLOW_TRACKING_URI to use the embedded store"
    if address.hostname in ("localhost", "127.0.0.1", "::1"):
        remedy += "; in a container, this name is the container itself: use the server's name or --network host"
    return remedy
