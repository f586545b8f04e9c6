"""What ``advise`` tries: the catalogue's techniques at the values of their ``tries``, each added to the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import params, tasks
from pipeline.data.prepared import read as read_dataset
from pipeline.errors import ConfigError, PipelineError, did_you_mean, first_line
from pipeline.pages import size
from pipeline.params import Config, Entry, Machine, Variant, VariantName
from pipeline.plans import Plan
from pipeline.plans import plan as plan_of
from pipeline.processes import randomness
from pipeline.profiling.prediction import RESERVE_FRACTION, Estimate
from pipeline.results import Record
from pipeline.tasks.base import CPU
from pipeline.tools.choices import CHANGES

LONGEST_NAME = 100


class Candidate(Record):
    """One way to train the job that is tried."""

    name: VariantName
    settings: dict[str, Any]
    """What a variant of params.yaml would say: the baseline's settings and the added ones."""
    techniques: tuple[str, ...]
    """The names of the added techniques."""
    made_of: tuple[str, str] | None = None
    """The two candidates that are combined; None for a technique alone."""
    apart: str = ""
    """How it changes the training; empty if it trains as the baseline does, up to rounding."""

    @property
    def compiles(self) -> bool:
        return any(params.COMPILER in params.entry(name).relies_on for name in self.techniques)


class Untried(Record):
    """A technique that is not tried."""

    technique: str
    setting: str
    why: str
    apart: bool
    """It would change the training."""


def groups(words: Sequence[str]) -> set[str]:
    """Return the groups of the catalogue that ``words`` name; without words, all. Raises ConfigError."""
    names = {entry.group.lower().replace(" ", "-"): entry.group for entry in params.entries()}
    for word in words:
        if word.lower() not in names:
            raise ConfigError(
                f"--only: found {word!r}; expected groups of techniques: {', '.join(names)}."
                f"{did_you_mean(word.lower(), names)}"
            )
    return {names[word.lower()] for word in words} or set(names.values())


def alone(
    config: Config, machine: Machine, base: Plan, only: Sequence[str], prepared: Path, memory_bytes: int | None = None
) -> tuple[list[Candidate], list[Untried]]:
    """Return the candidates of one technique each, and the techniques that are not tried. ``base``: the baseline's
    plan. ``memory_bytes``: the predicted peak of a candidate's step must fit into this; None: any.

    Processes that share one device's work are tried only if ``only`` names a group of them.
    """
    chosen, tried, untried = groups(only), list[Candidate](), list[Untried]()
    devices = machine.hosts * max(1, machine.gpus if base.device == "cuda" else 1)
    mixes = _mixes_samples(config, prepared)
    for entry in params.entries():
        if entry.group not in chosen:
            continue
        values = (entry.value if entry.example is None else entry.example,) if entry.tries is None else entry.tries
        shared = entry.key == "parallelism" or bool(entry.needs)
        why = ""
        if entry.requested_by(base.requested) and entry.example is None:
            why = "the baseline has it"
        elif not values:
            why = f"it pays {entry.pays}"
        elif shared and devices < 2 and not only:
            why = "there is one device, so nothing is shared (--only parallelism tries it nevertheless)"
        for value in () if why else values:
            proposed = _planned(config, machine, base, entry, value)
            if isinstance(proposed, Plan) and memory_bytes:
                proposed = _too_large(config, proposed, memory_bytes, prepared) or proposed
            if isinstance(proposed, str):
                untried.append(_left_out(entry, value, proposed))
                continue
            apart = CHANGES["statistics"] if entry.changes == "statistics" else ""
            if mixes and proposed.micro_batch_size < base.micro_batch_size:
                apart = f"the model mixes samples (BatchNorm), and sees {proposed.micro_batch_size} at once"
            settings = proposed.requested.model_dump(mode="json", exclude_defaults=True)
            tried.append(Candidate(name=proposed.name, settings=settings, techniques=(entry.name,), apart=apart))
        if why:
            untried.append(_left_out(entry, values[0] if values else None, why))
    return tried, untried


def _left_out(entry: Entry, value: object, why: str) -> Untried:
    setting = f"{entry.key}: {value}" if value is not None and entry.example is not None else entry.setting
    return Untried(technique=entry.name, setting=setting, why=why, apart=entry.changes == "statistics")


