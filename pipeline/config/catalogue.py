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

    group: str
    """The heading that it stands under."""
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
    needs: tuple[str, ...] = ()
    """Values of ``parallelism``, of which it needs one; empty: it needs none."""
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

    def label(self, variant: Variant) -> str:
        """The name, and what the variant says there where the name does not tell it.

        >>> [each.label(variant) for variant in [Variant(precision="bf16", gradient_accumulation=4)] for each in
        ...  asked(variant)]
        ['bf16', 'gradient_accumulation=4']
        """
        value = self.value(variant)
        told = isinstance(value, bool) or (isinstance(value, str) and self.setting == f"{self.key}: {value}")
        return self.name if told else f"{self.name}={value:g}" if isinstance(value, float) else f"{self.name}={value}"


def _without_native_bf16(machine: Machine, on_gpu: bool) -> str | None:
    if machine.gpu_native_bf16 if on_gpu else machine.cpu_native_bf16:
        return None
    if on_gpu:
        return "this GPU has no native bf16 (compute capability below 8.0) and would emulate it"
    return "this CPU has no native bf16 (AVX-512, AMX or Arm BF16) and would emulate it, several times slower"


def needs_gpu(_: Machine, on_gpu: bool) -> str | None:
    """``why_not`` of what is CUDA's own."""
    return None if on_gpu else "it needs a GPU, and this run is on the CPU"


_OVER_DDP = ("ddp", "zero1")
_SHARE_OUT_BATCHES = ("ddp", "zero1", "fsdp", "pipeline", "tensor")

