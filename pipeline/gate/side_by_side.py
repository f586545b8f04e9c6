"""Measure a revision and this work tree side by side."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import environment, results
from pipeline.benchmark import rounds
from pipeline.benchmark.rounds import Rounds, fewest_rounds, measure, outlook, turns_on
from pipeline.benchmark.server import ArmSpec, Server
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import Difference
from pipeline.environment import ENVIRONMENT_FILE, checked_out, stages
from pipeline.environment.stages import MEASURING
from pipeline.errors import count, say
from pipeline.files import read_json
from pipeline.gate.copies import check_arms, commit_of, copies, differing_packages, differing_systems, dvc
from pipeline.gate.decision import (
    Gated,
    GateError,
    Judged,
    Side,
    accuracies,
    accuracy_of,
    check_seeds,
    differing,
    judge,
    memory_known,
    rounds_of_sides,
    settled,
    unexplained,
    unshared,
)
from pipeline.gate.settings import differences, judging, require
from pipeline.params import Config
from pipeline.results import Arm, DatasetFacts, ScoreName, Unit
from pipeline.results.bench_file import FEWEST_PAIRS

SCORED: dict[str, Any] = {"task": "classification", "task_options": {}, "metric": "accuracy", "score": None}
"""Setting of ``train`` that decides how a model is scored -> its value in jobs without this setting."""
EQUAL = (
    "Base and head have the same code, settings and packages, so this gate says nothing about a change, and `promote` "
    "does not take it."
)


class Described(NamedTuple):
    """What one side says of itself, and how accurate its variants became."""

    commit: str | None
    about: dict[str, Any]
    """The answer of its server."""
    fingerprint: dict[str, Any]
    """Its environment.json."""
    test_accuracies: dict[str, dict[int, float]] = {}  # noqa: RUF012
    """Variant -> seed -> fraction. Empty if accuracies are not compared."""


def measured(config: Config, revision: str) -> Gated:
    """Measure ``revision`` and this work tree side by side, each with its own code and params.yaml.

    Raises GateError if the two cannot be compared, and KeyboardInterrupt if an interrupt comes before the first
    complete round.
    """
    commits = commit_of(revision), checked_out()
    with copies(commits[0]) as sides, ExitStack() as servers:
        roots = tuple(side.root for side in sides)
        check_arms(sides[0], f"{revision} ({commits[0][:12]})")
        remarks, systems = differing_packages(*roots), differing_systems(*roots)

        def opened(number: int, label: str) -> tuple[Server, Described]:
            dvc(sides[number], "repro", "environment", "prepare")
            server = servers.enter_context(Server(*sides[number]))
            fingerprint = environment.read(roots[number] / ENVIRONMENT_FILE)
            return server, Described(commits[number], complete(server.describe(), label), fingerprint)

        base_server, base = opened(0, revision)
        effective = judging(config, base.about, revision)
        if require(roots[0], effective, base.about):
            base_server.restart()
        require(roots[1], effective, config.model_dump(mode="json"), effective.variants.keys() - config.variants)
        head_server, head = opened(1, "this work tree")
        check(base, head, effective, revision)
        names, unit = chosen(effective, base), Unit()
        if effective.gate.accuracy:
            # DVC would reuse one side's training for the other side, because no fingerprint names all packages.
            anew = ("--force", "--no-run-cache", "--single-item") if remarks else ()
            for side, described in zip(sides, (base, head), strict=True):
                dvc(side, "repro", *anew, *trained_by(described, names))
            (of_base, _), (of_head, unit) = (accuracies_in(root, names) for root in roots)
            base, head = base._replace(test_accuracies=of_base), head._replace(test_accuracies=of_head)
        arms = arms_of(names, {"base": (base_server, base.about), "head": (head_server, head.about)})
        compared = _compared(base, head, effective, unit)
        rounds = _rounds(effective, arms, turns_on(head.about["device"], effective.bench), compared)
    return gated(base, head, rounds, config, effective, unit, against=revision, packages=remarks, systems=systems)


def gated(
    base: Described,
    head: Described,
    rounds: Rounds,
    config: Config,
    effective: Config,
    unit: Unit,
    *,
    against: str,
    packages: Sequence[str] = (),
    systems: Sequence[str] = (),
) -> Gated:
    """Return the decision on what was measured, with the samples and with what a reader must know of both sides.

    ``config``: params.yaml of the head. ``effective``: the settings that count. ``unit``: what the accuracies count.
    ``packages``, ``systems``: how the sides' packages and systems differ. Raises GateError if an interruption left too
    few rounds.
    """
    measured = len(rounds.arms[0].samples)
    interrupted = f"interrupted after {count(measured, 'round')}" if rounds.interrupted else ""
    if interrupted and measured < FEWEST_PAIRS:
        raise GateError(f"{interrupted}; a decision needs at least {FEWEST_PAIRS}.")
    names = chosen(effective, base)
    variants = [{name: side.about["variants"][name] for name in names} for side in (base, head)]
    judged = _judged(rounds, effective, _compared(base, head, effective, unit))
    made_of = [stages.made_of(side.fingerprint) for side in (base, head)]
    environments = [side.about["environment"] for side in (base, head)]
    equal = not packages and None not in made_of and made_of[0] == made_of[1] and environments[0] == environments[1]
    unmeasured = ", ".join(sorted(base.about["variants"].keys() - names))
    remarks = [
        EQUAL if equal else "",
        f"{interrupted.capitalize()}." if interrupted else "",
        *([] if packages else unexplained(judged, base.fingerprint, head.fingerprint)),
        *_other_code(base.fingerprint, head.fingerprint),
        *packages,
        *systems,
        *unshared(base.about["variants"], config.variants),
        f"Not measured, because gate.variants leaves out: {unmeasured}." if unmeasured else "",
        *differing(base.about["train"], head.about["train"], "train"),
        *differences(base.about, config.model_dump(mode="json")),
        *differing(variants[0], variants[1], "variants"),
        "" if effective.gate.accuracy else "Accuracy was not compared: gate.accuracy is false on both sides.",
    ]
    of_base, of_head = (
        Side(
            commit=side.commit,
            environment=side.about["environment"],
            made_of=digest,
            arms=of_side,
            test_accuracies=side.test_accuracies,
        )
        for side, digest, of_side in zip((base, head), made_of, _by_side(rounds.arms), strict=True)
    )
    return Gated(
        **dict(judged),
        against=against,
        margins=effective.compare.margins,
        dataset=head.about["dataset"] and DatasetFacts.model_validate(head.about["dataset"]),
        unit=unit,
        score=ScoreName(name=head.about["train"].get("metric", "accuracy")),
        base=of_base,
        head=of_head,
        sides_are_equal=equal,
        remarks=tuple(filter(None, remarks)),
        seconds=rounds.seconds,
        budget=_budget(rounds, effective),
    )


def chosen(effective: Config, base: Described) -> list[str]:
    """Return the variants to compare, the baseline first."""
    baseline, wanted = effective.compare.baseline, effective.gate.variants
    others = (name for name in base.about["variants"] if name != baseline)
    return [baseline, *(name for name in others if not wanted or name in wanted)]


def trained_by(side: Described, names: Sequence[str]) -> list[str]:
    """Return the stages of DVC that train the variants on this side. The other side may train them by other stages."""
    return [results.stage_of(name, side.about["variants"][name]) for name in names]


def _compared(base: Described, head: Described, effective: Config, unit: Unit) -> dict[str, Difference]:
    tests = (head.about["dataset"] or {}).get("test_count", 0) * unit.per_sample
    return accuracies(tests, base.test_accuracies, head.test_accuracies, effective.compare.margins.accuracy)


def _budget(rounds: Rounds, config: Config) -> str:
    return "bench.max_rounds" if len(rounds.arms[0].samples) == config.bench.max_rounds else "gate.max_minutes"


def _judged(rounds: Rounds, config: Config, compared: Mapping[str, Difference], *, look: bool = False) -> Judged:
    """Judge what was measured so far."""
    cost = RoundCost(_budget(rounds, config), len(rounds.arms[0].samples), rounds.seconds)
    of_sides = rounds_of_sides(*_by_side(rounds.arms), config.compare, cost)
    return judge(of_sides, compared, config.compare, config.gate.must_see, look=look)


def _by_side(arms: tuple[Arm, ...]) -> tuple[tuple[Arm, ...], tuple[Arm, ...]]:
    """Return the arms of base and head from those of ``arms_of``; the control is the base's first arm."""
    return (arms[0], *arms[1::2]), arms[2::2]


