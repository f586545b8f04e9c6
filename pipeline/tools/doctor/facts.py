"""Facts that are gathered once and judged by several checks: the job on this machine, and the answers of probes.

Each probe runs in a process of its own, because what it examines is slow, or may hang or crash. A probe prints each
fact as soon as it is known, so facts found before a hang are not lost. An exception in the probe becomes its failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pipeline import environment, params, plans
from pipeline.environment.gpus import instances
from pipeline.errors import ConfigError
from pipeline.files import PREPARED

if TYPE_CHECKING:
    from pipeline.data.prepared import Dataset

PROBE_SECONDS = 60.0
"""Longest time that a probe may take. Importing torch, DVC or MLflow takes one to three seconds, and much longer from a
cold disk or on a busy machine."""
LATE = "no answer within"


class Unanswered(Exception):
    """A probe did not report the fact that a check asks for. The message is the probe's failure."""


class Answer(NamedTuple):
    found: dict[str, Any]
    failure: str = ""
    """Why facts are missing; empty if the answer is complete."""

    def told(self, name: str) -> Any:
        """Return the fact ``name``. Raises Unanswered if the probe did not report it."""
        if name not in self.found:
            raise Unanswered(self.failure)
        return self.found[name]


@dataclass(frozen=True)
class Job:
    """The job of params.yaml, as far as it can be read and planned here."""

    config: params.Config | None = None
    mistakes: str = ""
    """Why params.yaml is not valid; empty if it is valid."""
    plans: dict[str, plans.Plan] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Variant -> why it cannot run here."""

    @property
    def device(self) -> Literal["auto", "cpu", "cuda"]:
        return self.config.train.device if self.config else "auto"

    def processes(self, *devices: Literal["cpu", "cuda"]) -> int:
        """Return the largest number of processes of a variant that trains on one of ``devices``."""
        return max((plan.processes for plan in self.plans.values() if plan.device in devices), default=1)


@dataclass(frozen=True)
class Facts:
    root: Path
    """The checkout."""
    job: Job
    planned_gpus: int
    """The number of GPUs for which the plans were made (``environment.machine``)."""
    driver: Answer
    torch: Answer
    git: Answer
    dvc: Answer
    store: Answer
    parts: Answer

    @property
    def computes(self) -> bool:
        """True if torch computes on GPUs."""
        return bool(self.torch.found.get("gpus")) and not self.torch.failure


def look(root: Path) -> Facts:
    """Gather the facts about the checkout at ``root``, which is the current directory, and about the machine."""
    machine = None
    with ThreadPoolExecutor(2) as pool:  # more threads would delay all probes on a small machine: imports take CPU time
        answers = pool.map(ask, PROBES)
        with suppress(Exception):  # without the machine, ``read`` plans no variant
            machine = environment.machine()
        job = read(root / params.PARAMS_FILE, machine)
        return Facts(root, job, machine.gpus if machine else 0, **dict(zip(PROBES, answers, strict=True)))


def read(path: Path, machine: params.Machine | None) -> Job:
    """Return the job of the params.yaml at ``path``. Its variants are planned for ``machine``, unless the machine is
    unknown (None)."""
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
    """Run ``PROBES[probe]`` for at most ``seconds`` in a process that finds the same modules as this process, and
    return its answer."""
    command, same = [sys.executable, "-m", __name__, probe], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, env=same, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        late = f"{LATE} {seconds:g} s".encode()
        done = subprocess.CompletedProcess(command, 1, error.stdout or b"", late)
    found: dict[str, Any] = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith("{"):
            with suppress(ValueError):  # libraries may print other lines
                found |= json.loads(line)
    failure = found.pop("failure", "")
    if done.returncode:  # the probe hung or crashed
        said = done.stderr.decode(errors="replace").strip().splitlines()
        failure = [f"the process ended with {done.returncode}", *said][-1]
    return Answer(found, failure)


def answer(probe: str) -> None:
    """Run the probe, which prints its facts as one JSON object per line. If it fails, print the failure in the same
    form."""
    try:
        PROBES[probe]()
    except Exception as error:
        missing = getattr(error, "missing_deps", ())  # DVC's errors list missing packages there
        _say(failure=" ".join([f"{type(error).__name__}:", *str(error).split(), *missing]))


def _say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def _driver() -> None:
    """Print the facts of the driver's library (NVML): version, cuda (the newest supported version) and gpus. ``gpus``
    has, for each GPU, the UUIDs of its MIG instances, or None if the GPU is not split."""
    import pynvml as nvml

    nvml.nvmlInit()
    split = [instances(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
    gpus = [made if made is None else [*map(nvml.nvmlDeviceGetUUID, made)] for made in split]
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    _say(version=nvml.nvmlSystemGetDriverVersion(), cuda=f"{cuda // 1000}.{cuda % 1000 // 10}", gpus=gpus)


def _torch() -> None:
    """Print the facts version, cuda (None in a CPU build), gpus (their number) and names. Raises an error if a GPU
    cannot compute."""
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
    """Print the fact commit or, if git fails, its error."""
    command, plain = ["git", "rev-parse", "--verify", "--short", "HEAD"], os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, env=plain, capture_output=True, text=True, errors="replace")
    _say(**{"failure": " ".join(done.stderr.split())} if done.returncode else {"commit": done.stdout.strip()})


def _store() -> None:
    """Print the facts well, found and remedy, from ``tracking.health``."""
    from pipeline import tracking

    publish = params.Publish()
    with suppress(ConfigError):
        publish = params.load().publish
    _say(**tracking.health(Path(), publish.experiment)._asdict())


def _dvc() -> None:
    """Print facts as DVC itself reads its settings: cache, remote (the default one) and url. If there is a remote,
    print also whether its folder exists."""
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
            _say(exists=system.fs.exists(path, strict=True))  # without strict, it returns False for any failure
        else:
            if bucket := path.split("/")[0]:
                system.fs.info(bucket)  # raises an error if the bucket cannot be read; exists() would return False
            _say(exists=system.exists(path))


def _parts() -> None:
    """Print the fact model. If the form of the data is known, print also data (in words) and parameters (their number).
    Raises the errors that training would raise."""
    config = params.load()
    with redirect_stdout(sys.stderr):  # a user's module may print; stdout is for the facts
        from pipeline import models, tasks
        from pipeline.data.prepared import check_batch
        from pipeline.models import loss_and_metric

        models.load(config.train.model)
        tasks.find(config.train.task)
        loss_and_metric.load(config.train)
        known = _data(config)
        dataset, samples = known or (None, 0)
        if dataset:
            check_batch(config.train.batch_size, dataset.name, samples)
            task = tasks.of_job(config.train, dataset)
            task.check()
            count = sum(each.numel() for each in task.model().parameters())
    _say(model=config.train.model)
    if dataset:
        _say(data=f"{dataset.name}, {samples:,} training samples", parameters=count)


def _data(config: params.Config) -> tuple[Dataset, int] | None:
    """Return the data set and its number of training samples; None if they are not known yet. Raises DataError.

    For an image folder, which may not be prepared yet, the data set is one sample in the shape of prepared images.
    """
    import torch

    from pipeline.data.decoded import held_out
    from pipeline.data.prepared import DESCRIPTION, Dataset, Split, Statistics, read
    from pipeline.data.sources.local import images_of

    if config.fetch.dataset == "image_folder":
        root, paths = images_of(config.fetch)
        train = [path for path in paths if path.startswith("train/")]
        names = [path.split("/")[1] for path in train]
        classes = tuple(sorted(set(names)))
        count = len(train)
        if count == len(paths):
            labels = [classes.index(name) for name in names]
            count -= int(held_out(train, labels, config.prepare.test_fraction).sum())
        inputs = torch.zeros((1, 3, *(config.prepare.image_size or ())), dtype=torch.uint8)
        split = Split({"inputs": inputs, "targets": torch.zeros(1, dtype=torch.int64)})
        form = Statistics(mean=(0.5,) * 3, std=(0.5,) * 3)
        dataset = Dataset(str(root), "", classes, None, {"inputs": form}, split, split)
        return dataset, min(count, config.prepare.train_limit or count)
    if not (PREPARED / DESCRIPTION).exists():
        return None
    dataset = read(PREPARED)
    return (dataset, len(dataset.train)) if dataset.name.split()[0] == config.fetch.dataset else None


PROBES = {"parts": _parts, "driver": _driver, "torch": _torch, "git": _git, "dvc": _dvc, "store": _store}


def nearest(path: Path) -> Path:
    """Return ``path``, or the first directory above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


if __name__ == "__main__":
    answer(sys.argv[1])
