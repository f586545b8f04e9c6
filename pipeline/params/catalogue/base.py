"""The declaration of one technique."""

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
"""How a technique changes the trained weights. nothing: they are the same, bit for bit. rounding: the same sums are
computed in another order or precision, so the weights agree within a tolerance that the technique's test states.
statistics: gradients or samples differ, so only averages over several runs agree, if at all."""

Layer = Literal["model", "blocks", "parallelism", "compiler", "forward", "step"]
"""Where a technique acts. Layers are applied in this order; within a layer, techniques are applied in the catalogue's
order.

model: the bare model, settings of its process, or the choice of optimizer. blocks: parts of the model. parallelism:
the whole model, which is wrapped or split, and the communication. compiler: the model inside the parallel wrapper.
forward: around the forward pass. step: around the whole step. If two techniques wrap the same part, the later technique
is outermost.
"""

COMPILER = "compiler"
"""The entry in ``relies_on`` that stands for the C++ compiler, which torch.compile calls."""

WhyNot = Callable[[Machine, bool], str | None]
"""(Machine, whether the job runs on GPUs) -> the reason why the technique cannot run on the machine; None if it can."""


def _nothing(*_: object) -> None:
    """Return None: there is no reason against the technique."""


@dataclass(frozen=True)
class Entry:
    """One technique, or one form of parallelism."""

    name: str
    """The technique's name in results and reports."""
    setting: str
    """The line of a variant in params.yaml that asks for the technique. With ``requested_if``, the line is only an
    example, because other values ask for the technique too."""
    searched_for: tuple[str, ...]
    """Names under which people look for the technique."""
    does: str
    pays: str
    """When the technique pays."""
    costs: str
    source: str
    changes: Changes
    implementation: str = ""
    """The technique's module under ``pipeline/techniques`` and its class: ``module.Class``. A job imports only the
    modules of the techniques that it applies, because some import much of torch. Empty if the technique has no class of
    its own, because the plan, the ``placement`` or a parallelism in ``needs`` does the work. Also empty for another
    package's technique, whose entry point names the class."""
    layer: Layer = "step"
    requested_if: Callable[[Variant], bool] | None = None
    """Returns whether a variant applies the technique. None: a variant applies it if it has the line ``setting``, or
    the technique's name under ``extra``."""
    details: tuple[str, ...] = ()
    """Further keys of a variant, which only configure the technique."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """The name of another technique, or a key that several techniques share -> the reason why they cannot run with this
    technique. Only one of the two techniques has to declare the exclusion."""
    needs: tuple[str, ...] = ()
    """The technique needs one of these values of ``parallelism``; empty if it needs no parallelism."""
    why_not: WhyNot = _nothing
    """Returns why the machine cannot run the technique; None if it can. If it cannot, the plan refuses the variant."""
    emulated: WhyNot = _nothing
    """Returns why the machine can only emulate the technique; None if no emulation is needed. The emulation is slower
    than training without the technique. ``train.without_native`` decides whether an emulated technique is skipped,
    refused or run."""
    why_not_with: Callable[[Train], str | None] = _nothing
    """Job -> the reason why the technique cannot be applied to this job on any machine; None if it can."""
    why_not_value: Mapping[object, WhyNot] = field(default_factory=dict)
    """Value of the key -> a function like ``why_not`` for this value."""
    why_not_beside: Callable[[Variant, bool], str | None] = _nothing
    """(Variant, whether the job runs on GPUs) -> the reason why the technique cannot run with the variant's other
    settings; None if it can. Used for conditions that ``excludes`` cannot express."""
    done_by: tuple[str, ...] = ()
    """Values of ``parallelism`` that already do the technique's work, so that its class is not used."""
    placement: Literal["resident", "streamed", "dataloader"] | None = None
    """The placement of the training data if the technique is applied; None: ``train.placement`` decides."""
    evaluates_whole: bool = False
    """True if evaluation cannot run the model that a process trains. For example, this model is only one stage, or must
    be averaged with other processes' models. Evaluation then runs the single-device model, with the state that a
    checkpoint would have. ``Technique.for_evaluation`` can change this model."""
    shared_rng: bool = False
    """Whether the processes that hold one model together must draw the same random numbers."""
    max_step_skew: int = 0
    """The largest number of steps by which a process can be ahead of another. It is above 0 if processes do not wait
    for each other in every step."""
    recomputes: bool = False
    """Whether the technique makes a step repeat floating-point operations."""
    needs_measuring: bool = False
    """Whether the technique's memory must be measured, because the estimate with fake tensors cannot predict it."""
    roundoff: float = 2.0**-24
    """The unit roundoff (half the distance from 1 to the next number) of the coarsest format in which the technique
    computes or sends numbers; default: float32. Used if ``changes`` is rounding: ``verify`` derives its bounds from
    this value."""
    repeats: bool = True
    """Whether the same seed gives the same weights again, bit for bit."""
    without_effect: Callable[[Variant], dict[str, Any]] | None = None
    """Variant -> changed settings with which the technique runs but does not affect the weights; ``verify`` tries these
    settings. None if there are no such settings."""
    relies_on: tuple[str, ...] = ()
    """The software, besides torch, whose versions affect the results: names of optional packages, or ``COMPILER``."""
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
        """Return why the technique cannot run on the machine, or with the variant's other settings; None if it can."""
        of_value = self.why_not_value.get(self.value(variant)) if self.why_not_value else None
        here = self.why_not(machine, on_gpu) or (of_value(machine, on_gpu) if of_value else None)
        return here or self.why_not_beside(variant, on_gpu)

    def excluding(self, other: Entry) -> str | None:
        """Return why ``other`` cannot run with this technique; None if this entry does not exclude it."""
        return self.excludes.get(other.name) or self.excludes.get(other.key)

    def label(self, variant: Variant) -> str:
        """Return the technique's name, followed by the variant's value if the name does not imply this value.

        >>> from pipeline.params import Variant, requested
        >>> variant = Variant(precision="bf16", gradient_accumulation=4)
        >>> [each.label(variant) for each in requested(variant)]
        ['bf16', 'gradient_accumulation=4']
        """
        value = self.value(variant)
        told = isinstance(value, bool) or value == "default" or (isinstance(value, str) and self.requested_if is None)
        return self.name if told else f"{self.name}={value:g}" if isinstance(value, float) else f"{self.name}={value}"


def needs_gpu(_: Machine, on_gpu: bool) -> str | None:
    """Return why a technique that needs CUDA cannot run; None if it can. Used as ``Entry.why_not``."""
    return None if on_gpu else "it needs a GPU, and this run is on the CPU"


def needs_package(package: str, extra: str) -> WhyNot:
    """Return the ``Entry.why_not`` of a technique that needs ``package``, which pip's extra ``extra`` installs."""
    reason = f"{package} is not installed (pip install '.[{extra}]')"
    return lambda machine, _: None if package in machine.installed else reason


def without_native_bf16(machine: Machine, on_gpu: bool) -> str | None:
    if machine.gpu_native_bf16 if on_gpu else machine.cpu_native_bf16:
        return None
    if on_gpu:
        return "this GPU has no native bf16 (compute capability below 8.0) and would emulate it"
    return "this CPU has no native bf16 (AVX-512 BF16, AMX or Arm BF16) and would emulate it, several times slower"