CATALOGUE: tuple[Entry, ...] = (
    Entry(
        group="Parallelism",
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
        group="Communication",
        name="bucket_mb",
        setting="bucket_mb: 50",
        searched_for=("bucket_cap_mb", "DDP bucket size", "gradient bucketing"),
        does="DDP reduces gradients in buckets of so many MiB instead of 25",
        pays="larger where every message costs much (many processes, slow networks), smaller where the backward pass "
        "is short and reductions should begin early",
        costs="larger: reductions begin later and overlap less; smaller: more messages",
        source="Li et al., PyTorch Distributed, VLDB 2020",
        changes="rounding",
        asked=lambda variant: variant.bucket_mb is not None,
        needs=_OVER_DDP,
    ),
    Entry(
        group="Communication",
        name="gradients_beside_buckets",
        setting="gradient_as_bucket_view: false",
        searched_for=("gradient_as_bucket_view",),
        does="Gradients are tensors of their own, copied into DDP's buckets and back; torch's default, and not ours",
        pays="never by itself: it is there to show what gradient_as_bucket_view saves",
        costs="memory for the gradients once more, and the copies",
        source="PyTorch documentation: DistributedDataParallel",
        changes="nothing",
        asked=lambda variant: not variant.gradient_as_bucket_view,
        needs=_OVER_DDP,
    ),
    Entry(
        group="Communication",
        name="static_graph",
        setting="static_graph: true",
        searched_for=("DDP static graph", "find_unused_parameters", "unused parameters"),
        does="DDP finds out in the first step which parameters are used, how often, and takes it for granted after",
        pays="for models with parameters that no step uses, which DDP refuses otherwise",
        costs="a first step that reduces only after its backward pass; a model that changes its mind fails",
        source="PyTorch documentation: DistributedDataParallel",
        changes="rounding",
        asked=lambda variant: variant.static_graph,
        needs=_OVER_DDP,
        excludes=dict.fromkeys(
            ("gradient_accumulation", "auto_micro_batch"),
            "DDP with a static graph fails when its first backward pass is not to be reduced (PyTorch issue 143580)",
        ),
    ),
    Entry(
        group="Communication",
        name="sync_batchnorm",
        setting="sync_batchnorm: true",
        searched_for=("SyncBatchNorm", "synchronized batch normalization", "cross-GPU batch norm"),
        does="BatchNorm takes mean and variance over the micro-batches of all processes together",
        pays="when a process's share of the batch is so small that its statistics are poor",
        costs="two collectives a BatchNorm and step, in the midst of the forward and backward pass",
        source="Zhang et al., Context Encoding for Semantic Segmentation, CVPR 2018",
        changes="statistics",
        asked=lambda variant: variant.sync_batchnorm,
        needs=_OVER_DDP,
        excludes={
            "activation_checkpointing": "a block that runs again must not count its batch again, and SyncBatchNorm "
            "cannot be kept from it",
            "selective_checkpointing": "a block that runs again must not count its batch again, and SyncBatchNorm "
            "cannot be kept from it",
            "auto_micro_batch": "a process that runs out of memory would leave the others waiting for its statistics",
        },
        why_not=needs_gpu,
    ),
    Entry(
        group="Communication",
        name="fp16_compression",
        setting="communication_hook: fp16",
        searched_for=("fp16_compress_hook", "gradient compression", "DDP communication hook"),
        does="DDP's gradients travel in float16, divided by the number of processes first",
        pays="where the network is what a step waits for",
        costs="gradients below 6e-8 become zero and above 65504 infinite, unless fp16's loss scale keeps them between",
        source="PyTorch documentation: DDP Communication Hooks",
        changes="rounding",
        asked=lambda variant: variant.communication_hook == "fp16",
        needs=_OVER_DDP,
    ),
    Entry(
        group="Communication",
        name="bf16_compression",
        setting="communication_hook: bf16",
        searched_for=("bf16_compress_hook", "gradient compression", "DDP communication hook"),
        does="DDP's gradients travel in bfloat16, divided by the number of processes first",
        pays="where the network is what a step waits for",
        costs="8 bits of mantissa in every gradient and in their sums",
        source="PyTorch documentation: DDP Communication Hooks",
        changes="rounding",
        asked=lambda variant: variant.communication_hook == "bf16",
        needs=_OVER_DDP,
    ),
    Entry(
        group="Communication",
        name="powersgd",
        setting="communication_hook: powersgd",
        searched_for=("PowerSGD", "powerSGD_hook", "low-rank gradient compression"),
        does="Matrices of gradients travel as factors of rank 2, found by a power iteration from the last step's; what "
        "they miss is added to the next step's gradients. It begins when the learning rate has warmed up",
        pays="where the network is what a step waits for, and 16 bits do not compress enough",
        costs="accuracy; two copies of the gradients' memory; products and reductions one after the other",
        source="Vogels et al., PowerSGD, NeurIPS 2019",
        changes="statistics",
        asked=lambda variant: variant.communication_hook == "powersgd",
        needs=_OVER_DDP,
        excludes={
            "channels_last": "torch's PowerSGD views gradients as matrices, which the strides of NHWC do not allow",
            "fp16": "an overflow, whose step the loss scale leaves out, would stay in what PowerSGD remembers for good",
        },
    ),
    Entry(
        group="Communication",
        name="post_local_sgd",
        setting="communication_hook: post_local_sgd",
        searched_for=(
            "post-local SGD",
            "PostLocalSGDOptimizer",
            "local SGD",
            "model averaging",
            "PeriodicModelAverager",
        ),
        does="Once the learning rate has warmed up, each process steps by its own gradients, and the weights are "
        "averaged every 4 steps. What is evaluated and saved is the average",
        pays="where the network is what a step waits for; a quarter of the reductions is left",
        costs="accuracy, the more processes the more; a copy of the model at each evaluation; larger checkpoints",
        source="Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020",
        changes="statistics",
        asked=lambda variant: variant.communication_hook == "post_local_sgd",
        needs=("ddp",),
    ),
    Entry(
        group="Communication",
        name="weak_scaling",
        setting="scaling: weak",
        searched_for=("linear scaling rule", "large minibatch", "batch size a GPU", "learning rate scaling"),
        does="Each data-parallel process takes train.batch_size samples a step, so the global batch grows with them; "
        "the learning rate is multiplied by their number and warmed up",
        pays="when a share of the batch would be too small for a device to be busy",
        costs="fewer, larger steps: accuracy, beyond some batch; another job than the baseline's",
        source="Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017",
        changes="statistics",
        asked=lambda variant: variant.scaling == "weak",
        needs=_SHARE_OUT_BATCHES,
    ),
    # Precision.
    Entry(
        group="Precision",
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
        group="Precision",
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
    Entry(
        group="Memory",
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
        group="Memory",
        name="gradient_accumulation",
        setting="gradient_accumulation: 4",
        searched_for=("micro-batches", "accumulate gradients", "batch splitting"),
        does="A step's gradients are the sum over micro-batches, of which one is in memory at a time",
        pays="when the batch does not fit, and with several processes as fewer reductions a sample",
        costs="smaller kernels; BatchNorm sees micro-batches",
        source="Ott et al., Scaling Neural Machine Translation, WMT 2018",
        changes="rounding",
        asked=lambda variant: variant.gradient_accumulation not in (1, "auto"),
    ),
    Entry(
        group="Memory",
        name="auto_micro_batch",
        setting="gradient_accumulation: auto",
        searched_for=("automatic batch size", "auto_find_batch_size", "batch size finder", "out of memory", "OOM"),
        does="Before the training, a trial step is divided into ever more micro-batches until every process has the "
        "memory for it; batch, learning rate and result stay what was asked",
        pays="when the same job has to fit on different devices",
        costs="a few trial steps; what gradient_accumulation costs, where it comes to that",
        source="Ott et al., Scaling Neural Machine Translation, WMT 2018",
        changes="rounding",
        asked=lambda variant: variant.gradient_accumulation == "auto",
        excludes=dict.fromkeys(
            ("fsdp", "tensor", "pipeline"),
            "a process that runs out of memory would leave the others waiting in the midst of their forward pass",
        ),
    ),
    Entry(
        group="Speed",
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
    apart = {other.name: _why_apart(technique, other) or _why_apart(other, technique) for other in CATALOGUE}
    others = {other.name: other.excludes[technique.name] for other in CATALOGUE if technique.name in other.excludes}
    return {name: reason for name, reason in apart.items() if reason} | others | dict(technique.excludes)


def _why_apart(technique: Entry, parallelism: Entry) -> str | None:
    """Why the technique cannot run in that parallelism, which is none of those that it needs."""
    if not technique.needs or parallelism.key != "parallelism" or parallelism.name in technique.needs:
        return None
    return f"{technique.name} needs parallelism: {' or '.join(technique.needs)}"


def misplaced(variant: Variant) -> dict[str, str]:
    """Key -> what is wrong with it, for what needs another parallelism than the variant's."""
    return {
        each.key: f"found {each.value(variant)!r} with parallelism {variant.parallelism!r}; it needs "
        f"{' or '.join(map(repr, each.needs))}: set that, or take {each.key} out."
        for each in asked(variant)
        if each.needs and variant.parallelism not in each.needs
    }


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
