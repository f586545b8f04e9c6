"""A variant's plan: how it runs on this machine."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import ConfigError, count
from pipeline.params import COMPILER, Config, Machine, Train, Variant, catalogue, outside
from pipeline.params.variants import ONE_BATCH, PARALLELISMS

MICRO_BATCHES_A_STAGE = 4
"""Default number of micro-batches per pipeline stage. With four, stages are seldom idle. Source: Huang et al., "GPipe:
Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019, section 2.3."""


_WITHIN_A_HOST = "a model that is divided stays on one host, unless replicas is a multiple of the number of hosts"


class WhyNot(NamedTuple):
    """Why a number of processes cannot hold or train a model together."""

    reason: str
    allowed: str = ""
    """What would be possible instead."""

    def __str__(self) -> str:
        return f"{self.reason}; allowed: {self.allowed}"


WhyNotHeldBy = Callable[[int], WhyNot | None]
"""Number of processes -> the reason why this many processes cannot hold one model together; None if they can."""

_FORMS_RELY_ON = {"compiled": (COMPILER,), "int8": (COMPILER, "torchao")}
"""Form of inference -> the software that its numbers depend on, like ``Entry.relies_on`` for techniques."""


class Plan(BaseModel):
    """How one variant runs on this machine; every worker follows the plan."""

    model_config = ConfigDict(frozen=True)

    name: str
    requested: Variant
    applied: Variant
    skipped: dict[str, str]
    """Technique that is skipped, or GPUs or hosts that stay unused ("GPU" or "1 of 3 GPUs") -> the reason. Empty if
    everything requested is applied."""
    decided: dict[str, str] = {}
    """Technique -> its automatic choice on this machine, and the reason. The key ``deterministic`` holds the reason why
    a deterministic run is impossible."""
    device: Literal["cpu", "cuda"]
    processes: int
    hosts: int = 1
    """Number of hosts among which the processes are divided equally."""
    model_processes: int = 1
    """Number of processes that hold one model together and take the same samples, with pipeline or tensor parallelism;
    otherwise 1."""
    scale: int = 1
    """Factor by which the job's batch size and learning rate are multiplied: ``data_processes`` with weak scaling, else
    1."""
    devices_per_process: int = 1
    """Number of devices on which one process computes: more than one only with nn.DataParallel."""
    micro_batches: int
    micro_batch_size: int
    """Samples that one process takes in one micro-batch."""
    reduces: bool = Field(True, exclude_if=operator.truth)
    """False: processes exchange neither gradients nor parameters, so that the arithmetic of a step is measured alone
    (``scaling``). Nothing is ever trained in this way."""
    train: Train
    """The job as this variant trains it: ``train`` of params.yaml, with the variant's own model if it has one. The
    batch size and the learning rate are multiplied by ``scale``.
    Linear scaling and warm-up: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.1."""

    @property
    def data_processes(self) -> int:
        """Number of shares into which the processes divide a global batch."""
        return self.processes // self.model_processes

    def with_train(self, **changes: Any) -> Plan:
        """Return a copy with other values in ``train``; the values are not validated."""
        return self.model_copy(update={"train": self.train.model_copy(update=changes)})

    def divided(self, micro_batches: int, **changes: Any) -> Plan:
        """Return a copy with another number of micro-batches. The number must divide a process's share of the batch."""
        size = self.micro_batches * self.micro_batch_size // micro_batches
        return self.model_copy(update={"micro_batches": micro_batches, "micro_batch_size": size, **changes})


