"""The trainings of a project's script: each seed of a variant, to the command's own end.

They depend on the files of the repository that the script reads, most of which its first steps show.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline import environment, results
from pipeline.environment import code, stages
from pipeline.errors import PipelineError, say
from pipeline.files import file_sha256, json_sha256, read_json, whole_directory
from pipeline.measurement.sampling import SystemSampler
from pipeline.params import Config, Machine, Script
from pipeline.params.commands import SEED
from pipeline.plans import plan
from pipeline.results import HistoryRow, Result, Run, ScoreName, Unit
from pipeline.results.figures import OUTSIDE, THROUGHPUT
from pipeline.script.arms import EXAMINED_STEPS, OpenArm, recorded, samples_of
from pipeline.script.jobs import KEPT, Job, one_source

RUN, OUTPUTS, OUTPUT = "run.json", "outputs", "output.txt"
"""In the folder of a finished seed: its figures; what it leaves under models/, with what it printed."""
CLOCK_SECONDS = 0.1
"""A file's time can be this much behind the clock."""


def examined(config: Config) -> dict[str, Any]:
    """Run the variants' commands up to their first optimizer step. Return the different ``commands``; the ``files``
    that they read, with their digests; and whether they must be measured ``alone``.

    Raises BenchError if one takes no step.
    """
    assert config.script is not None
    commands, files, alone = stages.commands_of(config), set[str](), False
    with one_source(config) as source:
        for name in {json_sha256(command): name for name, command in commands.items()}.values():
            say(f"environment: starts the command of {name} up to its first step, to see which files it reads")
            command = config.command_of(name).seeded(config.train.seeds[0])
            with Job(f"variants.{name}", command, config.script, source, watched=True) as job:
                job.meet()
                files |= job.files_read()
                alone |= job.needs_all()
    return {"commands": [*commands.values()], "files": code.of_opened(map(Path, sorted(files))), "alone": alone}


def check_known(read: Iterable[str], content: dict[str, Any], config: Config) -> None:
    """Raise Unfollowed if a file that a training ``read`` has no digest in ``content`` (environment.json)."""
    known = {path.resolve() for path in (*map(Path, content["script"]["files"]), *code.listed(config.train))}
    code.check_read(map(Path, read), known, config.train)


def run(config: Config, name: str, machine: Machine) -> None:
    """Train ``variants.<name>`` with every seed, and write its result, history and outputs.

    A finished seed is kept: after an interruption, or with further seeds, it is not trained again. Raises
    PipelineError.
    """
    content = recorded(config) | stages.described(config, {name: plan(config, name, machine)})
    key, environment_hash = stages.key(content, "train", name), environment.hash_of(content, "variants", name)
    depends_on = [environment_hash, content["variants"][name], content["stages"]["train"]["code"]]
    of_seeds: list[Result] = []
    with SystemSampler(results.system_file(name), ()) as sampler, one_source(config) as source:
        for seed in config.train.seeds:
            sampler.seed = seed
            folder, identity = KEPT / name / f"seed-{seed}", json_sha256([seed, *depends_on])
            if (folder / RUN).exists() and read_json(folder / RUN)["key"] == identity:
                say(f"{name} seed {seed}: complete in {folder}, which you can delete to train it again")
            else:
                with whole_directory(folder) as unfinished:
                    trained = _trained(config, name, seed, content, unfinished / OUTPUTS, source)
                    results.write(trained.model_copy(update={"key": identity}), unfinished / RUN)
            of_seeds.append(Result.model_validate(read_json(folder / RUN)))
            shutil.copytree(folder / OUTPUTS, results.model_file(name, seed).with_suffix(""), dirs_exist_ok=True)
    runs = tuple(run_of_seed for result in of_seeds for run_of_seed in result.runs)
    history, first = results.history_file(name), of_seeds[0]
    results.write_history([_row(run_of_seed, first.learning_rate) for run_of_seed in runs], history)
    asked = {"train": config.job, "variant": config.variants[name].model_dump(mode="json")}
    whole = {"config": asked, "key": key, "history_sha256": file_sha256(history), "runs": runs}
    results.write(first.model_copy(update=whole), results.result_file(name))
    results.read(results.result_file(name), config)  # refuses seeds that made no difference


