"""What a profile says, as ``profiles/<variant>/profile.json``."""

from __future__ import annotations

from pipeline.params import Seed
from pipeline.profiling.steps.trace import PARTS, Times
from pipeline.results import Record, Setup, VariantDocument

_MS = 1e-6
"""Nanoseconds to milliseconds."""


class StepTimes(Record):
    """Where one rank's mean step went, under the profiler. The parts but the hidden communication add up to the step.

    ``pipeline.profiling.steps.trace`` says what belongs to which part.
    """

    step_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    rest_ms: float
    """Work of the step that is none of these: gradients set to zero, a CUDA graph of the whole step."""
    communication_ms: float
    """Exposed: nothing else goes on."""
    input_ms: float
    idle_ms: float
    communication_hidden_ms: float
    """Beside the partition: during work."""

    def fraction(self, part: str) -> float:
        """Share of the step that one of ``PARTS`` takes."""
        value: float = getattr(self, f"{part}_ms")
        return value / self.step_ms

    @property
    def busy_ms(self) -> float:
        """The device works on this rank's own share."""
        return self.forward_ms + self.backward_ms + self.optimizer_ms + self.rest_ms

    @classmethod
    def of(cls, times: Times) -> StepTimes:
        """The mean over the window's steps."""
        scale = _MS / times.steps
        parts = {f"{part}_ms": times.parts[part] * scale for part in PARTS}
        return cls(step_ms=times.whole * scale, communication_hidden_ms=times.hidden * scale, **parts)


class Operator(Record):
    """What one operator took of the main rank's device a step, without the operators that it calls."""

    name: str
    calls_per_step: float
    step_ms: float


class Finding(Record):
    """What a person should know of the profile, and do about it."""

    rule: str
    """Its name, for programs."""
    share_fraction: float
    """Of the step."""
    text: str


class Profile(Setup, VariantDocument):
    """``profile.json``."""

    seed: Seed
    steps: int
    """In the profiled window, after the warm-up."""
    step_p50_ms: float
    """Without the profiler, in windows just before and after."""
    profiled_step_p50_ms: float
    """Under the profiler. No throughput is computed from it."""
    ranks: tuple[StepTimes, ...]
    operators: tuple[Operator, ...]
    """The longest of the main rank."""
    findings: tuple[Finding, ...]
    """The weightiest first."""
    has_memory_snapshot: bool

    @property
    def overhead_fraction(self) -> float:
        """By how much the profiler slowed the step down."""
        return self.profiled_step_p50_ms / self.step_p50_ms - 1