def _planned(config: Config, machine: Machine, base: Plan, entry: Entry, value: object) -> Plan | str:
    """Return the plan of the baseline with the technique, or why it cannot run here."""
    added: dict[str, Any] = {entry.key: value}
    if entry.key == "extra":
        added = {"extra": {**base.requested.extra, entry.name: entry.example or {}}}
    if entry.needs and base.requested.parallelism not in entry.needs:
        added["parallelism"] = entry.needs[0]
    variant = base.requested.model_copy(update=added)
    label = entry.name if entry.key == "extra" else entry.label(variant)
    name = "".join(letter if letter.isalnum() or letter == "_" else "-" for letter in label.lower())
    proposed = planned(config, machine, name, base.requested.model_dump(mode="json", exclude_defaults=True) | added)
    if isinstance(proposed, Plan):
        skipped = [why for technique, why in proposed.skipped.items() if technique in (entry.name, variant.parallelism)]
        if skipped:
            return f"it is skipped here: {skipped[0]}"
    return proposed


def planned(config: Config, machine: Machine, name: str, settings: Mapping[str, Any]) -> Plan | str:
    """Return the plan of a variant with these settings, or why it cannot run here."""
    try:
        asked = params.parse({"compare": {"baseline": name}, "variants": {name: dict(settings)}}).variants[name]
        return plan_of(config.model_copy(update={"variants": {name: asked}}), name, machine)
    except ConfigError as error:
        text = first_line(error)
        return (text.partition(", but ")[2] or text).rstrip(".").removesuffix("; take it out")


def combined(config: Config, machine: Machine, base: Variant, first: Candidate, second: Candidate) -> Candidate | None:
    """Return both candidates' settings together; None if they exclude each other or one contains the other."""
    plain = base.model_dump(mode="json", exclude_defaults=True)
    before, added = (
        {key: value for key, value in candidate.settings.items() if plain.get(key) != value}
        for candidate in (first, second)
    )
    clash = any(before[key] != added[key] for key in before.keys() & added.keys())
    settings = first.settings | added
    if clash or settings in (first.settings, second.settings):
        return None
    name = "--".join(sorted({*first.name.split("--"), *second.name.split("--")}))
    proposed = planned(config, machine, name, settings) if len(name) <= LONGEST_NAME else "its name is too long"
    if isinstance(proposed, str) or proposed.skipped.keys() & {*first.techniques, *second.techniques}:
        return None
    together = tuple(dict.fromkeys((*first.techniques, *second.techniques)))
    return Candidate(name=name, settings=settings, techniques=together, made_of=(first.name, second.name))


def plans_of(config: Config, machine: Machine, tried: Iterable[Candidate]) -> dict[str, Plan]:
    """Return candidate -> its plan, for those that can run here."""
    proposed = {candidate.name: planned(config, machine, candidate.name, candidate.settings) for candidate in tried}
    return {name: plan for name, plan in proposed.items() if isinstance(plan, Plan)}


def _too_large(config: Config, plan: Plan, memory_bytes: int, prepared: Path) -> str:
    """Return why a step does not fit into the memory. Empty if it fits, and if it cannot be predicted or cannot run,
    which is left to the measurement."""
    with suppress(PipelineError):
        peak_bytes = _estimate(config, plan, prepared).ledger(plan.micro_batch_size).peak_bytes
        if peak_bytes > memory_bytes * (1 - RESERVE_FRACTION[plan.device]):
            return f"a step would need {size(peak_bytes)}"
    return ""


def largest_batches(config: Config, plans: Mapping[str, Plan], memory_bytes: int, prepared: Path) -> dict[str, int]:
    """Return variant -> the largest batch that is predicted to fit into the memory, where it can be predicted."""
    largest = {}
    for name, plan in plans.items():
        with suppress(PipelineError):
            largest[name] = _estimate(config, plan, prepared).largest_batch(memory_bytes) or 0
    return largest


def _estimate(config: Config, plan: Plan, prepared: Path) -> Estimate:
    return Estimate(plan, replace(tasks.of_job(config.train, read_dataset(prepared)), train=plan.train))


def _mixes_samples(config: Config, prepared: Path) -> bool:
    """Return whether a BatchNorm of the model takes its statistics from the samples of a micro-batch."""
    from torch.nn.modules.batchnorm import _BatchNorm

    with randomness.kept():
        model = tasks.of_job(config.train, read_dataset(prepared)).on(CPU).model()
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
