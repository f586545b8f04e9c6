"""What a comparison rests on, as claims: each with a measured difference and the bound below which it holds.

Which claims a variant makes, and their bounds, follow from the catalogue's entries of its techniques
(``Entry.changes``, ``roundoff`` and ``repeats``), so a new technique is verified by what it promises there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline import config as configuration
from pipeline import models
from pipeline.assembly import planned
from pipeline.config import Config, ConfigError, Entry, Machine, Plan, Variant
from pipeline.data.prepared import Dataset
from pipeline.distributed import WorkerError
from pipeline.verification.natures import Nature, keep_still, nature
from pipeline.verification.observing import EPOCHS, PLAIN_SGD, Observed, Task, first_images, miniature, observer

FLOAT32 = 2.0**-24
"""Its unit roundoff."""
SUM_ROUNDOFFS = 2.0**11
"""In float32, by how many roundoffs a gradient may differ when its sum is taken in another order. A sum of k terms is
off by about sqrt(k) roundoffs of the terms' size (Higham and Mary, "A New Approach to Probabilistic Rounding Error
Analysis", 2019); k, samples times pixels, comes to some 10^5 here, and terms of both signs cancel in part."""
PRODUCT_ROUNDOFFS = 2.0**5
"""In a coarser format, by how many of its roundoffs: each layer rounds activations and their gradients once, errors of
n independent layers add up like sqrt(n), and sums are kept in float32. Enough for a thousand layers."""
SMALL_TENSOR = 0.1
"""Of a gradient that nearly cancels, only rounding is left: differences count relative to this share of the root mean
square over all tensors, at least."""
NOISE_DRAWS = 2.0
"""How many times as far as one error in the gradients, drawn at random, may another of its size carry the training."""

_NO_REFERENCE = "nothing to hold it against, as the training without it fails"
STILL = "with dropout off and BatchNorm's statistics fixed"


@dataclass(frozen=True)
class Claim:
    """One line of the table."""

    variant: str
    claim: str
    measured: float | None = None
    """In ``unit``. None: there was nothing to measure; ``note`` says why."""
    bound: float | None = None
    """None: none is promised."""
    holds: bool | None = None
    """None: only statistical, or not comparable here; ``note`` says why."""
    unit: str = ""
    note: str = ""


@dataclass(frozen=True)
class _Expected:
    """The training that a variant's is held against."""

    plan: Plan | None
    why_not: str = ""


def gradient_bound(roundoff: float) -> float:
    """By how much a gradient may differ from a single device's in float32, relative to its norm.

    >>> f"{gradient_bound(2.0**-24):.1e}, {gradient_bound(2.0**-8):.2f}"
    '1.2e-04, 0.13'
    """
    coarse = PRODUCT_ROUNDOFFS * roundoff if roundoff > FLOAT32 else 0.0
    return SUM_ROUNDOFFS * FLOAT32 + coarse


def tensor_difference(found: Path, expected: Path) -> float:
    """The largest relative difference of a tensor, be it a parameter or its gradient; infinite if one is not finite.

    A difference's norm is taken relative to that of the expected tensor, plus ``SMALL_TENSOR`` of the root mean square
    over all tensors. Counts, which are whole numbers, are left out.
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
    """The largest difference of a step's loss, relative to the mean over the steps."""
    if len(found) != len(expected):
        return math.inf
    mean = sum(map(abs, expected)) / len(expected)
    return max(abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)) / mean


def differing_values(found: Path, expected: Path) -> int:
    """How many numbers of two state dicts differ in any bit; a name that one lacks differs in all."""
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


def evaluated(plan: Plan, seen: Observed, metric: str) -> Claim:
    """Every test sample once, with the score that it has alone.

    A metric of the user's own may follow the logits' rounding; of accuracy, only the ties do.
    """
    shared = f"{plan.processes} processes" if plan.processes > 1 else "one process"
    claim = f"evaluation by {shared}: each of {seen.expected_count:,} samples once"
    bound = seen.ties + (0.0 if metric == "accuracy" else seen.expected_count * SUM_ROUNDOFFS * FLOAT32)
    if seen.count != seen.expected_count:
        note = f"{seen.count:,} samples were counted"
        return Claim(plan.name, claim, abs(seen.count - seen.expected_count), bound, False, "samples", note)
    difference = abs(seen.correct - seen.expected_correct)
    note = f"{seen.ties} samples have two largest logits that are as good as equal" if seen.ties else ""
    return Claim(plan.name, claim, difference, bound, difference <= bound, "samples", note)


