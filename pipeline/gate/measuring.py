"""A revision and this work tree, measured side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipeline import benchmark, results, stats
from pipeline.benchmark import Asked, Rounds, Server, measure
from pipeline.config import Config
from pipeline.environment import checked_out
from pipeline.gate.copies import check_arms, commit_of, copies, dvc
from pipeline.gate.decision import Gated, GateError, Side, accuracies, differing, in_common, judge, noises, unshared
from pipeline.verdicts import Accuracy

RULERS = ("arm.py", "detectors/*.py", "evaluation.py", "heap.py", "measurement.py", "records.py")
"""Modules that make numbers of a training; each side is measured by its own."""


def measured(config: Config, revision: str) -> Gated:
    """Measure ``revision`` and this work tree in turns, each with its own code and params.yaml.

    Raises GateError if there is nothing to measure, and KeyboardInterrupt before the first complete round.
    """
    commit, head_is = commit_of(revision), checked_out()
    with copies(commit) as roots:
        check_arms(roots[0], f"{revision} ({commit[:12]})")
        rulers = _other_rulers(*roots)
        for root in roots:
            dvc(root, "repro", "environment", "prepare")
        with Server(roots[0]) as base, Server(roots[1]) as head:
            there, here = base.describe(), head.describe()
            if problems := differing(there["dataset"], here["dataset"], "dataset"):
                raise GateError("\n".join([f"{revision} trains on other data than this work tree.", *problems]))
            names = in_common(there["variants"], here["variants"], revision)
            trained: list[dict[str, dict[int, float]]] = [{}, {}]
            if config.gate.accuracy:
                own = any(_has_own_code(each["train"]) for each in (there, here))
                for root in roots:
                    # DVC does not see the files of a user's own code; it would take one's training for the other's.
                    anew = ("--force", "--no-run-cache", "--single-item") if own else ()
                    dvc(root, "repro", *anew, *(f"train@{name}" for name in names))
                trained = [_test_accuracies(root, names) for root in roots]
            baseline = config.compare.baseline if config.compare.baseline in names else names[0]
            turns = benchmark.turns_on(here["device"], config.bench)
            rounds = _rounds(config, arms_of(names, baseline, {"base": (base, there), "head": (head, here)}), turns)

    arms = {arm.name: arm for arm in rounds.arms}
    again = rounds.arms[0]
    count = len(again.samples)
    if rounds.interrupted and count < stats.FEWEST_PAIRS:
        raise GateError(f"interrupted after {count} round(s); at least {stats.FEWEST_PAIRS} are needed to decide.")
    of_base, of_head = ({name: arms[f"{side} {name}"] for name in names} for side in ("base", "head"))
    settings = config.compare
    compared: dict[str, Accuracy] = {}
    missing = ["Accuracy was not compared: by train.metric, the two mean different things by it."]
    if there["train"].get("metric") == here["train"].get("metric"):
        compared, missing = accuracies(config, names, here["dataset"]["test_count"], *trained)
    variants = [{name: each["variants"][name] for name in names} for each in (there, here)]
    machine = noises(of_base[baseline], again, settings.max_spread)
    return Gated(
        **dict(judge(of_base, of_head, machine, settings.margins, compared, paired=True)),
        mode="side by side",
        against=revision,
        margins=settings.margins,
        base=Side(
            commit=commit,
            environment=there["environment"],
            arms=(again, *of_base.values()),
            test_accuracies=trained[0],
        ),
        head=Side(
            commit=head_is,
            environment=here["environment"],
            arms=tuple(of_head.values()),
            test_accuracies=trained[1],
        ),
        remarks=(
            *([f"Interrupted after {count} rounds."] if rounds.interrupted else []),
            *rulers,
            *unshared(there["variants"], here["variants"]),
            *differing(there["train"], here["train"], "train"),
            *(line for key in ("compare", "gate", "bench") for line in differing(there.get(key), here.get(key), key)),
            *differing(variants[0], variants[1], "variants"),
            *missing,
        ),
        seconds=rounds.seconds,
        budget="bench.max_rounds" if count == config.bench.max_rounds else "gate.max_minutes",
    )


def arms_of(names: Sequence[str], baseline: str, sides: Mapping[str, tuple[Server, dict[str, Any]]]) -> list[Asked]:
    """The first side's baseline once more, then every variant of every side, the baseline first: what is compared is
    measured side by side. ``sides``: name -> its server, and what that describes."""

    def asked(side: str, name: str, role: Literal["variant", "again"] = "variant") -> Asked:
        server, about = sides[side]
        label = f"{side} {name}" if role == "variant" else f"{side} {name} again"
        return Asked(label, role, name, None, server, about["variants"][name])

    ordered = [baseline, *(name for name in names if name != baseline)]
    return [asked(next(iter(sides)), baseline, "again"), *(asked(side, name) for name in ordered for side in sides)]


def steps_of(arms: Sequence[Asked], window_seconds: float) -> int:
    """As many steps as the first arm takes ``window_seconds`` for. Measures every arm once before: that warms it up."""
    for each in arms[1:]:
        each.server.measure(each.name, each.values, benchmark.CALIBRATION_STEPS)
    return benchmark.steps_of(arms[0], window_seconds)


def _rounds(config: Config, arms: Sequence[Asked], turns: int) -> Rounds:
    minutes = config.gate.max_minutes
    try:
        steps = steps_of(arms, config.bench.window_seconds)
        print(f"gate: {len(arms)} arms of {steps} steps, rounds for {minutes:g} minutes", file=sys.stderr, flush=True)
        return measure(arms, seconds=60 * minutes, max_rounds=config.bench.max_rounds, steps=steps, turns=turns)
    except (ValidationError, KeyError, TypeError) as error:
        raise GateError(
            "base and head report their samples in different forms, so one of them is of another version: hold this "
            f"against a newer commit, or against a recorded reports/comparison.json. ({error})"
        ) from None


def _other_rulers(base: Path, head: Path) -> list[str]:
    """Says which of the ``RULERS`` differ."""
    roots = base, head
    found = {path.relative_to(root) for root in roots for name in RULERS for path in root.glob(f"pipeline/{name}")}
    texts = {path: [(root / path).read_bytes() for root in roots if (root / path).exists()] for path in found}
    changed = [path.as_posix() for path, (text, *other) in sorted(texts.items()) if other != [text]]
    if not changed:
        return []
    return [f"The two sides measure by different code, so a difference may be the ruler's: {', '.join(changed)}."]


def _has_own_code(train: Mapping[str, Any]) -> bool:
    """Whether the model, the loss or the metric is the user's own, ``module:function``."""
    return any(":" in str(train.get(key)) for key in ("model", "loss", "metric"))


def _test_accuracies(root: Path, names: Sequence[str]) -> dict[str, dict[int, float]]:
    """Of each variant and seed, from the results there: read only as far as every version writes them alike."""
    files = {name: root / results.result_file(name) for name in names}
    runs = {name: json.loads(file.read_text(encoding="utf-8"))["runs"] for name, file in files.items()}
    return {name: {run["seed"]: run["test_correct"] / run["test_count"] for run in each} for name, each in runs.items()}
