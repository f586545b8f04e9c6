"""Which runs the files ask a store to hold: comparisons, with a child for each variant and seed, and their keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import results
from pipeline.comparison import consistency
from pipeline.environment import ENVIRONMENT_FILE
from pipeline.params import Config, Train
from pipeline.results import Result, ResultError, Run

LAYOUT = 2
"""Raise it when runs are to be logged differently: every run is then written again."""
REPORT_LAYOUT = 4
"""Raise it when what the report says is to be logged differently: that alone is written again."""

PREPARED = Path("data/prepared")
PROFILE = ("memory.pickle", "profile.json", "profile.md", "trace.json.gz")
"""The files of a profile. Others that lie there are not logged."""

COMPARISON = "pipeline.comparison"
"""Tag of a comparison's parent run and of its children: the key of the comparison."""
RUN = "pipeline.run"
"""Tag of a child: the key of the run. The parent has none."""
REPORT = "pipeline.report"
"""Tag of a parent: the digest of the report it holds."""
COMPLETE = "pipeline.complete"
"""Tag set as the last act of writing a run; a run without it does not count."""
LIVE = "pipeline.live"
"""Tag of a run that a follower writes: the checkout that trains."""
PARENT = "mlflow.parentRunId"


@dataclass(frozen=True)
class Child:
    """One run that the store must hold: one seed of one variant."""

    key: str
    result: Result
    run: Run
    train: Train
    """The job, as params.yaml has it: models are built from this, not from what the result says."""
    root: Path
    model_file: Path | None
    """The weights to log as a model; None: none to log."""

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
        """When this checkout got the result."""
        return round(self.result_file.stat().st_mtime * 1000)


@dataclass(frozen=True)
class Wanted:
    """One comparison that the store must hold."""

    key: str
    report: str
    """Digest of the report's files, and of the profiles and inference results beside it."""
    children: Mapping[str, Child]
    """By key, in the order of params.yaml and of the seeds."""
    profiles: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    """By variant: the files of its profile."""
    inference: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    """By variant: what inference with its model gave, for programs and for a person."""

    @property
    def records(self) -> list[Path]:
        """The records of both: each is another whenever it was measured again, so what lies beside need not be read."""
        return _records(self.profiles, self.inference)

    @property
    def name(self) -> str:
        return f"comparison-{self.key[:8]}"


def wanted(config: Config, root: Path) -> Wanted | None:
    """The comparison of the results that are there; None if there is none.

    Raises ResultError, naming the file, for one that is no result, not of what ``config`` says, or not of what it was
    made from or recorded as (``consistency.broken_links``).
    """
    found = []
    for variant in config.variants:
        path = results.result_file(variant, root / results.RESULTS)
        if path.exists():
            found.append(results.read(path, config))
    if not found:
        return None
    reports = (results.REPORTS / f"comparison.{kind}" for kind in ("json", "md", "html"))
    if problems := consistency.broken_links(found, root, *reports):
        raise ResultError("\n".join(problems))
    children = [child_of(config, root, result, run) for result in found for run in result.runs]
    profiles, inference = _profiles(config, root), _inference(config, root)
    shown = [*report_files(root), *_records(profiles, inference)]
    return Wanted(
        key=_digest([LAYOUT, *sorted(results.digest(result) for result in found)]),
        report=_digest([REPORT_LAYOUT, *([file.name, results.sha256(file)] for file in shown)]),
        children={child.key: child for child in children},
        profiles=profiles,
        inference=inference,
    )


def child_of(config: Config, root: Path, result: Result, run: Run) -> Child:
    """The run that the store must hold for one seed of ``result``."""
    weights = results.model_file(result.variant, run.seed, root / results.MODELS)
    has_model = config.publish.models and weights.exists() and (root / PREPARED / "dataset.json").exists()
    about = result.model_dump(mode="json", exclude={"runs", "summary"})
    return Child(
        key=_digest([LAYOUT, about, results.digest(run), has_model]),
        result=result,
        run=run,
        train=config.train,
        root=root,
        model_file=weights if has_model else None,
    )


def report_files(root: Path) -> list[Path]:
    """The comparison, as data, for a pull request and for a person."""
    return [file for file in sorted((root / results.REPORTS).glob("comparison.*")) if file.suffix != ".partial"]


def context_files(root: Path) -> list[Path]:
    """What a comparison rests on beside its results. No change of these alone makes a parent run out of date."""
    return [file for file in (root / ENVIRONMENT_FILE, root / "params.yaml", root / "dvc.lock") if file.exists()]


def _profiles(config: Config, root: Path) -> dict[str, list[Path]]:
    directories = {name: results.profile_directory(name, root / results.PROFILES) for name in config.profile.variants}
    return {
        name: [file for each in PROFILE if (file := directory / each).exists()]
        for name, directory in directories.items()
        if (directory / "profile.json").exists()
    }


def _inference(config: Config, root: Path) -> dict[str, list[Path]]:
    found = {
        name: [results.inference_file(name, kind, root / results.INFERENCE) for kind in ("json", "md")]
        for name in config.infer.variants
    }
    return {name: files for name, files in found.items() if all(file.exists() for file in files)}


def _records(*found: Mapping[str, Sequence[Path]]) -> list[Path]:
    return [file for each in found for files in each.values() for file in files if file.suffix == ".json"]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
