"""What the runs in the store hold: their parameters, tags and metrics, made from the files. Without MLflow."""

from __future__ import annotations

import csv
import getpass
import hashlib
import io
import json
import math
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import environment, pages, results
from pipeline.comparison.comparison_file import Compared, Comparison
from pipeline.comparison.stats import Difference
from pipeline.environment import ENVIRONMENT_FILE, hash_of
from pipeline.files import read_json, read_text
from pipeline.params import Config
from pipeline.results import HistoryRow, Result, Run
from pipeline.results.figures import FIGURES, QUANTITIES
from pipeline.tracking.comparisons import RUN, Child, Wanted

NOTE = "mlflow.note.content"
VERDICT = "verdict"
"""Tag of a child: its variant's verdict. A parent has one tag, with the reasons, ``verdict.<variant>`` per variant."""
REJECTIONS = "rejections"
"""Tag of a child: why numbers of the run were rejected. A parent has one tag ``rejections.<variant>`` per variant: the
variant's rejected samples in the bench."""
FINDING = "finding"
"""Tag ``finding.<variant>`` of a parent: the findings of the variant's profile."""
NOTE_LIMIT = 7900
"""Maximum number of characters of a note; MLflow limits a tag to 8000."""


def child_params(result: Result) -> dict[str, str]:
    """Return the configuration that the user asked for, and the configuration that ran on the machine."""
    values = result.model_dump(mode="json", exclude={"schema_", "variant", "environment", "runs"})
    return flatten(values.pop("config") | values)


def child_tags(child: Child) -> dict[str, str]:
    """Return the tags that people search by, and the run's key."""
    tags = {
        RUN: child.key,
        "variant": child.variant,
        "seed": str(child.run.seed),
        "world_size": str(child.result.world_size),
        "dvc_stage": results.stage_of(child.variant, child.result.applied),
        "model_sha256": child.run.model_sha256,
        **_origin_of(child.result, child.root),
    }
    if child.run.rejections:
        tags[REJECTIONS] = "\n".join(rejection.text for rejection in child.run.rejections)
    return tags


def parent_params(wanted: Wanted) -> dict[str, str]:
    """Return the parameters of the job, which all variants share."""
    by_variant = {child.variant: child.result for child in wanted.children.values()}
    first = next(iter(by_variant.values()))
    return flatten(
        {
            "train": first.config.get("train", {}),
            "dataset": first.dataset.model_dump(mode="json") if first.dataset else {},
            "device": first.device,
            "parameter_count": first.parameter_count,
            "variants": sorted(by_variant),
        }
    )


def parent_tags(config: Config, wanted: Wanted, root: Path) -> dict[str, str]:
    """Return the tags that can change while the results stay the same, such as the comparison's settings, the report's
    verdicts and the digest of dvc.lock."""
    origins = [_origin_of(child.result, root) for child in wanted.children.values()]
    tags = {name: " ".join(sorted({origin[name] for origin in origins if name in origin})) for name in origins[0]}
    tags |= flatten({"compare": config.compare.model_dump(mode="json")})
    if (note := root / results.REPORTS / "comparison.md") in wanted.report_files:  # MLflow shows it as a description
        tags[NOTE] = _cut(read_text(note))
    for variant, record in wanted.profiles.items():
        findings = results.read_values(record, variant)["findings"]
        tags[f"{FINDING}.{variant}"] = _cut("\n".join(finding["text"] for finding in findings))
    if comparison := wanted.comparison:
        ratios = [ratio for compared in comparison.variants for ratio in (compared.throughput, compared.memory)]
        sessions = max((ratio.session_count for ratio in ratios if ratio), default=0)
        single = "1; in other sessions these ratios may differ by an unknown amount"
        tags |= {"sessions": single if sessions == 1 else str(sessions), **champion(comparison)}
        for variant, verdict in verdicts(comparison).items():
            tags[f"{VERDICT}.{variant}"] = verdict
            # "none" replaces the tag of an older report.
            tags[f"{REJECTIONS}.{variant}"] = _rejections(comparison, variant) or "none"
    return tags


