"""Build the parameters and tags of MLflow's runs from results, reports and the git commit, without MLflow."""

from __future__ import annotations

import getpass
import hashlib
import json
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline import environment, results
from pipeline.comparison.comparison_file import Comparison
from pipeline.comparison.stats import Difference
from pipeline.environment import ENVIRONMENT_FILE, hash_of
from pipeline.files import read_text
from pipeline.pages import formats
from pipeline.params import Config
from pipeline.results import Result
from pipeline.results.figures import QUANTITIES
from pipeline.tracking.comparisons import RUN, Child, Wanted
from pipeline.tracking.metrics import allowed

NOTE = "mlflow.note.content"
VERDICT = "verdict"
"""Tag of a child: its variant's verdict. A parent has one tag ``verdict.<variant>`` per variant."""
REJECTIONS = "rejections"
"""Tag of a child: why numbers of the run were rejected. A parent has one tag ``rejections.<variant>`` per variant: the
variant's rejected samples in the bench."""
FINDING = "finding"
"""Tag ``finding.<variant>`` of a parent: the findings of the variant's profile."""
NOTE_LIMIT = 7900
"""Maximum number of characters of a note; MLflow limits a tag to 8000."""


def child_params(result: Result) -> dict[str, str]:
    """Return the configuration that the user asked for, and the configuration that ran on the machine."""
    values = result.model_dump(mode="json", exclude={"schema_", "variant", "environment", "summary", "runs"})
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
    if (note := root / results.REPORTS / "comparison.md").exists():  # MLflow shows it as the run's description
        tags[NOTE] = _cut(read_text(note))
    for variant, files in wanted.profiles.items():
        record = next(file for file in files if file.name == "profile.json")
        findings = results.read_values(record, variant)["findings"]
        tags[f"{FINDING}.{variant}"] = _cut("\n".join(finding["text"] for finding in findings))
    if comparison := wanted.comparison:
        ratios = [ratio for compared in comparison.variants for ratio in (compared.throughput, compared.memory)]
        sessions = max((session_count(ratio) for ratio in ratios if ratio), default=0)
        single = "1; in other sessions these ratios may differ by an unknown amount"
        tags |= {"sessions": single if sessions == 1 else str(sessions), **champion(comparison)}
        for variant, verdict in verdicts(comparison).items():
            tags[f"{VERDICT}.{variant}"] = verdict
            # "none" replaces the tag of an older report.
            tags[f"{REJECTIONS}.{variant}"] = _rejections(comparison, variant) or "none"
    return tags


def session_count(ratio: Difference) -> int:
    """Return the number of sessions in which ``ratio`` is trusted and has bounds."""
    return sum(part.counts for part in ratio.parts.values())


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
    """Return variant -> tags of its children, for a table: the verdict, the compared figures, the accuracy."""
    tags = {variant: {VERDICT: verdict} for variant, verdict in verdicts(comparison).items()}
    for compared in comparison.variants:
        for figure in QUANTITIES:
            value, ratio = compared.of(figure), compared.ratios.get(figure)
            if not value and figure.optional:
                continue
            text = formats.of_figure(figure, value, comparison.unit).replace(formats.JOINED, " ")
            if value and ratio and ratio.decision != "untrusted":
                text += f", {formats.TIMES}{_ratio(ratio)}"
            tags[compared.variant][figure.word] = text
        accuracy = formats.percent(compared.trained["test_accuracy_mean_fraction"])
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
