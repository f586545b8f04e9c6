"""What is known of every technique before any runs: how it is asked for, what it changes, what it cannot run with.

The techniques themselves are classes under ``pipeline/techniques``, one for each entry here, of the same name; fsdp's
own options are a part of its class. Other packages can bring more (``outside``). This half imports no torch, so that a
combination that cannot be is refused in the first second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from pipeline.config import outside
from pipeline.config.errors import ConfigError
from pipeline.config.sections import GRAPH_WARMUP_STEPS, Machine, Train, Variant

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
    emulated: WhyNot = lambda machine, on_gpu: None  # noqa: ARG005
    """Why the machine can do it only slower than without; train.without_native says what is done then."""
    why_not_with: Callable[[Train], str | None] = lambda train: None  # noqa: ARG005
    """The job -> why the technique cannot be applied to it, on any machine; None if it can."""
    why_not_value: Mapping[object, WhyNot] = field(default_factory=dict)
    """The same for single values of the key."""
    roundoff: float = 2.0**-24
    """Of what changes rounding: the unit roundoff (half the distance from 1 to the next number) of the coarsest format
    in which it computes or sends; float32's, unless it says otherwise. ``verify`` derives its bounds from it."""
    repeats: bool = True
    """Whether the same seed gives the same weights again, bit for bit."""
    options: type[BaseModel] | None = None
    """Of a technique from outside: what ``extra: {name: options}`` may hold. None: nothing."""

    @property
    def key(self) -> str:
        """The key of a variant that asks for it."""
        return "extra" if self.setting.startswith("extra:") else self.setting.partition(":")[0]

    def value(self, variant: Variant) -> object:
        """What the variant says there."""
        return getattr(variant, self.key)

    def refusal(self, variant: Variant, machine: Machine, on_gpu: bool) -> str | None:
        """Why what the variant says there cannot run on the machine; None if it can."""
        of_value = self.why_not_value.get(self.value(variant)) if self.why_not_value else None
        return self.why_not(machine, on_gpu) or (of_value(machine, on_gpu) if of_value else None)

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


def needs_adamw(train: Train) -> str | None:
    """``why_not_with`` of what stands in for AdamW."""
    return None if train.optimizer == "adamw" else f"it stands in for adamw, and train.optimizer is {train.optimizer}"


def _why_no_tf32(machine: Machine, on_gpu: bool) -> str | None:
    if on_gpu and not machine.gpu_tf32:
        return "this GPU has no TF32 (compute capability below 8.0)"
    return needs_gpu(machine, on_gpu)


def _why_no_offload(_: Machine, on_gpu: bool) -> str | None:
    return None if on_gpu else "it moves activations to the host's memory, where a run on the CPU has them already"


def _why_no_release(machine: Machine, on_gpu: bool) -> str | None:
    return None if on_gpu or machine.trims_memory else "this system's C library has no malloc_trim"


def _why_no_8bit(machine: Machine, _: bool) -> str | None:
    if "bitsandbytes" in machine.installed:
        return None
    return "bitsandbytes is not installed (pip install '.[low-bit]')"


_PARALLEL = ("data_parallel", "ddp", "zero1", "fsdp", "pipeline", "tensor")
_OWN_KERNEL = "it has a kernel of its own"


def _needs_compiler(machine: Machine, on_gpu: bool) -> str | None:
    return machine.no_gpu_kernels if on_gpu else machine.no_cpu_kernels


def _records_within_warmup(train: Train) -> str | None:
    if train.warmup_steps > GRAPH_WARMUP_STEPS:
        return None
    return (
        f"it records its step after {GRAPH_WARMUP_STEPS} others, which no figure may hold, and train.warmup_steps is "
        f"{train.warmup_steps}"
    )


def _records_graphs(_: Machine, on_gpu: bool) -> str | None:
    return None if on_gpu else "it is default and CUDA graphs, which need a GPU; on a CPU say default"


