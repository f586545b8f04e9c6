"""What a machine makes of a variant."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pipeline.config import catalogue
from pipeline.config.errors import ConfigError
from pipeline.config.sections import Config, Machine, Variant

_HOLD_A_MODEL_TOGETHER = ("pipeline",)
"""Parallelisms with several processes a model."""
MICRO_BATCHES_A_STAGE = 4
"""Of a pipeline, where the variant does not say. With four the bubble is small. Source: Huang et al., "GPipe: Efficient
Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019, section 2.3."""


class Plan(BaseModel):
    """What this machine makes of one variant; every worker follows it."""

    model_config = ConfigDict(frozen=True)

    name: str
    asked: Variant
    applied: Variant
    left_out: dict[str, str]
    """Technique -> why this machine leaves it out. Empty: everything asked is applied."""
    device: Literal["cpu", "cuda"]
    processes: int
    model_processes: int = 1
    """How many processes hold one model together and take the same samples: stages of a pipeline, tensor shards."""
    devices_per_process: int = 1
    """GPUs that one process computes on: more than one with nn.DataParallel alone."""
    micro_batches: int
    micro_batch_size: int
    """Samples one process takes in one micro-step."""

    @property
    def data_processes(self) -> int:
        """Into how many shares a global batch is divided."""
        return self.processes // self.model_processes


def plan(config: Config, name: str, machine: Machine, launched: int | None = None) -> Plan:
    """Decide how ``variants.<name>`` runs on ``machine``. Raises ConfigError if it cannot.

    ``launched`` is the world size, over all hosts, if a launcher such as torchrun started this process.
    """
    if name not in config.variants:
        raise ConfigError(f"variants.{name}: no such variant; there are: {', '.join(config.variants)}.")
    asked, train = config.variants[name], config.train
    where = f"variants.{name}"
    if train.device == "cuda" and machine.gpus == 0:
        raise ConfigError("train.device: found 'cuda', but this machine shows no GPU; allowed here: 'auto', 'cpu'.")
    on_gpu = train.device != "cpu" and machine.gpus > 0
    alone = asked.parallelism == "data_parallel"  # one process, however many GPUs
    processes = _processes(asked, machine, on_gpu, where, launched)

    left_out: dict[str, str] = {}
    changes: dict[str, Any] = {}
    together = asked.parallelism in _HOLD_A_MODEL_TOGETHER
    if on_gpu and launched is None and not (alone or asked.parallelism == "none") and asked.processes == "auto":
        while not together and train.batch_size % (processes * asked.gradient_accumulation) and processes > 1:
            processes -= 1
        if processes < machine.gpus:
            left_out[f"{machine.gpus - processes} of {machine.gpus} GPUs"] = (
                f"{asked.replicas} replicas take as many each"
                if together
                else f"train.batch_size {train.batch_size} is shared out evenly among {processes} at most"
            )
    devices_per_process = machine.gpus if asked.parallelism == "data_parallel" and on_gpu else 1
    if asked.parallelism != "none" and processes * devices_per_process == 1 and (on_gpu or not alone):
        left_out[asked.parallelism] = (
            "there is one GPU" if alone else "there is one process, which has nobody to share the batch with"
        )
        changes["parallelism"] = "none"
    for technique in catalogue.asked(asked):
        reason = technique.why_not(machine, on_gpu)
        if reason:
            raise ConfigError(f"{where}.{technique.key}: found {technique.value(asked)!r}, but {reason}; take it out.")
    if asked.precision == "bf16" and not (machine.gpu_native_bf16 if on_gpu else machine.cpu_native_bf16):
        reason = (
            "this GPU has no native bf16 (compute capability below 8.0) and would emulate it"
            if on_gpu
            else "this CPU has no native bf16 (AVX-512, AMX or Arm BF16) and would emulate it, several times slower"
        )
        if train.without_native == "refuse":
            raise ConfigError(
                f"{where}.precision: found 'bf16', but {reason}; use 'fp32', or set train.without_native to "
                "'leave_out' or 'run'."
            )
        if train.without_native == "leave_out":
            left_out["bf16"] = reason
            changes["precision"] = "fp32"

    model_processes = processes // asked.replicas if together else 1
    micro_batches = asked.gradient_accumulation
    if asked.parallelism == "pipeline" and model_processes > 1:
        micro_batches = _micro_batches_of_pipeline(asked, model_processes, train.batch_size // asked.replicas, where)
        changes["gradient_accumulation"] = micro_batches
    sharing = processes // model_processes
    shares = sharing * micro_batches
    if train.batch_size % shares:
        fitting = max(shares, round(train.batch_size / shares) * shares)
        who = "replica(s)" if model_processes > 1 else "process(es)"
        raise ConfigError(
            f"train.batch_size: found {train.batch_size}, which {where} cannot divide into {sharing} {who} x "
            f"{micro_batches} micro-batch(es); allowed: a multiple of {shares}, such as {fitting}."
        )
    return Plan(
        name=name,
        asked=asked,
        applied=asked.model_copy(update=changes),
        left_out=left_out,
        device="cuda" if on_gpu else "cpu",
        processes=processes,
        model_processes=model_processes,
        devices_per_process=devices_per_process if "parallelism" not in changes else 1,
        micro_batches=micro_batches,
        micro_batch_size=train.batch_size // shares,
    )


def plans(config: Config, machine: Machine) -> dict[str, Plan]:
    """Every variant's plan, or one ConfigError that lists all that cannot run here."""
    made, problems = {}, []
    for name in config.variants:
        try:
            made[name] = plan(config, name, machine)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return made


