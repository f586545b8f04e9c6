"""Looks that are slow, may hang or may crash, each in a process of its own.

A probe says what it finds as soon as it knows it, so what was found before a hang is not lost; what it raises is told
as its failure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.environment.gpus import instances
from pipeline.errors import PipelineError

PROBE_SECONDS = 60.0
"""Imports of torch, DVC or MLflow take one to three; from a cold disk, or on a busy machine, much longer."""
NETWORK_SECONDS = 3
"""After the imports, the longest wait for a DVC remote."""


class Answer(NamedTuple):
    found: dict[str, Any]
    failure: str = ""
    """Why it is not complete."""
    late: bool = False
    """It was cut off."""


def ask(probe: str, seconds: float = PROBE_SECONDS) -> Answer:
    """Run ``PROBES[probe]``, which finds the same modules as this process, and give it ``seconds``."""
    command, same = [sys.executable, "-m", __name__, probe], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, env=same, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        done = subprocess.CompletedProcess(command, -signal.SIGALRM, error.stdout or b"", b"")
    else:
        seconds = NETWORK_SECONDS
    found: dict[str, Any] = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith("{"):  # libraries may print what they like
            found |= json.loads(line)
    failure = found.pop("failure", "")
    if done.returncode == -signal.SIGALRM:
        return Answer(found, f"no answer within {seconds:g} s", late=True)
    if done.returncode:  # it crashed
        said = done.stderr.decode(errors="replace").strip().splitlines()
        failure = said[-1] if said else f"the process ended with {done.returncode}"
    return Answer(found, failure)


def answer(probe: str) -> None:
    """Print what the probe says, a JSON object a line."""
    try:
        PROBES[probe]()
    except PipelineError as error:
        _say(failure=str(error))
    except Exception as error:
        words = [*str(error).split(), *getattr(error, "missing_deps", ())]  # as DVC names what it needs
        _say(failure=": ".join(filter(None, [type(error).__name__, " ".join(words)])))


def _say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def _driver() -> None:
    """What the driver's library (NVML) knows: version, cuda (the newest, major and minor) and gpus: uuid, instances
    (UUIDs; None: it is not split, MIG), pids (of processes that compute on it, as the host counts them)."""
    import pynvml as nvml

    nvml.nvmlInit()
    gpus = []
    for handle in map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())):
        made, pids = instances(handle), []
        with suppress(nvml.NVMLError):  # a virtual GPU may not tell
            pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        uuids = None if made is None else [*map(nvml.nvmlDeviceGetUUID, made)]
        gpus.append({"uuid": nvml.nvmlDeviceGetUUID(handle), "instances": uuids, "pids": pids})
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    _say(version=nvml.nvmlSystemGetDriverVersion(), cuda=[cuda // 1000, cuda % 1000 // 10], gpus=gpus)


def _torch() -> None:
    """version, cuda (None in a CPU build), nccl (None without), gpus (how many) and their names; it fails where they do
    not compute."""
    import torch

    has_nccl = hasattr(torch._C, "_nccl_version")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    _say(version=torch.__version__, cuda=torch.version.cuda, nccl=nccl)
    if torch.version.cuda:
        _say(gpus=torch.cuda.device_count())
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
        _say(names=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())])


def _names() -> None:
    """It fails where the model, the loss or the metric of params.yaml cannot be found."""
    from pipeline import models, params
    from pipeline.models import loss_and_metric

    train = params.load().train
    models.load(train.model)
    loss_and_metric.load(train)


def _store() -> None:
    """well, found and remedy, as ``tracking.health`` tells them."""
    from pipeline import params, tracking

    try:
        experiment = params.load().publish.experiment
    except PipelineError:
        experiment = params.Publish().experiment
    health = tracking.health(Path(), experiment)
    _say(well=health.well, found=health.found, remedy=health.remedy)


def _dvc() -> None:
    """cache, how it links files, and the default remote, as DVC itself reads its settings; whether that exists."""
    from dvc.repo import Repo
    from dvc_objects.fs import generic

    with Repo() as repo:
        odb = repo.cache.local
        _say(cache=odb.path)
        if Path(odb.path).is_dir():
            beside = repo.fs.join(repo.root_dir, "x")
            _say(link=generic.test_links([*odb.cache_types, "copy"], odb.fs, odb.path, repo.fs, beside)[0])
        name, remotes = repo.config["core"].get("remote"), repo.config["remote"]
        _say(remote=name, remotes=sorted(remotes), url=remotes.get(name, {}).get("url", ""))
        if not name:
            return
        remote = repo.cloud.get_remote()
        system, path = remote.fs, remote.path
        assert system.fs  # imports and opens what speaks to the remote, which it has not done yet
        signal.alarm(NETWORK_SECONDS)  # nothing else ends a library that tries again and again
        if system.protocol == "local":
            there = nearest(Path(path))
            _say(exists=there == Path(path), writable=os.access(there, os.W_OK))
        elif system.protocol in ("http", "https"):
            _say(exists=system.fs.exists(path, strict=True))  # else it takes any failure for absence
        else:
            if bucket := path.split("/")[0]:
                system.fs.info(bucket)  # raises: exists() takes any failure for absence
            _say(exists=system.exists(path))


PROBES = {"driver": _driver, "torch": _torch, "names": _names, "store": _store, "dvc": _dvc}


def nearest(path: Path) -> Path:
    """``path``, or the first directory above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


if __name__ == "__main__":
    answer(sys.argv[1])
