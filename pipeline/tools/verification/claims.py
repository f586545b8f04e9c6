"""The claims on which a comparison rests. A claim compares a measured difference with the bound up to which it holds.

A variant's claims and their bounds follow from what its techniques promise in their entries of the catalogue
(``Entry.changes``, ``roundoff`` and ``repeats``). So a new technique is verified against its own entry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeline import params, tasks
from pipeline.distributed import WorkerError
from pipeline.errors import ConfigError
from pipeline.params import Config, Entry, Machine, Train, Variant
from pipeline.plans import Plan
from pipeline.tools.verification.natures import Nature, make_per_sample, nature, statistics
from pipeline.tools.verification.observing import (
    EPOCHS,
    PLAIN_SGD,
    STATISTICS_BATCHES,
    Observed,
    Task,
    first_inputs,
    miniature,
    observer,
    statistics_file,
)
from pipeline.training.assembly import planned

FLOAT32 = 2.0**-24
"""Unit roundoff of float32."""
LEAST = 2.0**11 * FLOAT32
"""Relative difference allowed for any float32 sum taken in another order. A sum of k terms is off by about sqrt(k)
roundoffs of the terms' size (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019). Here k,
samples times pixels, is about 10^5, and terms of opposite sign partly cancel."""
KERNEL_ROUNDOFFS = 2.0**5
"""Largest difference expected between two kernels of the same layer, in float32 roundoffs. On CPUs it is about 10."""
DRAWS = 2
"""How often the reference is trained with noise as large as the expected rounding. The largest difference counts."""
FACTOR = 2.0
"""Rounding may change a training by at most this many times the change that this noise causes."""
CLEAR = 2.0
"""A bound is meaningful if a fault planted in the reference causes a difference of at least this many times the
bound."""
RUNS: tuple[dict[str, Any], ...] = ({}, {"rate": 2.0**-3, "steps": 3}, {"rate": 2.0**-6, "steps": 3})
"""Settings of a ``Task``, tried one after the other: all steps at the job's learning rate, then few steps at smaller
rates. Rounding errors grow from step to step, in some trainings beyond every meaningful bound."""
SMALL_TENSOR = 0.1
"""A gradient whose terms nearly cancel consists of rounding errors only. So a difference is divided by a norm to which
this share of the root mean square over all tensors is added."""

Distance = Callable[[Observed, Observed], float]

PER_SAMPLE = "with dropout off and BatchNorm's statistics fixed"
UNTRIED, UNMEASURABLE, UNPROMISED = "could not be tried", "undecidable here", "not promised"
_NO_REFERENCE = "the reference, the training without these techniques, fails"


@dataclass(frozen=True)
class Claim:
    """One line of the table."""

    variant: str
    claim: str
    measured: float | None = None
    """The difference in ``unit``. None: there was nothing to measure; ``note`` says why."""
    bound: float | None = None
    """None: no bound is promised."""
    holds: bool | None = None
    """None: the claim is not decided. ``undecided`` says in which way, and ``note`` says why."""
    unit: str = ""
    note: str = ""
    undecided: str = ""
    """``UNTRIED``, ``UNMEASURABLE`` or ``UNPROMISED``."""
    fault: float | None = None
    """The difference measured for the reference with a planted fault: its gradients lack one part of each batch."""


@dataclass(frozen=True)
class _Expected:
    """The plan of a variant's reference training; None, with the reason, if there is no such plan."""

    plan: Plan | None
    why_not: str = ""


@dataclass(frozen=True)
class _Against:
    """The reference, a training on a single device, and the noise and the fault from which the bound follows."""

    plan: Plan
    noise: float
    """Size of the expected rounding, as in ``Task.noise``. 0: no bound is promised."""
    parts: int
    """Number of parts into which a batch is divided, at least two. A fault could lose one of them."""
    note: str


