"""What ``advise`` tries: the catalogue's techniques at the values of their ``tries``, each added to the baseline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from typing import Any

from pipeline import params, tasks
from pipeline.data.prepared import read as read_dataset
from pipeline.errors import ConfigError, PipelineError, did_you_mean, first_line
from pipeline.files import PREPARED
from pipeline.pages import size
from pipeline.params import Config, Entry, Machine
from pipeline.plans import Plan
from pipeline.profiling.prediction import RESERVE_FRACTION, Estimate
from pipeline.results import Record
from pipeline.tools import choices


class Candidate(Record):
    """One way to train the job that is tried."""

    name: str
    added: dict[str, Any]
    """What it adds to the baseline's settings."""
    techniques: tuple[str, ...]
    """The names of the added techniques."""
    made_of: tuple[str, str] | None = None
    """The two candidates that are combined; None for a technique alone."""
    apart: str = ""
    """How it changes the training; empty if it trains as the baseline does, up to rounding."""


def alone(
    config: Config, machine: Machine, base: Plan, only: Sequence[str], memory_bytes: int = 0
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return the candidates of one technique each by their names, and why others are not tried. ``base``: the
    baseline's plan. ``only``: groups of the catalogue; empty: all. ``memory_bytes``: as in ``planned``. Raises
    ConfigError for a wrong group.

    Processes that share one device's work are tried only if ``only`` names a group of them.
    """
    groups = {entry.group.lower().replace(" ", "-"): entry.group for entry in params.entries()}
    for word in only:
        if word not in groups:
            known = ", ".join(groups)
            raise ConfigError(f"--only: found {word!r}; expected groups: {known}.{did_you_mean(word, groups)}")
    chosen, mixes = {groups[word] for word in only or groups}, _mixes_samples(config, base)
    candidates, untried = dict[str, Candidate](), dict[str, str]()
    for entry in params.entries():
        usual = entry.value if entry.example is None else entry.example
        for value in (entry.tries or (usual,)) if entry.group in chosen else ():
            candidate = _candidate(base, entry, value)
            try:
                if why := _why_not(candidate, entry, base, machine, shares=bool(only)):
                    raise ConfigError(why)
                plan = planned(config, machine, candidate, memory_bytes)
            except ConfigError as error:
                untried[candidate.name] = first_line(error)
                continue
            if mixes and plan.micro_batch_size < base.micro_batch_size:
                apart = f"the model mixes samples (BatchNorm), and sees {plan.micro_batch_size} at once"
                candidate = candidate.model_copy(update={"apart": apart})
            candidates[candidate.name] = candidate
    return candidates, untried


def _candidate(base: Plan, entry: Entry, value: object) -> Candidate:
    """Return the candidate that adds one technique to the baseline."""
    added: dict[str, Any] = {entry.key: value}
    if entry.key == "extra":
        added = {"extra": {**base.requested.extra, entry.name: entry.example or {}}}
    if entry.needs and base.requested.parallelism not in entry.needs:
        added["parallelism"] = entry.needs[0]
    has_label = entry.key != "extra" and entry.tries != ()
    label = entry.label(base.requested.model_copy(update=added)) if has_label else entry.name
    apart = choices.CHANGES["statistics"] if entry.changes == "statistics" else ""
    return Candidate(name=re.sub(r"\W", "-", label.lower()), added=added, techniques=(entry.name,), apart=apart)


def _why_not(candidate: Candidate, entry: Entry, base: Plan, machine: Machine, *, shares: bool) -> str | None:
    """Return why the candidate is not tried, as far as its technique's entry tells. ``shares``: processes may share one
    device."""
    variant, on_gpu = base.requested.model_copy(update=candidate.added), base.device == "cuda"
    devices = machine.hosts * max(1, machine.gpus if on_gpu else 1)
    if entry.requested_by(base.requested) and entry.example is None:
        return "the baseline has it"
    if entry.tries == ():
        return f"it pays {entry.pays}"
    if (entry.key == "parallelism" or entry.needs) and devices < 2 and not shares:
        return "there is one device, so nothing is shared (--only parallelism tries it nevertheless)"
    return entry.why_refused(variant, machine, on_gpu) or entry.why_not_with(base.train)


def combined(first: Candidate, second: Candidate) -> Candidate | None:
    """Return both candidates together; None if they differ in a setting or one contains the other."""
    added = first.added | second.added
    if added != second.added | first.added or added in (first.added, second.added):
        return None
    name = "--".join(sorted({*first.name.split("--"), *second.name.split("--")}))
    techniques = tuple(dict.fromkeys((*first.techniques, *second.techniques)))
    return Candidate(name=name, added=added, techniques=techniques, made_of=(first.name, second.name))


def settings_of(config: Config, candidate: Candidate) -> dict[str, Any]:
    """Return what a variant of params.yaml would say: the baseline's settings and the added ones."""
    return config.variants[config.compare.baseline].model_dump(mode="json", exclude_defaults=True) | candidate.added


def planned(config: Config, machine: Machine, candidate: Candidate, memory_bytes: int = 0) -> Plan:
    """Return the candidate's plan. Raises ConfigError if its techniques exclude each other, if no variant can have its
    name, if it cannot run here, if one of its techniques is skipped, or if a step is predicted to need more than this
    memory (0: any). What cannot be predicted is left to the measurement."""
    for entry, beside in permutations(map(params.entry, candidate.techniques), 2):
        if why := entry.excluding(beside):
            raise ConfigError(f"the two exclude each other: {why}")
    plan, peak_bytes = choices.planned(config, candidate.name, settings_of(config, candidate), machine), 0
    for technique in candidate.techniques:
        if technique in plan.skipped:
            raise ConfigError(f"it is skipped here: {plan.skipped[technique]}")
    with suppress(PipelineError):
        peak_bytes = estimated(config, plan).ledger(plan.micro_batch_size).peak_bytes if memory_bytes else 0
    if peak_bytes > memory_bytes * (1 - RESERVE_FRACTION[plan.device]):
        raise ConfigError(f"a step would need {size(peak_bytes)}")
    return plan


def estimated(config: Config, plan: Plan) -> Estimate:
    """Return the prediction of a step's memory. Raises PipelineError."""
    return Estimate(plan, replace(tasks.of_job(config.train, read_dataset(PREPARED)), train=plan.train))


def _mixes_samples(config: Config, base: Plan) -> bool:
    """Return whether a BatchNorm of the model takes its statistics from the samples of a micro-batch."""
    from torch.nn.modules.batchnorm import _BatchNorm

    modules = estimated(config, base).model.modules()
    return any(isinstance(module, _BatchNorm) and module.training for module in modules)
