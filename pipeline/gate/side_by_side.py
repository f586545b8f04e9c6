"""Measure a revision and this work tree side by side."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline import environment, results
from pipeline.benchmark import calibration
from pipeline.benchmark.rounds import Rounds, fewest_rounds, measure, outlook, turns_on
from pipeline.benchmark.server import ArmSpec, Server
from pipeline.comparison import stats
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.verdicts import Accuracy
from pipeline.environment import ENVIRONMENT_FILE, checked_out, stages
from pipeline.environment.stages import MEASURING
from pipeline.errors import count, say
from pipeline.files import read_json
from pipeline.gate import environments
from pipeline.gate.copies import check_arms, commit_of, copies, dvc
from pipeline.gate.decision import (
    CONFIDENCE_OF_LOOKS,
    Gated,
    GateError,
    Judged,
    Side,
    accuracies,
    accuracy_of,
    check_seeds,
    differing,
    judge,
    noises,
    settled,
    unexplained,
    unshared,
)
from pipeline.gate.settings import differences, judging, require
from pipeline.params import Config
from pipeline.results import Arm, Dataset, ScoreName, Unit

SCORED = {"task": "classification", "task_options": {}, "metric": "accuracy"}
"""Setting of ``train`` that decides how a model is scored -> its value in versions without this setting."""
EQUAL = (
    "Base and head have the same code, settings and packages, so this gate says nothing about a change, and `promote` "
    "does not take it."
)


def measured(config: Config, revision: str) -> Gated:
    """Measure ``revision`` and this work tree side by side, each with its own code and params.yaml.

    Raises GateError if the two cannot be compared, and KeyboardInterrupt if an interrupt comes before the first
    complete round.
    """
    commit, head_is = commit_of(revision), checked_out()
    with copies(commit) as sides, ExitStack() as servers:
        roots = tuple(side.root for side in sides)
        check_arms(sides[0], f"{revision} ({commit[:12]})")
        packages = environments.packages(*roots)
        dvc(sides[0], "repro", "environment", "prepare")
        base = servers.enter_context(Server(*sides[0]))
        there = _described(base, revision)
        effective = judging(config, there, revision)
        require(roots[1], effective, config)
        dvc(sides[1], "repro", "environment", "prepare")
        head = servers.enter_context(Server(*sides[1]))
        here = _described(head, "this work tree")
        told = {key: here["dataset"].get(key) for key in there["dataset"]}  # a newer version may have more keys
        if problems := differing(there["dataset"], told, "dataset"):
            raise GateError("\n".join([f"{revision} trains on other data than this work tree.", *problems]))
        baseline, every = effective.compare.baseline, list(there["variants"])
        chosen = {baseline, *effective.gate.variants} if effective.gate.variants else set(every)
        names = [name for name in every if name in chosen]
        fingerprints = [environment.read(root / ENVIRONMENT_FILE) for root in roots]
        trained: list[dict[str, dict[int, float]]] = [{}, {}]
        unit = Unit()
        if effective.gate.accuracy:
            _check_comparable(
                there["train"], here["train"], *(fingerprint.get("rulers") for fingerprint in fingerprints)
            )
            # DVC does not see two kinds of differences: packages that no fingerprint names, and code of a version that
            # computes no digests of code. DVC would then reuse one side's training for the other side.
            unseen = packages or any("stages" not in fingerprint for fingerprint in fingerprints)
            anew = ("--force", "--no-run-cache", "--single-item") if unseen else ()
            for side, about in zip(sides, (there, here), strict=True):
                dvc(side, "repro", *anew, *(results.stage_of(name, about["variants"][name]) for name in names))
            trained[0], _ = _test_accuracies(roots[0], names)
            trained[1], unit = _test_accuracies(roots[1], names)
        turns = turns_on(here["device"], effective.bench)
        tests = here["dataset"]["test_count"] * unit.per_sample
        compared = accuracies(tests, trained[0], trained[1], effective.compare.margins.accuracy)
        specs = arms_of(names, baseline, {"base": (base, there), "head": (head, here)})
        rounds = _rounds(effective, specs, turns, compared)

    measured = len(rounds.arms[0].samples)
    if rounds.interrupted and measured < stats.FEWEST_PAIRS:
        done = count(measured, "round")
        raise GateError(f"interrupted after {done}; a decision needs at least {stats.FEWEST_PAIRS}.")
    variants = [{name: each["variants"][name] for name in names} for each in (there, here)]
    control, of_base, of_head = _sides(rounds)
    found = _judged(rounds, effective, compared)
    made_of = [stages.made_of(fingerprint) for fingerprint in fingerprints]
    of_sides = zip(made_of, (there["environment"], here["environment"]), strict=True)
    equal = not packages and None not in made_of and len(set(of_sides)) == 1
    left = ", ".join(sorted(set(every) - chosen))
    remarks = [
        EQUAL if equal else "",
        f"Interrupted after {count(measured, 'round')}." if rounds.interrupted else "",
        *([] if packages else unexplained(found, *fingerprints)),
        *_other_code(*fingerprints),
        *packages,
        *environments.systems(*roots),
        *unshared(there["variants"], config.variants),
        f"Not measured, because gate.variants leaves out: {left}." if left else "",
        *differing(there["train"], here["train"], "train"),
        *differences(there, config.model_dump(mode="json")),
        *differing(variants[0], variants[1], "variants"),
        "" if effective.gate.accuracy else "Accuracy was not compared: gate.accuracy is false on both sides.",
    ]
    return Gated(
        **dict(found),
        against=revision,
        margins=effective.compare.margins,
        dataset=Dataset.model_validate(here["dataset"]),
        unit=unit,
        score=ScoreName(name=here["train"].get("metric", "accuracy")),
        base=Side(
            commit=commit,
            environment=there["environment"],
            made_of=made_of[0],
            arms=(control, *of_base.values()),
            test_accuracies=trained[0],
        ),
        head=Side(
            commit=head_is,
            environment=here["environment"],
            made_of=made_of[1],
            arms=tuple(of_head.values()),
            test_accuracies=trained[1],
        ),
        sides_are_equal=equal,
        remarks=tuple(filter(None, remarks)),
        seconds=rounds.seconds,
        budget=_budget(rounds, effective),
    )


def _sides(rounds: Rounds) -> tuple[Arm, dict[str, Arm], dict[str, Arm]]:
    """Return the A/A control, and variant -> arm of the base and of the head.

    ``rounds.arms`` is in the order of ``arms_of``.
    """
    control, *others = rounds.arms
    base, head = ({arm.variant: arm for arm in arms} for arms in (others[::2], others[1::2]))
    return control, base, head


def _budget(rounds: Rounds, config: Config) -> str:
    return "bench.max_rounds" if len(rounds.arms[0].samples) == config.bench.max_rounds else "gate.max_minutes"


def _judged(rounds: Rounds, config: Config, compared: Mapping[str, Accuracy], confidence: float = 0.95) -> Judged:
    control, base, head = _sides(rounds)
    cost = RoundCost(_budget(rounds, config), len(control.samples), rounds.seconds)
    machine = noises(base[config.compare.baseline], control, config.compare.max_spread, cost)
    return judge(base, head, machine, config.compare.margins, compared, config.gate.must_see, confidence)


def arms_of(names: Sequence[str], baseline: str, sides: Mapping[str, tuple[Server, dict[str, Any]]]) -> list[ArmSpec]:
    """Return the A/A control (a second arm of the first side's baseline), then each variant on every side.

    The baseline comes first among the variants. ``sides``: name -> its server, and the server's description.
    """
    ordered = [baseline, *(name for name in names if name != baseline)]
    arms = [
        ArmSpec(f"{side} {name}", "variant", name, None, server, server.plan(name, about["variants"][name]))
        for name in ordered
        for side, (server, about) in sides.items()
    ]
    return [replace(arms[0], name=f"{arms[0].name}, A/A control", role="aa_control"), *arms]


def steps_of(arms: Sequence[ArmSpec], window_seconds: float) -> tuple[int, float]:
    """Return the number of steps that fill a window of the first arm, and the approximate seconds of a round.

    Every arm is measured once; this also loads its files into the page cache.
    """
    others = [calibration.calibrate(each) for each in arms[1:]]
    steps, first = calibration.steps_of(arms[0], window_seconds, others)
    return steps, sum(each.seconds(steps) for each in (first, *others))


def _rounds(config: Config, arms: Sequence[ArmSpec], turns: int, compared: Mapping[str, Accuracy]) -> Rounds:
    seconds, max_rounds = 60 * config.gate.max_minutes, config.bench.max_rounds
    fewest = fewest_rounds(config.bench)
    try:
        steps, taken = steps_of(arms, config.bench.window_seconds)
        said = outlook(len(arms), steps, taken, seconds=seconds, max_rounds=max_rounds, fewest=fewest)
        say(f"gate: {said}", file=sys.stderr)
        return measure(
            arms,
            seconds=seconds,
            max_rounds=max_rounds,
            steps=steps,
            turns=turns,
            fewest=fewest,
            leaves_open=lambda found: _judged(found, config, compared).outcome == "undecided",
            decided=lambda found: settled(_judged(found, config, compared, CONFIDENCE_OF_LOOKS)),
        )
    except (ValidationError, KeyError, TypeError) as error:
        raise GateError(
            "base and head report their samples in different forms, so one of them is of another version: compare "
            f"with a newer commit. ({error})"
        ) from None


def _other_code(base: Mapping[str, Any], head: Mapping[str, Any]) -> list[str]:
    """Return a sentence that names the files of the pipeline's code for training and measuring, of all variants, that
    differ between the two sides' ``environment.json``; an empty list if none differs."""
    codes = [[side.get("stages", {}).get(stage, {}).get("code", {}) for side in (base, head)] for stage in MEASURING]
    changed = sorted({file for of_base, of_head in codes for file, _ in of_base.items() ^ of_head.items()})
    if not changed:
        return []
    return [
        "The two sides train and measure with different code of the pipeline, so a difference may come from the "
        f"measurement: {', '.join(changed)}."
    ]


def _described(server: Server, side: str) -> dict[str, Any]:
    about = server.describe()
    needed = {"variants", "train", "bench", "compare", "gate", "dataset", "device", "environment", "requests"}
    if lacking := needed - about.keys():
        raise GateError(f"{side} does not report its {', '.join(sorted(lacking))}: compare newer commits.")
    return about


def _check_comparable(
    base: Mapping[str, Any],
    head: Mapping[str, Any],
    rulers_of_base: Mapping[str, str] | None,
    rulers_of_head: Mapping[str, str] | None,
) -> None:
    """Raise GateError unless the ``train`` sections of base and head lead to accuracies that can be compared.

    The rulers are the digests of the user's own task and metric; None if a side's version computes none.
    """
    of_base, of_head = ({key: train.get(key, value) for key, value in SCORED.items()} for train in (base, head))
    problems = differing(of_base, of_head, "train")
    if not problems and rulers_of_base is not None and rulers_of_head is not None:
        changed = [key for key, value in rulers_of_base.items() if rulers_of_head[key] != value]
        problems = [f"train.{key}: the code of {of_base[key]} differs" for key in changed]
    if problems:
        raise GateError(
            f"{'; '.join(problems)}: the two accuracies are different scores, so they cannot be compared. Make this "
            "change in a commit of its own without running the gate on it, or set gate.accuracy: false on both sides."
        )
    check_seeds(base["seeds"], head["seeds"])


def _test_accuracies(root: Path, names: Sequence[str]) -> tuple[dict[str, dict[int, float]], Unit]:
    """Return variant -> seed -> test accuracy from the results in ``root``, and the unit that the accuracies count.

    Only keys that every version writes are required. Without a unit in a result, the accuracies count samples.
    """
    found, unit = {}, Unit()
    for name in names:
        file = root / results.result_file(name)
        try:
            result = read_json(file)
            runs, unit = result["runs"], Unit.model_validate(result.get("unit", {}))
            found[name] = {run["seed"]: accuracy_of(run["test_correct"], run["test_count"], str(file)) for run in runs}
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise GateError(
                f"{file} has no test accuracies, which the stage that trains {name} should write: {error!r}"
            ) from None
    return found, unit
