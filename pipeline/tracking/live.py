"""Mirror a running training to MLflow from a process of its own, which yields to the training in everything."""

from __future__ import annotations

import csv
import os
import select
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread

from pipeline import results
from pipeline.params import Config
from pipeline.tracking import comparisons, labels, metrics, stores
from pipeline.tracking.comparisons import LIVE, MIRRORED
from pipeline.tracking.metrics import Point
from pipeline.tracking.stores import Store

POLL_SECONDS = 1.0
FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 300.0
FINISHED = b"finished"


def follow(config: Config, variant: str, root: Path = Path()) -> int:
    """Mirror ``variant``'s history and system samples into one live run a seed, until standard input ends.

    The line ``finished`` before the end says that the files are final: the live runs are then marked as complete, for
    ``publish`` to take over. An end without it says that the training died: its runs are marked as killed.

    Returns 0, or 1 if MLflow failed in the end; it never raises for that, and warns once.
    """
    _yield_to_training()
    mirror = _Mirror(config, variant, root)
    heard = b""
    warned = False
    pause, next_try = FIRST_PAUSE_SECONDS, 0.0
    more = True
    while more:
        more, heard = _listen(heard)
        finished = FINISHED in heard.split(b"\n")
        more = more and not finished
        if more and time.monotonic() < next_try:
            continue
        try:
            if more:
                mirror.update()
            elif finished:
                mirror.finish()
            else:
                mirror.abandon()
        except Exception as error:  # whatever MLflow, its database, its server or a broken row raises
            if not warned:
                consequence = "Training goes on without a live view; `publish` completes it from the files."
                stores.warn(f"{stores.describe(mirror.uri, error)} {consequence}")
            warned = True
            if not more:
                return 1
            next_try, pause = time.monotonic() + pause, min(2 * pause, LONGEST_PAUSE_SECONDS)
    return 0


class _Mirror:
    """The live runs of one training. After a failure every method can be called again: nothing is lost or doubled."""

    def __init__(self, config: Config, variant: str, root: Path) -> None:
        self.uri = stores.address(root)
        self._config, self._variant, self._root = config, variant, root
        self._opening: Future[Store] | None = None
        self._history = _Tail(results.history_file(variant, root / results.RESULTS))
        self._system = _Tail(results.system_file(variant, root / results.RESULTS))
        self._live: dict[int, _LiveRun] = {}

    def update(self, final: bool = False) -> None:
        """Log what the files have gained. Until ``final``, files from before we began are of an earlier training."""
        try:
            samples = [(int(row["seed"]), row) for row in self._system.read(final)]
            rows = [results.history_row(row) for row in self._history.read(final)]
        except Rewritten:
            self._start_again()
            self.update(final)
            return
        for seed, sample in samples:
            live = self._live.setdefault(seed, _LiveRun(float(sample["seconds"])))
            live.pending += metrics.system_points(sample, live.samples)
            live.samples += 1
        for row in rows:
            live = self._live.setdefault(row.seed, _LiveRun(time.time() - row.train_seconds))
            live.pending += metrics.history_points(row, live.started)
        self._system.take()
        self._history.take()
        pending = {seed: live for seed, live in self._live.items() if live.pending}
        store = self._opened() if pending else None
        if store:
            for seed, live in pending.items():
                self._log(store, seed, live)

    def finish(self) -> None:
        """The files are final: log the rest and mark as complete what is."""
        store = self._opened()
        if store is None:
            return
        self.update(final=True)
        result = results.read(results.result_file(self._variant, self._root / results.RESULTS), self._config)
        for run in result.runs:
            live = self._live.get(run.seed)
            if live is None or live.run_id is None:
                continue
            child = comparisons.child_of(self._config, self._root, result, run)
            store.client.set_terminated(live.run_id, "FINISHED", round(metrics.run_times(child)[1] * 1000))
            store.client.set_tag(live.run_id, MIRRORED, child.key)

    def abandon(self) -> None:
        """The training died: say so on the runs it leaves."""
        store = self._opened()
        if store is None:
            return
        with suppress(KeyError, TypeError, ValueError):  # a last look, at files that may be half-written
            self.update(final=True)
        for live in self._live.values():
            if live.run_id is not None:
                store.client.set_terminated(live.run_id, "KILLED")

    def _log(self, store: Store, seed: int, live: _LiveRun) -> None:
        if live.run_id is None:
            tags = labels.origin_tags(self._root, f"train {self._variant}")
            tags |= {LIVE: stores.checkout(self._root), "variant": self._variant, "seed": str(seed)}
            run = store.client.create_run(
                store.experiment_id,
                start_time=round(live.started * 1000),
                run_name=f"{self._variant}-seed{seed}",
                tags=tags,
            )
            live.run_id = run.info.run_id
        store.log_points(live.run_id, live.pending)
        live.pending = []

    def _opened(self) -> Store | None:
        """The store, once it is open. Asked for with something to log, it begins to open.

        That takes seconds of a processor that the training leaves us little of, so it happens beside: a training that
        ends first does not wait for it.
        """
        if self._opening is None and any(live.pending for live in self._live.values()):
            self._opening = Future()
            Thread(target=self._open, args=(self._opening,), daemon=True).start()  # a daemon: it ends with the process
        if self._opening is None or not self._opening.done():
            return None
        if self._opening.exception():
            opening, self._opening = self._opening, None  # to be tried again
            return opening.result()
        return self._opening.result()

    def _open(self, opening: Future[Store]) -> None:
        try:
            with stores.locked(self.uri):
                store = stores.open_store(self.uri, self._root, self._config.publish.experiment)
            # Live runs of this variant that an earlier follower could not end.
            for run in store.runs(comparison=""):
                if run.status == "RUNNING" and run.tags.get("variant") == self._variant:
                    store.client.set_terminated(run.run_id, "KILLED")
        except BaseException as error:
            opening.set_exception(error)
        else:
            opening.set_result(store)

    def _start_again(self) -> None:
        """A file no longer begins with what was mirrored: forget all of it."""
        store = self._opened()
        for live in self._live.values():
            if store and live.run_id is not None:
                store.delete(live.run_id)
                live.run_id = None
        self._live = {}
        self._history.rewind()
        self._system.rewind()


