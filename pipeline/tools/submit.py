"""Submit a command to Slurm and follow it, or print it as a job of Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline import environment, pages
from pipeline.errors import ConfigError, PipelineError, say
from pipeline.files import json_sha256
from pipeline.params import Config
from pipeline.tools.agents import PORT
from pipeline.tools.alone import JOBS, NoAnswer, check, jobs

POLL_SECONDS = 5.0
SILENCE_SECONDS = 600.0
"""A job is given up if squeue does not answer for this time."""
GRACE_SECONDS = 60.0
"""Longest time until a file of another host is seen here (``acdirmax`` of NFS)."""


def slurm(config: Config, command: Sequence[str], *, dry_run: bool) -> int:
    """Submit ``command``, or find the active job that has its name; print what it prints; return its exit code.

    The code is 1 if the job left none. ``dry_run``: only print the batch script. Raises PipelineError if Slurm refuses
    or does not answer. On Ctrl-C, the job goes on.
    """
    name = _job_name(command)
    texts: dict[str, Any] = {"name": name, "folder": JOBS, "command": shlex.join(command)}
    texts["path"] = str(Path(sys.executable).parent)
    script = pages.render("slurm.sh", slurm=config.launch.slurm, quoted=shlex.quote, **texts)
    if dry_run:
        say(script, end="")
        return 0
    active = [job for job in jobs(f"--user={os.getuid()}", f"--name={name}") if job.folder == str(Path.cwd())]
    if active:
        job = active[-1].id
        say(f"job {job} is active for this commit and command: nothing is submitted", file=sys.stderr)
    else:
        job = _submitted(script)
    try:
        return _followed(job, JOBS / f"{name}-{job}.log", JOBS / f"{name}-{job}.code")
    except KeyboardInterrupt:
        hint = f"job {job} goes on; to follow it, run the same command again; to cancel it: scancel {job}"
        raise KeyboardInterrupt(hint) from None


def kubernetes(config: Config, command: Sequence[str]) -> None:
    """Print a JobSet that runs ``command`` in the first of its pods. Raises ConfigError if settings are missing."""
    own = config.launch.kubernetes
    if own is None:
        raise ConfigError("launch.kubernetes: found null; expected image and claim: docs/submit.md.")
    if own.pods > 1 and own.secret is None:
        raise ConfigError("launch.kubernetes.secret: found null; several pods need a key: docs/submit.md.")
    name = re.sub("[^a-z0-9]+", "-", _job_name(command, 20).lower()).strip("-")
    # JobSet's names: its own, the job's, the number of the job, the number of the pod; in a subdomain of its name.
    of_pods = [f"{name}-first-0-0.{name}", *(f"{name}-others-0-{number}.{name}" for number in range(own.pods - 1))]
    values: dict[str, Any] = {"pod": own, "pods": of_pods, "port": PORT, "name": name, "command": [*command]}
    say(pages.render("jobset.yaml", **values, quoted=json.dumps), end="")


def _job_name(command: Sequence[str], length: int = 40) -> str:
    """Return a job's name, from the command and the commit: "dvc-repro-1a2b3c4d5e-9f3a". "+": files were changed."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", " ".join(command)).strip("-")[:length]
    commit = environment.checked_out() or "no-commit"
    return f"{words}-{commit[:10]}{'+' * commit.endswith('+')}-{json_sha256([*command])[:4]}"


def _submitted(script: str) -> str:
    """Return the new job's id. Raises PipelineError if the job would be refused, by Slurm or beside another."""
    check()
    JOBS.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    if done.returncode:
        raise PipelineError(f"{done.stderr.strip()}; see launch.slurm in params.yaml.")
    return done.stdout.strip().partition(";")[0]  # after the semicolon: the cluster


def _followed(job: str, log: Path, code: Path) -> int:
    """Print the log of ``job`` until Slurm says that it has ended. Return its exit code."""
    place, shown, answered = 0, "", time.monotonic()
    while True:
        place = _printed(log, place)
        with suppress(NoAnswer):
            found, answered = jobs(f"--job={job}"), time.monotonic()
            if not found:
                break
            if (now := f"job {job}: {found[0].state} {found[0].where}") != shown:
                say(shown := now, file=sys.stderr)
        if time.monotonic() - answered > SILENCE_SECONDS:
            raise NoAnswer(f"squeue has not answered for {SILENCE_SECONDS:.0f} s: {shown or f'job {job} is unknown'}.")
        time.sleep(POLL_SECONDS)
    while code not in code.parent.iterdir() and time.monotonic() < answered + GRACE_SECONDS:  # so NFS looks anew
        time.sleep(min(POLL_SECONDS, 1.0))
    _printed(log, place, to_the_end=True)
    with suppress(OSError, ValueError):
        return int(code.read_text(encoding="ascii"))
    say(f"error: job {job} has ended and left no exit code.", file=sys.stderr)
    return 1


def _printed(log: Path, place: int, *, to_the_end: bool = False) -> int:
    """Print the whole lines of ``log`` from byte ``place`` on, or all; return the place after them."""
    with suppress(FileNotFoundError), log.open("rb") as file:  # opened anew, so that NFS looks for a new end
        file.seek(place)
        new = file.read()
        new = new if to_the_end else new[: new.rfind(b"\n") + 1]
        say(new.decode("utf-8", "replace").replace("\r", "\n"), end="")
        place += len(new)
    return place
