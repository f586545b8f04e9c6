"""This checkout's comparison, held against one that was recorded earlier."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import environment
from pipeline.comparison.compare import Comparison, spent_by
from pipeline.comparison.verdicts import Noise
from pipeline.environment import checked_out, hash_of, optional_versions, stages
from pipeline.gate.copies import output
from pipeline.gate.decision import (
    Gated,
    GateError,
    Side,
    accuracies,
    accuracy_of,
    differing,
    held_variants,
    judge,
    noises,
    unshared,
)
from pipeline.gate.settings import STRICTER, judging, looser, told
from pipeline.params import Config
from pipeline.plans import plans
from pipeline.results import REPORTS

COMPARISON_FILE = REPORTS / "comparison.json"
STAGES = ("fetch", "prepare", "train", "bench")
"""Of whose code and settings a comparison is made."""
OF_VERDICTS = [key for key in STRICTER if key.startswith(("compare.margins.", "compare.max_spread"))]
OF_SAMPLES = [key for key in STRICTER if key.startswith("bench.")]


def recorded(config: Config, path: Path) -> Gated:
    """Hold ``reports/comparison.json`` against the comparison in ``path``.

    Raises GateError if they are not of one job in one environment, naming what differs, if this checkout's lacks what
    the other has or was measured by looser settings, or if it is not of what is here now.
    """
    if path.resolve() == COMPARISON_FILE.resolve():
        raise GateError(f"{path} is this checkout's own comparison: give a recorded one.")
    base, head = _read(path), _read(COMPARISON_FILE)
    there, here = ({arm.variant: arm for arm in each.bench.arms if arm.role == "variant"} for each in (base, head))
    names = held_variants(there, here, str(path))
    if problems := [*_environment_problems(base, head, names, path), *_job_problems(base, head, path)]:
        raise GateError("\n".join(problems))
    _check_current(config, names)
    there_asked = {"compare": {"margins": base.margins.model_dump(), "max_spread": base.noise_throughput.max_spread}}
    asked = judging(config, there_asked, str(path), OF_VERDICTS)
    margins, max_spread = asked.compare.margins, asked.compare.max_spread
    found = _noise(base, max_spread, path), _noise(head, max_spread, COMPARISON_FILE)
    throughput, memory = (max(each, key=_loudness) for each in zip(*found, strict=True))
    of_base, of_head = _side(base), _side(head)
    trained = {name: of_base.test_accuracies.get(name, {}) for name in names}
    compared = accuracies(head.dataset.test_count, trained, of_head.test_accuracies, margins.accuracy)
    variants = [{name: each.bench.config["variants"][name] for name in names} for each in (base, head)]
    return Gated(
        **dict(judge(there, here, (throughput, memory), margins, compared, paired=False)),
        mode="recorded",
        against=str(path),
        margins=margins,
        base=of_base,
        head=of_head,
        remarks=(
            "Recorded at different times: a change of the machine in between cannot be told from a change of the code. "
            "Held against a revision, both are measured side by side.",
            *_stale(head),
            *unshared(there, here),
            *told(there_asked, config.model_dump(mode="json"), OF_VERDICTS),
            *differing(variants[0], variants[1], "variants"),
        ),
        seconds=None,
        budget="bench.max_minutes",
    )


def _check_current(config: Config, names: Sequence[str]) -> None:
    """Raise GateError unless the comparison is of what is here now: of this code, these settings and, by DVC's word,
    these files."""
    made_of, here = environment.read(), stages.described(config, plans(config, environment.machine()))
    described = [("stages", each) for each in STAGES] + [("variants", each) for each in names]
    changed = [
        line.partition(":")[0]
        for section, name in described
        for line in differing(made_of.get(section, {}).get(name), here.get(section, {}).get(name), name)
    ]
    unknown = f"nobody knows whether {COMPARISON_FILE} is of what is here now, for `dvc status` failed; put that right"
    asked = [*(f"train@{name}" for name in names), "bench", "compare"]
    text = output([sys.executable, "-m", "dvc", "status", "--json", *asked], unknown)
    try:
        changed += [name for of_stage in json.loads(text).values() for change in of_stage for name in _changed(change)]
    except (AttributeError, TypeError, ValueError) as error:
        raise GateError(f"{unknown}: it wrote {text!r} ({error})") from None
    if changed:
        raise GateError(
            f"{COMPARISON_FILE} is not of what is here now: since it was made, {', '.join(dict.fromkeys(changed))} "
            "changed. Run `dvc repro`, which measures it again."
        )


def _changed(change: Any) -> list[str]:
    """Names what one entry of `dvc status` says of a stage. Of its outputs the comparison alone is read here."""
    if not isinstance(change, dict):
        return [str(change).removeprefix("changed ")]  # the stage's command
    names = [path for path in change.get("changed outs", {}) if path == str(COMPARISON_FILE)]
    for path, how in change.get("changed deps", {}).items():
        names.append(f"{path} ({', '.join(how)})" if isinstance(how, dict) else path)
    return names


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
            each.variant: {run.seed: accuracy_of(run.test_correct, run.test_count, each.variant) for run in each.runs}
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
    weaker = looser(base.bench.config, head.bench.config, OF_SAMPLES)
    return [
        *([f"{path} and {COMPARISON_FILE} are of different jobs, which are not compared.", *found] if found else []),
        *([f"{COMPARISON_FILE} was measured by looser settings than {path}.", *weaker] if weaker else []),
    ]


def _noise(comparison: Comparison, max_spread: float, path: Path) -> tuple[Noise, Noise]:
    bench = comparison.bench
    baseline, again = bench.arm("variant", bench.baseline), bench.arm("again", bench.baseline)
    if not (baseline and again):
        raise GateError(
            f"{path} holds no baseline that was measured twice: run `dvc repro bench compare` for it again."
        )
    return noises(baseline, again, max_spread, spent_by(bench))


def _loudness(noise: Noise) -> tuple[bool, float]:
    return noise.why_untrusted is not None, noise.high / noise.low if noise.low and noise.high else math.inf
