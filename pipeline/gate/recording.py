"""This checkout's comparison, held against one that was recorded earlier."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.comparison import Comparison
from pipeline.config import Config
from pipeline.environment import checked_out, hash_of, optional_versions
from pipeline.gate.decision import (
    Gated,
    GateError,
    Side,
    accuracies,
    differing,
    in_common,
    judge,
    noises,
    unshared,
)
from pipeline.results import REPORTS
from pipeline.verdicts import Noise

COMPARISON_FILE = REPORTS / "comparison.json"


def recorded(config: Config, path: Path) -> Gated:
    """Hold ``reports/comparison.json`` against the comparison in ``path``.

    Raises GateError if they are not of one job in one environment, naming what differs, or if this checkout's is not of
    what is here now.
    """
    base, head = _read(path), _read(COMPARISON_FILE)
    there, here = ({arm.variant: arm for arm in each.bench.arms if arm.role == "variant"} for each in (base, head))
    names = in_common(there, here, str(path))
    if problems := [*_environment_problems(base, head, names, path), *_job_problems(base, head, path)]:
        raise GateError("\n".join(problems))
    if changed := _changed(names):
        raise GateError(
            f"{COMPARISON_FILE} is not of what is here now: since it was made, {', '.join(changed)} changed. "
            "Run `dvc repro`, which measures it again."
        )
    settings = config.compare
    found = _noise(base, settings.max_spread, path), _noise(head, settings.max_spread, COMPARISON_FILE)
    throughput, memory = (max(each, key=_loudness) for each in zip(*found, strict=True))
    of_base, of_head = _side(base), _side(head)
    compared, missing = accuracies(
        config, names, head.dataset.test_count, of_base.test_accuracies, of_head.test_accuracies
    )
    variants = [{name: each.bench.config["variants"][name] for name in names} for each in (base, head)]
    return Gated(
        **dict(judge(there, here, (throughput, memory), settings.margins, compared, paired=False)),
        mode="recorded",
        against=str(path),
        margins=settings.margins,
        base=of_base,
        head=of_head,
        remarks=(
            "Recorded at different times: a change of the machine in between cannot be told from a change of the code. "
            "Held against a revision, both are measured side by side.",
            *_stale(head),
            *unshared(there, here),
            *differing(variants[0], variants[1], "variants"),
            *missing,
        ),
        seconds=None,
        budget="bench.max_minutes",
    )


def _changed(names: Sequence[str]) -> list[str]:
    """What this checkout's comparison rests on and was modified since, as far as DVC knows it."""
    if not Path(".dvc").is_dir():
        return []
    stages = [*(f"train@{name}" for name in names), "bench", "compare"]
    command = [sys.executable, "-m", "dvc", "status", "--json", *stages]
    done = subprocess.run(command, capture_output=True, text=True)
    known = json.loads(done.stdout) if done.returncode == 0 else {}  # it may not know these stages
    modified: dict[str, None] = {}
    for change in (each for changes in known.values() for each in changes if isinstance(each, dict)):
        for path, how in change.get("changed deps", {}).items():
            keys = how if isinstance(how, dict) else {path: how}  # parameters, or a file
            changed = (key for key, what in keys.items() if what == "modified")
            modified |= dict.fromkeys(key if path == "params.yaml" else path for key in changed)
    return list(modified)


def _stale(head: Comparison) -> list[str]:
    """Says that the code has changed since it was measured."""
    here = checked_out()
    if here == head.bench.commit:
        return []
    return [f"{COMPARISON_FILE} was measured at {head.bench.commit or 'no commit'}; what is here now is {here}."]


def _read(path: Path) -> Comparison:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        for each in (values, values["bench"]):
            each["schema_"] = each.pop("schema")
        return Comparison.model_validate(values)
    except FileNotFoundError:
        raise GateError(f"{path} is missing; run `dvc repro`, which writes it.") from None
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise GateError(
            f"{path} is not a comparison that this version can read: give a reports/comparison.json that this version "
            f"wrote, or a revision. ({error})"
        ) from None


def _side(comparison: Comparison) -> Side:
    return Side(
        commit=comparison.bench.commit,
        environment=comparison.bench.environment,
        arms=tuple(arm for arm in comparison.bench.arms if arm.role in ("variant", "again")),
        test_accuracies={
            each.variant: {run.seed: run.test_correct / run.test_count for run in each.runs}
            for each in comparison.variants
        },
    )


def _environment_problems(base: Comparison, head: Comparison, names: Sequence[str], path: Path) -> list[str]:
    there, here = (hash_of(each.environment, "variants", *names) for each in (base, head))
    if there == here:
        return []
    return [
        f"{path} was measured in environment {there[:12]} and {COMPARISON_FILE} in {here[:12]}: "
        "numbers of different machines or software are not compared. Against a revision, both would be measured here.",
        *differing(_depended_on(base.environment, names), _depended_on(head.environment, names), "environment"),
    ]


def _depended_on(environment: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What the numbers of the variants ``names`` depend on, without its hash."""
    of_variants = optional_versions(environment, "variants")
    relied_on = {"variants": {name: of_variants.get(name, {}) for name in names}}
    return {**environment, "hash": None, "relied_on": relied_on}


def _job_problems(base: Comparison, head: Comparison, path: Path) -> list[str]:
    found = [
        *differing(base.train | {"seeds": None}, head.train | {"seeds": None}, "train"),
        *differing(base.dataset.model_dump(), head.dataset.model_dump(), "dataset"),
    ]
    return [f"{path} and {COMPARISON_FILE} are of different jobs, which are not compared.", *found] if found else []


def _noise(comparison: Comparison, max_spread: float, path: Path) -> tuple[Noise, Noise]:
    bench = comparison.bench
    baseline, again = bench.arm("variant", bench.baseline), bench.arm("again", bench.baseline)
    if not (baseline and again):
        raise GateError(
            f"{path} holds no baseline that was measured twice: run `dvc repro bench compare` for it again."
        )
    return noises(baseline, again, max_spread)


def _loudness(noise: Noise) -> tuple[bool, float]:
    return noise.why_untrusted is not None, noise.high / noise.low if noise.low and noise.high else math.inf
