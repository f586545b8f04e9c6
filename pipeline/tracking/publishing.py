"""Make the store agree with the files. A repeated call does no harm, and takes little time if nothing is new."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, redacted, say
from pipeline.files import PREPARED, read_json, write_text
from pipeline.params import Config
from pipeline.processes import importing
from pipeline.results import DatasetFacts
from pipeline.tracking import comparisons, contents, stores
from pipeline.tracking.comparisons import COMPARISON, COMPLETE, LIVE, PARENT, PROFILE, REPORT, RUN, Child, Wanted
from pipeline.tracking.stores import SQLITE, Store, StoredRun

NO_HARM = (
    "The result files are complete and nothing is lost. Once MLflow works, run `python -m pipeline publish` "
    "(or `dvc repro`). MLFLOW_TRACKING_URI sets MLflow's address; without this variable, a local store is used."
)


@dataclass(frozen=True)
class Published:
    """The outcome of ``publish``. If the store agreed already, ``written`` and ``deleted`` are 0."""

    children: int = 0
    """Runs that the comparison holds now, one for each variant and seed."""
    written: int = 0
    """Runs among them that were written now."""
    deleted: int = 0
    """Deleted runs: half-written, duplicate or superseded ones, and live runs that the new runs replace."""
    failed: bool = False
    """True if MLflow failed. A warning has reported the failure, and the store may lack runs."""


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


def publish(config: Config, root: Path = Path()) -> Published:
    """Make the MLflow store hold the comparison of the results under ``root`` exactly once.

    The comparison is one parent run, with one complete child run for each variant and seed. Other comparisons stay as
    history. Prints what was written, and a link. If MLflow fails, prints a warning on stderr. Raises ResultError for
    files that cannot be read, a result of another job, or weights of another digest.
    """
    wanted = comparisons.wanted(config, root)
    if wanted is None:
        say("MLflow: no results yet, nothing to publish.")
        return Published()
    if wanted.stale:
        names = ", ".join(wanted.stale)
        stores.warn(f"the report was made from other files or settings ({names}): its verdicts are not published.")
    uri, experiment, children = stores.address(root), config.publish.experiment, len(wanted.children)
    experiment_id, changes = agreeing(uri, experiment, wanted), None
    if experiment_id is None:
        try:
            with stores.locked(uri):
                store = stores.open_store(uri, root, experiment)
                experiment_id = store.experiment_id
                changes = reconcile(wanted, store.runs(wanted.key), stores.checkout(root))
                if changes:
                    say(f"MLflow: writing {wanted.name} ...")
                    _apply(changes, wanted, store, config)
                record(store, experiment, wanted)
        except PipelineError:
            raise
        except Exception as error:  # any error of MLflow, its database or its server
            stores.warn(f"{stores.describe(uri, error)} {NO_HARM}")
            return Published(failed=True)
    link = f"{stores.page(uri, experiment_id)}?workflowType=machine_learning"  # else its page for language models
    if not uri.startswith("http"):
        in_checkout = (root / "pipeline").is_dir()  # which has a Makefile
        link += f" (after `{'make ui' if in_checkout else f'mlflow ui --backend-store-uri {redacted(uri)}'}`)"
    if not changes:
        say(f"MLflow: {wanted.name} is up to date with {children} runs: {link}")
        return Published(children)
    acts = {"written from files": len(changes.create), "stale runs deleted": len(changes.delete)}
    done = ", ".join(f"{count} {act}" for act, count in acts.items() if count) or "report renewed"
    say(f"MLflow: {wanted.name} holds {children} runs ({done}): {link}")
    return Published(children, len(changes.create), len(changes.delete))


def _apply(changes: Changes, wanted: Wanted, store: Store, config: Config) -> None:
    """Make ``changes``, in such an order that after an interruption the next call can finish the work."""
    for run_id in changes.delete:
        store.delete(run_id)
    parent_id = changes.parent.run_id if changes.parent else _create_parent(wanted, store)
    without_model: dict[str, list[str]] = {}
    for key in changes.create:
        if why := _write_child(wanted.children[key], wanted, parent_id, store):
            without_model.setdefault(why, []).append(wanted.children[key].name)
    for why, names in without_model.items():
        stores.warn(f"MLflow has no model of {', '.join(names)}: {why}")
    _say_what_is_compared(wanted, store)
    if changes.finish_parent:
        _complete_parent(parent_id, wanted, store, config)


def _write_child(child: Child, wanted: Wanted, parent_id: str, store: Store) -> str:
    """Write a run from its files, and mark it complete as the last step. Return what ``_log_model`` returns."""
    client, (started, ended) = store.client, contents.run_times(child)
    ended_ms = round(ended * 1000)
    # The run has its tags from the start, so that a half-written run is found and deleted.
    tags = contents.origin_tags(store.root, f"train {child.variant}") | contents.child_tags(child)
    tags |= {PARENT: parent_id, COMPARISON: wanted.key}
    created = client.create_run(store.experiment_id, round(started * 1000), tags, run_name=child.name)
    run_id = str(created.info.run_id)
    points = [*contents.recorded_points(child, started), *contents.final_points(child.run, ended_ms)]
    store.log(run_id, points, contents.child_params(child.result))
    if data := child.result.dataset:
        client.log_inputs(run_id, [_dataset(data)])
    for file in (child.result_file, child.history_file):
        if file.exists():
            store.log_file(run_id, file)
    why_no_model = _log_model(child, run_id, store) if child.model_file else ""
    client.set_terminated(run_id, "FINISHED", ended_ms)
    client.set_tag(run_id, COMPLETE, "true")
    return why_no_model


def _log_model(child: Child, run_id: str, store: Store) -> str:
    """Return why the run stays without its model; empty if the model is logged."""
    with importing():  # imports torch, too
        from pipeline.tracking import logged_models

    try:
        store.client.set_tag(run_id, "model", logged_models.log(store, run_id, child).model_uri)
    except logged_models.NotLoggable as error:
        store.client.set_tag(run_id, "model", f"not logged: {error}")
        return str(error)
    return ""


def _dataset(about: DatasetFacts) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=about.name,
        digest=about.sha256[:16],
        source_type="local",
        source=json.dumps({"uri": PREPARED.as_posix()}),
        profile=json.dumps({"train_count": about.train_count, "test_count": about.test_count, "sha256": about.sha256}),
    )
    return DatasetInput(dataset, tags=[InputTag("mlflow.data.context", "training")])


def _create_parent(wanted: Wanted, store: Store) -> str:
    start_ms = round(min(contents.run_times(child)[0] for child in wanted.children.values()) * 1000)
    run = store.client.create_run(store.experiment_id, start_ms, {COMPARISON: wanted.key}, wanted.name)
    return str(run.info.run_id)


def _say_what_is_compared(wanted: Wanted, store: Store) -> None:
    """Set each child's tags and metrics to the figures that the comparison has now for the child's variant.

    If there is no comparison of these results, the earlier tags and metrics stay.
    """
    if wanted.comparison is None:
        return
    columns = contents.columns(wanted.comparison)
    by_variant = {compared.variant: compared for compared in wanted.comparison.variants}
    for run in store.runs(wanted.key):
        child = wanted.children.get(run.tags.get(RUN, ""))
        if child and child.variant in columns and run.tags.get(COMPARISON) == wanted.key:
            points = contents.compared_points(by_variant[child.variant], run.metrics)
            store.log(run.run_id, points, tags=columns[child.variant])


def _complete_parent(run_id: str, wanted: Wanted, store: Store, config: Config) -> None:
    client, root = store.client, store.root
    ended_ms = round(max(contents.run_times(child)[1] for child in wanted.children.values()) * 1000)
    points = contents.parent_points(wanted, client.get_run(run_id).data.metrics)
    tags = contents.origin_tags(root, "publish") | contents.parent_tags(config, wanted, root)
    store.log(run_id, points, contents.parent_params(wanted), tags)
    folders: dict[str | None, Sequence[Path]] = {
        None: [*wanted.report_files, *comparisons.context_files(root)],
        "results": sorted({child.result_file for child in wanted.children.values()}),
        **{
            f"profiles/{name}": [record.with_name(file) for file in PROFILE] for name, record in wanted.profiles.items()
        },
        "inference": [file for record in wanted.inference.values() for file in (record, record.with_suffix(".md"))],
        **{page.stem: [page.with_suffix(f".{end}") for end in ("json", "md", "html")] for page in wanted.pages},
    }
    for folder, files in folders.items():
        for file in filter(Path.exists, files):
            store.log_file(run_id, file, folder)
    client.set_terminated(run_id, "FINISHED", ended_ms)
    store.log(run_id, tags={REPORT: wanted.report, COMPLETE: "true"})


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
        has_parent = parent is not None and run.tags.get(PARENT) == parent.run_id
        if has_parent and run.is_complete and key in wanted.children and key not in held:
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


# The record of an embedded store's content and of the state of its files, in a file next to the store. If it shows that
# nothing is new, MLflow, whose import takes seconds, is not needed. For a server there is no record, because files on
# this machine do not show a server's state.


def agreeing(uri: str, experiment: str, wanted: Wanted) -> str | None:
    """Return the experiment's id if the store held ``wanted`` when the record was written, and has not changed since.

    Otherwise return None; MLflow must then be asked.
    """
    try:
        recorded = read_json(_file(uri))
        experiment_id = str(recorded["experiment_id"])
        now = _content(uri, experiment, experiment_id, recorded["artifacts"], wanted)
    except (OSError, KeyError, TypeError, ValueError):  # there is no record, or it is broken
        return None
    return experiment_id if recorded == now else None


def record(store: Store, experiment: str, wanted: Wanted) -> None:
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
