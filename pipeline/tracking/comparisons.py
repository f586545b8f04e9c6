"""Derive from the files the runs that a store must hold: one parent per comparison, one child per variant and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import results
from pipeline.comparison import consistency
from pipeline.comparison.comparison_file import Comparison
from pipeline.environment import ENVIRONMENT_FILE
from pipeline.files import PREPARED, differing, file_sha256, json_sha256, read_json
from pipeline.params import Compare, Config, Train
from pipeline.results import Result, ResultError, Run

LAYOUT = 2
"""Increase this number when the layout of logged runs changes: every run is then written again."""
REPORT_LAYOUT = 5
"""Increase this number when the layout of the logged report changes: only the parent run is then written again."""

PAGES = ("scaling", "advice")
"""Names of further pages in ``reports/``, each with a JSON file that holds the benches of one job."""
PROFILE = ("memory.pickle", "profile.json", "profile.md", "trace.json.gz")
"""The files of a profile that are logged. Other files in its directory are not logged."""

COMPARISON = "pipeline.comparison"
"""Tag of a comparison's parent run and of its children: the key of the comparison."""
RUN = "pipeline.run"
"""Tag of a child: the key of the run. A parent does not have this tag."""
REPORT = "pipeline.report"
"""Tag of a parent: the digest of the report that the parent contains."""
COMPLETE = "pipeline.complete"
"""Tag that is set last when a run is written. A run without this tag counts as half-written."""
LIVE = "pipeline.live"
"""Tag of a run that ``follow`` writes during a training. Its value identifies the checkout that trains."""
PARENT = "mlflow.parentRunId"


@dataclass(frozen=True)
class Child:
    """One run that the store must hold: one seed of one variant."""

    key: str
    result: Result
    run: Run
    train: Train
    """The variant's job in params.yaml. The model to log is built from this job, not from the job that the result
    names."""
    root: Path
    model_file: Path | None
    """The weights to log as a model; None: no model is logged."""

    @property
    def variant(self) -> str:
        return self.result.variant

    @property
    def name(self) -> str:
        return f"{self.result.variant}-seed{self.run.seed}"

    @property
    def result_file(self) -> Path:
        return results.result_file(self.variant, self.root / results.RESULTS)

    @property
    def history_file(self) -> Path:
        return results.history_file(self.variant, self.root / results.RESULTS)

    @property
    def system_file(self) -> Path:
        return results.system_file(self.variant, self.root / results.RESULTS)

    @property
    def written_ms(self) -> int:
        """When the result was written in this checkout, in Unix milliseconds."""
        return round(self.result_file.stat().st_mtime * 1000)


@dataclass(frozen=True)
class Wanted:
    """One comparison that the store must hold."""

    key: str
    report: str
    """Digest of ``report_files``, and of the JSON files of profiles, inference and further pages, which every new
    measurement changes."""
    children: Mapping[str, Child]
    """Key -> child, in the order of params.yaml and of the seeds."""
    report_files: Sequence[Path] = ()
    """The report's files; none if it is ``stale``."""
    profiles: Mapping[str, Path] = field(default_factory=dict)
    """Variant -> its profile.json."""
    inference: Mapping[str, Path] = field(default_factory=dict)
    """Variant -> the JSON file of its inference."""
    pages: Sequence[Path] = ()
    """The JSON files of this job's further ``PAGES``."""
    stale: Sequence[str] = ()
    """The files and settings that have changed since comparison.json was made from them."""
    comparison: Comparison | None = None
    """The content of comparison.json; None if this file does not exist or is stale."""

    @property
    def name(self) -> str:
        return f"comparison-{self.key[:8]}"