def plan(
    config: Config,
    name: str,
    machine: Machine,
    launched: int | None = None,
    why_not_held_by: WhyNotHeldBy = lambda processes: None,  # noqa: ARG005
) -> Plan:
    """Return the plan of ``variants.<name>`` on ``machine``. Raises ConfigError if the variant cannot run there.

    ``launched``: the number of processes on all hosts, if a launcher such as torchrun started this process; else None.
    The launcher has then divided them among ``machine.hosts``.
    ``why_not_held_by``: says which numbers of processes cannot hold the job's model together; without it, all can.
    """
    if name not in config.variants:
        raise ConfigError(f"variants.{name}: no such variant; there are: {', '.join(config.variants)}.")
    asked, train = config.variants[name], config.train_of(name)
    where = f"variants.{name}"
    requested, decided = asked, dict[str, str]()
    if asked.replicas == "hosts":
        requested = asked.model_copy(update={"replicas": machine.hosts})
        decided["replicas"] = f"{machine.hosts}, one on each host"
    if train.device == "cuda" and machine.gpus == 0:
        why = f" ({machine.why_no_gpu})" if machine.why_no_gpu else ""
        raise ConfigError(f"train.device: found 'cuda', but no GPU can be used here{why}; allowed here: 'auto', 'cpu'.")
    on_gpu = train.device != "cpu" and machine.gpus > 0
    processes = _processes(requested, machine, on_gpu, where, launched)
    weak = requested.scaling == "weak"
    micro_batches = 1 if requested.gradient_accumulation == "auto" else requested.gradient_accumulation

    skipped: dict[str, str] = {}
    if train.device == "auto" and machine.why_no_gpu:
        skipped["GPU"] = machine.why_no_gpu
    automatic = launched is None and requested.parallelism in PARALLELISMS and requested.processes == "auto"
    if automatic and on_gpu:
        available = machine.hosts * machine.gpus
        numbers = _numbers_on_gpus(requested, machine)
        processes, why_fewer = _most_processes(requested, numbers, train.batch_size, micro_batches, why_not_held_by)
        if processes < available:
            skipped[f"{available - processes} of {available} GPUs"] = why_fewer
    hosts = machine.hosts if launched else _hosts(requested, machine, on_gpu, processes) or 1
    if automatic and not on_gpu and hosts < machine.hosts:
        skipped[f"{machine.hosts - hosts} of {machine.hosts} hosts"] = _WITHIN_A_HOST
    devices_per_process = machine.gpus if requested.parallelism == "data_parallel" and on_gpu else 1
    without = _alone(requested, processes, on_gpu and devices_per_process == 1)
    without |= _emulated(requested, machine, train, on_gpu, where)
    skipped |= without
    applied = catalogue.without(requested, (entry for entry in catalogue.requested(requested) if entry.name in without))
    changes: dict[str, Any] = {}

    model_processes = processes // requested.copies if requested.parallelism in ONE_BATCH else 1
    data_processes = processes // model_processes
    if model_processes > 1 and (reason := why_not_held_by(model_processes)):
        raise ConfigError(
            f"{where}.parallelism: found {requested.parallelism!r} of {model_processes} processes, but {reason}."
        )
    if requested.parallelism == "pipeline" and model_processes > 1:
        samples = train.batch_size // (1 if weak else data_processes)
        micro_batches = _micro_batches_of_pipeline(micro_batches, model_processes, samples, where)
        changes["gradient_accumulation"] = micro_batches
    if weak and data_processes == 1 and "weak_scaling" not in skipped:
        skipped["weak_scaling"] = "there is only one data-parallel process, so its batch is the global batch"
        changes["scaling"] = "strong"
    scale = data_processes if weak else 1
    shares = data_processes // scale * micro_batches
    if train.batch_size % shares:
        fitting = max(shares, round(train.batch_size / shares) * shares)
        who = count(data_processes // scale, "replica" if model_processes > 1 else "process")
        raise ConfigError(
            f"train.batch_size: found {train.batch_size}, which {where} cannot divide into {who} x "
            f"{count(micro_batches, 'micro-batch')}; allowed: a multiple of {shares}, such as {fitting}."
        )
    return Plan(
        name=name,
        requested=asked,
        applied=applied.model_copy(update=changes),
        skipped=skipped,
        decided=decided,
        device="cuda" if on_gpu else "cpu",
        processes=processes,
        hosts=hosts,
        model_processes=model_processes,
        devices_per_process=devices_per_process,
        scale=scale,
        micro_batches=micro_batches,
        micro_batch_size=train.batch_size // shares,
        train=train.model_copy(
            update={"batch_size": scale * train.batch_size, "learning_rate": scale * train.learning_rate}
        ),
    )


def _most_processes(
    requested: Variant, numbers: Sequence[int], batch_size: int, micro_batches: int, why_not_held_by: WhyNotHeldBy
) -> tuple[int, str]:
    """Return the first of the ``numbers`` of processes, which fall, that can run the variant, and why more processes
    cannot. If no number can, return the smallest possible number; later checks of the plan report the problem."""
    why_fewer = f"each of the {requested.copies} replicas must have the same number of GPUs"
    if requested.copies == 1:
        why_fewer = _WITHIN_A_HOST
    fewest = 2 * requested.copies if requested.copies > 1 or requested.parallelism in ONE_BATCH else 1
    for processes, fewer in pairwise([*numbers, 0]):
        why_not = _why_not_among(requested, processes, batch_size, micro_batches, why_not_held_by)
        if why_not is None or fewer < fewest:
            break
        why_fewer = why_not.reason
    return processes, why_fewer


def _alone(requested: Variant, processes: int, one_gpu: bool) -> dict[str, str]:
    """Return technique -> reason for each technique that is skipped because there is only one process or GPU. These are
    the variant's parallelism, and the techniques that need this parallelism. Return an empty dict if there are more
    processes or GPUs, or if the variant has no parallelism."""
    alone = processes == 1 if requested.parallelism in PARALLELISMS else one_gpu
    if requested.parallelism == "none" or not alone:
        return {}
    only = "process, so the batch is not shared" if requested.parallelism in PARALLELISMS else "GPU"
    options = [entry.name for entry in catalogue.requested(requested) if entry.needs]
    why = f"it needs {requested.parallelism}, which is skipped"
    return {requested.parallelism: f"there is only one {only}", **dict.fromkeys(options, why)}


def _emulated(requested: Variant, machine: Machine, train: Train, on_gpu: bool, where: str) -> dict[str, str]:
    """Return technique -> reason for each technique that is skipped because the machine only emulates it. Raises
    ConfigError for a technique that cannot run here, or that ``train.without_native`` refuses."""
    reasons = {}
    for technique in catalogue.requested(requested):
        what = f"{where}.{technique.key}: found {technique.value_in(requested)!r}, but"
        if reason := technique.why_refused(requested, machine, on_gpu) or technique.why_not_with(train):
            raise ConfigError(f"{what} {reason}; take it out.")
        reason = technique.emulated(machine, on_gpu)
        if reason and train.without_native == "refuse":
            raise ConfigError(f"{what} {reason}; take it out, or set train.without_native to 'leave_out' or 'run'.")
        if reason and train.without_native == "leave_out":
            reasons[technique.name] = reason
    return reasons


def plans(config: Config, machine: Machine) -> dict[str, Plan]:
    """Return every variant's plan. Raises one ConfigError if variants cannot run here; it names one problem of each
    such variant."""
    made, problems = {}, []
    for name in config.variants:
        try:
            made[name] = plan(config, name, machine)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return made


def relied_on(config: Config) -> dict[str, dict[str, frozenset[str]]]:
    """Return, for each variant and each form of inference, the optional software on whose versions its numbers depend.

    The result is ``{"variants": {name: software}, "forms": {form: software}}`` with the forms in ``infer.forms``. Each
    ``software`` is a set of names of distributions; it may also contain ``COMPILER``.
    """
    return {
        "variants": {
            name: variant_relies_on(variant, config.train_of(name)) for name, variant in config.variants.items()
        },
        "forms": {form: frozenset(_FORMS_RELY_ON.get(form, ())) for form in config.infer.forms},
    }


def variant_relies_on(variant: Variant, train: Train) -> frozenset[str]:
    """Return the optional software on whose versions the variant's numbers depend, as in ``relied_on``."""
    return (
        frozenset(package for technique in catalogue.requested(variant) for package in technique.relies_on)
        | set(map(outside.package_of, variant.extra))
        | ({"transformers"} & {train.model})
    )


def _processes(variant: Variant, machine: Machine, on_gpu: bool, where: str, launched: int | None) -> int:
    if launched is not None:
        if (variant.processes if variant.parallelism in PARALLELISMS else 1) not in ("auto", launched):
            raise ConfigError(
                f"{where}: found parallelism {variant.parallelism!r} and processes {variant.processes!r}, but a "
                f"launcher started {count(launched, 'process')}; allowed: parallelism "
                f"{' or '.join(map(repr, PARALLELISMS))} with processes 'auto' or {launched}."
            )
        processes = launched
    elif variant.parallelism not in PARALLELISMS:
        processes = 1
    elif variant.processes == "auto":
        on_cpus = variant.copies * max(2, machine.hosts * (variant.parallelism not in ONE_BATCH))
        processes = _numbers_on_gpus(variant, machine)[0] if on_gpu else on_cpus
    else:
        processes = variant.processes
        if on_gpu and not _hosts(variant, machine, on_gpu, processes):
            has = f"each of the {machine.hosts} hosts" if machine.hosts > 1 else "this machine"
            more = f", an equal number on each of at most {machine.hosts} hosts" if machine.hosts > 1 else ""
            raise ConfigError(
                f"{where}.processes: found {processes}, but {has} has {count(machine.gpus, 'GPU')}; "
                f"allowed: 1 to {machine.gpus}{more}, or 'auto'."
            )
    fitting = [1, *(replicas for replicas in range(2, processes // 2 + 1) if processes % replicas == 0)]
    if variant.copies not in fitting:
        raise ConfigError(
            f"{where}.replicas: found {variant.copies}, which cannot divide {count(processes, 'process')} into "
            f"groups of two or more; allowed: {', '.join(map(str, fitting))}."
        )
    return processes


def _numbers_on_gpus(variant: Variant, machine: Machine) -> list[int]:
    """Return the numbers of processes that use each GPU at most once, each replica on equally many; the largest first.
    If no number can, return the number of GPUs; later checks of the plan report the problem."""
    numbers = range(machine.hosts * machine.gpus, 0, -1)
    fitting = (number for number in numbers if number % variant.copies == 0)
    return [number for number in fitting if _hosts(variant, machine, True, number)] or [machine.gpus]


def _hosts(variant: Variant, machine: Machine, on_gpu: bool, processes: int) -> int | None:
    """Return the number of hosts among which ``processes`` are divided equally: on GPUs, the fewest that have enough;
    on CPUs, all hosts or one. None if they have not enough GPUs."""
    numbers = [number for number in range(1, machine.hosts + 1) if processes % number == 0]
    if variant.parallelism in ONE_BATCH:
        numbers = [number for number in numbers if variant.copies % number == 0]
    if on_gpu:
        return next((number for number in numbers if processes <= number * machine.gpus), None)
    return machine.hosts if machine.hosts in numbers else 1


def _why_not_among(
    variant: Variant, processes: int, batch_size: int, micro_batches: int, why_not_held_by: WhyNotHeldBy
) -> WhyNot | None:
    """Return why ``processes`` cannot share the batch evenly, or cannot hold one model together; None if they can."""
    if variant.parallelism in ONE_BATCH:  # the number of replicas is fixed, and only replicas share the batch
        together = processes // variant.copies
        if variant.parallelism == "pipeline" and 1 < micro_batches < together:
            return WhyNot(f"a pipeline of {together} stages has idle stages with {micro_batches} micro-batches")
        return why_not_held_by(together) if together > 1 else None
    if variant.scaling == "weak" or batch_size % (processes * micro_batches) == 0:
        return None
    most = processes - variant.copies
    return WhyNot(f"train.batch_size {batch_size} can be shared evenly by at most {most} of the GPUs")


def _micro_batches_of_pipeline(requested: int, stages: int, samples: int, where: str) -> int:
    """Return the number of micro-batches: ``requested`` or, if this is 1, up to ``MICRO_BATCHES_A_STAGE`` per stage.
    Raises ConfigError if a stage would be idle."""
    usual = range(MICRO_BATCHES_A_STAGE * stages, stages - 1, -1)
    micro_batches = next((size for size in usual if samples % size == 0), 0) if requested == 1 else requested
    if micro_batches >= stages:
        return micro_batches
    raise ConfigError(
        f"{where}.gradient_accumulation: found {requested}, but a pipeline of {stages} stages needs at least {stages} "
        f"micro-batches, otherwise some stages are idle. The number must divide the {samples} samples of a step; with "
        f"{MICRO_BATCHES_A_STAGE * stages}, stages are seldom idle."
    )
