"""Record the content of an embedded store and the state of its files, in a file next to the store.

If the record shows that nothing is new, ``publish`` does not open the store. So it need not import MLflow, which takes
seconds. For a server there is no record, because files on this machine do not show a server's state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.files import read_json, write_text
from pipeline.tracking.comparisons import Wanted
from pipeline.tracking.stores import SQLITE, Store


def agreeing(uri: str, experiment: str, wanted: Wanted) -> str | None:
    """Return the experiment's id if the store held ``wanted`` when the record was written, and has not changed since.

    Otherwise return None; MLflow must then be asked.
    """
    try:
        found = read_json(_file(uri))
        experiment_id = str(found["experiment_id"])
        now = _content(uri, experiment, experiment_id, found["artifacts"], wanted)
    except (OSError, KeyError, TypeError, ValueError):  # there is no record, or it is broken
        return None
    return experiment_id if found == now else None


def write(store: Store, experiment: str, wanted: Wanted) -> None:
    """Record that ``store`` holds ``wanted``; do nothing for a server. Call this while holding ``stores.locked``, when
    nothing is left to write."""
    if store.uri.startswith(SQLITE):
        content = _content(store.uri, experiment, store.experiment_id, store.artifacts, wanted)
        write_text(_file(store.uri), json.dumps(content, indent=1))


def _file(uri: str) -> Path:
    """Return the path of the record. Raises ValueError for a store that is not embedded."""
    if not uri.startswith(SQLITE):
        raise ValueError(uri)
    return Path(uri.removeprefix(SQLITE) + ".published")


def _content(uri: str, experiment: str, experiment_id: str, artifacts: str, wanted: Wanted) -> dict[str, Any]:
    database, directory = Path(uri.removeprefix(SQLITE)).stat(), Path(artifacts)
    kept = directory.stat() if directory.is_dir() else None  # None for an address: its state is unknown
    return {
        "comparison": wanted.key,
        "report": wanted.report,
        "experiment": experiment,
        "experiment_id": experiment_id,
        "artifacts": artifacts,
        "database_state": [database.st_ino, database.st_size, database.st_mtime_ns],
        "artifacts_state": [kept.st_ino, kept.st_mtime_ns] if kept else None,
    }
