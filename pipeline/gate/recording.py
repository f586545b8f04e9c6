"""Compare this checkout's comparison with one that was recorded earlier."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import environment, results
from pipeline.comparison.advice import percentage_points
from pipeline.comparison.comparison_file import Comparison
from pipeline.comparison.verdicts import MEMORY, THROUGHPUT, Quantity
from pipeline.environment import checked_out, hash_of, optional_versions, stages
from pipeline.gate.copies import output
from pipeline.gate.decision import GateError, accuracies, accuracy_of, differing, held_variants, unshared
from pipeline.gate.markdown import accuracy_cell, commits
from pipeline.params import Config
from pipeline.plans import plans
from pipeline.report.sentences import score
from pipeline.results import REPORTS, Arm, read_document, stage_of

COMPARISON_FILE = REPORTS / "comparison.json"
STAGES = ("fetch", "prepare", "train", "bench")
"""Stages whose code and settings make a comparison."""
RATES = (
    "Each ratio compares medians that were recorded at different times, so a change of the machine in between looks "
    "like a change of the code. In trials that decided by the spread of such rounds, a slowdown of 10% was found in "
    "40% of cases, and equal code was called worse in 1.7%. If you give a revision instead, both sides are measured "
    "side by side."
)


def recorded(config: Config, path: Path) -> tuple[str, bool]:
    """Compare ``reports/comparison.json`` with the comparison in ``path``.

    Returns the figures as Markdown, and True if an accuracy is worse.

    Only accuracies are decided, because they follow from the seeds. Raises GateError, naming the differences, if the
    two comparisons are of different jobs or environments. Raises GateError also if this checkout's comparison is out of
    date, or lacks a variant or seed of the comparison in ``path``. Raises ResultError, naming the file, for a file that
    is not a comparison.
    """
    if path.resolve() == COMPARISON_FILE.resolve():
        raise GateError(f"{path} is this checkout's own comparison; give the comparison of another commit.")
    base = read_document(path, Comparison, "give a reports/comparison.json that this version wrote, or a revision")
    head = read_document(COMPARISON_FILE, Comparison, "run `dvc repro`, which writes it")
    there, here = ({arm.variant: arm for arm in each.bench.arms if arm.role == "variant"} for each in (base, head))
    names = held_variants(there, here, str(path))
    if problems := _problems(base, head, names, path):
        raise GateError("\n".join(problems))
    check_current(config, names)
    margin = min(base.margins.accuracy, config.compare.margins.accuracy)
    trained = {name: _accuracies(base).get(name, {}) for name in names}
    compared = accuracies(head.dataset.test_count * head.unit.per_sample, trained, _accuracies(head), margin)
    worse = ", ".join(name for name in names if compared[name].decision == "worse")
    variants = [{name: each.bench.config["variants"][name] for name in names} for each in (base, head)]
    commit = checked_out()
    stale = (
        f"{COMPARISON_FILE} was measured at {head.bench.commit or 'no commit'}, but the commit here is now {commit}."
    )
    remarks = [
        *([stale] if commit != head.bench.commit else []),
        *unshared(there, here),
        *differing(base.bench.config["bench"], head.bench.config["bench"], "bench"),
        *differing(variants[0], variants[1], "variants"),
    ]
    lines = [
        f"**Advisory: speed and memory decide nothing here{f'; worse: accuracy ({worse})' if worse else ''}.**",
        "",
        f"| head against base | throughput | peak memory | {score(head)}, points |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {_ratio(there[name], here[name], THROUGHPUT)} | {_ratio(there[name], here[name], MEMORY)} | "
            f"{accuracy_cell(compared[name])} |"
            for name in names
        ),
        "",
        *(f"* {remark}" for remark in [RATES, *remarks]),
        f"* {commits(base.bench.commit, head.bench.commit)}; recorded.",
        f"* Accuracy is worse or better if its whole interval lies beyond {percentage_points(margin)}.",
    ]
    return "\n".join(lines) + "\n", bool(worse)


def _ratio(base: Arm, head: Arm, quantity: Quantity) -> str:
    """Return the ratio of the medians of samples that were not rejected."""
    known = [[value for each in arm.samples if (value := getattr(each, quantity.field))] for arm in (head, base)]
    return f"{statistics.median(known[0]) / statistics.median(known[1]):.3f}" if all(known) else "not known"


def check_current(config: Config, names: Sequence[str]) -> None:
    """Raise GateError unless the comparison was made from the present code, settings and files. `dvc status` says
    whether files changed."""
    made_of, here = environment.read(), stages.described(config, plans(config, environment.machine()))
    described = [("stages", each) for each in STAGES] + [("variants", each) for each in names]
    changed = [
        path
        for section, name in described
        for path, *_ in results.differing(made_of.get(section, {}).get(name), here.get(section, {}).get(name), name)
    ]
    unknown = f"`dvc status` failed, so {COMPARISON_FILE} may not match the present files; fix that error"
    trained = (f"{stage_of(config.variants.get(name))}@{name}" for name in names)
    stages_held = [*trained, "bench", "compare"]
    text = output([sys.executable, "-m", "dvc", "status", "--json", *stages_held], unknown)
    try:
        changed += [name for of_stage in json.loads(text).values() for change in of_stage for name in _changed(change)]
    except (AttributeError, TypeError, ValueError) as error:
        raise GateError(f"{unknown}: it wrote {text!r} ({error})") from None
    if changed:
        raise GateError(
            f"{COMPARISON_FILE} is out of date: since it was made, {', '.join(dict.fromkeys(changed))} "
            "changed. Run `dvc repro`, which measures it again."
        )


def _changed(change: Any) -> list[str]:
    """Return the changed names in one entry of `dvc status`. Among a stage's outputs, only the comparison counts."""
    if not isinstance(change, dict):
        return [str(change).removeprefix("changed ")]  # the stage's command
    names = [path for path in change.get("changed outs", {}) if path == str(COMPARISON_FILE)]
    for path, how in change.get("changed deps", {}).items():
        names.append(f"{path} ({', '.join(how)})" if isinstance(how, dict) else path)
    return names


def _accuracies(comparison: Comparison) -> dict[str, dict[int, float]]:
    return {
        each.variant: {run.seed: accuracy_of(run.test_correct, run.test_count, each.variant) for run in each.runs}
        for each in comparison.variants
    }


def _problems(base: Comparison, head: Comparison, names: Sequence[str], path: Path) -> list[str]:
    """Return why the two comparisons cannot be compared."""
    there, here = (hash_of(each.environment, "variants", *names) for each in (base, head))
    of_job = [
        *differing(base.train | {"seeds": None}, head.train | {"seeds": None}, "train"),
        *differing(base.dataset.model_dump(), head.dataset.model_dump(), "dataset"),
    ]
    problems = []
    if there != here:
        problems = [
            f"{path} was measured in environment {there[:12]} and {COMPARISON_FILE} in {here[:12]}: the machines or "
            "the software differ, so the numbers cannot be compared. If you give a revision instead, the gate measures "
            "both sides here.",
            *differing(_depended_on(base.environment, names), _depended_on(head.environment, names), "environment"),
        ]
    if of_job:
        problems.append(f"{path} and {COMPARISON_FILE} come from different jobs, so they cannot be compared.")
    return problems + of_job


def _depended_on(environment: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the part of ``environment`` that the variants ``names`` depend on, without its hash."""
    of_variants = optional_versions(environment, "variants")
    relied_on = {"variants": {name: of_variants.get(name, {}) for name in names}}
    return {**environment, "hash": None, "relied_on": relied_on}
