"""The content of ``profiles/<variant>/profile.json``, and its findings: one rule for each way in which a step loses
time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.params import Seed
from pipeline.results import Record, RunConditions, VariantDocument

WORK = ("optimizer", "forward", "backward", "rest")
"""The parts in which the device works. The optimizer comes first, because a backward node's event also covers an
optimizer step that runs inside the node."""
PARTS = (*WORK, "communication", "input", "idle")
"""All parts. An instant that fits several parts belongs to the first of them."""


class StepTimes(Record):
    """The parts of one rank's mean step under the profiler. All except hidden communication add up to ``step_ms``.

    ``pipeline.profiling.trace`` defines the parts.
    """

    step_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    rest_ms: float
    """Other work of the step, such as setting gradients to zero, or a CUDA graph of the whole step."""
    communication_ms: float
    """Exposed communication, during which the rank does no work."""
    input_ms: float
    idle_ms: float
    communication_hidden_ms: float
    """Communication during work, which is not added to the other parts."""

    def fraction(self, part: str) -> float:
        """Return the share of the step that one of ``PARTS`` takes."""
        value: float = getattr(self, f"{part}_ms")
        return value / self.step_ms

    @property
    def busy_ms(self) -> float:
        """Time in which the device works for this rank."""
        return self.forward_ms + self.backward_ms + self.optimizer_ms + self.rest_ms


class Operator(Record):
    """One operator's time per step on the main rank's device, without the time of the operators that it calls."""

    name: str
    calls_per_step: float
    step_ms: float


class Finding(Record):
    """One result of the profile, with advice."""

    rule: str
    """The name of the rule, for programs."""
    share_fraction: float
    """Share of the step that the finding describes."""
    text: str


class Profile(RunConditions, VariantDocument):
    """The content of ``profile.json``."""

    seed: Seed
    steps: int
    """Number of steps in the profiled window, after the warm-up."""
    step_p50_ms: float
    """Median step time without the profiler, in windows just before and after the profiled window."""
    profiled_step_p50_ms: float
    """Median step time under the profiler. No throughput is computed from it."""
    ranks: tuple[StepTimes, ...]
    operators: tuple[Operator, ...]
    """The operators of the main rank that take the most time."""
    findings: tuple[Finding, ...]
    """The finding with the largest share comes first."""
    has_memory_snapshot: bool

    def largest_share(self, part: str) -> float:
        """Return the largest share of a rank's step that one of ``PARTS`` takes."""
        return max(rank.fraction(part) for rank in self.ranks)

    @property
    def overhead_fraction(self) -> float:
        """Slowdown of the step by the profiler: 0.1 for 10%."""
        return self.profiled_step_p50_ms / self.step_p50_ms - 1


NOTABLE_IMBALANCE = 0.20
"""Smallest difference between the ranks' working times, as a share of the step, that is a finding."""


