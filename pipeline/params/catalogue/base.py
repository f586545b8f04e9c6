"""What one technique declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from pipeline.params.machine import Machine
from pipeline.params.sections import Train

if TYPE_CHECKING:
    from pipeline.params.catalogue import Variant

Changes = Literal["nothing", "rounding", "statistics"]
"""nothing: the trained weights are the same, bit for bit; rounding: the same sums in another order or precision, equal
within a tolerance that the technique's test states; statistics: another random process, equal on average over runs."""

Layer = Literal["model", "blocks", "parallelism", "compiler", "forward", "step"]
"""Where a technique acts. Layers apply in this order; techniques of one layer apply in the catalogue's order.

model: the bare model, its process, or the choice of optimizer; blocks: parts of the model; parallelism: the whole
model, which is wrapped or split, and the communication; compiler: the model inside the parallel wrapper; forward:
around the forward pass; step: around the whole step.
Of two techniques that wrap the same part, the later one is outermost.
"""

COMPILER = "compiler"
"""Value in ``relies_on`` for the C++ compiler that torch.compile calls."""

WhyNot = Callable[[Machine, bool], str | None]
"""The machine, and whether the job runs on its GPUs -> why the technique cannot run there; None if it can."""


def _nothing(*_: object) -> None:
    """Return None: there is no reason against the technique."""


@dataclass(frozen=True)
class Entry:
    """One technique, or one form of parallelism."""

    name: str
    """The name in results and reports."""
    setting: str
    """The line of a variant in params.yaml that asks for the technique; no other does, without ``requested_if``."""
    searched_for: tuple[str, ...]
    """Names under which people look for it."""
    does: str
    pays: str
    """When it pays."""
    costs: str
    source: str
    changes: Changes
    implementation: str = ""
    """Module under ``pipeline/techniques``, and class. A job imports only what it applies, as some import much of
    torch. Empty if the technique is part of the one it ``needs`` or of the plan, is a ``placement``, or is from another
    package, whose entry point names the class."""
    layer: Layer = "step"
    requested_if: Callable[[Variant], bool] | None = None
    """Whether a variant applies the technique. None: if the variant has ``setting``, or the name under ``extra``."""
    details: tuple[str, ...] = ()
    """Further keys of a variant, which only configure the technique."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Name of another technique -> why the two cannot run together. One of the two declares it."""
    needs: tuple[str, ...] = ()
    """Values of ``parallelism``, one of which the technique needs; empty if it needs none."""
    why_not: WhyNot = _nothing
    """Why the machine cannot run the technique, which is then refused."""
    emulated: WhyNot = _nothing
    """Why the machine only emulates the technique, slower than without it; train.without_native decides what to do."""
    why_not_with: Callable[[Train], str | None] = _nothing
    """The job -> why the technique cannot be applied to it, on any machine; None if it can."""
    why_not_value: Mapping[object, WhyNot] = field(default_factory=dict)
    """Like ``why_not``, for single values of the key."""
    why_not_beside: Callable[[Variant, bool], str | None] = _nothing
    """The whole variant, and whether the job runs on GPUs -> why the technique cannot run with the variant's other
    settings, for conditions that ``excludes`` cannot express; None if it can."""
    done_by: tuple[str, ...] = ()
    """Values of ``parallelism`` that already do what the technique does; with them, it changes nothing more."""
    placement: Literal["resident", "streamed", "dataloader"] | None = None
    """Where the training reads the data set from; None: as ``train.placement`` says."""
    evaluates_whole: bool = False
    """True if evaluation cannot run the trained model, for example because it is a stage, or one of several to average.
    Evaluation then runs the single-device model, as ``Technique.for_evaluation`` changes it, with the state that a
    checkpoint reads."""
    shared_rng: bool = False
    """Whether the processes that hold one model together must draw the same random numbers."""
    max_step_skew: int = 0
    """How many steps a process may be ahead of another: above 0 if some steps do not wait for all."""
    recomputes: bool = False
    """Whether the technique makes a step repeat floating-point operations."""
    needs_measuring: bool = False
    """Whether the technique's memory has to be measured, because the estimate on fake tensors does not foresee it."""
    roundoff: float = 2.0**-24
    """If ``changes`` is rounding: the unit roundoff (half the distance from 1 to the next number) of the coarsest
    format in which the technique computes or sends; by default float32's. ``verify`` derives its bounds from it."""
    repeats: bool = True
    """Whether the same seed gives the same weights again, bit for bit."""
    without_effect: Callable[[Variant], dict[str, Any]] | None = None
    """The variant -> changes of its settings with which the technique is applied but has no effect on the weights;
    ``verify`` tries them. None if there are none."""
    relies_on: tuple[str, ...] = ()
    """Software besides torch on whose versions the numbers depend: distributions of the extras, and ``COMPILER``."""
    options: type[BaseModel] | None = None
    """For another package's technique: the options that ``extra: {name: options}`` may hold. None: no options."""

    group: str = "Other packages"
    """The heading under which lists show the technique."""

    @property
    def key(self) -> str:
        """The key of a variant that asks for the technique."""
        return "extra" if self.setting.startswith("extra:") else self.setting.partition(":")[0]

    def requested_by(self, variant: Variant) -> bool:
        """Return whether the variant applies the technique."""
        if self.requested_if:
            return self.requested_if(variant)
        if self.key == "extra":
            return self.name in variant.extra
        return self.setting == f"{self.key}: {str(self.value(variant)).lower()}"

    def value(self, variant: Variant) -> object:
        """Return the variant's value of ``key``."""
        return getattr(variant, self.key)

    def why_refused(self, variant: Variant, machine: Machine, on_gpu: bool) -> str | None:
        """Return why the variant's setting cannot run on the machine; None if it can."""
        of_value = self.why_not_value.get(self.value(variant)) if self.why_not_value else None
        here = self.why_not(machine, on_gpu) or (of_value(machine, on_gpu) if of_value else None)
        return here or self.why_not_beside(variant, on_gpu)

    def label(self, variant: Variant) -> str:
        """Return the name, with the variant's value where the name does not imply it.

        >>> from pipeline.params import Variant, requested
        >>> variant = Variant(precision="bf16", gradient_accumulation=4)
        >>> [each.label(variant) for each in requested(variant)]
        ['bf16', 'gradient_accumulation=4']
        """
        value = self.value(variant)
        told = isinstance(value, bool) or value == "default" or (isinstance(value, str) and self.requested_if is None)
        return self.name if told else f"{self.name}={value:g}" if isinstance(value, float) else f"{self.name}={value}"


def needs_gpu(_: Machine, on_gpu: bool) -> str | None:
    """``why_not`` of techniques that only CUDA has."""
    return None if on_gpu else "it needs a GPU, and this run is on the CPU"


def without_native_bf16(machine: Machine, on_gpu: bool) -> str | None:
    if machine.gpu_native_bf16 if on_gpu else machine.cpu_native_bf16:
        return None
    if on_gpu:
        return "this GPU has no native bf16 (compute capability below 8.0) and would emulate it"
    return "this CPU has no native bf16 (AVX-512, AMX or Arm BF16) and would emulate it, several times slower"