def _trained(
    config: Config, name: str, seed: int, content: dict[str, Any], outputs: Path, source: Path | None
) -> Result:
    """Run the command with one seed to its end. Copy its outputs to the new folder ``outputs``. Return the result,
    without what describes all seeds. ``source``: of its ``Job``."""
    script, started, began = config.script, time.monotonic(), time.time()
    assert script is not None
    command = config.command_of(name).seeded(seed)
    say(f"{name} seed {seed}: {' '.join(command.words)}")
    with Job(f"{name} seed {seed}", command, script, source, watched=True) as job:
        job.meet()
        startup = time.monotonic() - started
        check_known(job.files_read(), content, config)  # before a long training
        first = job.take(EXAMINED_STEPS, examine=True)
        samples = script.samples_per_step or samples_of(first)
        answers = job.train()
        value, score = _score(script, seed, job, began)
        check_known(job.files_read(), content, config)
        outputs.mkdir()
        for place in command.outputs:
            if not (written := job.work / place).exists():
                raise PipelineError(f"{job.name}: script.outputs: found {place!r}, which the script did not write.")
            (outputs / place).parent.mkdir(parents=True, exist_ok=True)
            if written.is_dir():
                shutil.copytree(written, outputs / place, ignore_dangling_symlinks=True)
            else:
                shutil.copy2(written, outputs / place)
        (outputs / OUTPUT).write_text(job.output(), encoding="utf-8")
        for answer in answers:  # figures of steps: without what comes after the last one, and without compilation
            answer["clock"]["measured_seconds"] = sum(answer["clock"]["step_seconds"])
            answer["compile_seconds"] = 0.0
        measured = OpenArm(job, samples, answers=answers).measured()
    of_first, of_rest = (of[0]["clock"]["measured_seconds"] for of in (first, answers))
    outside = of_rest * (OUTSIDE.of(measured.window) or 0.0)
    metric = script.metric
    say(f"{name} seed {seed}: {metric.name} {value:g} after {job.steps:,} steps")
    made = Run(
        **dict(measured.window), seed=seed, test_accuracy=score, test_correct=score, test_count=1, test_loss=None,
        train_loss=None, steps=job.steps, startup_seconds=None if seed != config.train.seeds[0] else startup,
        first_step_seconds=None, train_seconds=of_first + of_rest - outside, evaluate_seconds=outside, resumes=0,
        model_sha256=json_sha256([answer["ended"] for answer in answers]),
        findings={} if metric.is_share else {metric.name: value},
    )  # fmt: skip
    return Result(
        variant=name, environment=environment.hash_of(content, "variants", name), config={}, dataset=None, key="",
        history_sha256="", runs=(made,), **dict(measured.conditions),
        score=ScoreName(name=metric.name), unit=Unit(name="samples" if samples else "steps"),
        directions={} if metric.is_share else {metric.name: metric.direction},
    )  # fmt: skip


def _score(script: Script, seed: int, job: Job, began: float) -> tuple[float, float]:
    """Return the value that the script left, and its share of 100%. Raises PipelineError. ``began``: when the run did,
    in Unix seconds."""
    metric, place = script.metric, f"script.metric: {script.metric.key} in {script.metric.file}"
    try:
        if metric.pattern is not None:
            place = f"script.metric.pattern {metric.pattern!r}"
            seen = (re.findall(metric.pattern, job.output()) or ["nothing"])[-1]
        else:
            file = job.work / str(metric.file).replace(SEED, str(seed))
            if file.stat().st_mtime < began - CLOCK_SECONDS:
                raise ValueError("the file is older than the run, which did not write it")
            seen = read_json(file)
            for key in str(metric.key).split("."):
                seen = seen.get(key, "nothing") if isinstance(seen, Mapping) else "nothing"
        value = float(seen)
        score = metric.score(value)
        if not 0 <= score <= 1:
            raise ValueError(
                f"found {value} as its {metric.name}, which counts as {score:.0%}; expected 0% to 100%: set "
                "script.metric.scale to the value that counts as 100%"
            )
    except (OSError, TypeError, ValueError) as error:
        raise PipelineError(f"{job.name}: {place}: {error}.{job.said()}") from None
    return value, score


def _row(run: Run, learning_rate: float) -> HistoryRow:
    """Return the end of a run as the only row of its history: nothing is known of its epochs and losses."""
    return HistoryRow(
        seed=run.seed, epoch=1.0, step=run.steps, train_seconds=run.train_seconds, learning_rate=learning_rate,
        train_loss=None, samples_per_second=THROUGHPUT.of(run), test_accuracy=run.test_accuracy,
    )  # fmt: skip
