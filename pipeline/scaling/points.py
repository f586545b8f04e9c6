"""The command ``scale``: measure the arms of a scaling curve side by side, and keep what was measured.

An arm is a variant with another number of processes. With strong scaling, the global batch stays; with weak scaling,
each process keeps the whole batch, which is another training. Each number of processes has a second arm, whose
processes exchange nothing, and so have further numbers, up to which the curve is projected: these take the share of the
batch that a process would have there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline import environment, files
from pipeline.benchmark.server import ArmSpec, Server
from pipeline.benchmark.stage import begin_session, calibrated, file_name, side_by_side
from pipeline.data.prepared import read as read_dataset
from pipeline.environment.hardware import cores
from pipeline.errors import ConfigError
from pipeline.files import PREPARED
from pipeline.params import Config, Machine, Variant, catalogue
from pipeline.plans import Plan
from pipeline.plans import plan as plan_of
from pipeline.results import Arithmetic, Bench, Document, Record
from pipeline.results.records import Count
from pipeline.scaling import probe
from pipeline.scaling.projection import Alone, alone_of
from pipeline.training.measured import dataset_of

KEPT = Path("scaling")
"""Each measurement is a file of this folder, kept in git like the sessions of the bench."""
MOST_ON_A_CPU = 8
"""The largest number of processes that is measured on the cores of one host."""
FURTHER = 4
"""Without --up-to, curves are projected to so many times the devices that there are."""
Mode = Literal["strong", "weak"]


class Place(Record):
    """A number of processes of a variant: a point of a curve."""

    name: str
    """The name of its arm; of a point that is projected, the name of the point."""
    variant: str
    mode: Mode
    processes: Count
    batch_size: Count
    devices: Count
    """What is paid for: the GPUs or, without GPUs, the hosts."""
    alone: str | None
    """The name of the arm that exchanges nothing; None if there is none."""
    measured: bool = True
    modelled: bool = True
    """Whether ``alone`` shows all that the arm exchanges, so that it can be projected."""
    replicas: Count = 1
    """Groups of processes that each share one model (fsdp)."""


class Measured(Document):
    """What ``scale`` measured: the raw samples, from which ``curves`` computes all else."""

    bench: Bench
    places: tuple[Place, ...]
    """One device first, then the others by variant, mode and number."""
    alone: dict[str, tuple[Alone, ...]]
    """Arm that exchanges nothing -> one entry a round."""
    probe: probe.Probe | None
    """None if no number of processes is more than 1."""
    devices: Count
    """The most processes that can be measured."""
    hosts: Count
    jobs: dict[str, str]
    """Variant -> digest of its settings, the job, the data and the kind of device: projections of equal jobs can be
    compared with what is measured."""
    epoch_samples: Count


class _Server(Server):
    """A server that keeps what arms without an exchange say beyond a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.alone: dict[str, list[Alone]] = {}

    def close(self, name: str) -> dict[str, Any]:
        answer = super().close(name)
        if ranks := answer.pop("arithmetic", ()):
            self.alone.setdefault(name, []).append(alone_of([Arithmetic.model_validate(rank) for rank in ranks]))
        return answer