_OVER_DDP = ("ddp", "zero1")
_SHARE_OUT_BATCHES = ("ddp", "zero1", "fsdp", "pipeline", "tensor")
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
            "factored_optimizer": "its factors are sums over rows and columns, of which a process holds a part",
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
        roundoff=2.0**-8,
        asked=lambda variant: variant.parameter_precision == "bf16",
        emulated=_without_native_bf16,
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
        },
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
            "factored_optimizer": "its factors are sums over rows and columns, of which a process holds a part",
            "fp16": "each process would find the overflows of its own share of the gradients, and scale by those",
            "cuda_graph": "its collectives are not known to be capturable",
            "auto_micro_batch": "a process that ran out of memory leaves the others waiting in the middle of a pair",
        },
    ),
    # Precision.
    Entry(
        name="tf32",
        setting="precision: tf32",
        searched_for=("TensorFloat-32", "allow_tf32", "set_float32_matmul_precision", "fp32_precision"),
        does="Products of matrices and convolutions of float32 numbers on Tensor Cores, which read 10 bits of mantissa",
        pays="on GPUs from compute capability 8.0, where a net in float32 waits for its products",
        costs="13 bits of mantissa of each factor; sums stay in float32",
        source="NVIDIA A100 Tensor Core GPU Architecture, 2020",
        changes="rounding",
        roundoff=2.0**-11,
        asked=lambda variant: variant.precision == "tf32",
        why_not=_why_no_tf32,
    ),
    Entry(
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
            **dict.fromkeys(
                ("activation_checkpointing", "selective_checkpointing", "checkpointing_budget"),
                "a block that runs again must not count its batch again, and SyncBatchNorm cannot be kept from it",
            ),
            "auto_micro_batch": "a process that runs out of memory would leave the others waiting for its statistics",
        },
        why_not=needs_gpu,
    ),
    Entry(
        name="fp16_compression",
        setting="communication_hook: fp16",
        searched_for=("fp16_compress_hook", "gradient compression", "DDP communication hook"),
        does="DDP's gradients travel in float16, divided by the number of processes first",
        pays="where the network is what a step waits for",
        costs="gradients below 6e-8 become zero and above 65504 infinite, unless fp16's loss scale keeps them between",
        source="PyTorch documentation: DDP Communication Hooks",
        changes="rounding",
        roundoff=2.0**-11,
        asked=lambda variant: variant.communication_hook == "fp16",
        needs=_OVER_DDP,
    ),
    Entry(
        name="bf16_compression",
        setting="communication_hook: bf16",
        searched_for=("bf16_compress_hook", "gradient compression", "DDP communication hook"),
        does="DDP's gradients travel in bfloat16, divided by the number of processes first",
        pays="where the network is what a step waits for",
        costs="8 bits of mantissa in every gradient and in their sums",
        source="PyTorch documentation: DDP Communication Hooks",
        changes="rounding",
        roundoff=2.0**-8,
        asked=lambda variant: variant.communication_hook == "bf16",
        needs=_OVER_DDP,
    ),
    Entry(
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
        name="bf16",
        setting="precision: bf16",
        searched_for=("bfloat16", "automatic mixed precision", "AMP", "autocast"),
        does="Matrix products and convolutions in bfloat16, parameters and sums in float32",
        pays="on GPUs from compute capability 8.0 and CPUs with AVX-512 BF16 or AMX, for nets that compute more than "
        "they move",
        costs="8 bits of mantissa in activations and their gradients",
        source="Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019",
        changes="rounding",
        roundoff=2.0**-8,
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
        roundoff=2.0**-11,
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
        asked=lambda variant: variant.activation_checkpointing is True,
    ),
    Entry(
        name="selective_checkpointing",
        setting="activation_checkpointing: selective",
        searched_for=("selective activation checkpointing", "SAC", "create_selective_checkpoint_contexts"),
        does="Blocks keep their input and the outputs of their matrix products and convolutions; what is cheap between "
        "them runs again in the backward pass",
        pays="when activations are most of the peak and a second forward pass costs too much",
        costs="the element-wise operations and normalisations of a forward pass once more; each operation passes "
        "through Python",
        source="Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023",
        changes="nothing",
        asked=lambda variant: variant.activation_checkpointing == "selective",
        excludes={"activation_offload": "what it keeps passes by the hooks that would offload it"},
    ),
    Entry(
        name="checkpointing_budget",
        setting="activation_checkpointing: 0.5",
        searched_for=("activation memory budget", "checkpointing policy", "activation_memory_budget"),
        does="As many blocks run again in the backward pass as are needed to keep at most this fraction of the "
        "activations' bytes, with as few operations as possible",
        pays="when activations are a little too large, and full checkpointing recomputes more than it must",
        costs="a second forward pass of the chosen blocks",
        source="Jain et al., Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020",
        changes="nothing",
        asked=lambda variant: isinstance(variant.activation_checkpointing, float),
    ),
    Entry(
        name="activation_offload",
        setting="activation_offload: true",
        searched_for=("CPU offload", "activation offloading", "save_on_cpu", "saved_tensors_hooks"),
        does="Activations wait for the backward pass in the host's pinned memory",
        pays="when activations do not fit, and the bus is faster than computing them again",
        costs="every kept byte over the bus twice; as much pinned host memory",
        source="Rhu et al., vDNN: Virtualized Deep Neural Networks, MICRO 2016",
        changes="nothing",
        asked=lambda variant: variant.activation_offload,
        why_not=_why_no_offload,
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
        asked=lambda variant: variant.gradient_accumulation not in (1, "auto"),
    ),
    Entry(
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
        name="optimizer_in_backward",
        setting="optimizer_in_backward: true",
        searched_for=("optimizer in backward", "fused backward", "register_post_accumulate_grad_hook", "LOMO"),
        does="Each parameter is updated as soon as its gradient is complete, and the gradient is freed",
        pays="when parameters are most of the memory: all gradients together never are",
        costs="an update a parameter instead of one for all; nothing can look at all gradients before the update",
        source="Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources, ACL 2024",
        changes="nothing",
        asked=lambda variant: variant.optimizer_in_backward,
        excludes={
            **dict.fromkeys(
                ("gradient_accumulation", "auto_micro_batch"),
                "a gradient is complete only after the last micro-batch, and it is used up after each",
            ),
            **dict.fromkeys(_PARALLEL, "a gradient is complete only when all devices have added theirs"),
            "fp16": "the scaler looks at all gradients before any update",
            "foreach_optimizer": "it updates one parameter at a time",
            "for_loop_optimizer": "it updates one parameter at a time already",
            "zeroed_gradients": "it frees gradients at once",
        },
    ),
    Entry(
        name="low_bit_optimizer",
        setting="optimizer_state: 8bit",
        searched_for=("8-bit Adam", "AdamW8bit", "bitsandbytes", "quantised optimizer state", "low-bit optimizer"),
        does="AdamW's two moments in 8 bits, with a scale for each block of 256 values",
        pays="when optimizer state is most of the memory: 2 bytes a parameter instead of 8",
        costs="24 of the moments' 32 bits, in tensors of 4096 values and more; on a GPU, a wait for the loss's flag a "
        "step",
        source="Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022",
        changes="statistics",
        asked=lambda variant: variant.optimizer_state == "8bit",
        why_not=_why_no_8bit,
        why_not_with=needs_adamw,
        excludes={
            **dict.fromkeys(("foreach_optimizer", "for_loop_optimizer"), _OWN_KERNEL),
            **dict.fromkeys(("fsdp", "tensor"), "its kernel takes whole tensors, not a rank's shards of them"),
        },
    ),
    Entry(
        name="factored_optimizer",
        setting="optimizer_state: factored",
        searched_for=("Adafactor", "factored second moment", "sublinear memory optimizer"),
        does="Adafactor in place of AdamW: no first moment, and of a matrix's second moments the means of its rows and "
        "columns alone",
        pays="when optimizer state is most of the memory: next to nothing instead of 8 bytes a parameter",
        costs="another optimizer: the learning rate is relative to the weights; on a GPU, a wait for the loss's flag a "
        "step",
        source="Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, ICML 2018",
        changes="statistics",
        asked=lambda variant: variant.optimizer_state == "factored",
        why_not_with=needs_adamw,
        excludes={
            **dict.fromkeys(("foreach_optimizer", "for_loop_optimizer"), _OWN_KERNEL),
            **dict.fromkeys(("fsdp", "tensor"), "the means of rows and columns are those of whole matrices"),
        },
    ),
    Entry(
        name="zeroed_gradients",
        setting="set_to_none: false",
        searched_for=("set_to_none", "zero_grad", "optimizer.zero_grad(set_to_none=False)"),
        does="Gradients keep their memory between steps and are filled with zeros, as PyTorch did until 2.0",
        pays="where something holds on to the gradients' addresses; to see what set_to_none, the default, saves",
        costs="the gradients' memory during the forward pass; a pass over it a step, and an addition instead of a move",
        source="PyTorch documentation: torch.optim.Optimizer.zero_grad",
        changes="nothing",
        asked=lambda variant: not variant.set_to_none,
    ),
    Entry(
        name="expandable_segments",
        setting="expandable_segments: true",
        searched_for=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "fragmentation", "reserved but unallocated"),
        does="CUDA's allocator maps more memory at the end of a segment instead of asking for another segment",
        pays="when sizes vary and reserved memory is well above what tensors take",
        costs="slower first allocations; tensors cannot be shared between processes by CUDA IPC in older drivers",
        source="PyTorch documentation: CUDA semantics, Optimizing memory usage with PYTORCH_ALLOC_CONF",
        changes="nothing",
        asked=lambda variant: variant.expandable_segments,
        why_not=needs_gpu,
    ),
    Entry(
        name="release_cache",
        setting="release_cache: true",
        searched_for=("torch.cuda.empty_cache", "malloc_trim", "empty cache between epochs"),
        does="Between training and evaluation, memory that is free goes back to the system",
        pays="when somebody else needs the memory in between; seldom for the job itself",
        costs="the next phase asks the system for the same memory again",
        source="PyTorch documentation: torch.cuda.empty_cache; glibc manual: malloc_trim",
        changes="nothing",
        asked=lambda variant: variant.release_cache,
        why_not=_why_no_release,
    ),
    # Speed.
    Entry(
        name="foreach_optimizer",
        setting="optimizer_kernel: foreach",
        searched_for=("foreach", "multi-tensor", "torch._foreach", "horizontal fusion"),
        does="Each operation of the update is one kernel for all parameters, instead of the whole update",
        pays="where an optimizer has no fused form; to see what fused, the default, gains",
        costs="temporary tensors of the parameters' size; on a GPU, a wait for the loss's flag a step",
        source="PyTorch documentation: torch.optim, How to adjust performance",
        changes="rounding",
        asked=lambda variant: variant.optimizer_kernel == "foreach",
    ),
    Entry(
        name="for_loop_optimizer",
        setting="optimizer_kernel: for_loop",
        searched_for=("single-tensor optimizer", "foreach=False", "fused=False"),
        does="Each operation of the update is one kernel for each parameter",
        pays="when the update's temporary tensors must be small; to see what fused, the default, gains",
        costs="many small kernels; on a GPU, a wait for the loss's flag a step",
        source="PyTorch documentation: torch.optim, How to adjust performance",
        changes="rounding",
        asked=lambda variant: variant.optimizer_kernel == "for_loop",
    ),
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
    Entry(
        name="compile",
        setting="compile: default",
        searched_for=("torch.compile", "TorchInductor", "TorchDynamo", "Triton", "kernel fusion", "max-autotune"),
        does="The model as one graph of fused, generated kernels; reduce-overhead also records CUDA graphs, and "
        "max-autotune also tries several kernels for matrix products (on a CPU: of batches of matrices)",
        pays="for models with many small operations, in runs long enough to win back the compilation",
        costs="tens of seconds before the first step, fewer with a warm cache; a C++ compiler; a model without graph "
        "breaks",
        source="Ansel et al., PyTorch 2, ASPLOS 2024",
        changes="rounding",
        asked=lambda variant: variant.compile != "none",
        excludes={
            "data_parallel": "its replicas are made anew in each step, and what is compiled belongs to one model",
            "pipeline": "a stage runs its own part of the model, not the compiled whole",
            "fsdp": "it gathers parameters between the blocks, which no single graph holds",
            "sync_batchnorm": "its exchange of statistics is not known to compile as a part of one graph",
            "activation_offload": "it is not known to offload what generated code keeps",
        },
        why_not=_needs_compiler,
        why_not_value={"reduce-overhead": _records_graphs},
    ),
    Entry(
        name="cuda_graph",
        setting="cuda_graph: true",
        searched_for=("CUDA graphs", "torch.cuda.CUDAGraph", "whole-network capture", "launch-bound"),
        does="Forward, backward and update are recorded once and replayed from then on, by one call a step",
        pays="for small models and batches, whose kernels end before the CPU has launched the next",
        costs="memory that nothing else gets; what Python decides in a step is decided once, when it is recorded",
        source="PyTorch documentation: CUDA semantics, CUDA Graphs",
        changes="rounding",
        asked=lambda variant: variant.cuda_graph,
        excludes={
            **dict.fromkeys(
                ("ddp", "pipeline", "data_parallel"), "the recording holds one GPU's step, without communication"
            ),
            "compile": "reduce-overhead records CUDA graphs of what it compiles",
            "fp16": "the host decides with the gradient scaler whether a step is taken",
            **dict.fromkeys(
                ("activation_checkpointing", "selective_checkpointing", "checkpointing_budget"),
                "to run a block again, the host asks for the random generator's state, which a recording forbids",
            ),
            "auto_micro_batch": "a recorded step cannot become smaller",
            "activation_offload": "its copies to the host are not part of a recording",
            "optimizer_in_backward": "the learning rate would be recorded with the step",
            **dict.fromkeys(
                ("low_bit_optimizer", "factored_optimizer", "foreach_optimizer", "for_loop_optimizer"),
                "the fused optimizers alone are known to take learning rate and the flag of a bad loss on the device",
            ),
        },
        why_not=needs_gpu,
        why_not_with=_records_within_warmup,
    ),
    Entry(
        name="cudnn_benchmark",
        setting="cudnn_benchmark: true",
        searched_for=("torch.backends.cudnn.benchmark", "cuDNN autotuning", "convolution algorithm search"),
        does="cuDNN tries its algorithms for each shape of convolution once and takes the fastest; while "
        "train.deterministic is true, the fastest of those that repeat exactly",
        pays="for convolutional nets with fixed shapes",
        costs="a search in the first step; its choice can differ from run to run, and with it the rounding",
        source="PyTorch documentation: torch.backends.cudnn",
        changes="rounding",
        repeats=False,
        asked=lambda variant: variant.cudnn_benchmark,
        why_not=needs_gpu,
    ),
    # Data loading.
    Entry(
        name="resident_data",
        setting="data_loading: resident",
        searched_for=("data set on the GPU", "GPU data loading"),
        does="The training images lie on the device as uint8, where whole batches are gathered, augmented, normalised",
        pays="whenever they fit",
        costs="a byte a pixel and channel of the training set",
        source="Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, 2024",
        changes="nothing",
        asked=lambda variant: variant.data_loading == "resident",
    ),
    Entry(
        name="streamed_data",
        setting="data_loading: streamed",
        searched_for=("memory map", "prefetching", "pinned memory"),
        does="A thread gathers batches from the memory map, a few ahead, and copies them to the device as uint8",
        pays="for data that do not fit on the device",
        costs="a processor's share for the gathering; four batches of memory",
        source="PyTorch tutorial: pin_memory() and non_blocking",
        changes="nothing",
        asked=lambda variant: variant.data_loading == "streamed",
    ),
    Entry(
        name="dataloader",
        setting="data_loading: dataloader",
        searched_for=("torch.utils.data.DataLoader", "num_workers", "persistent_workers", "torchvision transforms"),
        does="PyTorch's DataLoader: processes that read, augment and normalise sample by sample; pinned, kept for all "
        "epochs",
        pays="where samples must be decoded or changed one by one in Python; else it shows what the other ways save",
        costs="Python for every sample; loader_workers processes for each that trains, whose memory no figure counts",
        source="PyTorch documentation: torch.utils.data",
        changes="nothing",
        asked=lambda variant: variant.data_loading == "dataloader",
    ),
)
"""Every technique that the package knows, in the order in which people read of them."""


