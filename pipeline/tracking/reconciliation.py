"""Find the changes after which a store holds one comparison exactly once. This module makes no change itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.tracking.comparisons import COMPARISON, COMPLETE, LIVE, PARENT, REPORT, RUN, Wanted


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


@dataclass(frozen=True)
class Changes:
    """The changes from the store's state to the wanted one; every change can be repeated."""

    parent: StoredRun | None
    """The run to use as parent; None if a parent must be created."""
    finish_parent: bool
    """True if the parent must be written (again): it is new or half-written, or its report has changed."""
    create: list[str] = field(default_factory=list)
    """Keys of children to write from the files."""
    delete: list[str] = field(default_factory=list)
    """Ids of runs that are half-written, duplicate or superseded, and of live runs that a result replaces."""

    def __bool__(self) -> bool:
        return self.finish_parent or bool(self.create or self.delete)


def reconcile(wanted: Wanted, stored: Sequence[StoredRun], checkout: str) -> Changes:
    """Return the changes that make the store hold ``wanted`` exactly once.

    ``stored``: all runs tagged with this comparison's key, and all live runs of this checkout. ``checkout``: the
    value of their tag LIVE.

    Runs of other comparisons are history and stay. Live runs of this checkout are treated as follows. If the seed has a
    result, a live run is deleted when it has ended, or when it started before the result was written. A live run that
    started later and has not ended stays, because its training may still run. A live run whose seed has no result yet
    stays, as the record of an interrupted training.
    """
    ours = sorted((run for run in stored if run.tags.get(COMPARISON) == wanted.key), key=_precedence)
    parents = [run for run in ours if RUN not in run.tags]
    parent = parents[0] if parents else None
    delete = [run.run_id for run in parents[1:]]

    held: set[str] = set()
    for run in ours:
        key = run.tags.get(RUN)
        if key is None:  # a parent
            continue
        here = parent is not None and run.tags.get(PARENT) == parent.run_id
        if here and run.is_complete and key in wanted.children and key not in held:
            held.add(key)
        else:
            delete.append(run.run_id)

    seeds = {(child.variant, str(child.run.seed)): child for child in wanted.children.values()}
    for run in stored:
        child = seeds.get((run.tags.get("variant", ""), run.tags.get("seed", "")))
        if child is None or run.tags.get(LIVE) != checkout:
            continue
        if run.status != "RUNNING" or run.start_ms < child.written_ms:
            delete.append(run.run_id)

    return Changes(
        parent=parent,
        finish_parent=parent is None or not parent.is_complete or parent.tags.get(REPORT) != wanted.report,
        create=[key for key in wanted.children if key not in held],
        delete=delete,
    )


def _precedence(run: StoredRun) -> tuple[bool, int, str]:
    """Sort key: complete before half-written, then oldest first, so that two publishers choose the same run."""
    return not run.is_complete, run.start_ms, run.run_id
