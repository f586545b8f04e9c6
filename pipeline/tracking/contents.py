"""What a run in a store holds, by the files: metrics, parameters and tags. No MLflow here."""

from __future__ import annotations

import csv
import getpass
import hashlib
import json
import math
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import results
from pipeline.config import Config
from pipeline.environment import ENVIRONMENT_FILE, hash_of
from pipeline.results import HistoryRow, Result, Run
from pipeline.tracking.comparisons import RUN, Child, Wanted

NOTE = "mlflow.note.content"

VERDICT = "verdict"
"""Tag of a child; with a variant's name after a point, of a parent: what the comparison says of it."""
REFUSALS = "refusals"
"""Tag, likewise: which numbers were refused, and why."""
COMPARED = {
    "bench/samples_per_second": "samples_per_second",
    "bench/peak_memory_bytes": "peak_memory_bytes",
}
"""Metrics of a child -> what comparison.json calls them: medians over the bench's rounds."""
FINDING = "finding"
"""With a variant's name after a point, tag of a parent: what its profile says."""

NOTE_LIMIT = 7900
"""Characters; MLflow's tags end at 8000."""


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    timestamp_ms: int
    step: int


def history_points(row: HistoryRow, started: float) -> Iterator[Point]:
    """Metrics of one row. Their clock is training time after ``started`` (unix seconds): rows carry no other."""
    for name, value in row.model_dump(exclude={"seed", "step"}).items():
        if value is not None:
            yield Point(f"history/{name}", value, round((started + row.train_seconds) * 1000), row.step)


def system_points(row: Mapping[str, str], step: int) -> Iterator[Point]:
    """Metrics of one sample of the machine, the ``step``-th of its run. MLflow's page shows system/ by itself."""
    timestamp = round(float(row["seconds"]) * 1000)
    for column, text in row.items():
        value = _number(text)
        if column not in ("seed", "seconds") and value is not None:
            yield Point(f"system/{_metric_name(column)}", value, timestamp, step)


def final_points(run: Run, timestamp_ms: int) -> Iterator[Point]:
    """The result's figures; what is unknown is left out."""
    for name, value in run.model_dump(exclude={"seed", "peak_memory_rank_bytes"}).items():
        if isinstance(value, int | float):
            yield Point(name, value, timestamp_ms, run.steps)
    for name, value in run.findings.items():
        yield Point(f"findings/{name}", value, timestamp_ms, run.steps)
    ranks = run.peak_memory_rank_bytes
    for rank, peak in enumerate(ranks):
        if peak is not None and len(ranks) > 1:
            yield Point(f"peak_memory_rank_bytes/{rank}", peak, timestamp_ms, run.steps)


def recorded_points(child: Child, times: tuple[float, float]) -> list[Point]:
    """History and system metrics of one seed, from its files."""
    history = results.read_history(child.history_file) if child.history_file.exists() else []
    rows = [row for row in history if row.seed == child.run.seed]
    points = [point for row in rows for point in history_points(row, times[0])]
    for step, sample in enumerate(_samples(child)):
        points += system_points(sample, step)
    return points


def run_times(child: Child) -> tuple[float, float]:
    """When a run started and ended, in unix seconds: as sampled, else counted back from the result's file."""
    sampled = [float(sample["seconds"]) for sample in _samples(child)]
    durations = {run.seed: run.train_seconds + run.evaluate_seconds for run in child.result.runs}
    if sampled:
        return sampled[0], max(sampled[-1], sampled[0] + child.run.train_seconds)
    seeds = list(durations)
    after = sum(durations[seed] for seed in seeds[seeds.index(child.run.seed) + 1 :])
    ended = child.written_ms / 1000 - after
    return ended - durations[child.run.seed], ended


def child_params(result: Result) -> dict[str, str]:
    """The configuration asked for and what became of it on the machine."""
    values = result.model_dump(mode="json", exclude={"schema_", "variant", "environment", "summary", "runs"})
    return flatten(values.pop("config") | values)


def child_tags(child: Child) -> dict[str, str]:
    """What people look for, and the run's key."""
    tags = {
        RUN: child.key,
        "variant": child.variant,
        "seed": str(child.run.seed),
        "world_size": str(child.result.world_size),
        "dvc_stage": f"train@{child.variant}",
        "model_sha256": child.run.model_sha256,
        **_origin_of(child.result, child.root),
    }
    if child.run.refusals:
        tags[REFUSALS] = "\n".join(child.run.refusals)
    return tags


