"""Read the metrics of a run from the files. This module does not use MLflow."""

from __future__ import annotations

import csv
import io
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import results
from pipeline.comparison.comparison_file import Compared
from pipeline.files import read_json, read_text
from pipeline.results import HistoryRow, Run
from pipeline.results.figures import FIGURES
from pipeline.tracking.comparisons import Child, Wanted


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    timestamp_ms: int
    step: int


def history_points(row: HistoryRow, started: float) -> Iterator[Point]:
    """Yield the metrics of one row of the history. Their timestamp is ``started`` (Unix seconds) plus the row's
    training time, because a row has no other time."""
    for name, value in row.model_dump(exclude={"seed", "step"}).items():
        if value is not None:
            yield Point(f"history/{name}", value, round((started + row.train_seconds) * 1000), row.step)


def system_points(row: Mapping[str, str], step: int) -> Iterator[Point]:
    """Yield the metrics of one sample of the machine, the ``step``-th of its run. MLflow shows system/... on a separate
    page."""
    timestamp = round(float(row["seconds"]) * 1000)
    for column, text in row.items():
        value = _number(text)
        if column not in ("seed", "seconds") and value is not None:
            yield Point(f"system/{allowed(column)}", value, timestamp, step)


def final_points(run: Run, timestamp_ms: int) -> Iterator[Point]:
    """Yield the metrics of the run's figures. Unknown figures are left out."""
    for name, value in run.model_dump(exclude={"seed", "peak_memory_rank_bytes"}).items():
        if isinstance(value, int | float):
            yield Point(name, value, timestamp_ms, run.steps)
    for name, value in run.findings.items():
        yield Point(f"findings/{name}", value, timestamp_ms, run.steps)
    ranks = run.peak_memory_rank_bytes
    for rank, peak in enumerate(ranks):
        if peak is not None and len(ranks) > 1:
            yield Point(f"peak_memory_rank_bytes/{rank}", peak, timestamp_ms, run.steps)


def recorded_points(child: Child, started: float) -> list[Point]:
    """Return the history and system metrics of one seed, from its files. ``started``: see ``run_times``."""
    history = results.read_history(child.history_file) if child.history_file.exists() else []
    rows = [row for row in history if row.seed == child.run.seed]
    points = [point for row in rows for point in history_points(row, started)]
    for step, sample in enumerate(_samples(child)):
        points += system_points(sample, step)
    return points


def compared_points(compared: Compared, known: Mapping[str, float]) -> Iterator[Point]:
    """Yield a variant's figures in the comparison: ``bench/<field>``, joined over the bench's rounds, and
    ``median/<field>``, joined over seeds. The run's own speed and memory are not used, because the trainings ran one
    after the other, so their figures cannot be compared. All children of a variant have the same values, so MLflow's
    average over the children equals the figure in the tables.

    ``known``: the metrics of the run in the store. Only values that differ from ``known`` are yielded. A value that
    became unknown is yielded as NaN.
    """
    now = round(time.time() * 1000)  # MLflow shows a metric's latest value
    for figure in FIGURES:
        if figure.over_seeds == "first":  # each run has its own
            continue
        key = f"{'median' if figure.over_seeds and not figure.over_rounds else 'bench'}/{figure.field}"
        figure_value = compared.of(figure)
        value = math.nan if figure_value is None else float(figure_value)
        before = known.get(key, math.nan)
        if value != before and not (math.isnan(value) and math.isnan(before)):
            yield Point(key, value, now, 0)


def parent_points(wanted: Wanted, root: Path, timestamp_ms: int, known: Iterable[str] = ()) -> Iterator[Point]:
    """Yield the comparison's figures, named ``<variant>/<figure>``: the content of ``reports/metrics``, the shares of a
    profiled step, and the figures of inference.

    ``known``: the metrics that the store holds already. MLflow cannot delete a metric, so a metric that no longer
    has a value is logged as NaN. ``timestamp_ms``: when the last run ended. If a file was written later, the
    metrics get the time of the newest file, because MLflow shows a metric's latest value.
    """
    folder = root / results.REPORTS / "metrics"
    files = [file for child in wanted.children.values() if (file := folder / f"{child.variant}.json").exists()]
    youngest = max([timestamp_ms, *(round(file.stat().st_mtime * 1000) for file in [*files, *wanted.records])])
    figures = {
        f"{file.stem}/{name}": value
        for file in files
        for name, value in read_json(file).items()
        if isinstance(value, int | float)
    }
    for variant, measured in (*wanted.profiles.items(), *wanted.inference.items()):
        for file in (file for file in measured if file.suffix == ".json"):
            figures |= _figures_of(variant, results.read_values(file, variant))
    for key, value in {**dict.fromkeys(known, math.nan), **figures}.items():
        yield Point(key, float(value), youngest, 0)


def run_times(child: Child) -> tuple[float, float]:
    """Return the start and end of a run in Unix seconds: from the system samples or, if there are none, from the time
    at which the result's file was written."""
    sampled = [float(sample["seconds"]) for sample in _samples(child)]
    durations = {run.seed: run.train_seconds + run.evaluate_seconds for run in child.result.runs}
    if sampled:
        return sampled[0], max(sampled[-1], sampled[0] + child.run.train_seconds)
    seeds = list(durations)
    after = sum(durations[seed] for seed in seeds[seeds.index(child.run.seed) + 1 :])
    ended = child.written_ms / 1000 - after
    return ended - durations[child.run.seed], ended


def allowed(text: str) -> str:
    """Return ``text`` with "_" in place of each character that MLflow does not allow."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", "_", text)


def _figures_of(variant: str, record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each metric in the record of a profile or of inference."""
    for rank, times in enumerate(record.get("ranks", ())):
        for name, value in times.items():
            if name != "step_ms":
                share = f"{name.removesuffix('_ms')}_fraction"
                yield f"{variant}/profile/rank_{rank}/{share}", value / times["step_ms"]
    for form in record.get("forms", ()):
        if measured := form["measured"]:
            where = f"{variant}/inference/{form['device_type']}_{form['name']}"
            latency, agreement = measured["latency"], measured["agreement"]
            yield f"{where}/latency_p50_ms", latency["p50_ms"]
            if latency["p99_ms"] is not None:
                yield f"{where}/latency_p99_ms", latency["p99_ms"]
            for batch in measured["throughput"]:
                for figure in FIGURES:
                    if batch.get(figure.field):
                        yield f"{where}/batch_{batch['batch_size']}_{figure.field}", batch[figure.field]
            yield f"{where}/test_accuracy", agreement["correct_count"] / agreement["test_count"]
            yield f"{where}/equal_fraction", agreement["equal_count"] / agreement["test_count"]
            yield f"{where}/model_bytes", measured["model_bytes"]


def _samples(child: Child) -> list[dict[str, str]]:
    """Return the rows of system.csv that belong to this seed; an empty list if the file does not exist."""
    if not child.system_file.exists():
        return []
    rows = csv.DictReader(io.StringIO(read_text(child.system_file)))
    return [row for row in rows if row["seed"] == str(child.run.seed) and _number(row["seconds"])]


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
