"""Forms of parallelism: how processes or devices share the work."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.params.catalogue.base import Entry, needs_gpu, without_native_bf16
from pipeline.params.sections import Count, Section

_SHARE_OUT_BATCHES = ("ddp", "zero1", "fsdp", "pipeline", "tensor")
_ONE_FORWARD = "its copies of a block would all run the first GPU's, whose forward pass checkpointing replaces"


class ParallelismSettings(Section):
    """A variant's settings of how processes or devices share the work."""

    parallelism: Literal["none", "data_parallel", "ddp", "zero1", "fsdp", "pipeline", "tensor"] = Field(
        "none",
        description="none: one device. data_parallel: nn.DataParallel, one process for all GPUs. ddp: "
        "DistributedDataParallel, one process a device. zero1: ddp with the optimizer's state in shares. fsdp: "
        "parameters, gradients and optimizer state in shares. pipeline: the model in stages, one a process. tensor: "
        "pairs of linear layers in shares.",
    )
    processes: Count | Literal["auto"] = Field(
        "auto", description="With a parallelism: how many; auto: one a GPU, two (a replica) where there is none."
    )
    replicas: Count = Field(
        1,
        description="With fsdp, pipeline or tensor: how many whole models the processes hold, which share the batch as "
        "by ddp.",
    )
    schedule: Literal["gpipe", "1f1b"] = Field(
        "1f1b",
        description="Of a pipeline. gpipe: all forward passes, then all backward passes. 1f1b: in turns, so that no "
        "more micro-batches are in memory than there are stages.",
    )
    reshard_after_forward: bool = Field(
        True, description="With fsdp. false: gathered parameters stay until the backward pass has used them."
    )
    parameter_precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="With fsdp. bf16: parameters are gathered and used in bfloat16, gradients summed in float32.",
    )
    cpu_offload: bool = Field(
        False, description="With fsdp on GPUs: shares of parameters, gradients and optimizer state in host memory."
    )
    scaling: Literal["strong", "weak"] = Field(
        "strong",
        description="strong: train.batch_size is shared out. weak: each data-parallel process takes that many samples, "
        "and the learning rate is multiplied by the number of processes.",
    )


PARALLELISM: tuple[Entry, ...] = (
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
        layer="parallelism",
        implementation="data_parallel.DataParallel",
        needs_measuring=True,
        excludes={
            **dict.fromkeys(
                ("bf16", "float8"), "its threads do not take over autocast's type, and would compute in float16"
            ),
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
        layer="parallelism",
        implementation="ddp.DDP",
        details=("processes",),
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
        layer="parallelism",
        implementation="zero1.Zero1",
        needs_measuring=True,
        details=("processes",),
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
            "2-D parallelism",
            "device mesh",
        ),
        does="Every process holds a share of parameters, gradients and optimizer state, gathers a block's parameters "
        "when it runs, and scatters their gradients; `replicas: N` does so in N groups, which average as by ddp",
        pays="where parameters, gradients and optimizer state together do not fit on one GPU; the parameters alone "
        "must, at the start",
        costs="about half as much communication again as ddp, in smaller pieces; BatchNorm sees its own share of the "
        "batch",
        source="Zhao et al., PyTorch FSDP, VLDB 2023; Rajbhandari et al., ZeRO, SC 2020",
        changes="rounding",
        layer="parallelism",
        implementation="fsdp.FSDP",
        evaluates_whole=True,
        needs_measuring=True,
        details=("processes", "replicas"),
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
        emulated=without_native_bf16,
        needs=("fsdp",),
        excludes={"fp16": "two precisions of 16 bits would meet in one product"},
    ),
    Entry(
        name="cpu_offload",
        setting="cpu_offload: true",
        searched_for=("CPUOffloadPolicy", "ZeRO-Offload", "parameter offload"),
        does="Shares of parameters, gradients and optimizer state lie in pinned host memory, where the update runs",
        pays="as a last resort, where even the shares do not fit",
        costs="parameters and gradients cross PCIe every step, and the update runs on the CPU, which waits for them",
        source="Ren et al., ZeRO-Offload, USENIX ATC 2021",
        changes="rounding",
        needs=("fsdp",),
        excludes={"fp16": "the loss scale lies on the GPU, and the gradients that it divides do not"},
        why_not=needs_gpu,
    ),
    Entry(
        name="pipeline",
        setting="parallelism: pipeline",
        searched_for=(
            "pipeline parallelism",
            "model parallelism",
            "torch.distributed.pipelining",
            "PipelineStage",
            "GPipe",
            "1F1B",
            "stages",
            "2-D parallelism",
        ),
        does="The model is cut into stages of equal cost, one a process; micro-batches follow each other through them",
        pays="when parameters, gradients and optimizer state together do not fit on one GPU (the parameters alone "
        "must, at the start and for evaluation), and between hosts: only activations at the cuts are sent",
        costs="with p stages and m micro-batches a share (p - 1) / (m + p - 1) of the time, in which stages wait; "
        "BatchNorm sees micro-batches",
        source="Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019 (1F1B); bubble: Narayanan et "
        "al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021",
        changes="rounding",
        layer="parallelism",
        implementation="pipeline_parallel.Pipeline",
        evaluates_whole=True,
        needs_measuring=True,
        details=("processes", "replicas", "schedule"),
        excludes={
            "fp16": "each stage would find overflows, and follow a loss scale, of its own",
        },
    ),
    Entry(
        name="tensor",
        setting="parallelism: tensor",
        searched_for=("tensor parallelism", "TP", "Megatron", "parallelize_module", "DTensor", "model parallelism"),
        does="Pairs of linear layers are cut along the width between them, and gpt's attention by its heads: every "
        "process computes its columns of the first and its rows of the second; `replicas: N` does so in N groups, "
        "which share the batch as by ddp",
        pays="for wide transformers on GPUs of one host, joined by NVLink",
        costs="an all-reduce of activations a pair in each direction, which nothing hides; all else of the model is "
        "held and computed by every process",
        source="Shoeybi et al., Megatron-LM, 2019",
        changes="rounding",
        layer="parallelism",
        implementation="tensor.Tensor",
        shared_rng=True,
        needs_measuring=True,
        details=("processes", "replicas"),
        excludes={
            "factored_optimizer": "its factors are sums over rows and columns, of which a process holds a part",
            "fp16": "each process would find the overflows of its own share of the gradients, and scale by those",
            "cuda_graph": "its collectives are not known to be capturable",
            "auto_micro_batch": "a process that ran out of memory leaves the others waiting in the middle of a pair",
        },
    ),
    Entry(
        name="weak_scaling",
        setting="scaling: weak",
        searched_for=(
            "strong scaling",
            "linear scaling rule",
            "large minibatch",
            "batch size a GPU",
            "learning rate scaling",
        ),
        does="Each data-parallel process takes train.batch_size samples a step, so the global batch grows with them; "
        "the learning rate is multiplied by their number and warmed up",
        pays="when a share of the batch would be too small for a device to be busy",
        costs="fewer, larger steps: accuracy, beyond some batch; another job than the baseline's",
        source="Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017",
        changes="statistics",
        needs=_SHARE_OUT_BATCHES,
    ),
)