def arms_of(names: Sequence[str], sides: Mapping[str, tuple[Server, Mapping[str, Any]]]) -> list[ArmSpec]:
    """Return the A/A control (a second arm of the first side's baseline), then each variant on every side.

    ``names``: the baseline first. ``sides``: name -> its server, and the server's description.
    """
    arms = [
        ArmSpec.of_variant(name, server, server.plan(name, about["variants"][name]), f"{side} {name}")
        for name in names
        for side, (server, about) in sides.items()
    ]
    return [arms[0].control(), *arms]


def steps_of(arms: Sequence[ArmSpec], window_seconds: float) -> tuple[int, float]:
    """Return the number of steps that fill a window of the first arm, and the approximate seconds of a round.

    Every arm is measured once; this also loads its files into the page cache. Raises BenchError if a variant's samples
    a step do not allow a comparison (``rounds.check_samples``).
    """
    calibrated = [rounds.calibrate(arm) for arm in arms[1:]]
    for arm, base, head in zip(arms[1::2], calibrated[::2], calibrated[1::2], strict=True):
        rounds.check_samples(arm.variant, {"the base": base.answer, "the head": head.answer})
    steps, first = rounds.steps_of(arms[0], window_seconds, calibrated)
    return steps, sum(window.seconds(steps) for window in (first, *calibrated))


