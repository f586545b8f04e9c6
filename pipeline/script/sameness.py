"""Show whether the arms of a script do the same job: their parameters after a few steps, and their samples a step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.measurement.updates import relative_differences, rounding_errors
from pipeline.results import SameJob
from pipeline.script.jobs import Answers

EXAMINED_STEPS = 4
"""The first steps of each process. After them, an examined arm's parameters are compared with the baseline's."""
ROUNDING = 2.0**-5
"""Largest relative difference of a few steps' updates that is taken for rounding in the precision of the base. Numbers
of 16 bits can differ by more: Adam turns the sign of a small gradient into a whole step."""
OWN_FACTOR = 2.0
"""A difference up to this many times the base's from itself is no difference."""
LARGEST_OWN = 0.25
"""If the base differs from itself by more than this, no difference means anything."""


def samples_of(answers: Answers) -> int | None:
    """Return the samples of one step over all ranks; None if unknown."""
    counts = [statistics.median_low(answer["samples"]) for answer in answers]
    return (all(counts) and sum(counts)) or None


def apart(ours: Answers, theirs: Answers) -> tuple[float, str]:
    """Return the largest relative difference of a parameter's update on a rank of both, and the parameter's name.
    Parameters whose gradients are rounding errors in both do not count."""
    largest = 0.0, ""
    for pair in zip(ours, theirs, strict=False):
        own, expected = (dict(enumerate(answer["trained"])) for answer in pair)
        noise, others_noise = (
            rounding_errors({place: (gradient, update.numel()) for place, (_, gradient, update) in side.items()})
            for side in (own, expected)
        )
        updates = (
            {place: update for place, (*_, update) in side.items() if place not in noise & others_noise}
            for side in (own, expected)
        )
        for place, difference in relative_differences(*updates).items():
            largest = max(largest, (difference, (own | expected)[place][0]))
    return largest


def same_jobs(examined: Mapping[str, Answers], base: str, control: str) -> dict[str, SameJob]:
    """Return arm -> its job beside that of ``base``; for the base itself, that of ``control``."""

    def of(name: str, key: str) -> list[Any]:
        return [answer[key] for answer in examined[name]]

    own_difference, _ = apart(examined[control], examined[base])
    repeats = own_difference < LARGEST_OWN and of(control, "started") == of(base, "started")
    jobs = {}
    for name in (name for name in examined if name != control):
        beside = control if name == base else name
        difference, parameter = apart(examined[beside], examined[base])
        known = repeats and difference < float("inf")
        jobs[name] = SameJob(
            steps=EXAMINED_STEPS,
            equal_bits=of(beside, "ended") == of(base, "ended"),
            difference=difference if known else None,
            parameter=parameter if known else "",
            rounding=max(ROUNDING, OWN_FACTOR * own_difference) if repeats else 0.0,
            samples_per_step=samples_of(examined[name]),
        )
    return jobs


def lines(jobs: Mapping[str, SameJob], examined: Mapping[str, Answers], base: str) -> Iterator[str]:
    """Yield what a person must know of each arm's job."""
    for name, job in jobs.items():
        if (optimizers := examined[name][0]["optimizers"]) > 1:
            yield f"{name}: {optimizers} optimizers take steps; only the steps of one count (script.optimizer: which)"
        samples = "unknown samples" if job.samples_per_step is None else f"{job.samples_per_step:,} samples"
        who = "again, its parameters" if name == base else "its parameters"
        yield f"{name}: {samples} a step; after {job.steps} steps, {who} {job.in_words}"
    if not jobs[base].equal_bits:
        yield (
            f"{base} does not repeat itself, so small differences of the arms mean little; to see them, seed it before "
            "it makes the model (torch.manual_seed) and its data order, and set "
            "torch.use_deterministic_algorithms(True)"
        )