def tensor_difference(found: Path, expected: Path) -> float:
    """Return the largest relative difference between tensors of the same name in two files, such as gradients; infinite
    if the names differ or a difference is not finite.

    The norm of a difference is taken relative to the expected tensor's norm plus ``SMALL_TENSOR`` of the root mean
    square over all tensors. Integer tensors, which are counts, are left out.
    """
    ours, theirs = (
        {name: value for name, value in _read(file).items() if value.is_floating_point()} for file in (found, expected)
    )
    if ours.keys() != theirs.keys():
        return math.inf
    total = math.sqrt(sum(float(value.square().sum()) for value in theirs.values()))
    count = sum(value.numel() for value in theirs.values())
    largest = 0.0
    for name, value in theirs.items():
        usual = total * math.sqrt(value.numel() / count)
        size = float(value.norm()) + SMALL_TENSOR * usual
        difference = float((ours[name] - value).norm())
        if not math.isfinite(difference):
            return math.inf
        largest = max(largest, difference / size if size else 0.0)
    return largest


def curve_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference of a step's loss, relative to the mean expected loss over the steps; infinite if
    the number of steps differs."""
    if len(found) != len(expected):
        return math.inf
    largest = max((abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)), default=math.inf)
    return largest * len(expected) / sum(map(abs, expected)) if expected else math.inf


def way_difference(found: Observed, expected: Observed) -> float:
    return tensor_difference(found.way, expected.way)


def loss_difference(found: Observed, expected: Observed) -> float:
    return curve_difference(found.losses, expected.losses)


def differing_values(found: Path, expected: Path) -> int:
    """Return the number of values in two state dicts that differ in any bit. If a state dict lacks a name, all values
    of this name differ."""
    ours, theirs = _read(found), _read(expected)
    different = sum(
        value.numel() for name, value in {**ours, **theirs}.items() if not (name in ours and name in theirs)
    )
    for name in ours.keys() & theirs.keys():
        one, other = ours[name], theirs[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            different += one.numel()
            continue
        size = one.element_size()
        bits = (each.contiguous().flatten().view(torch.uint8).view(-1, size) for each in (one, other))
        different += int(torch.ne(*bits).any(1).sum()) if one.numel() else 0
    return different


def _read(file: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return state


def evaluated(plan: Plan, seen: Observed) -> Claim:
    """Return the claim that evaluation counts every test sample once, with the score that the sample has alone.

    Rounding of the outputs may change a fractional score; it changes a true-or-false score only at ties.
    """
    shared = f"{plan.processes} processes" if plan.processes > 1 else "one process"
    claim = f"evaluation by {shared}: each of {seen.expected_count:,} samples counts once"
    bound = seen.ties + (0.0 if seen.expected_correct.is_integer() else seen.expected_count * LEAST)
    if seen.count != seen.expected_count:
        note = f"{seen.count:,} samples were counted"
        return Claim(plan.name, claim, abs(seen.count - seen.expected_count), bound, False, "samples", note)
    difference = abs(seen.correct - seen.expected_correct)
    note = f"{seen.ties} scores depend on outputs that are almost equal" if seen.ties else ""
    return Claim(plan.name, claim, difference, bound, difference <= bound, "samples", note)


class Verifier:
    """Trains variants in miniature, each as often as needed, and compares the trainings.

    ``folder``: the directory for the files of the trainings, one per training.
    """

    def __init__(self, config: Config, machine: Machine, prepared: Path, task: tasks.Task, folder: Path) -> None:
        self.config, self.machine, self.prepared, self.folder = config, machine, prepared, folder
        self._seen: dict[tuple[str, Task, int], Observed] = {}
        self._small = replace(task, dataset=miniature(task.dataset, config.train.batch_size))
        self.steps = EPOCHS * (len(self._small.dataset.train) // config.train.batch_size)
        self.tested = len(self._small.dataset.test)
        """Number of test samples in the evaluation."""
        self._natures: dict[Path, tuple[Nature, Nature]] = {}
        self.nature, _ = self._natures_of(config.train)

    def _natures_of(self, train: Train) -> tuple[Nature, Nature]:
        """Return the nature of the job's model as it is, and of the model made per-sample. Raises ModelError."""
        file = self.folder / statistics_file(train)
        if file not in self._natures:
            task = replace(self._small, train=train)
            batches = first_inputs(task, STATISTICS_BATCHES)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(train.seeds[0])
                model = task.model()
                as_it_is, found = nature(model, batches[0]), statistics(model, batches)
                made_per_sample = nature(make_per_sample(model, found), batches[0])
            torch.save(found, file)
            self._natures[file] = as_it_is, made_per_sample
        return self._natures[file]

    def count(self, plan: Plan) -> int:
        """Return the number of claims that ``claims`` yields for the plan if all of them can be tried."""
        changes = {each.changes for each in params.requested(plan.applied)}
        idle = sum(each.without_effect is not None for each in params.requested(plan.applied))
        return len(plan.skipped) + 3 * ("rounding" in changes) + ("nothing" in changes) + idle + 3

    def claims(self, plan: Plan) -> Iterator[Claim]:
        """Yield the claims of the plan's variant. The note of a claim that cannot be tried here says why."""
        name = plan.name
        for technique, reason in plan.skipped.items():
            yield Claim(name, f"{technique} is skipped", note=reason, undecided=UNTRIED)
        entries = params.requested(plan.applied)
        try:
            (first,), (again,) = (self._observe(plan, [Task("run")], repeat) for repeat in (0, 1))
        except WorkerError as error:
            yield _failed(name, "the variant trains", error)
            return
        if not_finite := first.not_finite or again.not_finite:
            yield Claim(name, "the variant trains", note=not_finite, undecided=UNTRIED)
            yield from self._against_one_device(plan, entries)
            return
        moved = torch.load(first.way, weights_only=True)
        weights = [moved[weight] for weight, _ in self._small.model().named_parameters() if weight in moved]
        if weights and not any(each.any() for each in weights):
            yield Claim(name, "the variant trains", holds=False, note="no weight changed: no weight gets a gradient")
            return
        yield from self._against_one_device(plan, entries)
        yield from self._without(plan, entries, first)
        yield from self._without_effect(plan, entries)
        yield self._bit_by_bit(plan, entries, "the same seed in new processes: the same weights", first, again)
        yield self._worked(plan, entries, first)
        yield evaluated(plan, first)

    def _against_one_device(self, plan: Plan, entries: Sequence[Entry]) -> Iterator[Claim]:
        """Yield the claims that gradients, losses and weights equal those of the reference: a training on a single
        device in float32, which keeps the techniques that change statistics."""
        close = [each for each in entries if each.changes != "statistics"]
        if all(each.changes != "rounding" for each in close):
            return  # the claim of identical weights is stronger
        gradients, losses, weights = (
            f"{what}: equal to those of a single device"
            for what in ("gradients of a step", "losses of {} steps", "weights after {} steps")
        )
        expected = self._without_these(plan, close)
        if expected.plan is None:
            yield Claim(plan.name, gradients, note=expected.why_not, undecided=UNTRIED)
            return
        as_it_is, made_per_sample = self._natures_of(plan.train)
        per_sample = not as_it_is.per_sample
        statistical = [each.name for each in entries if each.changes == "statistics"]
        loose = [f"only statistically equal with {' and '.join(statistical)}"] if statistical else []
        if not made_per_sample.per_sample:
            loose.append(f"only statistically equal, because the model still {said(made_per_sample)}")
        roundoff = max(each.roundoff for each in close)
        against = _Against(
            expected.plan,
            0.0 if loose else roundoff / 2 if roundoff > FLOAT32 else KERNEL_ROUNDOFFS * FLOAT32,
            max(2, plan.data_processes * plan.micro_batches),
            "; ".join([PER_SAMPLE] * per_sample + loose),
        )
        plain = self.config.train.model_copy(update=PLAIN_SGD)
        if why_no_step := next(filter(None, (each.why_not_with(plain) for each in entries)), None):
            note = f"no step of plain SGD shows the gradients: {why_no_step}"
            yield Claim(plan.name, gradients, note=note, undecided=UNTRIED)
        else:
            (claim,) = self._compared(plan, against, [Task("step", per_sample)], {gradients: way_difference})
            yield claim
            if claim.undecided == UNMEASURABLE:
                note = "rounding hides a fault even in the gradients of a step"
                yield from (
                    Claim(plan.name, each.format(self.steps), note=note, undecided=UNMEASURABLE)
                    for each in (losses, weights)
                )
            if claim.undecided in (UNMEASURABLE, UNTRIED):
                return
        runs = [Task("run", per_sample, **changes) for changes in (RUNS[:1] if loose else RUNS)]
        distances = {weights: way_difference, losses: loss_difference}
        yield from reversed(self._compared(plan, against, runs, distances))

    def _compared(
        self, plan: Plan, against: _Against, tasks: Sequence[Task], distances: Mapping[str, Distance]
    ) -> list[Claim]:
        """Return a claim for each of ``distances``, from the first of ``tasks`` in which the first distance's bound is
        meaningful, or else from the last.

        In a claim's text, {} stands for the number of steps.
        """
        for task in tasks:
            spoilt = [replace(task, noise=against.noise, draw=draw) for draw in range(DRAWS)]
            spoilt = [*spoilt, replace(task, forgets=against.parts)] if against.noise else []
            names = [claim.format(task.steps or self.steps) for claim in distances]
            try:
                theirs, *others = self._observe(against.plan, [task, *spoilt])
            except WorkerError as error:
                return [Claim(plan.name, names[0], note=f"{_NO_REFERENCE}: {error}", undecided=UNTRIED)]
            judged = [
                _judged(Claim(plan.name, name, unit="relative"), [apart(each, theirs) for each in others])
                for name, apart in zip(names, distances.values(), strict=True)
            ]
            if judged[0].undecided != UNMEASURABLE:
                break
        slower = f"at 1/{1 / task.rate:.0f} of the learning rate" if task.rate < 1 else ""
        note = "; ".join(filter(None, [against.note, slower]))
        if theirs.not_finite or not math.isfinite(way_difference(theirs, theirs)):
            note = f"the reference, {theirs.not_finite or 'a single device, reaches values that are not finite'}"
            return [Claim(plan.name, each, note=note, undecided=UNTRIED) for each in names]
        try:
            (ours,) = self._observe(plan, [task])
        except WorkerError as error:
            return [_failed(plan.name, names[0], error)]
        if ours.overflowed:
            note = "a step was skipped, because its scaled gradients overflowed"
            return [Claim(plan.name, each, note=note, undecided=UNTRIED) for each in names]
        note = "; ".join(filter(None, [note, ours.not_finite]))
        measured = [apart(ours, theirs) for apart in distances.values()]
        return [
            replace(claim, measured=value, note=note, holds=None if claim.undecided else value <= (claim.bound or 0.0))
            for claim, value in zip(judged, measured, strict=True)
        ]

    def _without(self, plan: Plan, entries: Sequence[Entry], first: Observed) -> Iterator[Claim]:
        """Yield the claim that the final weights stay the same if the techniques that should change nothing are left
        out."""
        exact = [each for each in entries if each.changes == "nothing"]
        if not exact:
            return
        claim = f"weights after {self.steps} steps: equal to those without {', '.join(each.name for each in exact)}"
        reduced = self._without_these(plan, exact)
        if reduced.plan is None:
            yield Claim(plan.name, claim, note=reduced.why_not, undecided=UNTRIED)
            return
        try:
            (other,) = self._observe(reduced.plan, [Task("run")])
        except WorkerError as error:
            yield Claim(plan.name, claim, note=f"{_NO_REFERENCE}: {error}", undecided=UNTRIED)
            return
        yield self._bit_by_bit(plan, entries, claim, first, other)

    def _without_effect(self, plan: Plan, entries: Sequence[Entry]) -> Iterator[Claim]:
        """Yield, for each technique that can be set to have no effect, the claim that it then gives the same weights as
        a training without it."""
        for each in entries:
            if each.without_effect is None:
                continue
            changes = each.without_effect(plan.applied)
            claim = f"weights after {self.steps} steps, if {each.name} has no effect: equal to those without it"
            reduced = self._without_these(plan, [each])
            if reduced.plan is None:
                yield Claim(plan.name, claim, note=reduced.why_not, undecided=UNTRIED)
                continue
            idle = self._planned(plan.name, plan.applied.model_copy(update=changes))
            try:
                (ours,), (other,) = (self._observe(found, [Task("run")]) for found in (idle, reduced.plan))
            except WorkerError as error:
                yield _failed(plan.name, claim, error)
                continue
            yield self._bit_by_bit(plan, entries, claim, ours, other)

    def _bit_by_bit(self, plan: Plan, entries: Sequence[Entry], claim: str, first: Observed, other: Observed) -> Claim:
        """Return the claim that two trainings end in the same weights; not promised if a training is not
        deterministic."""
        loose = [each.name for each in entries if not each.repeats] + [first.unsteady] * bool(first.unsteady)
        if not self.config.train.deterministic:
            loose.append("train.deterministic: false")
        difference = differing_values(other.file, first.file)
        if loose:
            note = f"not promised: {' and '.join(loose)}"
            return Claim(plan.name, claim, difference, unit="values", note=note, undecided=UNPROMISED)
        return Claim(plan.name, claim, difference, 0, difference == 0, "values")

    def _worked(self, plan: Plan, entries: Sequence[Entry], first: Observed) -> Claim:
        """Return the claim that a step processes all samples that it is credited with. A compiled graph hides its work,
        so the claim is tried without compiler techniques."""
        work, compilers = first.work, [each for each in entries if each.layer == "compiler"]
        assert work is not None  # a run always records its work
        claim = f"the model and the loss take {work.credited:,} samples a step"
        if compilers and (reduced := self._without_these(plan, compilers).plan):
            try:
                work = self._observe(reduced, [Task("run")])[0].work or work
            except WorkerError as error:
                return Claim(plan.name, claim, note=f"the run without the compiler fails: {error}", undecided=UNTRIED)
        note = str(work) if work.missing else ""
        return Claim(plan.name, claim, work.missing, 0, not work.missing, "samples", note)

    def _without_these(self, plan: Plan, techniques: Sequence[Entry]) -> _Expected:
        """Return the plan of the same variant without ``techniques``."""
        try:
            return _Expected(self._planned(plan.name, params.without(plan.applied, techniques)))
        except ConfigError as error:
            problem = str(error).removeprefix(f"{params.PARAMS_FILE}: ")
            return _Expected(None, f"no reference, because the variant cannot run without these techniques: {problem}")

    def _planned(self, name: str, variant: Variant) -> Plan:
        values = self.config.model_dump(mode="json", include={"fetch", "prepare", "train"})
        values["variants"] = {name: variant.model_dump(mode="json")}
        values["compare"] = {"baseline": name}
        return planned(params.parse(values), name, self.machine, self.prepared)

    def _observe(self, plan: Plan, tasks: Sequence[Task], repeat: int = 0) -> list[Observed]:
        """Return the results of ``tasks``. Tasks that have no result yet run now, all in the same processes."""
        settled = self._settled(plan)
        new = [task for task in tasks if (settled, task, repeat) not in self._seen]
        if new:
            with observer(plan, self.prepared, self.folder) as observe:
                for task in new:
                    self._seen[settled, task, repeat] = observe(task, f"{len(self._seen)}.pt")
        return [self._seen[settled, task, repeat] for task in tasks]

    def _settled(self, plan: Plan) -> str:
        """Return the settings that a training depends on, as text. Plans that train in the same way have the same
        text."""
        values = plan.model_dump(mode="json", exclude={"name", "requested", "skipped", "decided"})
        values["applied"].pop("processes", None)  # "auto" or a number; the plan itself has the number
        return json.dumps(values, sort_keys=True)


