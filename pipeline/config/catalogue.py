"""What is known of every technique before any runs: how it is asked for, what it changes, what it cannot run with.

The techniques themselves are classes under ``pipeline/techniques``, one for each entry here, of the same name. This
half imports no torch, so that a combination that cannot be is refused in the first second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.config.sections import Machine, Variant

Changes = Literal["nothing", "rounding", "statistics"]
"""nothing: the trained weights are the same, bit for bit; rounding: the same sums in another order or precision, equal
within a tolerance that the technique's test states; statistics: another random process, equal over many runs."""

WhyNot = Callable[[Machine, bool], str | None]
"""The machine, and whether the job runs on its GPUs -> why the technique cannot run there; None if it can."""


@dataclass(frozen=True)
class Entry:
    """One technique, or one form of parallelism."""

    name: str
    """As results and reports call it."""
    setting: str
    """The keys of a variant in params.yaml that ask for it, such as ``parallelism: ddp, static_graph: true``: at last
    its own, before it what it cannot be without."""
    searched_for: tuple[str, ...]
    """Names under which people look for it."""
    does: str
    pays: str
    """When it pays."""
    costs: str
    source: str
    changes: Changes
    asked: Callable[[Variant], bool]
    """Whether a variant applies it."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Name of another technique -> why the two cannot run together. Said by one of the two."""
    why_not: WhyNot = lambda machine, on_gpu: None  # noqa: ARG005
    emulated: WhyNot = lambda machine, on_gpu: None  # noqa: ARG005
    """Why the machine can do it only slower than without; train.without_native says what is done then."""

    @property
    def key(self) -> str:
        """The key of a variant that asks for it."""
        return self.setting.rpartition(", ")[2].partition(":")[0]

    def value(self, variant: Variant) -> object:
        """What the variant says there."""
        return getattr(variant, self.key)


def _without_native_bf16(machine: Machine, on_gpu: bool) -> str | None:
    if machine.gpu_native_bf16 if on_gpu else machine.cpu_native_bf16:
        return None
    if on_gpu:
        return "this GPU has no native bf16 (compute capability below 8.0) and would emulate it"
    return "this CPU has no native bf16 (AVX-512, AMX or Arm BF16) and would emulate it, several times slower"


def needs_gpu(_: Machine, on_gpu: bool) -> str | None:
    """``why_not`` of what is CUDA's own."""
    return None if on_gpu else "it needs a GPU, and this run is on the CPU"


CATALOGUE: tuple[Entry, ...] = (
    # Parallelism: how processes or devices share the work.
    Entry(
        name="ddp",
        setting="parallelism: ddp",
        searched_for=("DistributedDataParallel", "DDP", "data parallelism", "multi-GPU", "NCCL"),
        does="Every process holds the model and a share of each batch; gradients are averaged during the backward pass",
        pays="with several GPUs, and a model and its optimizer state that fit on each",
        costs="an all-reduce of all gradients a step; BatchNorm sees its own share of the batch",
        source="Li et al., PyTorch Distributed, VLDB 2020",
        changes="rounding",
        asked=lambda variant: variant.parallelism == "ddp",
    ),
    # Precision.
    Entry(
        name="bf16",
        setting="precision: bf16",
        searched_for=("bfloat16", "automatic mixed precision", "AMP", "autocast"),
        does="Matrix products and convolutions in bfloat16, parameters and sums in float32",
        pays="on GPUs from compute capability 8.0 and CPUs with AVX-512 BF16 or AMX, for nets that compute more than "
        "they move",
        costs="8 bits of mantissa in activations and their gradients",
        source="Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019",
        changes="rounding",
        asked=lambda variant: variant.precision == "bf16",
        emulated=_without_native_bf16,
    ),
    Entry(
        name="fp16",
        setting="precision: fp16",
        searched_for=("float16", "half precision", "GradScaler", "automatic mixed precision", "AMP", "autocast"),
        does="Matrix products and convolutions in float16, with a loss scale that follows the gradients",
        pays="on GPUs with Tensor Cores but without bfloat16 (V100, T4)",
        costs="a range of 6e-8 to 65504: steps whose gradients overflow are left out; a pass over the gradients a step",
        source="Micikevicius et al., Mixed Precision Training, ICLR 2018",
        changes="rounding",
        asked=lambda variant: variant.precision == "fp16",
        why_not=needs_gpu,
    ),
    # Memory.
    Entry(
        name="activation_checkpointing",
        setting="activation_checkpointing: true",
        searched_for=("gradient checkpointing", "activation recomputation", "torch.utils.checkpoint", "remat"),
        does="Blocks keep their input alone and run again in the backward pass",
        pays="when activations are most of the peak, and a larger batch or model is worth a third more arithmetic",
        costs="a second forward pass of the blocks",
        source="Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016",
        changes="nothing",
        asked=lambda variant: variant.activation_checkpointing,
    ),
    Entry(
        name="gradient_accumulation",
        setting="gradient_accumulation: 4",
        searched_for=("micro-batches", "accumulate gradients", "batch splitting"),
        does="A step's gradients are the sum over micro-batches, of which one is in memory at a time",
        pays="when the batch does not fit, and with several processes as fewer reductions a sample",
        costs="smaller kernels; BatchNorm sees micro-batches",
        source="Ott et al., Scaling Neural Machine Translation, WMT 2018",
        changes="rounding",
        asked=lambda variant: variant.gradient_accumulation > 1,
    ),
    # Speed.
    Entry(
        name="channels_last",
        setting="channels_last: true",
        searched_for=("NHWC", "memory format", "torch.channels_last"),
        does="Images and weights with the channels innermost, as convolution kernels for Tensor Cores read them",
        pays="for convolutional nets in 16 bits on GPUs, and on CPUs with oneDNN",
        costs="a copy where an operation has no kernel for it",
        source="PyTorch tutorial: Channels Last Memory Format in PyTorch",
        changes="rounding",
        asked=lambda variant: variant.channels_last,
    ),
)
"""Every technique that the package knows, in the order in which people read of them."""


def entry(name: str) -> Entry:
    """The entry of that name. Raises KeyError."""
    return _BY_NAME[name]


def asked(variant: Variant) -> tuple[Entry, ...]:
    """What the variant applies, in the catalogue's order."""
    return tuple(each for each in CATALOGUE if each.asked(variant))


def exclusions(technique: Entry) -> dict[str, str]:
    """Names of the techniques that ``technique`` cannot run with -> why, whichever of the two says it."""
    others = {other.name: other.excludes[technique.name] for other in CATALOGUE if technique.name in other.excludes}
    return others | dict(technique.excludes)


def contradiction(variant: Variant) -> str | None:
    """Why the variant's techniques cannot run together; None if they can."""
    together = asked(variant)
    for one in together:
        for other in together:
            if other.name in one.excludes:
                return (
                    f"found {one.key} {one.value(variant)!r} with {other.key} {other.value(variant)!r}, which exclude "
                    f"each other: {one.excludes[other.name]}; take one of them out."
                )
    return None


_BY_NAME = {each.name: each for each in CATALOGUE}
