"""What one technique declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from pipeline.params.machine import Machine
from pipeline.params.sections import Train

if TYPE_CHECKING:
    from pipeline.params.catalogue import Variant

Changes = Literal["nothing", "rounding", "statistics"]
"""nothing: the trained weights are the same, bit for bit; rounding: the same sums in another order or precision, equal
within a tolerance that the technique's test states; statistics: another random process, equal over many runs."""

Layer = Literal["model", "blocks", "parallelism", "compiler", "forward", "step"]
"""Where a technique acts. They apply in this order, and those of one layer in the catalogue's.

model: on the bare model, its process, or what makes its optimizer; blocks: on parts of that model; parallelism: on all
of it, which is wrapped or cut, and on what is exchanged; compiler: on what is inside of that; forward, step: around the
forward pass, around the whole step. Of two that wrap the same, the later one is the outer one.
"""

COMPILER = "compiler"
"""In ``relies_on``: the C++ compiler that torch.compile calls."""

WhyNot = Callable[[Machine, bool], str | None]
"""The machine, and whether the job runs on its GPUs -> why the technique cannot run there; None if it can."""


def _nothing(*_: object) -> None:
    """No reason why not."""


@dataclass(frozen=True)
class Entry:
    """One technique, or one form of parallelism."""

    name: str
    """As results and reports call it."""
    setting: str
    """The line of a variant in params.yaml."""
    searched_for: tuple[str, ...]
    """Names under which people look for it."""
    does: str
    pays: str
    """When it pays."""
    costs: str
    source: str
    changes: Changes
    hooks: str = ""
    """Module under ``pipeline/techniques``, and class: a job imports what it applies, for some bring much of torch.
    Empty: it is a part of what it ``needs``; or from outside, where an entry point names the class."""
    layer: Layer = "step"
    asked: Callable[[Variant], bool] | None = None
    """Whether a variant applies it; None: where it says what ``setting`` says, or has the name under ``extra``."""
    details: tuple[str, ...] = ()
    """Further keys of a variant, which only say how it works."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Name of another technique -> why the two cannot run together. Said by one of the two."""
    needs: tuple[str, ...] = ()
    """Values of ``parallelism``, of which it needs one; empty: it needs none."""
    why_not: WhyNot = _nothing
    """Why the machine cannot do it; it is refused there."""
    emulated: WhyNot = _nothing
    """Why the machine can do it only slower than without; train.without_native says what is done then."""
    why_not_with: Callable[[Train], str | None] = _nothing
    """The job -> why the technique cannot be applied to it, on any machine; None if it can."""
    why_not_value: Mapping[object, WhyNot] = field(default_factory=dict)
    """Like ``why_not``, for single values of the key."""
    why_not_beside: Callable[[Variant, bool], str | None] = _nothing
    """The whole variant, and whether the job runs on GPUs -> why the technique cannot run beside what else is asked for
    there, where that hangs on more than names."""
    roundoff: float = 2.0**-24
    """Of what changes rounding: the unit roundoff (half the distance from 1 to the next number) of the coarsest format
    in which it computes or sends; float32's, unless it says otherwise. ``verify`` derives its bounds from it."""
    repeats: bool = True
    """Whether the same seed gives the same weights again, bit for bit."""
    relies_on: tuple[str, ...] = ()
    """On whose versions its numbers depend, beside torch's: distributions of the extras, and ``COMPILER``."""
    options: type[BaseModel] | None = None
    """Of a technique from outside: what ``extra: {name: options}`` may hold. None: nothing."""

    group: str = "Other packages"
    """The heading under which people read of it."""

    @property
    def key(self) -> str:
        """The key of a variant that asks for it."""
        return "extra" if self.setting.startswith("extra:") else self.setting.partition(":")[0]

    def asked_by(self, variant: Variant) -> bool:
        """Whether the variant applies it."""
        if self.asked:
            return self.asked(variant)
        if self.key == "extra":
            return self.name in variant.extra
        return self.setting == f"{self.key}: {str(self.value(variant)).lower()}"

    def value(self, variant: Variant) -> object:
        """What the variant says there."""
        return getattr(variant, self.key)

    def refusal(self, variant: Variant, machine: Machine, on_gpu: bool) -> str | None:
        """Why what the variant says there cannot run on the machine; None if it can."""
        of_value = self.why_not_value.get(self.value(variant)) if self.why_not_value else None
        here = self.why_not(machine, on_gpu) or (of_value(machine, on_gpu) if of_value else None)
        return here or self.why_not_beside(variant, on_gpu)

    def label(self, variant: Variant) -> str:
        """The name, and what the variant says there where the name does not tell it.

        >>> from pipeline.params import Variant, asked
        >>> variant = Variant(precision="bf16", gradient_accumulation=4)
        >>> [each.label(variant) for each in asked(variant)]
        ['bf16', 'gradient_accumulation=4']
        """
        value = self.value(variant)
        told = isinstance(value, bool) or (isinstance(value, str) and self.setting == f"{self.key}: {value}")
        return self.name if told else f"{self.name}={value:g}" if isinstance(value, float) else f"{self.name}={value}"


def needs_gpu(_: Machine, on_gpu: bool) -> str | None:
    """``why_not`` of what is CUDA's own."""
    return None if on_gpu else "it needs a GPU, and this run is on the CPU"


def without_native_bf16(machine: Machine, on_gpu: bool) -> str | None:
    if machine.gpu_native_bf16 if on_gpu else machine.cpu_native_bf16:
        return None
    if on_gpu:
        return "this GPU has no native bf16 (compute capability below 8.0) and would emulate it"
    return "this CPU has no native bf16 (AVX-512, AMX or Arm BF16) and would emulate it, several times slower"