def said(found: Nature) -> str:
    """Return the nature in words that follow "the model"."""
    parts = ["draws random numbers"] * found.stochastic + ["mixes the samples of a batch"] * found.batch_dependent
    return " and ".join(parts) or "draws no random numbers and does not mix the samples of a batch"


def _judged(claim: Claim, spoilt: Sequence[float]) -> Claim:
    """Return ``claim`` with the bound that follows from ``spoilt``: the differences that noise causes in the reference
    and, as the last value, the difference that a fault causes. If ``spoilt`` is empty, no bound is promised."""
    if not spoilt:
        return replace(claim, undecided=UNPROMISED)
    *noisy, fault = spoilt
    bound = LEAST + FACTOR * max(noisy)
    told = math.isfinite(bound) and CLEAR * bound <= fault
    return replace(claim, bound=bound, fault=fault, undecided="" if told else UNMEASURABLE)


def _failed(variant: str, claim: str, error: WorkerError) -> Claim:
    """Return the claim whose training ended with ``error``. If the pipeline itself refused, for lack of memory for
    instance, the claim could not be tried. After any other error, the claim is wrong."""
    text = str(error)
    if "Traceback (most recent call last)" in text:
        return Claim(variant, claim, holds=False, note=text)
    return Claim(variant, claim, note=text, undecided=UNTRIED)
