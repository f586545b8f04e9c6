"""Show whether the arms of a script do the same job: their parameters after a few steps, and their samples a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import ConfigError
from pipeline.measurement.updates import relative_differences, rounding_errors
from pipeline.results import SameJob
from pipeline.script.arms import EXAMINED_STEPS, samples_of

ROUNDING = 2.0**-5
"""Largest relative difference of a few steps' updates that is taken for rounding in the precision of the base. Numbers
of 16 bits can differ by more: Adam turns the sign of a small gradient into a whole step."""
OWN_FACTOR = 2.0
"""A difference up to this many times the base's from itself is no difference."""
LARGEST_OWN = 0.25
"""If the base differs from itself by more than this, no difference means anything."""

Answers = Mapping[str, Mapping[str, Any]]
"""Arm -> the answer of ``Scripts.close``, after the arm was examined."""


def same_jobs(answers: Answers, base: str, control: str) -> dict[str, SameJob]:
    """Return arm -> its job beside that of ``base``; for the base itself, that of ``control``."""

    def of(name: str, key: str) -> list[Any]:
        return [rank[key] for rank in answers[name]["examined"]]

    def updates(name: str) -> dict[Any, Any]:
        return {
            (rank, place): update for rank, own in enumerate(of(name, "update")) for place, update in enumerate(own)
        }

    def noise(name: str) -> set[Any]:
        trained = of(name, "trained")
        sizes = ((key, update.numel()) for key, update in updates(name).items())
        return rounding_errors({(rank, place): (trained[rank][place][1], size) for (rank, place), size in sizes})

    def apart(name: str) -> tuple[float, str]:
        left_out = noise(name) & noise(base)
        ours, theirs = (
            {key: update for key, update in updates(arm).items() if key not in left_out} for arm in (name, base)
        )
        differences = relative_differences(ours, theirs)
        if not any(differences.values()):
            return 0.0, ""
        rank, place = most = max(differences, key=differences.__getitem__)
        return differences[most], of(name if most in ours else base, "trained")[rank][place][0]

    own_difference, _ = apart(control)
    repeats = own_difference < LARGEST_OWN and of(control, "started") == of(base, "started")
    jobs = {}
    for name in (name for name in answers if name != control):
        beside = control if name == base else name
        difference, parameter = apart(beside)
        known = repeats and difference < float("inf")
        jobs[name] = SameJob(
            steps=EXAMINED_STEPS,
            equal_bits=of(beside, "ended") == of(base, "ended"),
            difference=difference if known else None,
            parameter=parameter if known else "",
            rounding=max(ROUNDING, OWN_FACTOR * own_difference) if repeats else 0.0,
            samples_per_step=samples_of(answers[name]["examined"]),
        )
    return jobs


def credits_of(jobs: Mapping[str, SameJob], base: str, *, batch_differs: bool) -> dict[str, int | None]:
    """Return arm -> the samples that one of its steps is credited with; None for all arms if an arm's are unknown.

    Raises ConfigError if an arm takes another number of samples a step than the base, unless ``batch_differs``.
    """
    taken = {name: job.samples_per_step for name, job in jobs.items()}
    unknown = [name for name, samples in taken.items() if samples is None]
    if unknown and batch_differs:
        raise ConfigError(
            f"--batch-differs: the samples of a step cannot be seen in {', '.join(unknown)}, because no module gets a "
            "tensor as a positional argument, so no speed per sample is known; leave the option out."
        )
    for name, samples in taken.items():
        if samples != taken[base] and not batch_differs and None not in (samples, taken[base]):
            raise ConfigError(
                f"{name}: found {samples} samples a step, but {base} takes {taken[base]}, so their steps are not the "
                "same work; give both the same batch. If the batches differ on purpose, add --batch-differs "
                "(script.batch_differs: true): then "
                "samples a second are compared."
            )
    return dict.fromkeys(taken, None) if unknown else taken


def lines(jobs: Mapping[str, SameJob], answers: Answers, base: str) -> Iterator[str]:
    """Yield what a person must know of each arm's job."""
    for name, job in jobs.items():
        if (optimizers := answers[name]["examined"][0]["optimizers"]) > 1:
            yield f"{name}: {optimizers} optimizers take steps; only the steps of one count (--optimizer names another)"
        samples = "unknown samples" if job.samples_per_step is None else f"{job.samples_per_step:,} samples"
        who = "again, its parameters" if name == base else "its parameters"
        yield f"{name}: {samples} a step; after {job.steps} steps, {who} {job.in_words}"
    if not jobs[base].equal_bits:
        yield (
            f"{base} does not repeat itself, so small differences of the arms mean little; to see them, seed it before "
            "it makes the model (torch.manual_seed) and its data order, and set "
            "torch.use_deterministic_algorithms(True)"
        )
