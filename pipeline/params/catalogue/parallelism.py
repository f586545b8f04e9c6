"""Forms of parallelism: how processes or devices share the work."""

from __future__ import annotations

from typing import Literal

from pipeline.params.catalogue.base import Entry, needs_gpu, without_native_bf16
from pipeline.params.sections import Count, Section

PARALLELISMS = ("ddp", "zero1", "fsdp", "pipeline", "tensor")
"""Values of ``parallelism`` that use several processes."""
ONE_BATCH = ("pipeline", "tensor")
"""Values of ``parallelism`` with which the processes that hold one model together take the same samples."""


class ParallelismSettings(Section):
    """A variant's settings for sharing the work between processes or devices."""

    parallelism: Literal["none", "data_parallel", "ddp", "zero1", "fsdp", "pipeline", "tensor"] = "none"
    processes: Count | Literal["auto"] = "auto"
    """Number of processes for the parallelism. auto: one per GPU; without a GPU, two per replica."""
    replicas: Count = 1
    """With fsdp, pipeline or tensor: number of complete models that the processes hold together. Each model takes a
    share of the batch, as in ddp."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """Schedule of a pipeline. gpipe: all forward passes, then all backward passes. 1f1b: forward and backward passes
    alternate, so that at most as many micro-batches are in memory as there are stages."""
    reshard_after_forward: bool = True
    """Used only with parallelism: fsdp."""
    parameter_precision: Literal["fp32", "bf16"] = "fp32"
    """Used only with parallelism: fsdp."""
    cpu_offload: bool = False
    """Used only with parallelism: fsdp on GPUs."""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: the processes share train.batch_size."""