def entries() -> tuple[Entry, ...]:
    """All that can be asked for here: the package's own, and those that other packages bring. Raises ConfigError."""
    return (*CATALOGUE, *(_from_outside(name) for name in outside.names()))


def entry(name: str) -> Entry:
    """The entry of that name. Raises ConfigError if there is none, or the package that brings it is broken."""
    return _BY_NAME.get(name) or _from_outside(name)


def asked(variant: Variant) -> tuple[Entry, ...]:
    """What the variant applies, in the catalogue's order. Raises ConfigError for an extra that is not installed."""
    own = (each for each in CATALOGUE if each.asked(variant))
    return (*own, *(_from_outside(name) for name in variant.extra))


def exclusions(technique: Entry, among: Sequence[Entry] = CATALOGUE) -> dict[str, str]:
    """Names of the techniques that ``technique`` cannot run with -> why, whichever of the two says it."""
    apart = {other.name: _why_apart(technique, other) or _why_apart(other, technique) for other in among}
    others = {other.name: other.excludes[technique.name] for other in among if technique.name in other.excludes}
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


def unasked(variant: Variant, technique: Entry) -> dict[str, Any]:
    """The key that asks for the technique, with the value with which the variant does not."""
    if technique.name in variant.extra:
        return {"extra": {name: options for name, options in variant.extra.items() if name != technique.name}}
    return {technique.key: getattr(Variant(), technique.key)}


