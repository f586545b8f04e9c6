"""Show a running training in MLflow. A separate process does this, and reads only the files that the training writes.

The view is provisional: later, ``publish`` writes each run from its files and deletes the live runs.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

from pipeline import results
from pipeline.files import read_text
from pipeline.params import Config
from pipeline.tracking import contents, stores
from pipeline.tracking.comparisons import LIVE
from pipeline.tracking.contents import Point
from pipeline.tracking.stores import Store

POLL_SECONDS = 1.0
FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 300.0
FINISHED = b"finished\n"


def follow(config: Config, variant: str, root: Path = Path()) -> int:
    """Mirror ``variant``'s history and system samples into one live run per seed, until a line arrives on standard
    input, or until standard input ends.

    After the line ``finished``, the live runs are marked as finished; after any other line, or the end, as killed.
    Returns 0, or 1 if the last update failed. MLflow's errors are not raised; the first error prints a warning.
    """
    _yield_to_training()
    mirror = _Mirror(config, variant, root)
    ended = Event()
    # Opening a store takes seconds of CPU time, and the training leaves little CPU time. So a daemon thread opens the
    # store while this thread reads standard input. If the training ends first, the process ends without a store.
    worker = Thread(target=mirror.run, args=(ended,), daemon=True)
    worker.start()
    status = "FINISHED" if sys.stdin.buffer.readline() == FINISHED else "KILLED"
    ended.set()
    if mirror.store is None:
        return 0
    worker.join()
    return 0 if mirror.update(status) else 1


class _Mirror:
    """The live runs of one training. Points that MLflow did not accept stay pending until the next update."""

    def __init__(self, config: Config, variant: str, root: Path) -> None:
        self.store: Store | None = None
        """None until there is something to log."""
        self._config, self._variant, self._root = config, variant, root
        self._history = _Tail(results.history_file(variant, root / results.RESULTS))
        self._system = _Tail(results.system_file(variant, root / results.RESULTS))
        self._live: dict[int, _LiveRun] = {}
        self._warned = False

    def run(self, ended: Event) -> None:
        """Update until the training has ended. The pause after a failed update gets longer with each failure."""
        pause = FIRST_PAUSE_SECONDS
        while not ended.wait(POLL_SECONDS):
            if not self.update():
                ended.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def update(self, status: str | None = None) -> bool:
        """Log the files' new rows. With a ``status``, also end the runs with this status. Return False if
        MLflow failed."""
        try:
            self._read()
            for seed, live in self._live.items():
                if live.pending:
                    self._log(seed, live)
                if status and self.store and live.run_id:
                    self.store.client.set_terminated(live.run_id, status, live.ended_ms)
        except Exception as error:  # any error of MLflow, its database or its server, or a broken row
            if not self._warned:
                consequence = "Training goes on without a live view; `publish` writes its runs from the files."
                stores.warn(f"{stores.describe(stores.address(self._root), error)} {consequence}")
            self._warned = True
            return False
        return True

    def _read(self) -> None:
        for sample in self._system.read():
            live = self._live.setdefault(int(sample["seed"]), _LiveRun(float(sample["seconds"])))
            live.pending += contents.system_points(sample, live.samples)
            live.samples += 1
        for row in map(results.history_row, self._history.read()):
            live = self._live.setdefault(row.seed, _LiveRun(time.time() - row.train_seconds))
            live.pending += contents.history_points(row, live.started)

    def _log(self, seed: int, live: _LiveRun) -> None:
        store = self.store = self.store or self._opened()
        if live.run_id is None:
            tags = contents.origin_tags(self._root, f"train {self._variant}")
            tags |= {LIVE: stores.checkout(self._root), "variant": self._variant, "seed": str(seed)}
            name, started_ms = f"{self._variant}-seed{seed}", round(live.started * 1000)
            live.run_id = store.client.create_run(store.experiment_id, started_ms, tags, name).info.run_id
        store.log(live.run_id, live.pending)
        live.ended_ms = max(live.ended_ms, *(point.timestamp_ms for point in live.pending))
        live.pending = []

    def _opened(self) -> Store:
        uri = stores.address(self._root)
        with stores.locked(uri):
            store = stores.open_store(uri, self._root, self._config.publish.experiment)
        for run in store.runs(comparison=""):
            if run.status == "RUNNING" and run.tags.get("variant") == self._variant:
                store.client.set_terminated(run.run_id, "KILLED")  # an earlier follower could not end it
        return store


@dataclass
class _LiveRun:
    """The live run of one seed."""

    started: float
    """Unix time, in seconds, that counts as the zero of the history's clock."""
    ended_ms: int = 0
    """When the last logged point was measured, in Unix milliseconds."""
    run_id: str | None = None
    samples: int = 0
    pending: list[Point] = field(default_factory=list)
    """Points read from the files and not logged yet."""


class _Tail:
    """Reads the new rows of a CSV file. The file's writer appends rows, or replaces the file by a longer one.

    If the file has fewer rows than were read before, it is read again from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._earlier = self._written()
        self._read = 0

    def _written(self) -> tuple[int, int, int] | None:
        """Identify the file and its last write by inode, time and size; None: there is no file."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def read(self) -> list[dict[str, str]]:
        """Return the complete rows that were not read yet. A file that was not written since this object was made
        belongs to an earlier training, so its rows are not returned."""
        if self._written() in (None, self._earlier):
            return []
        whole_lines = read_text(self._path).rpartition("\n")[0]
        rows = list(csv.DictReader(whole_lines.splitlines()))
        added = rows[self._read if self._read <= len(rows) else 0 :]
        self._read = len(rows)
        return added


def _yield_to_training() -> None:
    """Use one thread and, if the system allows this, only CPU time that no other process uses."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or not allowed
        os.nice(19)