def _processes(variant: Variant, machine: Machine, on_gpu: bool, where: str, launched: int | None) -> int:
    alone = variant.parallelism in ("none", "data_parallel")
    if launched is not None:
        if (1 if alone else variant.processes) not in ("auto", launched):
            raise ConfigError(
                f"{where}: found parallelism {variant.parallelism!r} and processes {variant.processes!r}, but a "
                f"launcher started {launched} process(es); allowed: parallelism 'ddp' with processes 'auto' or "
                f"{launched}."
            )
        return _shared_by_replicas(launched, variant, where)
    if alone:
        return 1
    if variant.processes == "auto":
        most = machine.gpus - machine.gpus % variant.replicas if on_gpu else 2 * variant.replicas
        return _shared_by_replicas(most, variant, where)
    if on_gpu and variant.processes > machine.gpus:
        raise ConfigError(
            f"{where}.processes: found {variant.processes}, but this machine shows {machine.gpus} GPU(s); "
            f"allowed: 1 to {machine.gpus}, or 'auto'."
        )
    return _shared_by_replicas(variant.processes, variant, where)


def _shared_by_replicas(processes: int, variant: Variant, where: str) -> int:
    """``processes``, if the replicas are so many models of several processes."""
    replicas = variant.replicas
    if replicas > 1 and (processes % replicas or processes <= replicas):
        raise ConfigError(
            f"{where}.replicas: found {replicas} with {processes} process(es); allowed: 1, or a number that divides "
            "the processes and leaves each replica two or more."
        )
    return processes


def _micro_batches_of_pipeline(variant: Variant, stages: int, samples: int, where: str) -> int:
    """Of ``samples`` a step and pipeline: as many as the variant says, by default up to ``MICRO_BATCHES_A_STAGE``."""
    asked = variant.gradient_accumulation
    if asked >= stages:
        return asked
    if asked == 1:
        for count in range(MICRO_BATCHES_A_STAGE * stages, stages - 1, -1):
            if samples % count == 0:
                return count
    raise ConfigError(
        f"{where}.gradient_accumulation: found {asked}, but a pipeline of {stages} stages stands still with fewer "
        f"micro-batches than stages, and {samples} samples a step must be a multiple of them; allowed: {stages} or "
        f"more, better {MICRO_BATCHES_A_STAGE * stages}."
    )
