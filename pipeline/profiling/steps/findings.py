"""Describe the findings of a profile: one rule for each way in which a step loses time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.profiling.steps.profile_file import Finding, StepTimes

NOTABLE_INPUT, NOTABLE_COMMUNICATION, NOTABLE_IDLE, NOTABLE_OPTIMIZER, NOTABLE_IMBALANCE = 0.10, 0.10, 0.15, 0.15, 0.20
"""Smallest shares of the step for which the rules report a finding."""


@dataclass(frozen=True)
class Facts:
    """The facts from which the rules make findings."""

    ranks: Sequence[StepTimes]
    on_gpu: bool
    placement: str
    """resident or streamed."""
    applied: Mapping[str, Any]
    """The variant's settings that were applied."""


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Return all notable findings, the largest share first. If there is none, return the finding ``computes``."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return tuple(sorted(found, key=lambda each: -each.share_fraction)) or (_computes(facts),)


def _waits_for_input(facts: Facts) -> Iterator[Finding]:
    share, where = _worst(facts, "input")
    if share < NOTABLE_INPUT:
        return
    if facts.applied.get("data_loading") == "dataloader":
        advice = "raise loader_workers, or set data_loading: resident, which decodes and copies nothing"
    elif facts.placement == "streamed":
        advice = (
            "set train.placement: resident if the samples fit into the device's memory, or give the job more CPU cores "
            "and a faster disk, because a thread gathers each batch from the prepared file"
        )
    else:
        advice = (
            "the samples are on the device already, so gathering, augmenting and normalising them takes this time. "
            "Remove an entry of train.augment, or train a larger model"
        )
    yield Finding(
        rule="waits_for_input", share_fraction=share, text=f"{share:.0%} of the step waits for input{where}: {advice}."
    )


def _waits_for_others(facts: Facts) -> Iterator[Finding]:
    share, where = _worst(facts, "communication")
    if share < NOTABLE_COMMUNICATION:
        return
    hidden = sum(rank.communication_hidden_ms for rank in facts.ranks)
    exposed = sum(rank.communication_ms for rank in facts.ranks)
    advice = {
        "pipeline": "raise gradient_accumulation, because more micro-batches keep more stages busy at the same time",
        "tensor": "use fewer processes per model, because each layer waits for sums that no computation can hide",
        "fsdp": "raise train.batch_size, so that there is more to compute per gathered layer, or set "
        "reshard_after_forward: false if the memory allows it",
    }.get(
        str(facts.applied.get("parallelism")),
        "raise train.batch_size or gradient_accumulation, so that there is more to compute per reduction, or send less "
        "with communication_hook: bf16",
    )
    yield Finding(
        rule="waits_for_others",
        share_fraction=share,
        text=f"{share:.0%} of the step waits for other processes{where}, and "
        f"{hidden / (hidden + exposed):.0%} of the communication is hidden behind computation: {advice}.",
    )


def _idles(facts: Facts) -> Iterator[Finding]:
    share, where = _worst(facts, "idle")
    if share < NOTABLE_IDLE:
        return
    text = (
        f"For {share:.0%} of the step, the GPU does nothing{where}, mostly because the host launches kernels more "
        "slowly than they run: raise train.batch_size, or set compile: reduce-overhead or cuda_graph: true, so "
        "that the host launches less often"
        if facts.on_gpu
        else f"For {share:.0%} of the step, no operator runs{where}, because Python and dispatch between small "
        "operators take this time: raise train.batch_size, use fewer micro-batches, or set compile: default"
    )
    yield Finding(rule="idles", share_fraction=share, text=f"{text}.")


def _updates(facts: Facts) -> Iterator[Finding]:
    share, where = _worst(facts, "optimizer")
    if share < NOTABLE_OPTIMIZER:
        return
    yield Finding(
        rule="updates",
        share_fraction=share,
        text=f"The optimizer takes {share:.0%} of the step{where}, and its time does not depend on the batch: raise "
        "train.batch_size, keep optimizer_kernel: fused, or, with several processes, distribute the update with "
        "parallelism: zero1.",
    )


def _is_uneven(facts: Facts) -> Iterator[Finding]:
    busy = [rank.busy_ms for rank in facts.ranks]
    longest, shortest = max(busy), min(busy)
    share = (longest - shortest) / max(rank.step_ms for rank in facts.ranks)
    if share < NOTABLE_IMBALANCE:
        return
    slow, quick = busy.index(longest), busy.index(shortest)
    advice = (
        "the stages are not balanced: give the model more and smaller parts to split"
        if facts.applied.get("parallelism") == "pipeline"
        else f"the other ranks wait for rank {slow}: look for another process on its device, a slower or throttled "
        "device, or too few CPU cores"
    )
    yield Finding(
        rule="is_uneven",
        share_fraction=share,
        text=f"Rank {slow} works {longest:.1f} ms a step, and rank {quick} works {shortest:.1f} ms; {advice}.",
    )


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _waits_for_input,
    _waits_for_others,
    _idles,
    _updates,
    _is_uneven,
)


def _computes(facts: Facts) -> Finding:
    main = facts.ranks[0]
    share = main.busy_ms / main.step_ms
    cheaper = "precision: bf16, channels_last: true or compile: default"
    return Finding(
        rule="computes",
        share_fraction=share,
        text=f"For {share:.0%} of the step, the device works ({main.fraction('forward'):.0%} forward, "
        f"{main.fraction('backward'):.0%} backward), so nothing waits. Make the arithmetic cheaper with {cheaper} if "
        "the hardware supports it, or distribute it over several devices.",
    )


def _worst(facts: Facts, part: str) -> tuple[float, str]:
    """Return the largest share of ``part`` on any rank, and the words " on rank N" if there are several ranks."""
    shares = [rank.fraction(part) for rank in facts.ranks]
    worst = max(shares)
    return worst, f" on rank {shares.index(worst)}" if len(shares) > 1 else ""