def without(variant: Variant, techniques: Iterable[Entry]) -> Variant:
    """The variant with these techniques not applied. The rest need not be able to run alone."""
    for technique in techniques:
        variant = variant.model_copy(update=unasked(variant, technique))
    return variant


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


def extra_problems(variant: Variant) -> list[str]:
    """What is wrong with the variant's techniques of other packages, by key: not installed, or with other options."""
    return [problem for name, options in variant.extra.items() for problem in _problems_of(name, options)]


def _problems_of(name: str, options: Mapping[str, Any]) -> list[str]:
    try:
        model = _from_outside(name).options
    except ConfigError as error:
        return [f"extra.{name}: {error}"]
    if model is None:
        return [f"extra.{name}: found {dict(options)}, but it takes no options; write {name}: {{}}"] if options else []
    try:
        model.model_validate(options)
    except ValidationError as error:
        return [
            f"extra.{'.'.join(map(str, (name, *each['loc'])))}: found {each['input']!r}; {each['msg']}. "
            f"Options of {name}: {', '.join(model.model_fields) or 'none'}."
            for each in error.errors(include_url=False)
        ]
    return []


@functools.cache
def _from_outside(name: str) -> Entry:
    found = outside.load(outside.CATALOGUE, name)
    if not isinstance(found, Entry) or found.name != name:
        raise ConfigError(f"the entry point {name!r} of the group {outside.CATALOGUE} is {found!r}, not its Entry.")
    if name in _BY_NAME:
        raise ConfigError(f"an installed package brings a technique {name!r}, which is the name of a built-in one.")
    return found


_BY_NAME = {each.name: each for each in CATALOGUE}
