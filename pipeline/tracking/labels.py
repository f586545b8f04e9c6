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
from pipeline.comparison.consistency import changed_since
from pipeline.environment import ENVIRONMENT_FILE, hash_of
from pipeline.files import read_json, read_text
from pipeline.params import Config
from pipeline.results import Result
from pipeline.tracking.comparisons import RUN, Child, Wanted
from pipeline.tracking.metrics import allowed

NOTE = "mlflow.note.content"
VERDICT = "verdict"
"""Tag of a child: its variant's verdict. A parent has one tag ``verdict.<variant>`` per variant."""
COLUMNS = (VERDICT, "speed", "memory", "accuracy")
"""Tags of a child: the comparison's figures for its variant, shown in a table."""
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
        tags[REJECTIONS] = "\n".join(child.run.rejections)
    return tags


def parent_params(wanted: Wanted) -> dict[str, str]:
    """Return the parameters of the job, which all variants share."""
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
    """Return the tags that can change while the results stay the same, such as the comparison's settings, the report's
    verdicts and the digest of dvc.lock."""
    origins = [_origin_of(child.result, root) for child in wanted.children.values()]
    tags = {name: " ".join(sorted({origin[name] for origin in origins if name in origin})) for name in origins[0]}
    tags |= flatten({"compare": config.compare.model_dump(mode="json")})
    if (note := root / results.REPORTS / "comparison.md").exists():  # MLflow shows it as the run's description
        tags[NOTE] = _cut(read_text(note))
    for variant, files in wanted.profiles.items():
        record = next(file for file in files if file.name == "profile.json")
        found = results.read_values(record, variant)["findings"]
        tags[f"{FINDING}.{variant}"] = _cut("\n".join(each["text"] for each in found))
    comparison = compared(wanted, root)
    if comparison:
        ratios = [each[field] for each in comparison["variants"] for field in ("throughput", "memory")]
        measured = max((session_count(each) for each in ratios if each), default=0)
        one = "1; in other sessions these ratios may differ by an unknown amount"
        tags |= {"sessions": one if measured == 1 else str(measured), **champion(comparison)}
    for variant, verdict in verdicts(comparison).items():
        tags[f"{VERDICT}.{variant}"] = verdict
        # "none" replaces the tag of an older report.
        tags[f"{REJECTIONS}.{variant}"] = _rejections(comparison, variant) or "none"
    return tags


def session_count(ratio: Mapping[str, Any]) -> int:
    """Return the number of sessions in which ``ratio`` (from comparison.json) is trusted and has bounds."""
    return sum(one["trusted"] and one["low"] is not None for one in ratio["sessions"])


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


def compared(wanted: Wanted, root: Path) -> dict[str, Any]:
    """Return the content of comparison.json; an empty dict if this file does not exist or is ``stale``."""
    return {} if stale(wanted, root) else _comparison(root)


def stale(wanted: Wanted, root: Path) -> list[str]:
    """Return the files and settings that have changed since comparison.json was made from them."""
    runs = {child.variant: [run.model_dump(mode="json") for run in child.result.runs]
            for child in wanted.children.values()}  # fmt: skip
    content = _comparison(root)
    told = [each for each in content.get("variants", ()) if each["runs"] != runs.get(each["variant"])]
    now = wanted.settings.model_dump(mode="json") if content else None
    settings = [f"{path} in params.yaml" for path, *_ in results.differing(content.get("settings"), now, "compare")]
    return settings + (changed_since(content, root) or [f"the runs of {each['variant']}" for each in told])


def _comparison(root: Path) -> dict[str, Any]:
    path = root / results.REPORTS / "comparison.json"
    try:
        content = read_json(path) if path.exists() else {}
        if all(each["runs"] and each["variant"] for each in content.get("variants", ())):
            return dict(content)
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        pass
    raise results.ResultError(f"{path} is not a comparison: run `dvc repro compare`.")


