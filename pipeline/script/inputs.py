"""Which files of the repository a script reads. Its figures depend on them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from pipeline import environment
from pipeline.environment import code, imports, stages
from pipeline.environment.imports import Unfollowed
from pipeline.errors import PipelineError, say
from pipeline.params import Config
from pipeline.params.commands import SEED, command_of
from pipeline.results import MODELS
from pipeline.script.arms import Job
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
    """Run the script up to its first optimizer step. Return its ``command``; the ``files`` that it reads, with their
    digests; and whether it must be measured ``alone``, because it is on a GPU or has worker processes.

    Raises BenchError if it takes no step.
    """
    assert config.script is not None
    seed = config.train.seeds[0]
    say("environment: starts script.command up to its first step, to see which files it reads")
    command = command_of("script.command", config.script.command).seeded(seed)
    with Job("script.command", command, watched=True, **options_of(config)) as job:
        job.meet()
        check_software(job)
        files = [Path(name) for name in sorted(files_read(job, seeded(config.script.outputs, seed)))]
        alone = bool(job.ranks[0]["gpu"]) or job.has_workers()
        return {"command": config.script.command, "files": code.of_opened(files), "alone": alone}


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
    """Return the files of the repository that the processes read, as paths from here: not what they wrote, ``outputs``,
    and files of tools, caches and installed packages. Raises Unfollowed as ``imports.check_copy`` does."""
    written, read = set(), set()
    made = [Path.cwd() / output for output in outputs]
    for writes, path in job.opened():
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
            f"{', '.join(unknown)}: read by the script after its first step, but without a digest. So changes would go "
            "unnoticed, and old results would count as results of the present files. Add to params.yaml: "
            f"{code.key_of(config.train)}: [{', '.join([*config.train.files, *unknown])}]."
        )


def seeded(texts: Iterable[str], seed: int) -> list[str]:
    return [text.replace(SEED, str(seed)) for text in texts]
