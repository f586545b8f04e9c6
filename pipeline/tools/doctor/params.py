"""params.yaml, and what this machine makes of its variants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline import params, plans
from pipeline.errors import ConfigError
from pipeline.params import Config, Machine
from pipeline.plans import Plan
from pipeline.tools.doctor.findings import Finding
from pipeline.tools.doctor.probes import Answer


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
    def loader_workers(self) -> int:
        """The most processes that read data for a variant, of all its trainers."""
        readers = [plan for plan in self.plans.values() if plan.applied.data_loading == "dataloader"]
        return max((plan.processes * plan.applied.loader_workers for plan in readers), default=0)

    @property
    def gpu_processes(self) -> int:
        """The most that train together on GPUs, and so over NCCL."""
        return max((plan.processes for plan in self.plans.values() if plan.device == "cuda"), default=0)


def read(path: Path, machine: Machine | None) -> Job:
    """The job of ``path``, planned for ``machine`` unless that is unknown."""
    try:
        found = params.load(path)
    except ConfigError as error:
        return Job(mistakes=str(error))
    job = Job(found)
    for name in found.variants if machine else ():
        assert machine is not None
        try:
            job.plans[name] = plans.plan(found, name, machine)
        except ConfigError as error:
            job.refused[name] = str(error)
    return job


def check(job: Job) -> Iterator[Finding]:
    if job.config is None:
        remedy = "correct params.yaml; params.schema.json lists all keys"
        if "is missing" in job.mistakes:
            remedy = "cd to the top of the checkout; in a container, mount it there"
        yield Finding("params.yaml", "problem", job.mistakes, remedy)
        return
    yield Finding("params.yaml", "ok", f"{len(job.config.variants)} variants: {', '.join(job.config.variants)}")
    yield from _variants(job)


def check_names(job: Job, torch: Answer, names: Answer) -> Iterator[Finding]:
    """Whether the model, the loss and the metric are there; without params.yaml or torch, that is said already."""
    if job.config is None or "version" not in torch.found:
        return
    train = job.config.train
    mistake = names.found.get("error") or names.failure
    if names.late:
        remedy = "try again: a first import from a cold disk is slow, and so is a busy machine"
        yield Finding("model", "warning", f"is still being imported: {mistake}", remedy)
    elif mistake:
        remedy = "correct params.yaml, or the module that it names"
        yield Finding("model", "problem", mistake, remedy)
    else:
        yield Finding("model", "ok", f"{train.model}, with {train.loss} and {train.metric}")


def _variants(job: Job) -> Iterator[Finding]:
    for reason in dict.fromkeys(job.refused.values()):
        names = ", ".join(name for name, why in job.refused.items() if why == reason)
        remedy = "follow the message, or use a machine that has what the variant asks for"
        yield Finding("variants", "problem", f"cannot run here: {names}: {reason}", remedy)
    left_out = [(name, *each) for name, plan in job.plans.items() for each in plan.skipped.items()]
    for name, technique, reason in left_out:
        remedy = "none needed if that is known: the report says so"
        if technique == "bf16":
            remedy = "use a machine that has it, or set train.without_native: run"
        elif technique == "GPU":
            remedy = "see to the NVIDIA driver, below, or set train.device: cpu"
        elif "train.batch_size" in reason:
            remedy = "set train.batch_size to a multiple of the number of GPUs"
        yield Finding("variants", "warning", f"{name}: {technique} is left out: {reason}", remedy)
    if job.plans and not job.refused and not left_out:
        devices = ", ".join(f"{name} on {_devices(plan)}" for name, plan in job.plans.items())
        yield Finding("variants", "ok", f"all run here as asked: {devices}")


def _devices(plan: Plan) -> str:
    return f"{plan.processes} GPU(s)" if plan.device == "cuda" else f"the CPU ({plan.processes} process(es))"