def origin_tags(root: Path, command: str) -> dict[str, str]:
    """Return the origin of a run, in the tags that MLflow's page shows. The commit is the one checked out now."""
    tags = {"mlflow.source.name": f"python -m pipeline {command}", "mlflow.source.type": "LOCAL"}
    with suppress(OSError, KeyError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    git = ["git", "-C", str(root), "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.CalledProcessError):  # no git here, or no commit yet
        answer = subprocess.run(git, capture_output=True, text=True, check=True)
        tags["mlflow.source.git.commit"] = answer.stdout.strip()
    return tags


def verdicts(comparison: Comparison) -> dict[str, str]:
    """Return variant -> its verdict, with the reasons if the verdict is undecided or untrusted. The baseline's verdict
    is "baseline"."""
    texts = {}
    for compared in comparison.variants:
        verdict, reasons = compared.verdict or "baseline", (*compared.reasons, *compared.shared_reasons)
        explained = bool(reasons) and verdict in ("undecided", "untrusted")
        texts[compared.variant] = _cut(f"{verdict}: {'; '.join(reasons)}") if explained else verdict
    return texts


def columns(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Return variant -> tags of its children, for a table: the verdict, the compared figures, the accuracy. The
    reasons behind a verdict are tags of the parent, because a column of the table has room for few words."""
    tags = {compared.variant: {VERDICT: compared.badge or "baseline"} for compared in comparison.variants}
    for compared in comparison.variants:
        for figure in QUANTITIES:
            value, ratio = compared.of(figure), compared.ratios.get(figure)
            if not value and figure.optional:
                continue
            text = pages.of_figure(figure, value, comparison.unit).replace(pages.JOINED, " ")
            if value and ratio and not ratio.why_untrusted:
                text += f", {pages.TIMES}{_ratio(ratio)}"
            tags[compared.variant][figure.word] = text
        accuracy = pages.percent(compared.trained["test_accuracy_mean_fraction"])
        difference = compared.accuracy.estimate if compared.accuracy else None
        points = "" if difference is None else f", {100 * difference:+.2f} points"
        tags[compared.variant]["accuracy"] = accuracy + points
    return tags


def champion(comparison: Comparison) -> dict[str, str]:
    """Return tags: the best variant, its gain over the baseline, and its ratio to the second-best variant.
    If no variant pays, the baseline is the best."""
    best = comparison.champion
    if not best:
        return {"champion": comparison.baseline, "champion.gain": "none", "champion.head_to_head": "none"}
    gain, pair = best.ratio, best.head_to_head
    return {
        "champion": best.variant,
        "champion.gain": f"{_ratio(gain)} times the {best.quantity}" if gain else "unknown",
        "champion.head_to_head": f"{_ratio(pair)} against {best.runner_up}: {pair.decision}" if pair else "none",
    }


def _ratio(ratio: Difference) -> str:
    if ratio.estimate is None:  # no round has samples of both variants
        return "unknown"
    low, high = ratio.bounds
    return f"{ratio.estimate:.3f}" + ("" if ratio.low is None else f" ({low:.3f} to {high:.3f})")


def lock_sha256(lock: Path) -> str:
    """Return the digest of dvc.lock without the stage ``publish``, which DVC adds only after ``publish`` has run.

    So the digest stays the same when DVC adds this stage.
    """
    stages = re.split(r"^(?=  \S)", read_text(lock), flags=re.MULTILINE)
    return hashlib.sha256("".join(stage for stage in stages if not stage.startswith("  publish:")).encode()).hexdigest()


def flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Return nested values as ``a.b.c`` -> text; values other than text become JSON.

    >>> flatten({"train": {"seeds": [0, 1], "augment": {"flip": False}, "model": "small_cnn"}})
    {'train.seeds': '[0, 1]', 'train.augment.flip': 'false', 'train.model': 'small_cnn'}
    """
    texts: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            texts |= {f"{allowed(key)}.{inner}": text for inner, text in flatten(value).items()}
        else:
            texts[allowed(key)] = value if isinstance(value, str) else json.dumps(value)
    return texts


def _origin_of(result: Result, root: Path) -> dict[str, str]:
    """Return the origin of a result, except for its commit: machine, container image and digest of dvc.lock."""
    tags = {"environment": result.environment, "device": result.device}
    fingerprint, lock = root / ENVIRONMENT_FILE, root / "dvc.lock"
    known = environment.read(fingerprint) if fingerprint.exists() else {}
    if known:  # ``comparisons.wanted`` has checked that this is the result's environment
        tags["environment"] = hash_of(known, "variants")  # without the variants' own packages
        if known["software"]["image"]:
            tags["image"] = known["software"]["image"]
    if lock.exists():
        tags["dvc_lock_sha256"] = lock_sha256(lock)
    return tags


def _rejections(comparison: Comparison, variant: str) -> str:
    """Return why the bench rejected samples of a variant: one line per round with a rejected sample."""
    arm = comparison.bench.arm("variant", variant)
    lines = [
        f"round {number}: {'; '.join(rejection.advising(comparison.advised).text for rejection in sample.rejections)}"
        for number, sample in enumerate(arm.samples if arm else (), 1)
        if sample.rejections
    ]
    return _cut("\n".join(lines))


def _cut(text: str) -> str:
    return text if len(text) <= NOTE_LIMIT else f"{text[:NOTE_LIMIT]} ... (cut short)"


# Metrics


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


def parent_points(wanted: Wanted, known: Iterable[str] = ()) -> Iterator[Point]:
    """Yield the comparison's figures, named ``<variant>/<figure>``: the content of ``reports/metrics``, the shares of a
    profiled step, and the figures of inference, scaling and advice.

    ``known``: the metrics that the store holds already. MLflow cannot delete a metric, so a metric that no longer
    has a value is logged as NaN; but those of a report stay while the files have a stale one.
    """
    from pipeline.report import metrics  # takes a while, and most calls of publish write nothing

    now = round(time.time() * 1000)  # MLflow shows a metric's latest value
    figures = {
        f"{compared.variant}/{name}": value
        for compared in (wanted.comparison.variants if wanted.comparison else ())
        for name, value in metrics(compared).items()
        if isinstance(value, int | float)
    }
    for variant, record in (*wanted.profiles.items(), *wanted.inference.items()):
        figures |= _figures_of(variant, results.read_values(record, variant))
    for page in wanted.pages:
        figures |= _FIGURES_OF_PAGE[page.stem](read_json(page))
    for key, value in {**({} if wanted.stale else dict.fromkeys(known, math.nan)), **figures}.items():
        yield Point(key, float(value), now, 0)


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


def _figures_of_scaling(report: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for curve in report["curves"]:
        for point in curve["points"]:
            where = f"{curve['variant']}/scale/{curve['mode']}_{point['place']['processes']}"
            figures = {name: point[name] for name in ("samples_per_second", "peak_memory_bytes", "price", "money")}
            yield from ((f"{where}/{name}", value) for name, value in figures.items() if value is not None)
            yield from ((f"{where}/speedup_{end}", value) for end, value in _ends(point["speedup"]))


def _figures_of_advice(report: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for candidate, ratios in report["ratios"].items():
        for figure, ratio in ratios.items():
            name = allowed(f"advice/{candidate}/{figure}_ratio")
            yield from ((f"{name}_{end}", value) for end, value in _ends(ratio))


def _ends(ratio: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return what is known of a ratio whose size is trusted."""
    ends = () if ratio["why_untrusted"] else ("estimate", "low", "high")
    return [(end, ratio[end]) for end in ends if ratio[end] is not None]


_FIGURES_OF_PAGE = {"scaling": _figures_of_scaling, "advice": _figures_of_advice}


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
