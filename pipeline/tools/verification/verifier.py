"""Train variants in miniature, and decide their claims.

A variant's claims and their bounds follow from what its techniques promise in their entries of the catalogue
(``Entry.changes``, ``roundoff`` and ``repeats``). So a new technique is verified against its own entry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline import params, tasks
from pipeline.distributed import WorkerError
from pipeline.errors import ConfigError, count
from pipeline.measurement.updates import rounding_errors
from pipeline.models import optimizers
from pipeline.params import Config, Entry, Machine, Train, Variant
from pipeline.plans import Plan
from pipeline.processes import randomness
from pipeline.techniques.lora import targets
from pipeline.techniques.muon import RMS, hidden_matrices
from pipeline.tools.verification import observing
from pipeline.tools.verification.claims import (
    DRAWS,
    FLOAT32,
    KERNEL_ROUNDOFFS,
    MANY_DRAWS,
    UNMEASURABLE,
    UNPROMISED,
    UNTRIED,
    Claim,
    Distance,
    Untried,
    beside_nf4,
    differing_values,
    evaluated,
    failed,
    is_close,
    loss_difference,
    way_difference,
    weights_of,
    with_bound,
)
from pipeline.tools.verification.observing import Nature, Observed, Trial
from pipeline.training.assembly import planned

FAR_FROM_ONE = 0.5
"""Largest distance from 1 of a singular value after Muon's iteration, which ends between 0.68 and 1.13 (Jordan, 2024);
the rest is for its bfloat16."""
RUNS: tuple[dict[str, Any], ...] = ({}, {"rate": 2.0**-3, "steps": 3}, {"rate": 2.0**-6, "steps": 3})
"""Settings of a ``Trial``, tried one after the other: all steps at the job's learning rate, then few steps at smaller
rates. Rounding errors grow from step to step, in some trainings beyond every meaningful bound."""

LEFT_OUT = (
    "losses and weights after several steps beside those of a single device; whether the same seed gives the same "
    "weights; whether techniques that change nothing change no bit; and torch.compile"
)
"""What ``quick`` leaves out."""
PER_SAMPLE = "with dropout off and BatchNorm's statistics fixed"


class Verifier:
    """Trains variants in miniature, each as often as needed, and compares the trainings.

    ``folder``: the directory for the files of the trainings. ``quick``: train smaller miniatures, once, without
    compiling, and claim only what they show (``LEFT_OUT``).
    """

    def __init__(
        self,
        config: Config,
        machine: Machine,
        prepared: Path,
        task: tasks.Task,
        folder: Path,
        *,
        quick: bool = False,
    ) -> None:
        self.quick, self._size = quick, observing.QUICK if quick else observing.WHOLE
        self.put_off: list[Iterator[Claim]] = []
        """With ``quick``, the claims beside a reference that ``claims`` has left to its caller."""
        self._run = Trial("run", size=self._size)
        self.config, self.machine, self.prepared, self.folder = config, machine, prepared, folder
        self._seen: dict[tuple[str, Trial, int], Observed] = {}
        self._small = replace(task, dataset=observing.miniature(task.dataset, config.train.batch_size, self._size))
        self.steps = self._size.epochs * (len(self._small.dataset.train) // config.train.batch_size)
        self.tested = len(self._small.dataset.test)
        """Number of test samples in the evaluation."""
        self._natures: dict[Path, tuple[Nature, Nature]] = {}
        self.nature, _ = self._natures_of(config.train)

    def _natures_of(self, train: Train) -> tuple[Nature, Nature]:
        """Return the natures of the job's model before and after ``make_per_sample``. Raises ModelError."""
        file = self.folder / observing.statistics_file(train)
        if file not in self._natures:
            task = replace(self._small, train=train)
            batches = observing.first_inputs(task, observing.STATISTICS_BATCHES)
            with randomness.kept():
                randomness.seed(train.seeds[0])
                model = task.begun()
                as_it_is, per_sample = observing.nature(model, batches[0]), observing.statistics(model, batches)
                made_per_sample = observing.nature(observing.make_per_sample(model, per_sample), batches[0])
            torch.save(per_sample, file)
            self._natures[file] = as_it_is, made_per_sample
        return self._natures[file]

    def count(self, plan: Plan) -> int:
        """Return the number of claims that ``claims`` yields for the plan if all of them can be tried."""
        entries = params.requested(plan.applied)
        changes = {entry.changes for entry in entries if not self.quick or entry.layer != "compiler"}
        idle = sum(entry.without_effect is not None for entry in entries)
        of_frozen = bool(self._kept(plan))
        own = (plan.applied.lora, plan.applied.base_weights, plan.applied.optimizer)  # each has a claim of its own
        always = len(plan.skipped) + of_frozen + sum(map(bool, own)) + 2
        if self.quick:
            return always + ("rounding" in changes)
        return always + 3 * ("rounding" in changes) + ("nothing" in changes) + idle + 1

    def claims(self, plan: Plan) -> Iterator[Claim]:
        """Yield the claims of the plan's variant, except those in ``put_off``. The note of a claim that cannot be tried
        here says why."""
        name = plan.name
        for technique, reason in plan.skipped.items():
            yield Claim(name, f"{technique} is skipped", note=reason, undecided=UNTRIED)
        entries = params.requested(plan.applied)
        if self.quick and (compilers := [entry for entry in entries if entry.layer == "compiler"]):
            try:
                plan = self._without_these(plan, compilers)
            except Untried as reason:
                yield failed(name, "the variant trains", reason)
                return
            entries = params.requested(plan.applied)
        try:
            (first,) = self._observe(plan, [self._run])
            (again,) = [first] if self.quick else self._observe(plan, [self._run], 1)
        except WorkerError as error:
            yield failed(name, "the variant trains", error)
            return
        if not_finite := first.not_finite or again.not_finite:
            yield Claim(name, "the variant trains", note=not_finite, undecided=UNTRIED)
            yield from self._beside_reference(plan, entries)
            return
        moved = torch.load(first.way, weights_only=True)
        weights = [moved[weight] for weight, _ in self._small.model().named_parameters() if weight in moved]
        if weights and not any(weight.any() for weight in weights):
            yield Claim(name, "the variant trains", holds=False, note="no weight changed: no weight gets a gradient")
            return
        yield from self._beside_reference(plan, entries)
        if not self.quick:
            yield from self._unchanged(plan, entries)
        yield from self._frozen(plan, moved)
        yield from self._low_rank(plan, first, moved)
        yield from self._orthogonal(plan)
        if not self.quick:
            yield self._bit_by_bit(plan, entries, "the same seed in new processes: the same weights", first, again)
        yield self._worked(plan, entries, first)
        yield evaluated(plan, first)

    def _beside_reference(self, plan: Plan, entries: Sequence[Entry]) -> Iterator[Claim]:
        against = self._against_one_device(plan, entries)
        if not self.quick:
            yield from against
        elif any(entry.changes == "rounding" for entry in entries):
            self.put_off.append(against)

    def _against_one_device(self, plan: Plan, entries: Sequence[Entry]) -> Iterator[Claim]:
        """Yield the claims that gradients, losses and weights equal those of the reference. The reference is a training
        on a single device in float32. It keeps only the techniques that change statistics."""
        close = [entry for entry in entries if entry.changes != "statistics"]
        if all(entry.changes != "rounding" for entry in close):
            return  # the claim of identical weights is stronger
        gradients, losses, weights = (
            f"{what}: equal to those of a single device"
            for what in ("gradients of a step", "losses of {} steps", "weights after {} steps")
        )
        try:
            reference = self._without_these(plan, close)
        except Untried as reason:
            yield failed(plan.name, gradients, reason)
            return
        as_it_is, made_per_sample = self._natures_of(plan.train)
        per_sample = not as_it_is.per_sample
        loose = [f"only statistically equal with {entry.name}" for entry in entries if entry.changes == "statistics"]
        if not made_per_sample.per_sample:
            loose.append(f"only statistically equal, because the model still {said(made_per_sample)}")
        note = "; ".join([PER_SAMPLE] * per_sample + loose)
        spoils: list[dict[str, Any]] = []  # without them, no bound is promised
        if not loose:
            roundoff = max(entry.roundoff for entry in close)
            noise = roundoff / 2 if roundoff > FLOAT32 else KERNEL_ROUNDOFFS * FLOAT32
            parts = max(2, plan.data_processes * plan.micro_batches)  # a fault could lose one of them
            spoils = [*({"noise": noise, "draw": draw} for draw in range(DRAWS)), {"forgets": parts}]

        def spoilt(*trials: Trial) -> list[list[Trial]]:
            return [[trial, *(replace(trial, **changes) for changes in spoils)] for trial in trials]

        unsized: list[str] = []
        plain = self.config.train.model_copy(update=observing.PLAIN_SGD)
        if why_no_step := next(filter(None, (entry.why_not_with(plain) for entry in entries)), None):
            no_step = f"no step of plain SGD shows the gradients: {why_no_step}"
            yield Claim(plan.name, gradients, note=no_step, undecided=UNTRIED)
        else:
            step = Trial("step", per_sample, size=self._size)
            (claim,) = self._compared(plan, reference, note, spoilt(step), {gradients: way_difference})
            yield claim
            if claim.undecided == UNMEASURABLE and not self.quick:
                hidden = "rounding hides a fault even in the gradients of a step"
                for wording in (losses, weights):
                    yield Claim(plan.name, wording.format(self.steps), note=hidden, undecided=UNMEASURABLE)
            if self.quick or claim.undecided in (UNMEASURABLE, UNTRIED):
                return
            unsized = self._without_gradient(plan, *self._reference(reference, [step]))
        if self.quick:
            return
        if unsized:
            note = "; ".join(filter(None, [note, f"without {', '.join(unsized)}, whose gradients are rounding errors"]))
        runs = [Trial("run", per_sample, **changes) for changes in (RUNS[:1] if loose else RUNS)]
        distances: dict[str, Distance] = {weights: partial(way_difference, left_out=unsized), losses: loss_difference}
        yield from reversed(self._compared(plan, reference, note, spoilt(*runs), distances))

    def _without_gradient(self, plan: Plan, step: Observed) -> list[str]:
        """Return the parameters whose gradients in a ``step`` are rounding errors."""
        moved, names = weights_of(step.way), (name for name, _ in self._plain(plan).named_parameters())
        changes = {name: moved[name] for name in names if name in moved and moved[name].numel()}
        sizes = {name: (float(change.square().mean().sqrt()), change.numel()) for name, change in changes.items()}
        return sorted(rounding_errors(sizes))

    def _compared(
        self, plan: Plan, reference: Plan, note: str, runs: Sequence[Sequence[Trial]], distances: Mapping[str, Distance]
    ) -> list[Claim]:
        """Return a claim for each of ``distances``. The claims come from the first of ``runs`` that gives the first
        distance a meaningful bound. If there is none, they come from the last of ``runs``.

        ``runs``: each has the trial and, to find the bound, the trial with noise and with the planted fault. In a
        claim's text, {} stands for the number of steps.
        """
        names: list[str] = []

        def judge(trial: Trial, spoilt: Sequence[Trial]) -> tuple[Observed, list[Claim]]:
            theirs, *others = self._reference(reference, [trial, *spoilt])
            return theirs, [
                with_bound(Claim(plan.name, name, unit="relative"), [apart(run, theirs) for run in others])
                for name, apart in zip(names, distances.values(), strict=True)
            ]

        try:
            for trial, *spoilt in runs:
                names = [claim.format(trial.steps or self.steps) for claim in distances]
                theirs, judged = judge(trial, spoilt)
                if judged[0].undecided != UNMEASURABLE:
                    break
            if theirs.not_finite or not math.isfinite(way_difference(theirs, theirs)):
                reason = theirs.not_finite or "a single device, reaches values that are not finite"
                raise Untried(f"the reference, {reason}")
            (ours,) = self._observe(plan, [trial])
            if ours.overflowed:
                raise Untried("a step was skipped, because its scaled gradients overflowed")
            measured = [apart(ours, theirs) for apart in distances.values()]
            if any(map(is_close, judged, measured)):
                draws = [replace(spoilt[0], draw=draw) for draw in range(DRAWS, MANY_DRAWS)]
                _, judged = judge(trial, [*draws, *spoilt])
        except WorkerError as error:
            return [failed(plan.name, name, error) for name in names]
        slower = f"at 1/{1 / trial.rate:.0f} of the learning rate" if trial.rate < 1 else ""
        note = "; ".join(filter(None, [note, slower, ours.not_finite]))
        return [
            replace(claim, measured=value, note=note, holds=None if claim.undecided else value <= (claim.bound or 0.0))
            for claim, value in zip(judged, measured, strict=True)
        ]

    def _unchanged(self, plan: Plan, entries: Sequence[Entry]) -> Iterator[Claim]:
        """Yield the claim that the final weights stay the same if the techniques that should change nothing are left
        out. For each technique that can be set to have no effect, yield the claim that it then changes nothing."""
        after = f"weights after {self.steps} steps"
        exact = [entry for entry in entries if entry.changes == "nothing"]
        without = f"{after}: equal to those without {', '.join(entry.name for entry in exact)}"
        claims = [(without, plan.applied, exact)] if exact else []
        for entry in entries:
            if entry.without_effect:
                idle = plan.applied.model_copy(update=entry.without_effect(plan.applied))
                claims.append((f"{after}, if {entry.name} has no effect: equal to those without it", idle, [entry]))
        for claim, applied, left_out in claims:
            try:
                tried = plan if applied is plan.applied else self._planned(plan.name, applied)
                (ours,) = self._observe(tried, [self._run])
                (plain,) = self._reference(self._without_these(plan, left_out), [self._run])
            except (ConfigError, WorkerError) as error:
                yield failed(plan.name, claim, error)
            else:
                yield self._bit_by_bit(plan, entries, claim, ours, plain)

    def _frozen(self, plan: Plan, moved: Mapping[str, torch.Tensor]) -> Iterator[Claim]:
        """Yield the claim that a training leaves what is frozen as it was, bit by bit. ``moved``: name -> change."""
        if kept := self._kept(plan):
            changed = sum(int(values.count_nonzero()) for name, values in moved.items() if name in kept)
            claim = f"{count(len(kept), 'frozen tensor')}: as before, after {self.steps} steps"
            yield Claim(plan.name, claim, changed, 0, not changed, "values")

    def _low_rank(self, plan: Plan, first: Observed, moved: Mapping[str, torch.Tensor]) -> Iterator[Claim]:
        """Yield the claim that the weights of adapted layers have changed by matrices of the rank of lora, and, with
        base_weights, that they began at the levels of 4 bits that are nearest to the job's weights.

        The bound is for the singular value after the last that may differ from zero, relative to the first. It is the
        size of the rounding of the changed weights to float32, as a random matrix has it.
        """
        settings, after = plan.applied.lora, weights_of(first.file)
        if settings is None:
            return
        worst, bound = 0.0, 0.0
        for name in self._adapted(plan):
            values = torch.linalg.svdvals(moved[name])
            rounding = FLOAT32 * after[name].abs().max().item() * sum(size**0.5 for size in moved[name].shape)
            if len(values) > settings.rank and values[0] > 0:
                excess, allowed = (float(value / values[0]) for value in (values[settings.rank], rounding))
                worst, bound = max((worst, bound), (excess, allowed), key=lambda pair: pair[0] - pair[1])
        claim = f"the changes of {count(len(self._adapted(plan)), 'layer')} have rank {settings.rank}"
        yield Claim(plan.name, claim, worst, bound, worst <= bound, "relative")
        if plan.applied.base_weights:
            began = self._plain(plan).state_dict()
            in_bits = (name for name in self._adapted(plan) if began[name].shape[1] % 64 == 0)
            apart = max((beside_nf4(after[name] - moved[name], began[name]) for name in in_bits), default=0.0)
            claim, bound = "weights in 4 bits begin at the nearest levels", KERNEL_ROUNDOFFS * FLOAT32
            yield Claim(plan.name, claim, apart, bound, apart <= bound, "relative")

    def _orthogonal(self, plan: Plan) -> Iterator[Claim]:
        """Yield the claim that the first update of each hidden matrix is nearly orthogonal: the largest singular
        value has the size that learning rate and sides give it. Smaller ones may be rounding."""
        if plan.applied.optimizer != "muon":
            return
        train, claim = plan.train, "the first updates of hidden matrices are nearly orthogonal"
        try:
            (step,) = self._observe(plan, [replace(self._run, steps=1)])
        except WorkerError as error:
            yield failed(plan.name, claim, error)
            return
        moved, after, model = weights_of(step.way), weights_of(step.file), self._plain(plan)
        inputs = observing.first_inputs(replace(self._small, train=train))[0]
        with randomness.kept(), torch.no_grad():
            names = hidden_matrices(model, lambda: model(inputs))
        distances = []
        for name in (name for name in names if moved[name].any()):
            rate = step.rates[0] * optimizers.lr_factor(train, name)
            decay = 0.0 if optimizers.matches(name, train.no_decay) else train.weight_decay
            update = moved[name] / (1 - (train.ema_decay or 0.0)) + rate * decay * (after[name] - moved[name])
            size = torch.linalg.matrix_norm(update, 2).item() / (rate * RMS * max(update.shape) ** 0.5)
            distances.append(abs(size - 1))
        if not distances:
            yield Claim(plan.name, claim, note="no hidden matrix changed in the first step", undecided=UNTRIED)
            return
        yield Claim(plan.name, claim, max(distances), FAR_FROM_ONE, max(distances) <= FAR_FROM_ONE, "relative")

    def _adapted(self, plan: Plan) -> list[str]:
        """Return the names of the weights that the variant changes by adapters."""
        settings = plan.applied.lora
        model = self._plain(plan)
        return [f"{name}.weight" for name in targets(model, settings.targets, settings.train)] if settings else []

    def _plain(self, plan: Plan) -> nn.Module:
        """Return the model as a training begins with it, before any technique."""
        with randomness.kept():
            randomness.seed(plan.train.seeds[0])
            return replace(self._small, train=plan.train).begun()

    def _kept(self, plan: Plan) -> set[str]:
        """Return the names of the parameters that the variant does not train, and of the statistics in parts that are
        in evaluation mode."""
        model, trained = self._plain(plan), plan.applied.lora.train if plan.applied.lora else ["*"]
        weights = model.named_parameters()
        frozen = {name for name, weight in weights if not (weight.requires_grad and optimizers.matches(name, trained))}
        frozen -= {*self._adapted(plan)}
        still = [(name, part) for name, part in model.named_modules() if not part.training]
        return frozen | {f"{name}.{key}" for name, part in still for key, _ in part.named_buffers(recurse=False)}

    def _bit_by_bit(self, plan: Plan, entries: Sequence[Entry], claim: str, first: Observed, plain: Observed) -> Claim:
        """Return the claim that two trainings end in the same weights; not promised if a training is not
        deterministic."""
        loose = [entry.name for entry in entries if not entry.repeats] + [first.unsteady] * bool(first.unsteady)
        if not self.config.train.deterministic:
            loose.append("train.deterministic: false")
        difference = differing_values(plain.file, first.file)
        if loose:
            note = f"not promised: {' and '.join(loose)}"
            return Claim(plan.name, claim, difference, unit="values", note=note, undecided=UNPROMISED)
        return Claim(plan.name, claim, difference, 0, difference == 0, "values")

    def _worked(self, plan: Plan, entries: Sequence[Entry], first: Observed) -> Claim:
        """Return the claim that a step processes all samples that it is credited with. A compiled graph hides its work,
        so the claim is tried without compiler techniques."""
        work, compilers = first.work, [entry for entry in entries if entry.layer == "compiler"]
        assert work is not None  # a run always records its work
        claim = f"the model and the loss take {work.credited:,} samples a step"
        if compilers:
            try:
                work = self._reference(self._without_these(plan, compilers), [self._run])[0].work or work
            except Untried as reason:
                return failed(plan.name, claim, reason)
        note = work.rejection.happened if work.missing else ""
        return Claim(plan.name, claim, work.missing, 0, not work.missing, "samples", note)

    def _without_these(self, plan: Plan, techniques: Sequence[Entry]) -> Plan:
        """Return the plan of the same variant without ``techniques``. Raises Untried."""
        try:
            return self._planned(plan.name, params.without(plan.applied, techniques))
        except ConfigError as error:
            problem = str(error).removeprefix(f"{params.PARAMS_FILE}: ")
            raise Untried(
                f"no reference, because the variant cannot run without some of its techniques: {problem}"
            ) from None

    def _reference(self, plan: Plan, trials: Sequence[Trial]) -> list[Observed]:
        """Return the results of ``trials`` for a plan without some of the variant's techniques. Raises Untried."""
        try:
            return self._observe(plan, trials)
        except WorkerError as error:
            raise Untried(f"the reference, a training without some of the techniques, fails: {error}") from None

    def _planned(self, name: str, variant: Variant) -> Plan:
        values = self.config.model_dump(mode="json", include={"fetch", "prepare", "train"})
        values["variants"] = {name: variant.model_dump(mode="json")}
        values["compare"] = {"baseline": name}
        return planned(params.parse(values), name, self.machine, self.prepared)

    def _observe(self, plan: Plan, trials: Sequence[Trial], repeat: int = 0) -> list[Observed]:
        """Return the results of ``trials``. Trials that have no result yet run now, all in the same processes."""
        values = plan.model_dump(mode="json", exclude={"name", "requested", "skipped", "decided"})
        values["applied"].pop("processes", None)  # "auto" or a number; the plan itself has the number
        settled = json.dumps(values, sort_keys=True)  # equal for plans that train in the same way
        new = [trial for trial in trials if (settled, trial, repeat) not in self._seen]
        if new:
            with observing.observer(plan, self.prepared, self.folder) as observe:
                for trial in new:
                    self._seen[settled, trial, repeat] = observe(trial, f"{len(self._seen)}.pt")
        return [self._seen[settled, trial, repeat] for trial in trials]


def said(of_model: Nature) -> str:
    """Return the nature in words that follow "the model"."""
    parts = ["draws random numbers"] * of_model.stochastic + ["mixes the samples of a batch"] * of_model.batch_dependent
    return " and ".join(parts) or "draws no random numbers and does not mix the samples of a batch"
