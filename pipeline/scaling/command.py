"""The command ``scale``: how many devices pay, and what they cost.

An arm is a variant with another number of processes. With strong scaling, the global batch stays; with weak scaling,
each process keeps the whole batch, which is another training. Each number of processes has a second arm, whose
processes exchange nothing, and so have further numbers, up to which the curve is projected: these take the share of the
batch that a process would have there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.benchmark.server import ArmSpec, Server
from pipeline.benchmark.stage import begin_session, calibrated, file_name, served, side_by_side
from pipeline.errors import ConfigError, say
from pipeline.params import Config, Machine, Variant, catalogue, check_minutes
from pipeline.plans import Plan
from pipeline.plans import plan as plan_of
from pipeline.report import write_pages
from pipeline.report.pictures import Chart, loglog
from pipeline.results import REPORTS, Arithmetic, read_documents
from pipeline.scaling import probe
from pipeline.scaling.curves import Analysis, Curve, Measured, Place, Report
from pipeline.scaling.projection import Parts, alone_of

KEPT = Path("scaling")
"""Each report is a file of this folder, kept in git like the sessions of the bench."""
FURTHER = 4
"""Without --up-to, curves are projected to so many times the devices that there are."""
SHARED = ("ddp", "zero1", "fsdp")
"""The kinds of parallelism whose processes share the batch."""
MODELLED = {
    "ddp", "weak_scaling", "bucket_mb", "gradients_beside_buckets", "static_graph", "fp16_compression",
    "bf16_compression", "fsdp", "keep_gathered", "parameter_precision", "cpu_offload",
}  # fmt: skip
"""What can exchange something so that ``projection`` knows when, and how many bytes."""


def run(
    config: Config,
    machine: Machine,
    names: Sequence[str],
    *,
    up_to: int | None,
    price: float | None,
    minutes: float,
    link: str | None,
) -> None:
    """Measure the curves of the variants ``names``; write ``reports/scaling.*``, and keep the report.

    ``up_to``: the most devices of a projection. ``price``: of a device-hour. ``link``: what connects hosts that are not
    here. Raises PipelineError, and KeyboardInterrupt, whose message says what is kept.
    """
    check_minutes(minutes)
    if price is not None and not 0 < price <= 1e9:
        raise ConfigError(f"--price: found {price:g}; expected a number above 0, at most 1e9.")
    if link not in (None, *probe.LINKS):
        raise ConfigError(f"--link: found {link!r}; expected one of {', '.join(probe.LINKS)}.")
    measured = _measured(config, machine, names, up_to, minutes)
    earlier = read_documents(KEPT, Report, "it is left out")
    report = reported(config, measured, earlier, price=price, link=link)
    kept = KEPT / file_name(measured.bench)
    files.write_text(kept, report.to_json())
    write(report)
    say(f"scale: {REPORTS / 'scaling.html'}")
    if measured.bench.interrupted:
        raise KeyboardInterrupt(f"the complete rounds are kept in {kept}")


class _Server(Server):
    """A server that keeps what arms without an exchange say beyond a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: dict[str, list[list[Arithmetic]]] = defaultdict(list)

    def close(self, name: str) -> dict[str, Any]:
        answer = super().close(name)
        if ranks := answer.pop("arithmetic", ()):
            self.rounds[name].append([Arithmetic.model_validate(rank) for rank in ranks])
        return answer


def _measured(config: Config, machine: Machine, names: Sequence[str], up_to: int | None, minutes: float) -> Measured:
    """Measure the curves of the variants ``names`` (``variants_of``).

    Raises ConfigError, before anything is started, for a curve that cannot be measured or projected.
    """
    variants, present, base = variants_of(config, names), probe.numbers_here(config, machine), config.compare.baseline
    places, plans = arms_of(config, machine, variants, numbers_of(present, up_to), present[-1])
    probed, session = probe.measured(config, machine, present), begin_session()
    settings = config.bench.model_copy(update={"max_minutes": minutes})
    of_base = config.model_copy(update={"variants": {base: config.variants[base]}})
    with served(of_base, machine, server := _Server()) as job:
        specs = [ArmSpec.of_variant(name, server, plan.model_dump(mode="json")) for name, plan in plans.items()]
        arms = [*specs, specs[0].control()]
        steps, round_seconds, _, _ = calibrated(arms, settings, ledgers=False)
        server.rounds.clear()  # the samples of the calibration are no rounds
        about = job.facts | {"baseline": specs[0].name, "keys": {}, "budget": "--minutes"}
        about |= {"session": session, "keep": lambda _: None}
        bench = side_by_side("scale", arms, settings, job.device, steps=steps, round_seconds=round_seconds, **about)
    data = job.facts["dataset"]
    of_job = [config.job, data.sha256, bench.arms[0].device]
    values = {name: of.model_dump(mode="json", exclude={"processes"}) for name, of in variants.items()}
    return Measured(
        bench=bench,
        places=places,
        alone={name: alone_of(rounds) for name, rounds in server.rounds.items()},
        probe=probed,
        jobs={name: files.json_sha256([of, *of_job]) for name, of in values.items()},
        epoch_samples=data.train_count,
    )


