"""Techniques of communication: what processes exchange under DistributedDataParallel, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.params.catalogue.base import Entry, needs_gpu
from pipeline.params.sections import Section

_OVER_DDP = ("ddp", "zero1")
LOCAL_STEPS = 4
"""Number of steps from one averaging of the weights to the next in post-local SGD."""


class CommunicationSettings(Section):
    """A variant's settings for the communication between its processes."""

    bucket_mb: Annotated[float, Field(gt=0.0, le=2.0**20)] | None = None
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    sync_batchnorm: bool = False
    communication_hook: Literal["none", "fp16", "bf16", "powersgd", "post_local_sgd"] = "none"


COMMUNICATION: tuple[Entry, ...] = (
    Entry(
        name="bucket_mb",
        setting="bucket_mb: 50",
        searched_for=("bucket_cap_mb", "DDP bucket size", "gradient bucketing"),
        does="DDP reduces gradients in buckets of this many MiB instead of 25",
        pays="larger buckets: when every message takes long (many processes, slow networks); smaller buckets: when the "
        "backward pass is short and reductions should begin early",
        costs="larger buckets: reductions begin later and overlap less; smaller buckets: more messages",
        source="Li et al., PyTorch Distributed, VLDB 2020",
        changes="rounding",
        requested_if=lambda variant: variant.bucket_mb is not None,
        needs=_OVER_DDP,
        why_not_beside=lambda variant, _: (
            "compile makes one graph per bucket, and the first bucket has 1 MiB, so bucket_mb must be at least 1"
            if variant.compile != "none" and (variant.bucket_mb or 1) < 1
            else None
        ),
    ),
    Entry(
        name="gradients_beside_buckets",
        setting="gradient_as_bucket_view: false",
        searched_for=("gradient_as_bucket_view",),
        does="Gradients have their own memory, and are copied into DDP's buckets and back. This is torch's default",
        pays="never; it is here to show what this project's default, gradient_as_bucket_view: true, saves",
        costs="twice the memory for gradients, and the time for copies",
        source="PyTorch documentation: DistributedDataParallel",
        changes="nothing",
        layer="parallelism",
        implementation="ddp.GradientsBesideBuckets",
        needs_measuring=True,
        needs=_OVER_DDP,
    ),
    Entry(
        name="static_graph",
        setting="static_graph: true",
        searched_for=("DDP static graph", "find_unused_parameters", "unused parameters"),
        does="DDP records in the first step which parameters are used and how often, and assumes that all later steps "
        "do the same",
        pays="for models with parameters that no step uses; DDP otherwise refuses such models",
        costs="in the first step, reductions begin only after the backward pass; a model that later uses other "
        "parameters fails",
        source="PyTorch documentation: DistributedDataParallel",
        changes="rounding",
        needs=_OVER_DDP,
        excludes={
            "gradient_accumulation": "DDP with a static graph fails if the first backward pass does not reduce the "
            "gradients (PyTorch issue 143580)"
        },
    ),
    Entry(
        name="sync_batchnorm",
        setting="sync_batchnorm: true",
        searched_for=("SyncBatchNorm", "synchronized batch normalization", "cross-GPU batch norm"),
        does="BatchNorm computes mean and variance over the micro-batches of all processes together",
        pays="when a process's share of the batch is too small for good estimates of mean and variance",
        costs="two collectives per BatchNorm layer and step, one in the forward and one in the backward pass; in the "
        "forward pass the host waits for the device",
        source="Zhang et al., Context Encoding for Semantic Segmentation, CVPR 2018",
        changes="statistics",
        layer="model",
        implementation="sync_batchnorm.SyncBatchNorm",
        needs_measuring=True,
        needs=_OVER_DDP,
        excludes={
            "activation_checkpointing": "a block that is recomputed must not update running statistics a second time, "
            "but SyncBatchNorm updates them in every forward pass",
            "auto_micro_batch": "if one process runs out of memory, the others wait for its statistics forever",
        },
        why_not=needs_gpu,
    ),
    Entry(
        name="fp16_compression",
        setting="communication_hook: fp16",
        searched_for=("fp16_compress_hook", "gradient compression", "DDP communication hook"),
        does="DDP's gradients are divided by the number of processes and sent in float16",
        pays="when steps wait for the network",
        costs="gradients below 6e-8 become zero, and those above 65504 become infinite, unless fp16's loss scale "
        "prevents this",
        source="PyTorch documentation: DDP Communication Hooks",
        changes="rounding",
        roundoff=2.0**-11,
        layer="parallelism",
        implementation="communication.FP16Compression",
        needs_measuring=True,
        needs=_OVER_DDP,
    ),
    Entry(
        name="bf16_compression",
        setting="communication_hook: bf16",
        searched_for=("bf16_compress_hook", "gradient compression", "DDP communication hook"),
        does="DDP's gradients are divided by the number of processes and sent in bfloat16",
        pays="when steps wait for the network",
        costs="gradients and their sums keep 7 bits of mantissa",
        source="PyTorch documentation: DDP Communication Hooks",
        changes="rounding",
        roundoff=2.0**-8,
        layer="parallelism",
        implementation="communication.BF16Compression",
        needs_measuring=True,
        needs=_OVER_DDP,
    ),
    Entry(
        name="powersgd",
        setting="communication_hook: powersgd",
        searched_for=("PowerSGD", "powerSGD_hook", "low-rank gradient compression"),
        does="Gradient matrices are sent as factors of rank 2. A power iteration computes the factors from the "
        "gradient and starts with a factor of the previous step. The error of this approximation is added to the next "
        "step's gradients. Compression begins after the learning rate's warm-up",
        pays="when steps wait for the network, and 16 bits do not compress enough",
        costs="accuracy; two more copies of the gradients; matrix products; reductions that do not overlap with the "
        "backward pass; on a GPU, the host waits for the device once per bucket",
        source="Vogels et al., PowerSGD, NeurIPS 2019",
        changes="statistics",
        layer="parallelism",
        implementation="communication.PowerSGD",
        needs_measuring=True,
        needs=_OVER_DDP,
        excludes={
            "channels_last": "torch's PowerSGD views gradients as matrices, which the strides of NHWC do not allow",
            "fp16": "a step that overflows is skipped, but the error that PowerSGD stores would keep the overflow",
        },
    ),
    Entry(
        name="post_local_sgd",
        setting="communication_hook: post_local_sgd",
        searched_for=("PostLocalSGDOptimizer", "local SGD", "model averaging", "PeriodicModelAverager"),
        does="After the learning rate's warm-up, each process updates its weights with its own gradients, and the "
        "weights are averaged every 4 steps. Evaluation and checkpoints use the average",
        pays="when steps wait for the network: only every fourth step has a reduction",
        costs="accuracy, which falls with the number of processes; a copy of the model at each evaluation; larger "
        "checkpoints",
        source="Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020",
        changes="statistics",
        layer="parallelism",
        implementation="communication.PostLocalSGD",
        max_step_skew=LOCAL_STEPS - 1,
        evaluates_whole=True,
        needs_measuring=True,
        needs=("ddp",),
    ),
)