def measured(
    config: Config, machine: Machine, names: Sequence[str], up_to: int | None, minutes: float, modes: Sequence[Mode]
) -> Measured:
    """Measure the curves of the variants ``names`` (none: all with data parallelism). Keep the rounds so far in a file.

    Raises ConfigError, before anything is started, for a curve that cannot be measured or projected.
    """
    variants = variants_of(config, names)
    if on_gpu(config, machine) and machine.hosts * machine.gpus == 1:
        raise ConfigError("scale: found one GPU; a curve needs two or more, here or on further hosts (launch.hosts).")
    available = machine.hosts * machine.gpus if on_gpu(config, machine) else max(machine.hosts, _processes_of_a_cpu())
    numbers = numbers_of(available, up_to)
    places, plans = arms_of(config, machine, variants, numbers, available, modes, all_numbers=up_to is not None)
    dataset, content = dataset_of(read_dataset(PREPARED)), environment.read()
    base = places[0]
    config = config.model_copy(update={"compare": config.compare.model_copy(update={"baseline": base.name})})
    settings = config.bench.model_copy(update={"max_minutes": minutes})
    session_so_far, hashed = begin_session(), environment.hash_of(content, "variants", *config.variants)
    copies = {(plan.processes, plan.applied.copies) for plan in plans.values()}
    counts = sorted({number for pair in copies for number in (*pair, pair[0] // pair[1])} - {1})
    sharded = "fsdp" in {plan.applied.parallelism for plan in plans.values()}
    probed = (
        probe.measured(config, machine, counts, probe.OPERATIONS if sharded else ("all_reduce",)) if counts else None
    )
    with _Server() as server:
        specs = [ArmSpec.of_variant(name, server, plan.model_dump(mode="json")) for name, plan in plans.items()]
        arms = [*specs, specs[0].control()]
        steps, round_seconds, _, _ = calibrated(arms, settings, ledgers=False)
        server.alone.clear()  # the samples of the calibration are no rounds

        def kept(bench: Bench) -> Measured:
            number = bench.rounds
            result = Measured(
                bench=bench,
                places=places,
                alone={name: tuple(of_arm[:number]) for name, of_arm in server.alone.items()},
                probe=probed,
                devices=available,
                hosts=machine.hosts,
                jobs={name: _job(config, variant, dataset.sha256, bench) for name, variant in variants.items()},
                epoch_samples=dataset.train_count,
            )
            files.write_text(KEPT / file_name(bench), result.to_json())
            return result

        bench = side_by_side(
            "scale",
            arms,
            settings,
            plans[base.name].device,
            steps=steps,
            round_seconds=round_seconds,
            session=session_so_far,
            keep=kept,
            environment=hashed,
            commit=environment.checked_out(),
            config={"train": config.job, "bench": settings.model_dump(mode="json"), "variants": {}},
            dataset=dataset,
            baseline=base.name,
            margins=config.compare.margins,
            keys={name: files.json_sha256(plan.model_dump(mode="json")) for name, plan in plans.items()},
        )
        return kept(bench)


def on_gpu(config: Config, machine: Machine) -> bool:
    return config.train.device != "cpu" and machine.gpus > 0


def _processes_of_a_cpu() -> int:
    return min(MOST_ON_A_CPU, max(2, 1 << int(math.log2(max(1.0, cores())))))


def variants_of(config: Config, names: Sequence[str]) -> dict[str, Variant]:
    """Return the variants of params.yaml with these names or, for the name of a parallelism, the baseline with it.

    Without names, return all variants whose processes share the batch. Raises ConfigError.
    """
    shared = ("ddp", "zero1", "fsdp")
    known = {name: variant for name, variant in config.variants.items() if variant.parallelism in shared}
    base = config.variants[config.compare.baseline]
    chosen = {}
    for name in names or known:
        if name in shared and name not in config.variants:
            known[name] = base.model_copy(update={"parallelism": name})
        if name not in known:
            has = f"parallelism {config.variants[name].parallelism!r}" if name in config.variants else "no such variant"
            raise ConfigError(
                f"scale: found {name} ({has}); expected variants whose processes share the batch: parallelism "
                f"{', '.join(shared)}, or one of these words."
            )
        chosen[name] = known[name]
    if not chosen:
        raise ConfigError(
            f"scale: no variant of params.yaml has parallelism {', '.join(shared)}; name one of these words, such as "
            "`scale ddp`."
        )
    return chosen


def numbers_of(available: int, up_to: int | None) -> tuple[int, ...]:
    """Return the numbers of processes of a curve: 1, 2, 4, ..., ``available``, and doubled from there to ``up_to``."""
    last = FURTHER * available if up_to is None else up_to
    if last < available or last % available:
        raise ConfigError(f"--up-to: found {up_to}, but {available} are measured here; expected a multiple of it.")
    powers = [2**power for power in range(last.bit_length())]
    further = {available * power for power in powers if available * power < last}
    return tuple(sorted({power for power in powers if power < available} | further | {available, last}))


def arms_of(
    config: Config,
    machine: Machine,
    variants: Mapping[str, Variant],
    numbers: Sequence[int],
    available: int,
    modes: Sequence[Mode],
    *,
    all_numbers: bool = True,
) -> tuple[tuple[Place, ...], dict[str, Plan]]:
    """Return the places of all curves, and the plans of their arms.

    Raises ConfigError for whatever makes a plan impossible, and for a batch that further processes cannot divide;
    without ``all_numbers``, these are left out.
    """
    places: list[Place] = []
    plans: dict[str, Plan] = {}

    def planned(name: str, variant: Variant) -> Plan:
        return plan_of(config.model_copy(update={"variants": {name: variant}}), name, machine)

    def place(plan: Plan, variant: str, mode: Mode, processes: int, alone: str | None, batch_size: int) -> None:
        devices = processes if plan.device == "cuda" else max(1, plan.hosts * processes // plan.processes)
        further = processes // plan.processes if variants[variant].replicas == "hosts" else 1
        places.append(
            Place(
                name=f"{variant}-{processes}{'-weak' * (mode == 'weak')}",
                variant=variant,
                mode=mode,
                processes=processes,
                batch_size=batch_size,
                devices=devices,
                alone=alone,
                measured=processes <= available,
                modelled=_exchanging(plan) <= _MODELLED,
                replicas=further * plan.applied.copies,
            )
        )

    for name, variant in variants.items():
        single = f"{name}-1"
        plans[single] = planned(single, variant.model_copy(update={"processes": 1, "replicas": 1, "scaling": "strong"}))
        place(plans[single], name, "strong", 1, None, plans[single].train.batch_size)
        replicas = machine.hosts if variant.replicas == "hosts" else variant.replicas
        fewest = 2 * replicas if replicas > 1 else 1
        for mode in modes:
            for number in numbers:
                measurable = min(number, available)
                if number == 1 or measurable % fewest:
                    continue
                if number > measurable and mode == "strong" and not all_numbers and config.train.batch_size % number:
                    continue
                own = f"{name}-{measurable}{'-weak' * (mode == 'weak')}"
                if number == measurable:
                    plans[own] = planned(own, variant.model_copy(update={"processes": number, "scaling": mode}))
                plan, alone = plans[own], None
                if _exchanging(plan) <= (_MODELLED | _LEFT_OUT if number == measurable else _MODELLED):
                    alone = f"{own}-alone" if mode == "weak" else f"{name}-{number}-alone"
                    plans[alone] = _with_share(plan, alone, number if mode == "strong" else measurable)
                if alone or number == measurable:
                    larger = number // measurable if mode == "weak" else 1
                    place(plan, name, mode, number, alone, larger * plan.train.batch_size)
    return tuple(places), plans


def _with_share(plan: Plan, name: str, number: int) -> Plan:
    """Return the plan of processes that exchange nothing and take the share of the batch of one of ``number``."""
    shares = max(number, plan.processes) * plan.micro_batches
    batch_size = plan.train.batch_size
    if batch_size % shares:
        raise ConfigError(
            f"train.batch_size: found {batch_size}, which {number} processes cannot divide; allowed: a multiple of "
            f"{shares}, or a smaller --up-to."
        )
    share = batch_size // shares
    applied = plan.applied.model_copy(update={"communication_hook": "none", "sync_batchnorm": False})
    return plan.with_train(batch_size=share * plan.micro_batches * plan.processes).model_copy(
        update={"name": name, "micro_batch_size": share, "reduces": False, "applied": applied}
    )


_MODELLED = {
    "ddp", "weak_scaling", "bucket_mb", "gradients_beside_buckets", "static_graph", "fp16_compression",
    "bf16_compression", "fsdp", "keep_gathered", "parameter_precision", "cpu_offload",
}  # fmt: skip
"""What can exchange something so that ``projection`` knows when, and how many bytes."""
_LEFT_OUT = {"zero1", "sync_batchnorm", "powersgd", "post_local_sgd"}
"""What an arm that exchanges nothing can leave out or do without, although ``projection`` does not know it."""


def _exchanging(plan: Plan) -> set[str]:
    """Return the plan's parallelism, and the techniques that need one."""
    effective = catalogue.in_effect(plan.applied)
    return {entry.name for entry in effective if entry.needs or entry.name == plan.applied.parallelism}


def _job(config: Config, variant: Variant, data_sha256: str, bench: Bench) -> str:
    """Return a digest of what projections of a variant depend on, besides the number of devices."""
    values = variant.model_dump(mode="json", exclude={"processes", "scaling"})
    return files.json_sha256([values, config.job, data_sha256, bench.arms[0].device])
