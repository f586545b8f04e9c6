"""What is known of every technique before any runs: how it is asked for, what it changes, what it cannot run with.

The techniques themselves are classes under ``pipeline/techniques``, one for each entry here, of the same name; fsdp's
own options are a part of its class. This half imports no torch, so that a combination that cannot be is refused in the
first second.
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
    needs: tuple[str, ...] = ()
    """Values of ``parallelism``, of which it needs one; empty: it needs none."""
    why_not: WhyNot = lambda machine, on_gpu: None  # noqa: ARG005

    @property
    def key(self) -> str:
        """The key of a variant that asks for it."""
        return self.setting.partition(":")[0]

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
        return self.name if told else f"{self.name}={value}"


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
    Entry(
        name="zero1",
        setting="parallelism: zero1",
        searched_for=("ZeRO", "ZeRO-1", "ZeroRedundancyOptimizer", "sharded optimizer state", "DeepSpeed stage 1"),
        does="ddp, but every process keeps the optimizer state of its share of the parameters alone, updates these and "
        "sends them to the others",
        pays="where the optimizer's state is what does not fit (AdamW: two values a parameter)",
        costs="a broadcast of all parameters a step, after the update, which nothing hides",
        source="Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020",
        changes="rounding",
        asked=lambda variant: variant.parallelism == "zero1",
        excludes={
            "optimizer_in_backward": "the shares of the new parameters are sent on after one update of all of them",
            "cuda_graph": "its update sends parameters from the host's side, which no graph holds",
        },
    ),
    Entry(
        name="fsdp",
        setting="parallelism: fsdp",
        searched_for=(
            "FSDP",
            "FSDP2",
            "fully_shard",
            "FullyShardedDataParallel",
            "ZeRO-3",
            "DeepSpeed stage 3",
            "HSDP",
        ),
        does="Every process holds a share of parameters, gradients and optimizer state, gathers a block's parameters "
        "when it runs, and scatters their gradients; `replicas: N` does so in N groups, which average as by ddp",
        pays="where model and optimizer state do not fit on one GPU",
        costs="about half as much communication again as ddp, in smaller pieces; BatchNorm sees its own share of the "
        "batch",
        source="Zhao et al., PyTorch FSDP, VLDB 2023; Rajbhandari et al., ZeRO, SC 2020",
        changes="rounding",
        asked=lambda variant: variant.parallelism == "fsdp",
        excludes={
            "cuda_graph": "it gathers and frees parameters from the host's side, which no graph holds",
            "auto_micro_batch": "a step that breaks off leaves parameters half gathered",
        },
    ),
    Entry(
        name="keep_gathered",
        setting="reshard_after_forward: false",
        searched_for=("reshard_after_forward", "SHARD_GRAD_OP", "ZeRO-2"),
        does="A block's gathered parameters stay from its forward to its backward pass",
        pays="where fsdp's communication is what a step waits for, and the whole parameters fit",
        costs="the memory of the whole parameters while a step runs",
        source="PyTorch documentation: torch.distributed.fsdp.fully_shard",
        changes="nothing",
        asked=lambda variant: not variant.reshard_after_forward,
        needs=("fsdp",),
    ),
    Entry(
        name="parameter_precision",
        setting="parameter_precision: bf16",
        searched_for=("MixedPrecisionPolicy", "param_dtype", "bf16 parameters", "FSDP mixed precision"),
        does="Parameters are gathered and used in bfloat16, and gradients summed in float32; the shares that the "
        "optimizer updates stay float32, and BatchNorm's are gathered so too",
        pays="on GPUs from compute capability 8.0: half the bytes of every gathering, and matrix products in bfloat16",
        costs="8 bits of mantissa in parameters, activations and their gradients",
        source="PyTorch documentation: torch.distributed.fsdp.MixedPrecisionPolicy",
        changes="rounding",
        asked=lambda variant: variant.parameter_precision == "bf16",
        needs=("fsdp",),
        excludes={"fp16": "two precisions of 16 bits would meet in one product"},
    ),
    Entry(
        name="cpu_offload",
        setting="cpu_offload: true",
        searched_for=("CPUOffloadPolicy", "ZeRO-Offload", "parameter offload"),
        does="Shares of parameters, gradients and optimizer state lie in pinned host memory, where the update runs",
        pays="as a last resort, where even the shares do not fit",
        costs="parameters and gradients cross PCIe every step, and the update runs on the CPU",
        source="Ren et al., ZeRO-Offload, USENIX ATC 2021",
        changes="rounding",
        asked=lambda variant: variant.cpu_offload,
        needs=("fsdp",),
        excludes={"fp16": "the loss scale lies on the GPU, and the gradients that it divides do not"},
        why_not=needs_gpu,
    ),
    Entry(
        name="tensor",
        setting="parallelism: tensor",
        searched_for=("tensor parallelism", "TP", "Megatron", "parallelize_module", "DTensor", "model parallelism"),
        does="Pairs of linear layers are cut along the width between them: every process computes its columns of the "
        "first and its rows of the second; `replicas: N` does so in N groups, which share the batch as by ddp",
        pays="for transformers with wide MLPs on GPUs of one host, joined by NVLink",
        costs="an all-reduce of activations a pair in each direction, which nothing hides; all else of the model is "
        "held and computed by every process",
        source="Shoeybi et al., Megatron-LM, 2019",
        changes="rounding",
        asked=lambda variant: variant.parallelism == "tensor",
        excludes={
            "fp16": "each process would find the overflows of its own share of the gradients, and scale by those",
            "cuda_graph": "its collectives are not known to be capturable",
            "auto_micro_batch": "a process that ran out of memory leaves the others waiting in the middle of a pair",
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
