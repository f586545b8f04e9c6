"""What is looked at once, and judged by several checks: the job on this machine, and what probes answer.

A probe is a look that is slow, may hang or may crash, in a process of its own. It says what it finds as soon as it
knows it, so what was found before a hang is not lost; what it raises is told as its failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipeline import environment, params, plans
from pipeline.environment.gpus import instances
from pipeline.errors import ConfigError

PROBE_SECONDS = 60.0
"""Imports of torch, DVC or MLflow take one to three; from a cold disk, or on a busy machine, much longer."""
LATE = "no answer within"


class Unanswered(Exception):
    """A probe does not tell what a check asks for; its failure."""


class Answer(NamedTuple):
    found: dict[str, Any]
    failure: str = ""
    """Why it is not complete."""

    def told(self, name: str) -> Any:
        """Raises Unanswered."""
        if name not in self.found:
            raise Unanswered(self.failure)
        return self.found[name]


@dataclass(frozen=True)
class Job:
    """What params.yaml asks for, as far as it can be read and planned here."""

    config: params.Config | None = None
    mistakes: str = ""
    """Why there is no config."""
    plans: dict[str, plans.Plan] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Variant -> why it cannot run here."""

    @property
    def device(self) -> Literal["auto", "cpu", "cuda"]:
        return self.config.train.device if self.config else "auto"

    def processes(self, *devices: Literal["cpu", "cuda"]) -> int:
        """The most that train together on one of ``devices``."""
        return max((plan.processes for plan in self.plans.values() if plan.device in devices), default=1)


@dataclass(frozen=True)
class Facts:
    root: Path
    """The checkout."""
    job: Job
    planned_gpus: int
    """How many the plans count on (``environment.machine``)."""
    driver: Answer
    torch: Answer
    git: Answer
    dvc: Answer
    store: Answer

    @property
    def computes(self) -> bool:
        """Torch does, on GPUs."""
        return bool(self.torch.found.get("gpus")) and not self.torch.failure


def look(root: Path) -> Facts:
    """What there is in the checkout at ``root``, the current directory, and around it."""
    machine = None
    with ThreadPoolExecutor(2) as pool:  # more would make each late on a small machine: imports are work
        answers = pool.map(ask, PROBES)
        with suppress(Exception):  # the checks that miss it say so
            machine = environment.machine()
        job = read(root / params.PARAMS_FILE, machine)
        return Facts(root, job, machine.gpus if machine else 0, **dict(zip(PROBES, answers, strict=True)))


def read(path: Path, machine: params.Machine | None) -> Job:
    """The job of ``path``, planned for ``machine`` unless that is unknown."""
    try:
        job = Job(config := params.load(path))
    except ConfigError as error:
        return Job(mistakes=str(error))
    if machine is None:
        return job
    for name in config.variants:
        try:
            job.plans[name] = plans.plan(config, name, machine)
        except ConfigError as error:
            job.refused[name] = str(error)
    return job


def ask(probe: str, seconds: float = PROBE_SECONDS) -> Answer:
    """Run ``PROBES[probe]`` in a process that finds the same modules as this one, and give it ``seconds``."""
    command, same = [sys.executable, "-m", __name__, probe], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, env=same, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        late = f"{LATE} {seconds:g} s".encode()
        done = subprocess.CompletedProcess(command, 1, error.stdout or b"", late)
    found: dict[str, Any] = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith("{"):
            with suppress(ValueError):  # libraries may print what they like
                found |= json.loads(line)
    failure = found.pop("failure", "")
    if done.returncode:  # it hung or crashed
        said = done.stderr.decode(errors="replace").strip().splitlines()
        failure = [f"the process ended with {done.returncode}", *said][-1]
    return Answer(found, failure)


def answer(probe: str) -> None:
    """Print what the probe says, a JSON object a line."""
    try:
        PROBES[probe]()
    except Exception as error:
        missing = getattr(error, "missing_deps", ())  # as DVC names what it needs
        _say(failure=" ".join([f"{type(error).__name__}:", *str(error).split(), *missing]))


def _say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def _driver() -> None:
    """What the driver's library (NVML) knows: version, cuda (the newest, major and minor) and gpus, of each the UUIDs
    of its instances (MIG), or None if it is not split."""
    import pynvml as nvml

    nvml.nvmlInit()
    split = [instances(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
    gpus = [made if made is None else [*map(nvml.nvmlDeviceGetUUID, made)] for made in split]
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    _say(version=nvml.nvmlSystemGetDriverVersion(), cuda=[cuda // 1000, cuda % 1000 // 10], gpus=gpus)


def _torch() -> None:
    """version, cuda (None in a CPU build), gpus (how many) and their names; it fails where they do not compute."""
    import torch

    _say(version=torch.__version__, cuda=torch.version.cuda)
    if torch.version.cuda:
        gpus = range(torch.cuda.device_count())
        _say(gpus=len(gpus))
        torch.cuda.init()
        for index in gpus:
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
        _say(names=[*map(torch.cuda.get_device_name, gpus)])


def _git() -> None:
    """commit; it fails where git does."""
    command, plain = ["git", "rev-parse", "--verify", "--short", "HEAD"], os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, env=plain, capture_output=True, text=True, errors="replace")
    _say(**{"failure": " ".join(done.stderr.split())} if done.returncode else {"commit": done.stdout.strip()})


def _store() -> None:
    """well, found and remedy, as ``tracking.health`` tells them."""
    from pipeline import tracking

    publish = params.Publish()
    with suppress(ConfigError):
        publish = params.load().publish
    _say(**tracking.health(Path(), publish.experiment)._asdict())


def _dvc() -> None:
    """cache, and the default remote, as DVC itself reads its settings; whether that exists."""
    from dvc.repo import Repo

    with Repo() as repo:
        _say(cache=repo.cache.local.path)
        name, remotes = repo.config["core"].get("remote"), repo.config["remote"]
        _say(remote=name, url=remotes.get(name, {}).get("url", ""))
        if not name:
            return
        remote = repo.cloud.get_remote()
        system, path = remote.fs, remote.path
        if system.protocol in ("http", "https"):
            _say(exists=system.fs.exists(path, strict=True))  # else it takes any failure for absence
        else:
            if bucket := path.split("/")[0]:
                system.fs.info(bucket)  # raises: exists() takes any failure for absence
            _say(exists=system.exists(path))


PROBES = {"driver": _driver, "torch": _torch, "git": _git, "dvc": _dvc, "store": _store}


def nearest(path: Path) -> Path:
    """``path``, or the first directory above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


if __name__ == "__main__":
    answer(sys.argv[1])