def parent_params(wanted: Wanted) -> dict[str, str]:
    """The job, which all variants share."""
    by_variant = {child.variant: child.result for child in wanted.children.values()}
    first = next(iter(by_variant.values()))
    return flatten(
        {
            "train": first.config.get("train", {}),
            "dataset": first.dataset.model_dump(mode="json"),
            "device": first.device,
            "parameter_count": first.parameter_count,
            "variants": sorted(by_variant),
        }
    )


def parent_tags(config: Config, wanted: Wanted, root: Path) -> dict[str, str]:
    """What can change while the results stay: how they are compared, the report, the locked state of the data."""
    origins = [_origin_of(child.result, root) for child in wanted.children.values()]
    tags = {name: " ".join(sorted({origin[name] for origin in origins if name in origin})) for name in origins[0]}
    tags |= flatten({"compare": config.compare.model_dump(mode="json")})
    if note := parent_note(root):
        tags[NOTE] = note
    for variant, files in wanted.profiles.items():
        record = next(file for file in files if file.name == "profile.json")
        found = json.loads(record.read_text(encoding="utf-8"))["findings"]
        tags[f"{FINDING}.{variant}"] = _cut("\n".join(each["text"] for each in found))
    comparison = compared(root)
    for variant, verdict in verdicts(comparison).items():
        tags[f"{VERDICT}.{variant}"] = verdict
        tags[f"{REFUSALS}.{variant}"] = _refusals(comparison, variant) or "none"  # in place of an older report's
    return tags


def compared(root: Path) -> dict[str, Any]:
    """The content of comparison.json; empty without one, and if it compares other runs than those in the results."""
    path = root / results.REPORTS / "comparison.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for each in content.get("variants", ()):
        file = results.result_file(each["variant"], root / results.RESULTS)
        if not file.exists() or json.loads(file.read_text(encoding="utf-8"))["runs"] != each["runs"]:
            return {}
    return content


def verdicts(comparison: Mapping[str, Any]) -> dict[str, str]:
    """By variant: what the comparison (see ``compared``) says of it, and why it says no more; none if it is empty."""
    found = {}
    for each in comparison.get("variants", ()):
        verdict, reasons = each.get("verdict") or "baseline", each.get("reasons", ())
        plain = verdict not in ("undecided", "untrusted") or not reasons
        found[str(each["variant"])] = verdict if plain else _cut(f"{verdict}: {'; '.join(reasons)}")
    return found


def compared_points(comparison: Mapping[str, Any], child: Child, known: Mapping[str, float]) -> Iterator[Point]:
    """What the comparison holds of the child's variant, of the bench's rounds: the run's own speed and memory are those
    of trainings one after the other, which nobody should compare.

    ``known``: the metrics of the run in the store. A value that is refused now becomes not a number.
    """
    now = round(time.time() * 1000)  # of several values MLflow shows the youngest
    [found] = [each for each in comparison["variants"] if each["variant"] == child.variant]
    for key, field in COMPARED.items():
        value = math.nan if found[field] is None else float(found[field])
        before = known.get(key, math.nan)
        if value != before and not (math.isnan(value) and math.isnan(before)):
            yield Point(key, value, now, 0)


def parent_points(wanted: Wanted, root: Path, timestamp_ms: int, known: Iterable[str] = ()) -> Iterator[Point]:
    """The comparison's figures, as ``<variant>/<figure>``: those that ``dvc metrics show`` prints, the shares of a
    profiled step, and what inference gave.

    ``known``: the metrics that the store holds already. MLflow deletes none, so one that is not known any more becomes
    not a number. ``timestamp_ms``: when the last run ended; of several values MLflow shows the youngest, so a report
    that was written later counts from then.
    """
    files = [
        root / results.REPORTS / "metrics" / f"{variant}.json"
        for variant in dict.fromkeys(child.variant for child in wanted.children.values())
    ]
    files = [file for file in files if file.exists()]
    youngest = max([timestamp_ms, *(round(file.stat().st_mtime * 1000) for file in files)])
    figures = {
        f"{file.stem}/{name}": value
        for file in files
        for name, value in json.loads(file.read_text(encoding="utf-8")).items()
        if isinstance(value, int | float)
    }
    youngest = max([youngest, *(round(file.stat().st_mtime * 1000) for file in wanted.records)])
    for file in wanted.records:
        figures |= _figures_of(json.loads(file.read_text(encoding="utf-8")))
    for key, value in {**dict.fromkeys(known, math.nan), **figures}.items():
        yield Point(key, float(value), youngest, 0)