PARALLELISM: tuple[Entry, ...] = (
    Entry(
        name="data_parallel",
        setting="parallelism: data_parallel",
        searched_for=("DataParallel", "nn.DataParallel", "DP", "multi-GPU", "single process"),
        does="One process copies the model to every GPU in each forward pass, and one thread per GPU runs its copy",
        pays="never; it is here for comparison with DistributedDataParallel, which replaced it",
        costs="a broadcast of the model and a reduction of the gradients per step; threads that wait for Python's "
        "lock; more memory on the first GPU than on the others",
        source="PyTorch documentation: torch.nn.DataParallel; Li et al., PyTorch Distributed, VLDB 2020",
        changes="rounding",
        layer="parallelism",
        implementation="data_parallel.DataParallel",
        needs_measuring=True,
        excludes={
            "bf16": "DataParallel's threads do not inherit autocast's number format, and would compute in float16",
            "activation_checkpointing": "checkpointing replaces the blocks' forward methods, and the copies on other "
            "GPUs would run the first GPU's methods",
            "activation_offload": "DataParallel's threads do not inherit the hooks that move activations",
        },
        why_not=needs_gpu,
    ),
    Entry(
        name="ddp",
        setting="parallelism: ddp",
        searched_for=("DistributedDataParallel", "DDP", "data parallelism", "multi-GPU", "NCCL"),
        does="Every process holds the model and a share of each batch; gradients are averaged during the backward pass",
        pays="with several GPUs, if the model and its optimizer state fit on each",
        costs="an all-reduce of all gradients per step; BatchNorm sees only its process's share of the batch",
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
        does="Like ddp, but every process keeps the optimizer state for only a share of the parameters. Each process "
        "updates its share and sends it to the other processes",
        pays="when the optimizer's state (AdamW: two values per parameter) does not fit into a GPU's memory",
        costs="a broadcast of all parameters after each update, which does not overlap with computation",
        source="Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020",
        changes="rounding",
        layer="parallelism",
        implementation="zero1.Zero1",
        needs_measuring=True,
        details=("processes",),
        excludes={
            "cuda_graph": "the host starts zero1's broadcasts after the update, and a graph would not record them",
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
        does="Every process holds a shard of parameters, gradients and optimizer state. It gathers a block's "
        "parameters when the block runs, and reduces and scatters their gradients. With `replicas: N`, N groups do "
        "this, and average gradients as in ddp",
        pays="when parameters, gradients and optimizer state together do not fit on one GPU; the parameters alone "
        "must fit at the start",
        costs="1.5 times the communication of ddp, in smaller pieces; BatchNorm sees only its process's share of the "
        "batch",
        source="Zhao et al., PyTorch FSDP, VLDB 2023; Rajbhandari et al., ZeRO, SC 2020",
        changes="rounding",
        layer="parallelism",
        implementation="fsdp.FSDP",
        evaluates_whole=True,
        needs_measuring=True,
        details=("processes", "replicas"),
        excludes={"cuda_graph": "with fsdp, the host gathers and frees parameters, and a graph would not record this"},
    ),
    Entry(
        name="keep_gathered",
        setting="reshard_after_forward: false",
        searched_for=("reshard_after_forward", "SHARD_GRAD_OP", "ZeRO-2"),
        does="A block's gathered parameters stay in memory from its forward to its backward pass",
        pays="when steps wait for fsdp's communication, and a GPU's memory has room for all parameters at once",
        costs="memory for all gathered parameters while a step runs",
        source="PyTorch documentation: torch.distributed.fsdp.fully_shard",
        changes="nothing",
        needs=("fsdp",),
    ),
    Entry(
        name="parameter_precision",
        setting="parameter_precision: bf16",
        searched_for=("MixedPrecisionPolicy", "param_dtype", "bf16 parameters", "FSDP mixed precision"),
        does="Parameters are gathered and used in bfloat16, and gradients are summed in float32; the shards that the "
        "optimizer updates stay float32, and BatchNorm's parameters are gathered in float32",
        pays="on GPUs from compute capability 8.0: gathering sends half the bytes, and matrix products run in bfloat16",
        costs="parameters, activations and their gradients keep 7 bits of mantissa",
        source="PyTorch documentation: torch.distributed.fsdp.MixedPrecisionPolicy",
        changes="rounding",
        roundoff=2.0**-8,
        emulated=without_native_bf16,
        needs=("fsdp",),
        excludes={"fp16": "matrix products would mix float16 and bfloat16 numbers"},
    ),
    Entry(
        name="cpu_offload",
        setting="cpu_offload: true",
        searched_for=("CPUOffloadPolicy", "ZeRO-Offload", "parameter offload"),
        does="Shards of parameters, gradients and optimizer state are kept in pinned host memory, and the CPU runs "
        "the update",
        pays="as a last resort, when even the shards do not fit into a GPU's memory",
        costs="parameters and gradients cross PCIe every step, and the update waits for the gradients and runs on the "
        "CPU",
        source="Ren et al., ZeRO-Offload, USENIX ATC 2021",
        changes="rounding",
        needs=("fsdp",),
        excludes={"fp16": "the loss scale is on the GPU, but the gradients that must be divided by it are on the host"},
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
        does="The model is cut into stages of nearly equal cost, one per process; micro-batches pass from stage to "
        "stage",
        pays="when parameters, gradients and optimizer state together do not fit on one GPU; also across hosts, "
        "because only activations at the cuts and their gradients are sent. The parameters alone must fit, because "
        "evaluation runs the whole model on one GPU",
        costs="with p stages and m micro-batches, a stage is idle for a share (p - 1) / (m + p - 1) of a step; "
        "BatchNorm sees only one micro-batch at a time",
        source="Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019 (1F1B); bubble: Narayanan et "
        "al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021",
        changes="rounding",
        layer="parallelism",
        implementation="pipeline_parallel.Pipeline",
        evaluates_whole=True,
        needs_measuring=True,
        details=("processes", "replicas", "schedule"),
        excludes={"fp16": "each stage would detect its own overflows and have its own loss scale"},
    ),
    Entry(
        name="tensor",
        setting="parallelism: tensor",
        searched_for=("tensor parallelism", "TP", "Megatron", "parallelize_module", "DTensor", "model parallelism"),
        does="Pairs of linear layers are cut along their common width, and gpt's attention is cut between heads. Every "
        "process computes some columns of the first layer and the matching rows of the second. With `replicas: N`, N "
        "groups do this and share the batch as in ddp",
        pays="for wide transformers on GPUs of one host, joined by NVLink",
        costs="two all-reduces of activations per pair of layers, one in the forward and one in the backward pass; "
        "they do not overlap with computation. Every process holds and computes all other layers",
        source="Shoeybi et al., Megatron-LM, 2019",
        changes="rounding",
        layer="parallelism",
        implementation="tensor.Tensor",
        shared_rng=True,
        needs_measuring=True,
        details=("processes", "replicas"),
        excludes={
            "fp16": "each process would detect the overflows of its own gradients and have its own loss scale",
            "cuda_graph": "it is not known whether CUDA graphs can capture tensor's collectives",
        },
    ),
    Entry(
        name="weak_scaling",
        setting="scaling: weak",
        searched_for=("strong scaling", "linear scaling rule", "batch size per GPU", "learning rate scaling"),
        does="Each data-parallel process takes train.batch_size samples per step, so the global batch grows with the "
        "number of processes. The learning rate is multiplied by this number and warmed up",
        pays="when a share of train.batch_size would be too small to keep a device busy",
        costs="fewer and larger steps, which lower the accuracy beyond some batch size; the job differs from the "
        "baseline's job",
        source="Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017",
        changes="statistics",
        needs=PARALLELISMS,
    ),
)
