"""Techniques of communication: what processes exchange under DistributedDataParallel, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.params.catalogue.base import Entry, needs_gpu
from pipeline.params.sections import Section

_OVER_DDP = ("ddp", "zero1")
LOCAL_STEPS = 4
"""Post-local SGD: steps from one averaging of the weights to the next."""


class CommunicationSettings(Section):
    """A variant's settings of what processes exchange, and how."""

    bucket_mb: Annotated[float, Field(gt=0.0, le=2.0**20)] | None = Field(
        None, description="DDP: size in MiB at which a bucket of gradients is reduced; null: torch's own, 25."
    )
    gradient_as_bucket_view: bool = Field(
        True, description="DDP: gradients lie in the buckets; false: beside them, and are copied in and out."
    )
    static_graph: bool = Field(False, description="DDP: promise that every step uses the same parameters alike.")
    sync_batchnorm: bool = Field(False, description="BatchNorm normalises by the whole micro-batch of all processes.")
    communication_hook: Literal["none", "fp16", "bf16", "powersgd", "post_local_sgd"] = Field(
        "none", description="DDP: how gradients travel: as they are, in 16 bits, as low-rank factors, or seldom."
    )


COMMUNICATION: tuple[Entry, ...] = (
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
        requested_if=lambda variant: variant.bucket_mb is not None,
        needs=_OVER_DDP,
        why_not_beside=lambda variant, _: (
            "compile ends its graphs where buckets end, the first of which has 1 MiB; say 1 or more"
            if variant.compile != "none" and (variant.bucket_mb or 1) < 1
            else None
        ),
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
        layer="parallelism",
        implementation="ddp.GradientsBesideBuckets",
        needs_measuring=True,
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
        costs="two collectives a BatchNorm and step, in the midst of the forward and backward pass, and in the forward "
        "pass the host waits for the device",
        source="Zhang et al., Context Encoding for Semantic Segmentation, CVPR 2018",
        changes="statistics",
        layer="model",
        implementation="sync_batchnorm.SyncBatchNorm",
        needs_measuring=True,
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
        layer="parallelism",
        implementation="communication.FP16Compression",
        needs_measuring=True,
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
        layer="parallelism",
        implementation="communication.BF16Compression",
        needs_measuring=True,
        needs=_OVER_DDP,
    ),
    Entry(
        name="powersgd",
        setting="communication_hook: powersgd",
        searched_for=("PowerSGD", "powerSGD_hook", "low-rank gradient compression"),
        does="Matrices of gradients travel as factors of rank 2, found by a power iteration from the last step's; what "
        "they miss is added to the next step's gradients. It begins when the learning rate has warmed up",
        pays="where the network is what a step waits for, and 16 bits do not compress enough",
        costs="accuracy; two copies of the gradients' memory; products and reductions one after the other; on a GPU, a "
        "wait for the device a bucket",
        source="Vogels et al., PowerSGD, NeurIPS 2019",
        changes="statistics",
        layer="parallelism",
        implementation="communication.PowerSGD",
        needs_measuring=True,
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
        layer="parallelism",
        implementation="communication.PostLocalSGD",
        max_step_skew=LOCAL_STEPS - 1,
        evaluates_whole=True,
        needs_measuring=True,
        needs=("ddp",),
    ),
)