def verdicts(comparison: Mapping[str, Any]) -> dict[str, str]:
    """Return variant -> its verdict in ``comparison``, with the reasons if the verdict is undecided or untrusted.
    The baseline's verdict is "baseline"."""
    found = {}
    for each in comparison.get("variants", ()):
        verdict, reasons = each.get("verdict") or "baseline", each.get("reasons", ())
        plain = verdict not in ("undecided", "untrusted") or not reasons
        found[str(each["variant"])] = verdict if plain else _cut(f"{verdict}: {'; '.join(reasons)}")
    return found


def columns(comparison: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return variant -> tags of its children: the verdict, and speed, memory and accuracy as text for a table."""
    found, said, unit = {}, verdicts(comparison), comparison.get("unit", {"name": "samples", "per_sample": 1})
    for each in comparison.get("variants", ()):
        speed, memory, difference = each["samples_per_second"], each["peak_memory_bytes"], each["accuracy_difference"]
        points = f", {100 * difference['mean_fraction']:+.2f} points" if difference else ""
        texts = (
            said[each["variant"]],
            f"{speed * unit['per_sample']:,.0f} {unit['name']}/s{_beside(each['throughput'])}" if speed else "unknown",
            f"{memory / 2**20:,.1f} MiB{_beside(each['memory'])}" if memory else "unknown",
            f"{each['test_accuracy_mean_fraction']:.2%}{points}",
        )
        found[str(each["variant"])] = dict(zip(COLUMNS, texts, strict=True))
    return found


def _beside(ratio: Mapping[str, Any] | None) -> str:
    return f", \N{MULTIPLICATION SIGN}{_ratio(ratio)}" if ratio and ratio["decision"] != "untrusted" else ""


def champion(comparison: Mapping[str, Any]) -> dict[str, str]:
    """Return tags: the best variant, its gain over the baseline, and its ratio to the second-best variant.
    If no variant pays, the baseline is the best."""
    best = comparison.get("champion")
    if not best:
        return {"champion": comparison["baseline"], "champion.gain": "none", "champion.head_to_head": "none"}
    gain, pair = best["ratio"], best["head_to_head"]
    return {
        "champion": best["variant"],
        "champion.gain": f"{_ratio(gain)} times the {best['quantity']}" if gain else "unknown",
        "champion.head_to_head": f"{_ratio(pair)} against {best['runner_up']}: {pair['decision']}" if pair else "none",
    }


def _ratio(ratio: Mapping[str, Any]) -> str:
    if ratio["estimate"] is None:  # no round has samples of both variants
        return "unknown"
    ends = (ratio["low"], ratio["high"])
    return f"{ratio['estimate']:.3f}" + (f" ({ends[0]:.3f} to {ends[1]:.3f})" if None not in ends else "")


def lock_sha256(lock: Path) -> str:
    """Return the digest of dvc.lock without the stage ``publish``, which DVC adds only after ``publish`` has run.

    So the digest stays the same when DVC adds this stage.
    """
    stages = re.split(r"^(?=  \S)", read_text(lock), flags=re.MULTILINE)
    return hashlib.sha256("".join(each for each in stages if not each.startswith("  publish:")).encode()).hexdigest()


def flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Return nested values as ``a.b.c`` -> text; values other than text become JSON.

    >>> flatten({"train": {"seeds": [0, 1], "augment": {"flip": False}, "model": "small_cnn"}})
    {'train.seeds': '[0, 1]', 'train.augment.flip': 'false', 'train.model': 'small_cnn'}
    """
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{allowed(key)}.{inner}": text for inner, text in flatten(value).items()}
        else:
            found[allowed(key)] = value if isinstance(value, str) else json.dumps(value)
    return found


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


def _rejections(comparison: Mapping[str, Any], variant: str) -> str:
    """Return why the bench rejected samples of a variant: one line per round with a rejected sample."""
    [arm] = [each for each in comparison["bench"]["arms"] if (each["role"], each["variant"]) == ("variant", variant)]
    lines = [
        f"round {index}: {'; '.join(sample['rejections'])}"
        for index, sample in enumerate(arm["samples"], 1)
        if sample["rejections"]
    ]
    return _cut("\n".join(lines))


def _cut(text: str) -> str:
    return text if len(text) <= NOTE_LIMIT else f"{text[:NOTE_LIMIT]} ... (cut short)"
