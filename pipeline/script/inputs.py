"""Which files of the repository a script reads. Its figures depend on them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline import environment
from pipeline.environment import code, imports, stages
from pipeline.environment.imports import Unfollowed
from pipeline.errors import PipelineError, say
from pipeline.params import Config
from pipeline.params.commands import SEED
from pipeline.results import MODELS
from pipeline.script.jobs import Job, one_source
from pipeline.training.checkpoints import CHECKPOINTS

KEPT = CHECKPOINTS / "script"
"""The folder of finished seeds."""


def options_of(config: Config) -> dict[str, Any]:
    """Return the options of a script's ``Job``. Its copy has no outputs of earlier runs, from which it could resume."""
    assert config.script is not None
    left_out = [KEPT, *(MODELS / name for name in config.variants)]
    left_out += [Path(output) for seed in config.train.seeds for output in seeded(config.script.outputs, seed)]
    return {
        "in_place": config.script.in_place,
        "left_out": [Path.cwd() / path for path in left_out],
        "timeout": config.script.timeout_seconds,
        "optimizer": config.script.optimizer,
    }


def examined(config: Config) -> dict[str, Any]:
    """Run the variants' commands up to their first optimizer step. Return the different ``commands``; the ``files``
    that they read, with their digests; and whether they must be measured ``alone``, because one of them is on a GPU or
    has worker processes.

    Raises BenchError if one takes no step.
    """
    assert config.script is not None
    seed, commands, files, alone = config.train.seeds[0], list[Any](), set[str](), False
    with one_source(options_of(config)) as options:
        for name, command in stages.commands_of(config).items():
            if command in commands:
                continue
            commands.append(command)
            say(f"environment: starts the command of {name} up to its first step, to see which files it reads")
            command_of_seed = config.command_of(name).seeded(seed)
            with (
                fresh_outputs(config, seed),
                Job(f"variants.{name}", command_of_seed, watched=True, **options) as job,
            ):
                job.meet()
                check_software(job)
                files |= files_read(job, seeded(config.script.outputs, seed))
                alone = alone or bool(job.ranks[0]["gpu"]) or job.has_workers()
    return {"commands": commands, "files": code.of_opened(map(Path, sorted(files))), "alone": alone}


@contextmanager
def fresh_outputs(config: Config, seed: int) -> Iterator[None]:
    """Where a run does not write into a copy, raise PipelineError if an output is there before it, from which it could
    resume. At the end, delete what it left, as a copy is deleted."""
    assert config.script is not None
    places = [Path(place) for place in seeded(config.script.outputs, seed)]
    shared = [place for place in places if config.script.in_place or place.parent.resolve() != place.parent.absolute()]
    for place in shared:
        if place.is_file() or (place.is_dir() and any(place.iterdir())):
            why = (
                "script.in_place" if config.script.in_place else f"{place.parent} is behind a link, which is not copied"
            )
            raise PipelineError(
                f"script.outputs: {place} is there before the run, which could resume from it ({why}): move it away."
            )
    try:
        yield
    finally:
        for place in shared:
            for left in [*place.iterdir()] if place.is_dir() else [place]:  # the folder can be a link
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink(missing_ok=True)


def recorded(config: Config) -> dict[str, Any]:
    """Return the content of environment.json. Raises PipelineError if it does not describe the present script."""
    content = environment.read()
    if stages.script_seen(config, content) is None:
        raise PipelineError(
            f"{environment.ENVIRONMENT_FILE} does not describe the present script and the files that it reads: run "
            "`dvc repro`, or `python -m pipeline environment`."
        )
    return content


def check_software(job: Job) -> None:
    """Raise PipelineError if the script runs with another torch than the one that environment.json describes."""
    used = job.ranks[0]["torch"]
    if used != torch.__version__:
        raise PipelineError(
            f"script.command: runs with torch {used}, but the pipeline with {torch.__version__}, which is what it "
            "records: run both with one Python."
        )


def files_read(job: Job, outputs: Iterable[str]) -> set[str]:
    """Return the files of the repository that the processes read, or that the command names, as paths from here: not
    what they wrote, ``outputs``, and files of tools, caches and installed packages. Raises Unfollowed as
    ``imports.check_copy`` does."""
    written, read = set(), set()
    made = [Path.cwd() / output for output in outputs]
    named = (Path(os.path.abspath(word.partition("=")[2] or word)) for word in job.command.words)  # noqa: PTH100
    for writes, path in (*job.opened(), *((False, path) for path in named)):  # a shell reads without telling
        if writes:
            written.add(path)
        elif path not in written and code.is_input(path) and not any(map(path.is_relative_to, made)):
            read.add(os.path.relpath(path))
    imports.check_copy({name: Path(name) for name in read})
    return read


def check_known(read: Iterable[str], content: dict[str, Any], config: Config) -> None:
    """Raise Unfollowed if a file that a training ``read`` has no digest in ``content`` (environment.json)."""
    known = {path.resolve() for path in (*map(Path, content["script"]["files"]), *code.listed(config.train))}
    unknown = sorted(name for name in read if Path(name).resolve() not in known)
    if unknown:
        raise Unfollowed(
            f"{', '.join(unknown)}: read by the script, but without a digest. So changes would go unnoticed, "
            "and old results would count as results of the present files. Add to params.yaml: "
            f"{code.key_of(config.train)}: [{', '.join([*config.train.files, *unknown])}]."
        )


def seeded(texts: Iterable[str], seed: int) -> list[str]:
    return [text.replace(SEED, str(seed)) for text in texts]
