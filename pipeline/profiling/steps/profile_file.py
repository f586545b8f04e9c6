"""The content of ``profiles/<variant>/profile.json``."""

from __future__ import annotations

from pipeline.params import Seed
from pipeline.results import Record, RunConditions, VariantDocument

WORK = ("optimizer", "forward", "backward", "rest")
"""The parts in which the device works. The optimizer comes first, because a backward node's event also covers an
optimizer step that runs inside the node."""
PARTS = (*WORK, "communication", "input", "idle")
"""All parts. An instant that fits several parts belongs to the first of them."""


class StepTimes(Record):
    """The parts of one rank's mean step under the profiler. All except hidden communication add up to ``step_ms``.

    ``pipeline.profiling.steps.trace`` defines the parts.
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

    @property
    def overhead_fraction(self) -> float:
        """Slowdown of the step by the profiler: 0.1 for 10%."""
        return self.profiled_step_p50_ms / self.step_p50_ms - 1
