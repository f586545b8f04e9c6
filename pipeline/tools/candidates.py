"""What ``advise`` tries: the catalogue's techniques at the values of their ``tries``, each added to the baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import params, tasks
from pipeline.data.prepared import read as read_dataset
from pipeline.errors import ConfigError, PipelineError, did_you_mean, first_line
from pipeline.params import Config, Entry, Machine, Variant, VariantName
from pipeline.plans import Plan, plan
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


class Untried(Record):
    """A technique that is not tried."""

    technique: str
    setting: str
    why: str
    apart: bool
    """It would change the training."""


def groups(words: Sequence[str]) -> set[str]:
    """Return the groups of the catalogue that ``words`` name; without words, all. Raises ConfigError."""
    known = {entry.group.lower().replace(" ", "-"): entry.group for entry in params.entries()}
    if unknown := [word for word in words if word.lower() not in known]:
        raise ConfigError(
            f"--only: found {unknown[0]!r}; expected groups of techniques: {', '.join(known)}."
            f"{did_you_mean(unknown[0].lower(), known)}"
        )
    return {known[word.lower()] for word in words} or set(known.values())


def alone(
    config: Config, machine: Machine, base: Plan, only: Sequence[str], prepared: Path
) -> tuple[list[Candidate], list[Untried]]:
    """Return the candidates of one technique each, and the techniques that are not tried. ``base``: the baseline's
    plan.

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
        why, statistics = "", entry.changes == "statistics"
        if entry.requested_by(base.requested) and entry.example is None:
            why = "the baseline has it"
        elif not values:
            why = f"it pays {entry.pays}"
        elif shared and devices < 2 and not only:
            why = "there is one device, so nothing is shared (--only parallelism tries it nevertheless)"
        for value in () if why else values:
            proposed = _planned(config, machine, base, entry, value)
            if isinstance(proposed, str):
                untried.append(_left_out(entry, value, proposed))
                continue
            apart = CHANGES["statistics"] if statistics else ""
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
        return plan(config.model_copy(update={"variants": {name: asked}}), name, machine)
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


def too_large(config: Config, plans: Mapping[str, Plan], memory_bytes: int, prepared: Path) -> dict[str, int]:
    """Return variant -> its predicted peak, for those that do not fit into the memory. What cannot be predicted,
    or cannot run at all, is left to the measurement."""
    peaks = _predicted(
        config, plans, prepared, lambda held, estimate: estimate.ledger(held.micro_batch_size).peak_bytes
    )
    limits = {name: memory_bytes * (1 - RESERVE_FRACTION[held.device]) for name, held in plans.items()}
    return {name: peak for name, peak in peaks.items() if peak > limits[name]}


def largest_batches(config: Config, plans: Mapping[str, Plan], memory_bytes: int, prepared: Path) -> dict[str, int]:
    """Return variant -> the largest batch that is predicted to fit into the memory, where it can be predicted."""
    return _predicted(config, plans, prepared, lambda _, estimate: estimate.largest_batch(memory_bytes) or 0)


def _predicted(
    config: Config, plans: Mapping[str, Plan], prepared: Path, asked: Callable[[Plan, Estimate], int]
) -> dict[str, int]:
    """Return variant -> what is ``asked`` of its estimate, where it can be predicted."""
    task, answers = tasks.of_job(config.train, read_dataset(prepared)), {}
    for name, of_name in plans.items():
        with suppress(PipelineError):
            answers[name] = asked(of_name, Estimate(of_name, replace(task, train=of_name.train)))
    return answers


def _mixes_samples(config: Config, prepared: Path) -> bool:
    """Return whether a BatchNorm of the model takes its statistics from the samples of a micro-batch."""
    from torch.nn.modules.batchnorm import _BatchNorm

    with randomness.kept():
        model = tasks.of_job(config.train, read_dataset(prepared)).on(CPU).model()
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
