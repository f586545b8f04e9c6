"""The trainings of a project's script: each seed of a variant, to the command's own end."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import environment, results
from pipeline.environment import stages
from pipeline.errors import PipelineError, say
from pipeline.files import file_sha256, json_sha256, read_json, whole_directory, write_text
from pipeline.measurement.sampling import SystemSampler
from pipeline.params import Config, Machine, Script
from pipeline.params.commands import SEED
from pipeline.plans import plan
from pipeline.results import HistoryRow, Result, Run, RunConditions, ScoreName, Unit
from pipeline.results.figures import OUTSIDE, THROUGHPUT
from pipeline.script.arms import OpenArm, samples_of
from pipeline.script.inputs import (
    KEPT,
    check_known,
    check_software,
    files_read,
    fresh_outputs,
    options_of,
    recorded,
    seeded,
)
from pipeline.script.jobs import Job, one_source

RUN, OUTPUTS, OUTPUT, COMPLETE = "run.json", "outputs", "output.txt", "complete"
"""In the folder of a finished seed: its figures; what it leaves under models/, with what it printed; a mark: the result
of all seeds was written."""


CLOCK_SECONDS = 0.1
"""A file's time can be this much behind the clock."""


class ScoreError(PipelineError):
    """The script's score cannot be read. The message says where it was expected."""


def run(config: Config, name: str, machine: Machine) -> None:
    """Train ``variants.<name>`` with every seed, and write its result, history and outputs.

    A finished seed is kept: after an interruption, or with further seeds, it is not trained again. Raises
    PipelineError.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    content = recorded(config)
    content |= stages.described(config, {name: plan(config, name, machine)})
    environment_hash = environment.hash_of(content, "variants", name)
    depends_on = [environment_hash, content["variants"][name], content["stages"]["train"]["code"]]
    identity = {seed: json_sha256([seed, *depends_on]) for seed in config.train.seeds}
    folders = {seed: KEPT / name / f"seed-{seed}" for seed in config.train.seeds}
    complete = {mark.parent for mark in (KEPT / name).glob(f"seed-*/{COMPLETE}")}
    anew = complete == {*folders.values()}  # with the same seeds as before, somebody wants all to be trained anew
    of_seeds: list[dict[str, Any]] = []
    with SystemSampler(results.system_file(name), ()) as sampler, one_source(options_of(config)) as options:
        for seed, folder in folders.items():
            sampler.seed = seed
            if anew or not (folder / RUN).exists() or read_json(folder / RUN)["identity"] != identity[seed]:
                with whole_directory(folder) as unfinished:
                    made = _trained(config, name, seed, content, unfinished / OUTPUTS, options)
                    write_text(unfinished / RUN, json.dumps(made | {"identity": identity[seed]}))
            else:
                say(f"{name} seed {seed}: complete in {folder}")
            of_seeds.append(read_json(folder / RUN))
            _check_differs(name, dict(zip(folders, of_seeds, strict=False)))
            shutil.copytree(folder / OUTPUTS, results.model_file(name, seed).with_suffix(""), dirs_exist_ok=True)
    runs = tuple(Run.model_validate(values["run"]) for values in of_seeds)
    conditions = RunConditions.model_validate(of_seeds[0]["conditions"])
    history = results.history_file(name)
    results.write_history([_row(run_of_seed, conditions) for run_of_seed in runs], history)
    config_of = {"train": config.job, "variant": config.variants[name].model_dump(mode="json")}
    assert config.script is not None
    metric = config.script.metric
    result = Result(
        variant=name, environment=environment_hash, config=config_of, **dict(conditions), dataset=None,
        key=stages.key(content, "train", name), history_sha256=file_sha256(history),
        score=ScoreName(name=metric.name), unit=Unit() if of_seeds[0]["counted"] else Unit(name="steps"),
        directions={} if metric.is_share else {metric.name: metric.direction},
        runs=runs,
    )  # fmt: skip
    results.write(result, results.result_file(name))
    for folder in folders.values():
        (folder / COMPLETE).touch()
    for folder in complete - {*folders.values()}:
        shutil.rmtree(folder)


def _check_differs(name: str, kept: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise PipelineError if the last of the seeds in ``kept`` ended with the weights of an earlier one."""
    *earlier, last = kept
    for seed in earlier:
        if kept[seed]["run"]["model_sha256"] == kept[last]["run"]["model_sha256"]:
            raise PipelineError(
                f"{name}: seeds {seed} and {last} ended with the same weights: the command ignores {SEED}. With equal "
                "runs, nothing is known of how much the score varies. Seed the script with it, or train one seed."
            )