def _rounds(config: Config, arms: Sequence[ArmSpec], turns: int, compared: Mapping[str, Difference]) -> Rounds:
    seconds, max_rounds = 60 * config.gate.max_minutes, config.bench.max_rounds
    fewest = fewest_rounds(config.bench)
    steps, taken = steps_of(arms, config.bench.window_seconds)
    ahead = outlook(len(arms), steps, taken, seconds=seconds, max_rounds=max_rounds, fewest=fewest)
    say(f"gate: {ahead}", file=sys.stderr)
    return measure(
        arms,
        seconds=seconds,
        max_rounds=max_rounds,
        steps=steps,
        turns=turns,
        fewest=fewest,
        leaves_open=lambda rounds: _judged(rounds, config, compared).outcome == "undecided",
        decided=lambda rounds: settled(_judged(rounds, config, compared, look=True)),
        memory_known=lambda rounds: memory_known(_judged(rounds, config, compared, look=True)),
    )


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


def complete(about: dict[str, Any], side: str) -> dict[str, Any]:
    """Return ``about``, a server's answer. Raises GateError if it lacks what the gate needs."""
    needed = {"variants", "train", "bench", "compare", "gate", "dataset", "device", "environment", "requests"}
    if lacking := needed - about.keys():
        raise GateError(f"{side} does not report its {', '.join(sorted(lacking))}: compare newer commits.")
    return about


def check(base: Described, head: Described, effective: Config, against: str) -> None:
    """Raise GateError unless both sides have the same data and, if accuracies are compared, the same score and seeds.

    The rulers are the digests of the user's own task and metric; a side's version may compute none.
    """
    dataset, of_head = (side.about["dataset"] or {} for side in (base, head))
    trained = [side.about["train"] for side in (base, head)]
    known = {key: of_head.get(key) for key in dataset}  # a newer version may have more keys
    if problems := differing(dataset, known, "dataset"):
        raise GateError("\n".join([f"{against} trains on other data than this work tree.", *problems]))
    if not effective.gate.accuracy:
        return
    of_base, of_head = ({key: job.get(key, value) for key, value in SCORED.items()} for job in trained)
    problems = differing(of_base, of_head, "train")
    rulers, own = base.fingerprint.get("rulers"), head.fingerprint.get("rulers")
    if not problems and rulers is not None and own is not None:
        changed = [key for key, value in rulers.items() if own[key] != value]
        problems = [f"train.{key}: the code of {of_base[key]} differs" for key in changed]
    if problems:
        raise GateError(
            f"{'; '.join(problems)}: the two accuracies are different scores, so they cannot be compared. Make this "
            "change in a commit of its own without running the gate on it, or set gate.accuracy: false on both sides."
        )
    check_seeds(*(job["seeds"] for job in trained))


def accuracies_in(root: Path, names: Sequence[str]) -> tuple[dict[str, dict[int, float]], Unit]:
    """Return variant -> seed -> test accuracy from the results in ``root``, and the unit that the accuracies count.

    Only keys that every version writes are required. Without a unit in a result, the accuracies count samples.
    """
    accuracies, unit = {}, Unit()
    for name in names:
        file = root / results.result_file(name)
        try:
            result = read_json(file)
            runs, unit = result["runs"], Unit.model_validate(result.get("unit", {}))
            accuracies[name] = {
                run["seed"]: accuracy_of(run["test_correct"], run["test_count"], str(file)) for run in runs
            }
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise GateError(
                f"{file} has no test accuracies, which the stage that trains {name} should write: {error!r}"
            ) from None
    return accuracies, unit