def _figures_of(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Metrics of a profile's or an inference's record."""
    variant = record["variant"]
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
            for each in measured["throughput"]:
                yield f"{where}/batch_{each['batch_size']}_samples_per_second", each["samples_per_second"]
            yield f"{where}/test_accuracy", agreement["correct_count"] / agreement["test_count"]
            yield f"{where}/equal_fraction", agreement["equal_count"] / agreement["test_count"]
            yield f"{where}/model_bytes", measured["model_bytes"]


def parent_note(root: Path) -> str | None:
    """The comparison in Markdown, which MLflow shows as the run's description."""
    path = root / results.REPORTS / "comparison.md"
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    if len(text) <= NOTE_LIMIT:
        return text
    beginning = text[:NOTE_LIMIT]
    whole_lines = beginning.rpartition("\n")[0] or beginning
    return whole_lines + "\n\n*Cut short: the artifact comparison.md has all of it.*"


def origin_tags(root: Path, command: str) -> dict[str, str]:
    """Where a run came from, in the tags that MLflow's page shows; the commit is the one checked out now."""
    tags = {"mlflow.source.name": f"python -m pipeline {command}", "mlflow.source.type": "LOCAL"}
    with suppress(OSError, KeyError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    git = ["git", "-C", str(root), "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.CalledProcessError):  # no git here, or no commit yet
        answer = subprocess.run(git, capture_output=True, text=True, check=True)
        tags["mlflow.source.git.commit"] = answer.stdout.strip()
    return tags


def lock_sha256(lock: Path) -> str:
    """The digest of dvc.lock without the stage ``publish``, which DVC enters only after we have run.

    So the file that is then committed has the same one.
    """
    stages = re.split(r"^(?=  \S)", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return hashlib.sha256("".join(each for each in stages if not each.startswith("  publish:")).encode()).hexdigest()


def flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Nested values as ``a.b.c`` -> text; what is not text is JSON.

    >>> flatten({"train": {"seeds": [0, 1], "augment": {"flip": False}, "model": "small_cnn"}})
    {'train.seeds': '[0, 1]', 'train.augment.flip': 'false', 'train.model': 'small_cnn'}
    """
    return {
        _metric_name(name): value if isinstance(value, str) else json.dumps(value) for name, value in _leaves(values)
    }


def batches(points: Iterable[Point], size: int) -> Iterator[list[Point]]:
    """``points`` in lists of at most ``size``."""
    pending: list[Point] = []
    for point in points:
        pending.append(point)
        if len(pending) == size:
            yield pending
            pending = []
    if pending:
        yield pending


def _origin_of(result: Result, root: Path) -> dict[str, str]:
    """What a result came from, beside the commit: the machine, the container image, the locked state of the data."""
    tags = {"environment": result.environment, "device": result.device}
    fingerprint, lock = root / ENVIRONMENT_FILE, root / "dvc.lock"
    known = json.loads(fingerprint.read_text(encoding="utf-8")) if fingerprint.exists() else {}
    if known and hash_of(known, "variants", result.variant) == result.environment:
        tags["environment"] = known["hash"]  # what all variants have in common, to be searched for
        if known["software"]["image"]:
            tags["image"] = known["software"]["image"]
    if lock.exists():
        tags["dvc_lock_sha256"] = lock_sha256(lock)
    return tags


def _refusals(comparison: Mapping[str, Any], variant: str) -> str:
    """Which samples of the bench were refused of a variant, a line a round."""
    samples = [
        sample
        for arm in comparison.get("bench", {}).get("arms", ())
        if (arm["role"], arm["variant"]) == ("variant", variant)
        for sample in arm["samples"]
    ]
    lines = [
        f"round {index}: {'; '.join(sample['refusals'])}"
        for index, sample in enumerate(samples, 1)
        if sample["refusals"]
    ]
    return _cut("\n".join(lines))


def _cut(text: str) -> str:
    return text if len(text) <= NOTE_LIMIT else f"{text[:NOTE_LIMIT]} ..."


def _samples(child: Child) -> list[dict[str, str]]:
    """The rows of system.csv that belong to this seed; none without the file."""
    if not child.system_file.exists():
        return []
    with child.system_file.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["seed"] == str(child.run.seed) and _number(row["seconds"])]


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            for inner, leaf in _leaves(value):
                yield f"{key}.{inner}", leaf
        else:
            yield key, value


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _metric_name(text: str) -> str:
    """``text`` in the characters that MLflow allows."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", "_", text)