def _trained(
    config: Config, name: str, seed: int, content: dict[str, Any], outputs: Path, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Run the command with one seed to its end. Copy its outputs to the new folder ``outputs``. Return its run, its
    conditions, and whether its samples were counted. ``options``: those of ``Job``."""
    script, started, began = config.script, time.monotonic(), time.time()
    assert script is not None
    command = config.command_of(name).seeded(seed)
    say(f"{name} seed {seed}: {' '.join(command.words)}")
    with fresh_outputs(config, seed), Job(f"{name} seed {seed}", command, watched=True, **options) as job:
        job.meet()
        check_software(job)
        startup, named = time.monotonic() - started, seeded(script.outputs, seed)
        check_known(files_read(job, named), content, config)  # before a long training
        answers = job.train()
        value = _value(script, seed, job, began)
        check_known(files_read(job, named), content, config)
        outputs.mkdir()
        for place in named:
            _copied(job.work / place, outputs / place, f"{job.name}: script.outputs: found {place!r}")
        (outputs / OUTPUT).write_text(job.output(), encoding="utf-8")
        for answer in answers:  # figures of steps: without what comes after the last one, and without compilation
            answer |= {"wall": sum(answer["seconds"]), "compile_seconds": 0.0}
        samples = command.samples or samples_of(answers)
        trained = OpenArm(job, command._replace(samples=samples), 0)
        trained.turns = [answers]
        measured = trained.measured()
    score, seconds = script.metric.score(value), answers[0]["wall"]
    if not 0 <= score <= 1:
        raise ScoreError(
            f"{job.name}: found {value} as its {script.metric.name}, which counts as {score:.0%}; expected 0% to 100%: "
            "set script.metric.scale to the value that counts as 100%."
        )
    outside = seconds * (OUTSIDE.of(measured.window) or 0.0)
    made = Run(
        **dict(measured.window), seed=seed, test_accuracy=score, test_correct=score, test_count=1, test_loss=None,
        train_loss=None, steps=job.steps, startup_seconds=None if seed != config.train.seeds[0] else startup,
        first_step_seconds=None, train_seconds=seconds - outside, evaluate_seconds=outside, resumes=0,
        model_sha256=json_sha256([answer["ended"] for answer in answers]), 
        findings={} if script.metric.is_share else {script.metric.name: value},
    )  # fmt: skip
    say(f"{name} seed {seed}: {script.metric.name} {value:g} after {job.steps:,} steps")
    conditions = measured.conditions.model_dump(mode="json")
    return {"run": made.model_dump(mode="json"), "conditions": conditions, "counted": samples is not None}


def _value(script: Script, seed: int, job: Job, began: float) -> float:
    """Return the score that the script left. Raises ScoreError. ``began``: when the run did, in Unix seconds."""
    metric = script.metric
    if metric.pattern is not None:
        where, values_found = f"script.metric.pattern {metric.pattern!r}", re.findall(metric.pattern, job.output())[-1:]
    else:
        file = job.work / str(metric.file).replace(SEED, str(seed))
        where = f"script.metric: {metric.key} in {metric.file}"
        try:
            values, written = read_json(file), file.stat().st_mtime
        except (OSError, ValueError) as error:
            raise ScoreError(f"{job.name}: {where}: the file cannot be read as JSON: {error}.{job.said()}") from None
        if written < began - CLOCK_SECONDS:
            raise ScoreError(
                f"{job.name}: {where}: the file is older than the run, which did not write it.{job.said()}"
            )
        for key in str(metric.key).split("."):
            values = values.get(key) if isinstance(values, Mapping) else None
        values_found = [] if values is None else [values]
    if not values_found:
        raise ScoreError(f"{job.name}: {where}: found nothing.{job.said()}")
    try:
        value = float(values_found[0])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ScoreError(f"{job.name}: {where}: found {values_found[0]!r}; expected a finite number.{job.said()}")
    return value


def _copied(source: Path, target: Path, what: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.is_file():
        shutil.copy2(source, target)
    else:
        raise PipelineError(f"{what}, but the script wrote no such file or folder.")


def _row(run: Run, conditions: RunConditions) -> HistoryRow:
    """Return the end of a run as the only row of its history: nothing is known of its epochs and losses."""
    return HistoryRow(
        seed=run.seed, epoch=1.0, step=run.steps, train_seconds=run.train_seconds,
        learning_rate=conditions.learning_rate, train_loss=None, samples_per_second=THROUGHPUT.of(run),
        test_accuracy=run.test_accuracy,
    )  # fmt: skip