@dataclass(frozen=True)
class Facts:
    """The facts from which the rules make findings."""

    ranks: Sequence[StepTimes]
    on_gpu: bool
    placement: str
    """resident, streamed or dataloader."""
    applied: Mapping[str, Any]
    """The variant's settings that were applied."""


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Return all notable findings, the largest share first. If there is none, return the finding ``computes``."""
    made = _uneven(facts)
    for rule, (part, notable, text) in RULES.items():
        shares = [rank.fraction(part) for rank in facts.ranks]
        worst = max(shares)
        if worst >= notable:
            where = f" on rank {shares.index(worst)}" if len(shares) > 1 else ""
            made.append(Finding(rule=rule, share_fraction=worst, text=text(facts, f"{worst:.0%}", where)))
    return tuple(sorted(made, key=lambda finding: -finding.share_fraction)) or (_computes(facts),)


def _waits_for_input(facts: Facts, share: str, where: str) -> str:
    if facts.applied.get("data_loading") == "dataloader":
        advice = "raise loader_workers, or set data_loading: resident, which keeps the decoded samples on the device"
    elif facts.placement == "streamed":
        advice = (
            "set train.placement: resident if the samples fit into the device's memory, or give the job more CPU cores "
            "and a faster disk. Both help, because a thread gathers each batch from the prepared file"
        )
    else:
        advice = (
            "the samples are on the device already, so gathering, augmenting and normalising them takes this time. "
            "Remove an entry of train.augment, or train a larger model"
        )
    return f"{share} of the step waits for input{where}: {advice}."


def _waits_for_others(facts: Facts, share: str, where: str) -> str:
    hidden = sum(rank.communication_hidden_ms for rank in facts.ranks)
    exposed = sum(rank.communication_ms for rank in facts.ranks)
    advice = {
        "pipeline": "raise gradient_accumulation, because more micro-batches keep more stages busy at the same time",
        "tensor": "use fewer processes per model, because each layer waits for sums over the processes, which no "
        "computation can hide",
        "fsdp": "raise train.batch_size, so that there is more to compute per gathered layer, or set "
        "reshard_after_forward: false if the memory allows it",
    }.get(
        str(facts.applied.get("parallelism")),
        "raise train.batch_size or gradient_accumulation, so that there is more to compute per reduction, or send less "
        "with communication_hook: bf16",
    )
    return (
        f"{share} of the step waits for other processes{where}, and {hidden / (hidden + exposed):.0%} of the "
        f"communication is hidden behind computation: {advice}."
    )


def _idles(facts: Facts, share: str, where: str) -> str:
    if facts.on_gpu:
        return (
            f"For {share} of the step, the GPU does nothing{where}, mostly because the host launches kernels more "
            "slowly than they run. Raise train.batch_size, or set compile: reduce-overhead or cuda_graph: true, so "
            "that the host launches less often."
        )
    return (
        f"For {share} of the step, no operator runs{where}, because Python and dispatch between small operators take "
        "this time. Raise train.batch_size, use fewer micro-batches, or set compile: default."
    )


def _updates(_: Facts, share: str, where: str) -> str:
    return (
        f"The optimizer takes {share} of the step{where}, and its time does not depend on the batch. Raise "
        "train.batch_size, keep optimizer_kernel: fused, or, with several processes, distribute the update with "
        "parallelism: zero1."
    )


RULES: Mapping[str, tuple[str, float, Callable[[Facts, str, str], str]]] = {
    "waits_for_input": ("input", 0.10, _waits_for_input),
    "waits_for_others": ("communication", 0.10, _waits_for_others),
    "idles": ("idle", 0.15, _idles),
    "updates": ("optimizer", 0.15, _updates),
}
"""Rule -> a part of the step, the smallest share that is a finding, and the text for the largest share of any rank."""


def _uneven(facts: Facts) -> list[Finding]:
    busy = [rank.busy_ms for rank in facts.ranks]
    longest, shortest = max(busy), min(busy)
    share = (longest - shortest) / max(rank.step_ms for rank in facts.ranks)
    if share < NOTABLE_IMBALANCE:
        return []
    slow, quick = busy.index(longest), busy.index(shortest)
    advice = (
        "the stages are not balanced: give the model more and smaller parts to split"
        if facts.applied.get("parallelism") == "pipeline"
        else f"the other ranks wait for rank {slow}: look for another process on its device, a slower or throttled "
        "device, or too few CPU cores"
    )
    text = f"Rank {slow} works {longest:.1f} ms a step, and rank {quick} works {shortest:.1f} ms; {advice}."
    return [Finding(rule="is_uneven", share_fraction=share, text=text)]


def _computes(facts: Facts) -> Finding:
    main = facts.ranks[0]
    share = main.busy_ms / main.step_ms
    return Finding(
        rule="computes",
        share_fraction=share,
        text=f"For {share:.0%} of the step, the device works ({main.fraction('forward'):.0%} forward, "
        f"{main.fraction('backward'):.0%} backward), and no other part takes much time. Make the arithmetic cheaper "
        "with precision: bf16, channels_last: true or compile: default if the hardware supports them, or distribute "
        "the arithmetic over several devices.",
    )
