"""The claims on which a comparison rests. A claim compares a measured difference of two trainings with the bound up to
which it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.distributed import WorkerError
from pipeline.errors import PipelineError
from pipeline.measurement.updates import relative_difference
from pipeline.plans import Plan
from pipeline.tools.verification.observing import Observed

FLOAT32 = 2.0**-24
"""Unit roundoff of float32."""
LEAST = 2.0**11 * FLOAT32
"""Relative difference allowed for any float32 sum taken in another order. A sum of k terms is off by about sqrt(k)
roundoffs of the terms' size (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019). Here k,
samples times pixels, is about 10^5, and terms of opposite sign partly cancel."""
KERNEL_ROUNDOFFS = 2.0**5
"""Largest difference expected between two kernels of the same layer, in float32 roundoffs. On CPUs the difference is
about 10."""
DRAWS = 2
"""How often the reference is trained with noise as large as the expected rounding. The largest difference counts."""
MANY_DRAWS = 8
"""The same for a difference beyond the bound, but far from what a fault causes: two draws can give too low a bound."""
FACTOR = 2.0
"""Rounding may change a training by at most ``LEAST`` plus this many times the change that the noise causes."""
CLEAR = 2.0
"""A bound is meaningful if a fault planted in the reference causes a difference of at least this many times the
bound."""
Distance = Callable[[Observed, Observed], float]

UNTRIED, UNMEASURABLE, UNPROMISED = "could not be tried", "undecidable here", "not promised"


@dataclass(frozen=True)
class Claim:
    """A claim about a variant, and its result: one line of the table that ``verify`` prints."""

    variant: str
    claim: str
    measured: float | None = None
    """The difference in ``unit``. None: there was nothing to measure; ``note`` says why."""
    bound: float | None = None
    """None: no bound is promised, or there was nothing to measure."""
    holds: bool | None = None
    """None: the claim is not decided. ``undecided`` says in which way, and ``note`` says why."""
    unit: str = ""
    note: str = ""
    undecided: str = ""
    """``UNTRIED``, ``UNMEASURABLE`` or ``UNPROMISED``."""
    fault: float | None = None
    """The difference measured for the reference with a planted fault: its gradients lack one part of each batch."""


class Untried(WorkerError):
    """A claim cannot be tried, because there is no usable reference, for instance. The message says why."""


def way_difference(observed: Observed, expected: Observed, left_out: Collection[str] = ()) -> float:
    """Compare how two trainings changed each tensor, by ``relative_difference``. Integer tensors, which are counts, and
    those ``left_out`` do not count."""
    ours, theirs = (
        {
            key: value
            for key, value in weights_of(training.way).items()
            if value.is_floating_point() and key not in left_out
        }
        for training in (observed, expected)
    )
    return relative_difference(ours, theirs)


def loss_difference(observed: Observed, expected: Observed) -> float:
    """Return the largest difference of a step's loss, relative to the mean expected loss over the steps; infinite if
    the number of steps differs."""
    ours, theirs = observed.losses, expected.losses
    if len(ours) != len(theirs) or not theirs:
        return math.inf
    return max(abs(our - their) for our, their in zip(ours, theirs, strict=True)) * len(theirs) / sum(map(abs, theirs))


def differing_values(observed: Path, expected: Path) -> int:
    """Return the number of values in two state dicts that differ in any bit. If a state dict lacks a name, all values
    of this name differ."""
    ours, theirs = weights_of(observed), weights_of(expected)
    different = sum(value.numel() for name, value in {**ours, **theirs}.items() if name not in ours.keys() & theirs)
    for name in ours.keys() & theirs.keys():
        our_value, their_value = ours[name], theirs[name]
        if our_value.shape != their_value.shape or our_value.dtype != their_value.dtype:
            different += our_value.numel()
            continue
        size = our_value.numel(), our_value.element_size()
        bits = (value.contiguous().flatten().view(torch.uint8).view(size) for value in (our_value, their_value))
        different += int(torch.ne(*bits).any(1).sum())
    return different


def weights_of(file: Path) -> dict[str, torch.Tensor]:
    """Return the state dict in ``file``, or how a training changed it (``Observed.way``)."""
    state: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return state


def beside_nf4(held: torch.Tensor, weights: torch.Tensor) -> float:
    """Return how far ``held`` is from what NF4 keeps of ``weights``: the nearest of 16 levels, times the largest weight
    of a block of 64. The distance is relative to this weight; of two levels that are as near, each is right.

    The levels are quantiles of the normal distribution, and zero. Source: Dettmers et al., QLoRA, NeurIPS 2023.
    """
    above, below = (torch.special.ndtri(torch.linspace(0.9677083, 0.5, size).double()) for size in (9, 8))
    levels = torch.cat([above, -below[:-1]]).sort().values / above[0]
    exact, kept = (values.double().view(-1, 64) for values in (weights, held))
    scales = exact.abs().amax(1, keepdim=True).clamp(min=torch.finfo(exact.dtype).tiny)
    nearest = levels[torch.bucketize(exact / scales, (levels[1:] + levels[:-1]) / 2)] * scales
    return float((((kept - exact).abs() - (nearest - exact).abs()).abs() / scales).max())


def evaluated(plan: Plan, seen: Observed) -> Claim:
    """Return the claim that evaluation counts every test sample once, with the score that one process alone computes.

    Rounding of the outputs may change a fractional score; it changes a true-or-false score only at ties.
    """
    shared = f"{plan.processes} processes" if plan.processes > 1 else "one process"
    claim = f"evaluation by {shared}: each of {seen.expected_count:,} samples counts once"
    bound = seen.ties + (0.0 if seen.expected_correct.is_integer() else seen.expected_count * LEAST)
    missing = abs(seen.count - seen.expected_count)
    difference = missing or abs(seen.correct - seen.expected_correct)
    note = f"scores that depend on almost equal outputs: {seen.ties:,}" if seen.ties else ""
    if missing:
        note = f"{seen.count:,} samples were counted"
    return Claim(plan.name, claim, difference, bound, not missing and difference <= bound, "samples", note)


def with_bound(claim: Claim, spoilt: Sequence[float]) -> Claim:
    """Return ``claim`` with the bound that follows from ``spoilt``: the differences that noise causes in the reference
    and, as the last value, the difference that a fault causes. If ``spoilt`` is empty, no bound is promised."""
    if not spoilt:
        return replace(claim, undecided=UNPROMISED)
    *noisy, fault = spoilt
    bound = LEAST + FACTOR * max(noisy)
    decided = math.isfinite(bound) and CLEAR * bound <= fault
    return replace(claim, bound=bound, fault=fault, undecided="" if decided else UNMEASURABLE)


def is_close(claim: Claim, measured: float) -> bool:
    """Return True if ``measured`` is beyond the claim's bound, but far from what the planted fault causes."""
    return not claim.undecided and (claim.bound or 0.0) < measured < (claim.fault or 0.0) / CLEAR


def failed(variant: str, claim: str, error: PipelineError) -> Claim:
    """Return the claim whose training ended with ``error``. If the pipeline itself refused, for lack of memory for
    instance, the claim could not be tried. After any other error, the claim is wrong."""
    text = str(error)
    if isinstance(error, Untried) or "Traceback (most recent call last)" not in text:
        return Claim(variant, claim, note=text, undecided=UNTRIED)
    return Claim(variant, claim, holds=False, note=text)
