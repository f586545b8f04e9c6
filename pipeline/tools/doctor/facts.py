"""What is looked at once, and judged by several checks: the job on this machine, and what the probes answer."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline import environment, params, plans
from pipeline.errors import ConfigError
from pipeline.params import PARAMS_FILE, Config, Machine
from pipeline.plans import Plan
from pipeline.tools.doctor import probes
from pipeline.tools.doctor.probes import Answer

CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


@dataclass(frozen=True)
class Job:
    """What params.yaml asks for, as far as it can be read and planned here."""

    config: Config | None = None
    mistakes: str = ""
    """Why there is no config."""
    plans: dict[str, Plan] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Variant -> why it cannot run here."""

    @property
    def device(self) -> Literal["auto", "cpu", "cuda"]:
        return self.config.train.device if self.config else "auto"

    @property
    def processes(self) -> int:
        """The most that train together."""
        return max((plan.processes for plan in self.plans.values()), default=1)

    @property
    def gpu_processes(self) -> int:
        """The most that train together on GPUs, and so over NCCL."""
        return max((plan.processes for plan in self.plans.values() if plan.device == "cuda"), default=0)


def read(path: Path, machine: Machine | None) -> Job:
    """The job of ``path``, planned for ``machine`` unless that is unknown."""
    try:
        config = params.load(path)
    except ConfigError as error:
        return Job(mistakes=str(error))
    job = Job(config)
    for name in config.variants if machine else ():
        assert machine
        try:
            job.plans[name] = plans.plan(config, name, machine)
        except ConfigError as error:
            job.refused[name] = str(error)
    return job


@dataclass(frozen=True)
class Facts:
    root: Path
    """The checkout."""
    job: Job
    planned_gpus: int
    """How many the plans count on (``environment.machine``)."""
    container: bool
    """This is one."""
    driver: Answer
    torch: Answer
    names: Answer
    store: Answer
    dvc: Answer

    @property
    def computes(self) -> bool:
        """Torch does, on GPUs."""
        return bool(self.torch.found.get("gpus")) and not self.torch.failure


def look(root: Path) -> Facts:
    """What there is in the checkout at ``root``, the current directory, and around it."""
    driver, machine = probes.ask("driver"), None  # before anything of ours computes on a GPU: it lists who does
    with ThreadPoolExecutor() as pool:
        asked = {probe: pool.submit(probes.ask, probe) for probe in probes.PROBES if probe != "driver"}
        with suppress(Exception):  # the checks that miss it say so
            machine = environment.machine()
        job = read(root / PARAMS_FILE, machine)
        answers = {probe: answer.result() for probe, answer in asked.items()}
    container = any(mark.exists() for mark in CONTAINER_MARKS) or "KUBERNETES_SERVICE_HOST" in os.environ
    return Facts(root, job, machine.gpus if machine else 0, container, driver, **answers)
