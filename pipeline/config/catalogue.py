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
    """The line of a variant in params.yaml."""
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

    @property
    def key(self) -> str:
        """The key of a variant that asks for it."""
        return self.setting.partition(":")[0]

    def value(self, variant: Variant) -> object:
        """What the variant says there."""
        return getattr(variant, self.key)


def needs_gpu(_: Machine, on_gpu: bool) -> str | None:
    """``why_not`` of what is CUDA's own."""
    return None if on_gpu else "it needs a GPU, and this run is on the CPU"


_ONE_FORWARD = "its copies of a block would all run the first GPU's, whose forward pass checkpointing replaces"

CATALOGUE: tuple[Entry, ...] = (
    # Parallelism: how processes or devices share the work.
    Entry(
        name="data_parallel",
        setting="parallelism: data_parallel",
        searched_for=("DataParallel", "nn.DataParallel", "DP", "multi-GPU", "single process"),
        does="One process copies the model to every GPU in each forward pass, and a thread drives each",
        pays="nowhere any more: it shows what DistributedDataParallel replaced",
        costs="the model broadcast and the gradients gathered in each step; threads that wait for Python's lock; more "
        "memory on the first GPU than on the others",
        source="PyTorch documentation: torch.nn.DataParallel; Li et al., PyTorch Distributed, VLDB 2020",
        changes="rounding",
        asked=lambda variant: variant.parallelism == "data_parallel",
        excludes={
            "bf16": "its threads do not take over autocast's type, and would compute in float16",
            "activation_checkpointing": _ONE_FORWARD,
            "selective_checkpointing": _ONE_FORWARD,
            "checkpointing_budget": _ONE_FORWARD,
            "activation_offload": "its threads do not take over the hooks that move activations",
            "compile": "torch.compile does not follow it into its threads",
            "cuda_graph": "a graph is captured in one thread, on one GPU",
        },
        why_not=needs_gpu,
    ),
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
    Entry(
        name="pipeline",
        setting="parallelism: pipeline",
        searched_for=("pipeline parallelism", "model parallelism", "GPipe", "1F1B", "PipelineStage", "stages"),
        does="The model is cut into stages of equal cost, one a process; micro-batches follow each other through them",
        pays="when the model and its optimizer state do not fit on one GPU, and between hosts: only activations at the "
        "cuts are sent",
        costs="with p stages and m micro-batches a share (p - 1) / (m + p - 1) of the time, in which stages wait; "
        "BatchNorm sees micro-batches",
        source="Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019 (1F1B); bubble: Narayanan et "
        "al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021",
        changes="rounding",
        asked=lambda variant: variant.parallelism == "pipeline",
        excludes={
            "fp16": "each stage would find overflows, and follow a loss scale, of its own",
            "optimizer_in_backward": "a stage's gradients are complete when its last micro-batch is through",
            "auto_micro_batch": "the stages are cut, and their buffers made, for one size of micro-batch",
            "cuda_graph": "what stages send each other is not captured with a step",
        },
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