def wanted(config: Config, root: Path) -> Wanted | None:
    """Return the comparison of the present results; None if there is no result.

    Raises ResultError if a file is not a result, is of another job than ``config``, or does not match its inputs or
    dvc.lock; the message names the file. Also raises the errors of ``consistency.broken_links``.
    """
    files = [results.result_file(variant, root / results.RESULTS) for variant in config.variants]
    measured = [results.read(file, config) for file in files if file.exists()]
    if not measured:
        return None
    reports = (results.REPORTS / f"comparison.{kind}" for kind in ("json", "md", "html"))
    if problems := consistency.broken_links(measured, root, *reports):
        raise ResultError("\n".join(problems))
    children = [child_of(config, root, result, run) for result in measured for run in result.runs]
    directories = {name: results.profile_directory(name, root / results.PROFILES) for name in config.profile.variants}
    profiles = _existing({name: directory / "profile.json" for name, directory in directories.items()})
    folder = root / results.INFERENCE
    inference = _existing({name: results.inference_file(name, "json", folder) for name in config.infer.variants})
    existing = (file for name in PAGES if (file := root / results.REPORTS / f"{name}.json").exists())
    data = measured[0].model_dump(mode="json", include={"dataset"})["dataset"]
    further = [file for file in existing if _is_of_job(config.job, data, file)]
    comparison = read_comparison(root)
    stale = _changed(comparison, measured, config.compare, root) if comparison else []
    report = [] if stale else report_files(root)
    shown = [*report, *profiles.values(), *inference.values(), *further]
    return Wanted(
        key=json_sha256([LAYOUT, *sorted(results.digest(result) for result in measured)]),
        report=json_sha256([REPORT_LAYOUT, *([file.name, file_sha256(file)] for file in shown)]),
        children={child.key: child for child in children},
        report_files=report,
        profiles=profiles,
        inference=inference,
        pages=further,
        stale=stale,
        comparison=None if stale else comparison,
    )


def _is_of_job(job: Mapping[str, Any], data: Any, file: Path) -> bool:
    """Return whether the page in ``file`` has a bench of this job and data. Raises ResultError."""
    try:
        page = read_json(file)
        benches = page["benches"] if "benches" in page else [page["measured"]["bench"]]
        return any((bench["config"]["train"], bench["dataset"]) == (job, data) for bench in benches)
    except (ValueError, LookupError, TypeError) as error:
        raise ResultError(f"{file} is no report of this version ({error!r}): measure again, or remove it.") from None


def read_comparison(root: Path) -> Comparison | None:
    """Read comparison.json; return None if it does not exist. Raises ResultError if it is not a comparison."""
    file = root / results.REPORTS / "comparison.json"
    return results.read_document(file, Comparison, "run `dvc repro compare`") if file.exists() else None


def _changed(comparison: Comparison, measured: Sequence[Result], settings: Compare, root: Path) -> list[str]:
    """Return the files and settings that have changed since ``comparison`` was made from them."""
    then = comparison.settings and comparison.settings.model_dump(mode="json")
    moved = differing(then, settings.model_dump(mode="json"), "compare")
    runs = {result.variant: result.runs for result in measured}
    others = [compared for compared in comparison.variants if compared.runs != runs.get(compared.variant)]
    changed = consistency.changed_since(comparison.made_of, root)
    changed = changed or [f"the runs of {compared.variant}" for compared in others]
    return [*(f"{key} in params.yaml" for key, *_ in moved), *changed]


def child_of(config: Config, root: Path, result: Result, run: Run) -> Child:
    """Return the child that the store must hold for one seed of ``result``."""
    weights = results.model_file(result.variant, run.seed, root / results.MODELS)
    has_model = config.publish.models and weights.exists() and (root / PREPARED / "dataset.json").exists()
    about = result.model_dump(mode="json", exclude={"runs"})
    return Child(
        key=json_sha256([LAYOUT, about, results.digest(run), has_model]),
        result=result,
        run=run,
        train=config.train_of(result.variant),
        root=root,
        model_file=weights if has_model else None,
    )


def report_files(root: Path) -> list[Path]:
    """Return the report's files: JSON, Markdown and HTML."""
    return [file for file in sorted((root / results.REPORTS).glob("comparison.*")) if file.suffix != ".partial"]


def context_files(root: Path) -> list[Path]:
    """Return further files that a comparison depends on. If only these change, the parent run is not written again."""
    return [file for file in (root / ENVIRONMENT_FILE, root / "params.yaml", root / "dvc.lock") if file.exists()]


def _existing(files: Mapping[str, Path]) -> dict[str, Path]:
    return {variant: file for variant, file in files.items() if file.exists()}