class Verifier:
    """Trains variants in miniature, each as often as it takes, and holds them against each other.

    ``folder`` takes what they leave, a file a training.
    """

    def __init__(self, config: Config, machine: Machine, prepared: Path, dataset: Dataset, folder: Path) -> None:
        self.config, self.machine, self.prepared, self.folder = config, machine, prepared, folder
        self._seen: dict[tuple[str, Task, int], Observed] = {}
        small = miniature(dataset, config.train.batch_size)
        self.steps = EPOCHS * (len(small.train) // config.train.batch_size)
        self.nature, self.nature_still = natures_of(config, small)
        """Of the model, as it is and kept still."""

    def claims(self, name: str) -> Iterator[Claim]:
        """Those of ``variants.<name>``. What its reference cannot be trained for promises nothing, and says so."""
        plan = planned(self.config, name, self.machine, self.prepared)
        for technique, reason in plan.left_out.items():
            yield Claim(name, f"{technique} is left out", note=reason)
        try:
            (first,) = self._observe(plan, [Task("run")])
            (again,) = self._observe(plan, [Task("run")], repeat=1)
        except WorkerError as error:
            yield Claim(name, "the variant trains", holds=False, note=str(error))
            return
        entries = configuration.asked(plan.applied)
        yield from self._against_one_device(plan, entries)
        yield from self._without(plan, entries, first)
        yield self._bit_by_bit(plan, entries, "the same seed in new processes: the same weights", first, again)
        yield evaluated(plan, first, self.config.train.metric)

    def _against_one_device(self, plan: Plan, entries: Sequence[Entry]) -> Iterator[Claim]:
        """Gradients, losses and weights against a single device's in float32, with what changes statistics left in."""
        close = [each for each in entries if each.changes != "statistics"]
        if not close or all(each.changes == "nothing" for each in entries):
            return  # bit-identity says more
        gradients, losses, weights = (
            f"{what}: a single device's"
            for what in ("gradients of a step", f"losses of {self.steps} steps", f"weights after {self.steps} steps")
        )
        expected = self._single(plan, close)
        if expected.plan is None:
            yield Claim(plan.name, gradients, note=expected.why_not)
            return
        still = not self.nature.still
        notes = [STILL] if still else []
        promised = True
        others = [each.name for each in entries if each.changes == "statistics"]
        if others:
            promised, notes = False, [*notes, f"{' and '.join(others)}: only statistical"]
        if not self.nature_still.still:
            promised, notes = False, [*notes, f"only statistical: the model {said(self.nature_still)} also then"]
        note = "; ".join(notes)
        bound = gradient_bound(max(each.roundoff for each in close))
        plain = self.config.train.model_copy(update=PLAIN_SGD)
        why_no_step = next(filter(None, (each.why_not_with(plain) for each in entries)), None)
        tasks = [Task("run", still)] if why_no_step else [Task("run", still), Task("step", still)]
        try:
            ours = self._observe(plan, tasks)
        except WorkerError as error:
            refused = f"variants.{plan.name}." in str(error)  # the model that is kept still has no BatchNorm, say
            yield Claim(plan.name, gradients, holds=None if refused else False, note=str(error))
            return
        try:
            theirs = self._observe(expected.plan, tasks)
        except WorkerError as error:
            yield Claim(plan.name, gradients, note=f"{_NO_REFERENCE}: {error}")
            return
        if why_no_step:
            yield Claim(plan.name, gradients, note=f"no step of plain SGD to see them by: {why_no_step}")
        elif ours[1].left_out:
            yield Claim(plan.name, gradients, note="the first step was left out: its scaled gradients overflowed")
        else:
            difference = tensor_difference(ours[1].file, theirs[1].file)
            yield _held(plan.name, gradients, difference, bound, promised, "relative", note)
        apart = {
            losses: curve_difference(ours[0].losses, theirs[0].losses),
            weights: tensor_difference(ours[0].file, theirs[0].file),
        }
        try:
            (noisy,) = self._observe(expected.plan, [Task("run", still, bound)])
        except WorkerError as error:
            why_no_bound = f"no bound: an error of {bound:.1e} in its gradients ends the single device's own training"
            for claim, difference in apart.items():
                yield Claim(plan.name, claim, difference, unit="relative", note=f"{why_no_bound}: {error}")
            return
        carried = {
            losses: bound + NOISE_DRAWS * curve_difference(noisy.losses, theirs[0].losses),
            # Weights are float32, whatever a step computes in: to what errors carry, only their own rounding is added.
            weights: gradient_bound(FLOAT32) + NOISE_DRAWS * tensor_difference(noisy.file, theirs[0].file),
        }
        for claim, difference in apart.items():
            yield _held(plan.name, claim, difference, carried[claim], promised, "relative", note)

    def _without(self, plan: Plan, entries: Sequence[Entry], first: Observed) -> Iterator[Claim]:
        """What changes nothing, against the same variant without it: the same weights, as they are trained."""
        exact = [each for each in entries if each.changes == "nothing"]
        if not exact:
            return
        claim = f"weights after {self.steps} steps: those without {', '.join(each.name for each in exact)}"
        reduced = self._reduced(plan, configuration.without(plan.applied, exact), keep_options=True)
        if reduced.plan is None:
            yield Claim(plan.name, claim, note=reduced.why_not)
            return
        try:
            (other,) = self._observe(reduced.plan, [Task("run")])
        except WorkerError as error:
            yield Claim(plan.name, claim, note=f"{_NO_REFERENCE}: {error}")
            return
        yield self._bit_by_bit(plan, entries, claim, first, other)

    def _bit_by_bit(self, plan: Plan, entries: Sequence[Entry], claim: str, first: Observed, other: Observed) -> Claim:
        """Two trainings that end in the same weights, unless what a seed gives is left to chance."""
        loose = [each.name for each in entries if not each.repeats] + [first.unsteady] * bool(first.unsteady)
        if not self.config.train.deterministic:
            loose.append("train.deterministic: false")
        note = f"not promised: {' and '.join(loose)}" if loose else ""
        return _held(plan.name, claim, differing_values(other.file, first.file), 0, not loose, "values", note)

    def _single(self, plan: Plan, close: Sequence[Entry]) -> _Expected:
        return self._reduced(plan, configuration.without(plan.applied, close), keep_options=False)

    def _reduced(self, plan: Plan, variant: Variant, *, keep_options: bool) -> _Expected:
        """The plan of a variant of which techniques were taken out.

        A key that only said how such a technique works must go with it. ``keep_options``: but no other.
        """
        used = {each.key for each in configuration.asked(variant)}
        plain = Variant()
        options = [key for key, value in variant if key not in used and value != getattr(plain, key)]
        every = variant.model_copy(update={key: getattr(plain, key) for key in options})
        tried = [every]
        if keep_options:
            single = [variant.model_copy(update={key: getattr(plain, key)}) for key in options]
            tried = [variant, *single, every]
        problem = ""
        for each in tried:
            try:
                return _Expected(self._planned(plan.name, each))
            except ConfigError as error:
                problem = problem or str(error).removeprefix(f"{configuration.PARAMS_FILE}: ")
        return _Expected(None, f"nothing to hold it against, as the rest cannot be by itself: {problem}")

    def _planned(self, name: str, variant: Variant) -> Plan:
        values = self.config.model_dump(mode="json", include={"fetch", "prepare", "train"})
        values["variants"] = {name: variant.model_dump(mode="json")}
        values["compare"] = {"baseline": name}
        return planned(configuration.parse(values), name, self.machine, self.prepared)

    def _observe(self, plan: Plan, tasks: Sequence[Task], repeat: int = 0) -> list[Observed]:
        """Each task once, unless it was done before; all that are new in the same processes."""
        settled = self._settled(plan)
        new = [task for task in tasks if (settled, task, repeat) not in self._seen]
        if new:
            with observer(self.config, plan, self.prepared, self.folder) as observe:
                for task in new:
                    self._seen[settled, task, repeat] = observe(task, f"{len(self._seen)}.pt")
        return [self._seen[settled, task, repeat] for task in tasks]

    def _settled(self, plan: Plan) -> str:
        """What a training depends on: plans that run alike share it."""
        values = plan.model_dump(mode="json", exclude={"name", "asked", "left_out", "decided"})
        values["applied"].pop("processes", None)  # "auto", and the number it comes to, are the same
        return json.dumps(values, sort_keys=True)


def natures_of(config: Config, dataset: Dataset) -> tuple[Nature, Nature]:
    """The job's model as it is, and kept still. Raises ModelError."""
    images = first_images(dataset)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seeds[0])
        model = models.of_job(config.train, dataset.shape, len(dataset.classes))
        return nature(model, images), nature(keep_still(model, images), images)


def said(found: Nature) -> str:
    """In words: the model ..."""
    parts = ["draws random numbers"] * found.draws + ["looks at several samples together"] * found.mixes
    return " and ".join(parts) or "draws nothing at random and sees each sample by itself"


def _held(variant: str, claim: str, measured: float, bound: float, promised: bool, unit: str, note: str) -> Claim:
    if not promised:
        return Claim(variant, claim, measured, None, None, unit, note)
    return Claim(variant, claim, measured, bound, measured <= bound, unit, note)