class _LiveRun:
    """One seed's run in the making."""

    def __init__(self, started: float) -> None:
        self.started = started
        """Unix seconds; the zero of the history's clock."""
        self.run_id: str | None = None
        self.samples = 0
        self.pending: list[Point] = []
        """Read from the files, not yet logged."""


class Rewritten(Exception):
    """A file does not begin with what was read of it before."""


class _Tail:
    """The rows that a CSV file gains, whether it is appended to or replaced by a longer one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began_ns = time.time_ns()
        self._taken = self._read = b""
        self._taken_at: tuple[int, int] | None = None
        self._read_at: tuple[int, int] | None = None

    def read(self, final: bool) -> list[dict[str, str]]:
        """Complete rows that were not taken yet. Raises Rewritten.

        Unless ``final``, a file that was last written before this object was made is not looked at.
        """
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._taken_at or (status.st_mtime_ns < self._began_ns and not final):
                return []
            content = self._path.read_bytes()
        except FileNotFoundError:
            stamp, content = None, b""
        if not content.startswith(self._taken):
            raise Rewritten
        self._read_at, self._read = stamp, content[: content.rfind(b"\n") + 1]
        header = self._read[: self._read.find(b"\n") + 1] if self._taken else b""
        added = header + self._read[len(self._taken) :]
        return list(csv.DictReader(added.decode().splitlines()))

    def take(self) -> None:
        """Count what was read as taken."""
        self._taken, self._taken_at = self._read, self._read_at

    def rewind(self) -> None:
        """Take the file from its beginning again."""
        self._taken = self._read = b""
        self._taken_at = self._read_at = None


def _listen(heard: bytes) -> tuple[bool, bytes]:
    """Wait for news on standard input, at most one poll. Whether there may be more, and all that was heard."""
    source = sys.stdin.fileno()
    if not select.select([source], [], [], POLL_SECONDS)[0]:
        return True, heard
    chunk = os.read(source, 4096)
    return bool(chunk), heard + chunk


def _yield_to_training() -> None:
    """Run only on what the training leaves, on one thread."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or not allowed
        os.nice(19)