def variants_of(config: Config, names: Sequence[str]) -> dict[str, Variant]:
    """Return the variants of params.yaml with these names or, for the name of a parallelism, the baseline with it; with
    "-weak" after a name, with weak scaling.

    Without names, return all variants whose processes share the batch or, if there are none, the baseline with each
    parallelism, all with both kinds of scaling. Raises ConfigError.
    """
    base = config.variants[config.compare.baseline]
    words = {word: base.model_copy(update={"parallelism": word}) for word in SHARED}
    ours = {name: variant for name, variant in config.variants.items() if variant.parallelism in SHARED}

    def with_weak(variants: dict[str, Variant]) -> dict[str, Variant]:
        strong = {name: variant for name, variant in variants.items() if variant.scaling == "strong"}
        return {f"{name}-weak": of.model_copy(update={"scaling": "weak"}) for name, of in strong.items()} | variants

    known = with_weak(words | ours)
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"scale: found {', '.join(wrong)}; expected some of {', '.join(known)}.")
    return {name: known[name] for name in names or with_weak(ours or words)}


def numbers_of(present: Sequence[int], up_to: int | None) -> list[int]:
    """Return the numbers of processes of a curve: 1, the ``present`` ones, and doubled from there to ``up_to``."""
    last = FURTHER * present[-1] if up_to is None else up_to
    if last < present[-1] or last % present[-1]:
        raise ConfigError(f"--up-to: found {up_to}, but {present[-1]} are measured here; expected a multiple of it.")
    numbers = [1, *present]
    while numbers[-1] < last:
        numbers.append(min(2 * numbers[-1], last))
    return numbers


def arms_of(
    config: Config, machine: Machine, variants: Mapping[str, Variant], numbers: Sequence[int], available: int
) -> tuple[tuple[Place, ...], dict[str, Plan]]:
    """Return the places of all curves, and the plans of their arms.

    Raises ConfigError for whatever makes a plan impossible, and for a batch that further processes cannot divide.
    """
    places: list[Place] = []
    plans: dict[str, Plan] = {}
    whole = config.train.batch_size

    def planned(name: str, batch_size: int, variant: Variant, **changes: Any) -> Plan:
        train = config.train.model_copy(update={"batch_size": batch_size})
        of_name = {name: variant.model_copy(update=changes)}
        return plan_of(config.model_copy(update={"train": train, "variants": of_name}), name, machine)

    for (name, variant), number in product(variants.items(), numbers):
        measured, further, weak = min(number, available), max(1, number // available), variant.scaling == "weak"
        replicas = machine.hosts if variant.replicas == "hosts" else variant.replicas
        if number > 1 and replicas > 1 and measured % (2 * replicas):
            continue
        own, alone = f"{name}-{measured}", f"{name}-{measured if weak else number}-alone"
        single = {"replicas": 1, "scaling": "strong"} if number == 1 else {}
        plan = planned(own, whole, variant, processes=measured, **single)
        exchanging = {entry.name for entry in catalogue.in_effect(plan.applied) if entry.needs or entry.name in SHARED}
        is_modelled = number > 1 and exchanging <= MODELLED
        if number > available and not is_modelled:
            continue
        plans[own] = plan
        if is_modelled:
            if not weak and whole % number:
                raise ConfigError(
                    f"train.batch_size: found {whole}, which {number} processes cannot divide; allowed: a multiple of "
                    f"{number}, or a smaller --up-to."
                )
            twin = planned(alone, whole if weak else whole * measured // number, variant, processes=measured)
            applied = twin.applied.model_copy(update={"communication_hook": "none"})
            plans[alone] = twin.model_copy(update={"reduces": False, "applied": applied})
        places.append(
            Place(
                name=f"{name}-{number}",
                variant=name,
                mode=variant.scaling,
                processes=number,
                hosts=further * plan.hosts,
                batch_size=whole * number if weak else whole,
                devices=number if plan.device == "cuda" else further * plan.hosts,
                replicas=plan.applied.copies * (further if variant.replicas == "hosts" else 1),
                alone=alone if is_modelled else None,
                measured=number <= available,
            )
        )
    return tuple(places), plans


def reported(
    config: Config, measured: Measured, earlier: Sequence[Report], *, price: float | None, link: str | None
) -> Report:
    """Return the report. ``earlier``: reports whose projections are compared with this measurement."""
    price = price or config.compare.price_on(measured.bench.arms[0].device)
    epochs, to_target = float(config.train.epochs), False
    with suppress(OSError, ValueError, KeyError, TypeError):  # without a comparison of this job, nothing is known
        comparison = files.read_json(REPORTS / "comparison.json")
        if comparison["train"] == config.job and (samples := comparison["variants"][0]["time_to_target"]["samples"]):
            epochs, to_target = samples / measured.epoch_samples, True
    report = Report(
        measured=measured, worth=config.scale.worth, price=price, epochs=epochs, to_target=to_target, link=link
    )
    curves = Analysis(report, config.compare.max_spread, earlier).curves()
    return report.model_copy(update={"curves": tuple(curves)})


def write(report: Report, directory: Path = REPORTS) -> None:
    """Write the report as JSON, Markdown and a page, all or none; print the Markdown."""
    charts = [_speedups(curve) for curve in report.curves]
    content: dict[str, Any] = {"report": report, "parts": [*Parts.__annotations__], "charts": charts}
    say(write_pages("scaling", directory, report.to_json(), **content), end="")


def _speedups(curve: Curve) -> Chart | None:
    """Return the speed-ups over the number of devices; None if one is unknown."""
    number = sum(point.place.measured for point in curve.points)
    line = [(float(point.place.processes), point.speedup.estimate or 0.0) for point in curve.points]
    if number < 2 or not all(speedup for _, speedup in line):
        return None
    lines = {
        "measured": line[:number],
        "projected": line[number - 1 :],
        "as fast as ideal": [line[0], (line[-1][0],) * 2],
    }
    lines = {name: of for name, of in lines.items() if len(of) > 1}
    return loglog(lines, lambda value, _: f"{value:g}", lambda value, _: f"{value:g}")
