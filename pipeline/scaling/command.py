"""The command ``scale``: how many devices pay, and what they cost.

An arm is a variant with another number of processes. With strong scaling, the global batch stays; with weak scaling,
each process keeps the whole batch, which is another training. Each number of processes has a second arm, whose
processes exchange nothing, and so have further numbers, up to which the curve is projected: these take the share of the
batch that a process would have there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import NamedTuple

from pipeline import files, plans
from pipeline.benchmark.server import ArmSpec, Server
from pipeline.benchmark.stage import begin_session, calibrated, file_name, served, side_by_side
from pipeline.errors import ConfigError, say
from pipeline.params import Config, Machine, Variant, catalogue, check_minutes
from pipeline.report import write_pages
from pipeline.report.pictures import Chart, loglog
from pipeline.results import REPORTS, read_documents
from pipeline.scaling import probe
from pipeline.scaling.curves import Analysis, Curve, Measured, Place, Report

KEPT = Path("scaling")
"""Each report is a file of this folder, kept in git like the sessions of the bench."""
FURTHER = 4
"""Without --up-to, curves are projected to so many times the devices that there are."""
MOST = 2**16
"""Most devices of a projection, as many as ``processes`` of params.yaml."""
SHARED = ("ddp", "zero1", "fsdp")
"""The kinds of parallelism whose processes share the batch."""
NOT_MODELLED = {"zero1", "sync_batchnorm", "powersgd", "post_local_sgd"}
"""What exchanges something so that ``projection`` does not know when, or how many bytes."""


class Options(NamedTuple):
    """The options of the command."""

    up_to: int | None = None
    """The most devices of a projection."""
    price: float | None = None
    """Of a device-hour."""
    minutes: float = 5.0
    link: str | None = None
    """What connects hosts that are not here."""


def run(config: Config, machine: Machine, names: Sequence[str], options: Options) -> None:
    """Measure the curves of the variants ``names``; write ``reports/scaling.*``, and keep the report.

    Raises PipelineError, and KeyboardInterrupt, whose message says what is kept.
    """
    check_minutes(options.minutes)
    if options.price is not None and not 0 < options.price <= 1e9:
        raise ConfigError(f"--price: found {options.price:g}; expected a number above 0, at most 1e9.")
    if options.link not in (None, *probe.LINKS):
        raise ConfigError(f"--link: found {options.link!r}; expected one of {', '.join(probe.LINKS)}.")
    measured = _measured(config, machine, names, options)
    report = reported(config, measured, read_documents(KEPT, Report, "it is left out"), options)
    kept = KEPT / file_name(measured.bench)
    files.write_text(kept, report.to_json())
    write(report)
    say(f"scale: {REPORTS / 'scaling.html'}")
    if measured.bench.interrupted:
        raise KeyboardInterrupt(f"the complete rounds are kept in {kept}")


def _measured(config: Config, machine: Machine, names: Sequence[str], options: Options) -> Measured:
    """Measure the curves of the variants ``names`` (``variants_of``).

    Raises ConfigError, before anything is started, for a curve that cannot be measured or projected.
    """
    variants, present, base = variants_of(config, names), probe.numbers_here(config, machine), config.compare.baseline
    places, planned = arms_of(config, machine, variants, numbers_of(present, options.up_to), present[-1])
    probed, session = probe.measured(config, machine, present), begin_session()
    settings = config.bench.model_copy(update={"max_minutes": options.minutes})
    of_base = config.model_copy(update={"variants": {base: config.variants[base]}})
    with served(of_base, machine, Server()) as job:
        specs = [ArmSpec.of_variant(name, job.server, plan.model_dump(mode="json")) for name, plan in planned.items()]
        arms = [*specs, specs[0].control()]
        steps, round_seconds, _, _ = calibrated(arms, settings, ledgers=False)
        about = job.facts | {"baseline": specs[0].name, "keys": {}, "budget": "--minutes", "session": session}
        bench = side_by_side("scale", arms, settings, job.device, steps=steps, round_seconds=round_seconds, **about)
    data = job.facts["dataset"]
    of_job = [config.job, data.sha256, bench.arms[0].device]
    jobs = {name: files.json_sha256([of.model_dump(mode="json"), *of_job]) for name, of in variants.items()}
    return Measured(bench=bench, places=places, probe=probed, jobs=jobs, epoch_samples=data.train_count)


def variants_of(config: Config, names: Sequence[str]) -> dict[str, Variant]:
    """Return the variants of params.yaml with these names or, for the name of a parallelism, the baseline with it; with
    "-weak" after a name, with weak scaling.

    Without names, return all variants whose processes share the batch or, if there are none, the baseline with each
    parallelism, all with both kinds of scaling. Raises ConfigError.
    """
    base = config.variants[config.compare.baseline]
    ours = {name: variant for name, variant in config.variants.items() if variant.parallelism in SHARED}
    words = {word: base.model_copy(update={"parallelism": word}) for word in SHARED if word not in ours}
    known = ours | words
    strong = {name: variant for name, variant in known.items() if variant.scaling == "strong"}
    known = {f"{name}-weak": of.model_copy(update={"scaling": "weak"}) for name, of in strong.items()} | known
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"scale: found {', '.join(wrong)}; expected some of {', '.join(known)}.")
    chosen = names or [name for name in known if {name, name.removesuffix("-weak")} & (ours or words).keys()]
    return {name: known[name].model_copy(update={"processes": "auto"}) for name in chosen}


def numbers_of(present: Sequence[int], up_to: int | None) -> list[int]:
    """Return the numbers of processes of a curve: 1, the ``present`` ones, and doubled from there to ``up_to``."""
    last = FURTHER * present[-1] if up_to is None else up_to
    if not present[-1] <= last <= MOST or last % present[-1]:
        raise ConfigError(f"--up-to: found {up_to}; expected a multiple of the {present[-1]} here, at most {MOST:,}.")
    return [1, *present[:-1], *probe.doubled(present[-1], last)]


def arms_of(
    config: Config, machine: Machine, variants: Mapping[str, Variant], numbers: Sequence[int], available: int
) -> tuple[tuple[Place, ...], dict[str, plans.Plan]]:
    """Return the places of all curves, and the plans of their arms.

    Raises ConfigError for whatever makes a plan impossible, and for a batch that further processes cannot divide.
    """
    places: list[Place] = []
    arms: dict[str, plans.Plan] = {}
    whole = config.train.batch_size

    def planned(name: str, variant: Variant, processes: int, batch_size: int, hosts: int) -> plans.Plan:
        train = config.train.model_copy(update={"batch_size": batch_size})
        of_name = {name: variant.model_copy(update={"processes": processes})}
        enough = machine.model_copy(update={"hosts": hosts})
        return plans.plan(config.model_copy(update={"train": train, "variants": of_name}), name, enough)

    for (name, variant), number in product(variants.items(), numbers):
        running, replicas = min(number, available), machine.hosts if variant.replicas == "hosts" else variant.replicas
        in_effect, weak = catalogue.in_effect(variant), variant.scaling == "weak"
        unknown = any(entry.name in NOT_MODELLED or (entry.needs and entry.key == "extra") for entry in in_effect)
        alone = None if number == 1 or unknown else f"{name}-{running if weak else number}-alone"
        if (number > running and not alone) or (number > 1 and replicas > 1 and running % (2 * replicas)):
            continue
        of_number = variant if number > 1 else variant.model_copy(update={"replicas": 1, "scaling": "strong"})
        plan = planned(f"{name}-{number}", of_number, number, whole, machine.hosts * number // running)
        if number == running:
            arms[plan.name] = plan
        if alone:
            twin = planned(alone, variant, running, whole if weak else whole * running // number, machine.hosts)
            applied = twin.applied.model_copy(update={"communication_hook": "none"})
            arms[alone] = twin.model_copy(update={"reduces": False, "applied": applied})
        places.append(
            Place(
                name=plan.name,
                variant=name,
                mode=variant.scaling,
                processes=number,
                hosts=plan.hosts,
                batch_size=plan.train.batch_size,
                devices=number if plan.device == "cuda" else plan.hosts,
                replicas=plan.applied.copies,
                alone=alone,
                measured=number == running,
            )
        )
    return tuple(places), arms


def reported(config: Config, measured: Measured, earlier: Sequence[Report], options: Options) -> Report:
    """Return the report. ``earlier``: reports whose projections are compared with this measurement."""
    price = options.price or config.compare.price_on(measured.bench.arms[0].device)
    epochs, to_target = float(config.train.epochs), False
    with suppress(OSError, ValueError, KeyError, TypeError):  # without a comparison of this job, nothing is known
        comparison = files.read_json(REPORTS / "comparison.json")
        if comparison["train"] == config.job and (samples := comparison["variants"][0]["time_to_target"]["samples"]):
            epochs, to_target = samples / measured.epoch_samples, True
    worth, link = config.scale.worth, options.link
    report = Report(measured=measured, worth=worth, price=price, epochs=epochs, to_target=to_target, link=link)
    curves = Analysis(report, config.compare.max_spread, earlier).curves()
    return report.model_copy(update={"curves": tuple(curves)})


def write(report: Report, directory: Path = REPORTS) -> None:
    """Write the report as JSON, Markdown and a page, all or none; print the Markdown."""
    say(write_pages("scaling", directory, report.to_json(), report=report, chart_of=_speedups), end="")


def _speedups(curve: Curve) -> Chart | None:
    """Return the speed-ups over the number of devices; None if one is unknown, or if only one was measured."""
    last = sum(point.place.measured for point in curve.points) - 1
    line = [(float(point.place.processes), point.speedup.estimate or 0.0) for point in curve.points]
    if last < 1 or not all(speedup for _, speedup in line):
        return None
    lines = {"measured": line[: last + 1], "projected": line[last:], "as fast as ideal": [line[0], (line[-1][0],) * 2]}
    known = {name: of for name, of in lines.items() if len(of) > 1}
    return loglog(known, lambda value, _: f"{value:g}", lambda value, _: f"{value:g}")
