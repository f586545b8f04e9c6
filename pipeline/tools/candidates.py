"""What ``advise`` tries: the catalogue's techniques at the values of their ``tries``, each added to the baseline."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import params, tasks
from pipeline.data.prepared import read as read_dataset
from pipeline.errors import ConfigError, PipelineError, did_you_mean, first_line
from pipeline.pages import size
from pipeline.params import Config, Entry, Machine, VariantName
from pipeline.plans import Plan
from pipeline.plans import plan as plan_of
from pipeline.processes import randomness
from pipeline.profiling.prediction import RESERVE_FRACTION, Estimate
from pipeline.results import Record
from pipeline.tasks.base import CPU
from pipeline.tools.beforehand import parse_bytes
from pipeline.tools.choices import CHANGES


class Candidate(Record):
    """One way to train the job that is tried."""

    name: VariantName
    added: dict[str, Any]
    """What it adds to the baseline's settings."""
    techniques: tuple[str, ...]
    """The names of the added techniques."""
    made_of: tuple[str, str] | None = None
    """The two candidates that are combined; None for a technique alone."""
    apart: str = ""
    """How it changes the training; empty if it trains as the baseline does, up to rounding."""


def alone(
    config: Config, machine: Machine, base: Plan, only: Sequence[str], prepared: Path, memory: str | None = None
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return the candidates of one technique each by their names, and why some of them are not tried. ``base``: the
    baseline's plan. ``only``: groups of the catalogue; empty: all. ``memory``: the predicted peak of a candidate's step
    must fit into this, such as 16GiB; None: any. Raises ConfigError for a wrong group or memory.

    Processes that share one device's work are tried only if ``only`` names a group of them.
    """
    groups = {entry.group.lower().replace(" ", "-"): entry.group for entry in params.entries()}
    for word in only:
        if word not in groups:
            known = ", ".join(groups)
            raise ConfigError(f"--only: found {word!r}; expected groups: {known}.{did_you_mean(word, groups)}")
    chosen, memory_bytes = {groups[word] for word in only or groups}, parse_bytes(memory) if memory else 0
    found, untried, mixes = dict[str, Candidate](), dict[str, str](), _mixes_samples(config, prepared)
    for entry in params.entries():
        usual = entry.value if entry.example is None else entry.example
        for value in (entry.tries or (usual,)) if entry.group in chosen else ():
            candidate = _candidate(base, entry, value)
            try:
                plan = _runnable(config, machine, base, entry, candidate, shares=bool(only))
                if why := too_large(config, plan, memory_bytes, prepared):
                    raise ConfigError(why)
            except ConfigError as error:
                untried[candidate.name] = first_line(error)
            else:
                if mixes and plan.micro_batch_size < base.micro_batch_size:
                    apart = f"the model mixes samples (BatchNorm), and sees {plan.micro_batch_size} at once"
                    candidate = candidate.model_copy(update={"apart": apart})
            found[candidate.name] = candidate
    return found, untried


def _candidate(base: Plan, entry: Entry, value: object) -> Candidate:
    """Return the candidate that adds one technique to the baseline."""
    added: dict[str, Any] = {entry.key: value}
    if entry.key == "extra":
        added = {"extra": {**base.requested.extra, entry.name: entry.example or {}}}
    if entry.needs and base.requested.parallelism not in entry.needs:
        added["parallelism"] = entry.needs[0]
    has_label = entry.key != "extra" and entry.tries != ()
    label = entry.label(base.requested.model_copy(update=added)) if has_label else entry.name
    apart = CHANGES["statistics"] if entry.changes == "statistics" else ""
    return Candidate(name=re.sub(r"\W", "-", label.lower()), added=added, techniques=(entry.name,), apart=apart)


def _runnable(
    config: Config, machine: Machine, base: Plan, entry: Entry, candidate: Candidate, *, shares: bool
) -> Plan:
    """Return the candidate's plan. Raises ConfigError, which says why it is not tried. ``shares``: processes may share
    one device."""
    variant, why = base.requested.model_copy(update=candidate.added), None
    devices = machine.hosts * max(1, machine.gpus if base.device == "cuda" else 1)
    if entry.requested_by(base.requested) and entry.example is None:
        why = "the baseline has it"
    elif entry.tries == ():
        why = f"it pays {entry.pays}"
    elif (entry.key == "parallelism" or entry.needs) and devices < 2 and not shares:
        why = "there is one device, so nothing is shared (--only parallelism tries it nevertheless)"
    if why := why or entry.why_refused(variant, machine, base.device == "cuda") or entry.why_not_with(config.train):
        raise ConfigError(why)
    proposed = planned(config, machine, candidate.name, candidate.added)
    if why := proposed.skipped.get(entry.name) or proposed.skipped.get(variant.parallelism):
        raise ConfigError(f"it is skipped here: {why}")
    return proposed


def settings_of(config: Config, added: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a variant of params.yaml would say: the baseline's settings and the ``added`` ones."""
    return config.variants[config.compare.baseline].model_dump(mode="json", exclude_defaults=True) | dict(added)


def planned(config: Config, machine: Machine, name: str, added: Mapping[str, Any]) -> Plan:
    """Return the plan of the baseline with the ``added`` settings. Raises ConfigError if it cannot run here."""
    asked = params.parse({"compare": {"baseline": name}, "variants": {name: settings_of(config, added)}})
    return plan_of(config.model_copy(update={"variants": asked.variants}), name, machine)


def combined(config: Config, machine: Machine, first: Candidate, second: Candidate) -> Candidate | None:
    """Return both candidates together; None if they exclude each other or one contains the other."""
    added = first.added | second.added
    if added != second.added | first.added or added in (first.added, second.added):
        return None
    name = "--".join(sorted({*first.name.split("--"), *second.name.split("--")}))
    techniques = tuple(dict.fromkeys((*first.techniques, *second.techniques)))
    with suppress(ConfigError):
        if not planned(config, machine, name, added).skipped.keys() & {*techniques}:
            return Candidate(name=name, added=added, techniques=techniques, made_of=(first.name, second.name))
    return None


def too_large(config: Config, plan: Plan, memory_bytes: int, prepared: Path) -> str:
    """Say by how much a step does not fit into the memory (0: any); empty if it fits, or if it cannot be predicted or
    cannot run, which is left to the measurement."""
    peak_bytes = 0
    with suppress(PipelineError):
        peak_bytes = estimated(config, plan, prepared).ledger(plan.micro_batch_size).peak_bytes if memory_bytes else 0
    is_larger = peak_bytes > memory_bytes * (1 - RESERVE_FRACTION[plan.device])
    return f"a step would need {size(peak_bytes)}" if is_larger else ""


def estimated(config: Config, plan: Plan, prepared: Path) -> Estimate:
    """Return the prediction of a step's memory. Raises PipelineError."""
    return Estimate(plan, replace(tasks.of_job(config.train, read_dataset(prepared)), train=plan.train))


def _mixes_samples(config: Config, prepared: Path) -> bool:
    """Return whether a BatchNorm of the model takes its statistics from the samples of a micro-batch."""
    from torch.nn.modules.batchnorm import _BatchNorm

    with randomness.kept():
        model = tasks.of_job(config.train, read_dataset(prepared)).on(CPU).model()
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
