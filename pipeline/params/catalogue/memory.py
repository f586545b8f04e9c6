"""Techniques that save memory."""

from __future__ import annotations

from typing import Literal

from pipeline.params.catalogue.base import Entry, needs_gpu, needs_package
from pipeline.params.machine import Machine
from pipeline.params.sections import Count, PositiveInt, ProperFraction, Section, Train


def needs_adamw(train: Train) -> str | None:
    """Return why a technique that replaces AdamW cannot be applied to the job; None if it can. Used as
    ``Entry.why_not_with``."""
    return None if train.optimizer == "adamw" else f"it replaces adamw, and train.optimizer is {train.optimizer}"


def _why_no_release(machine: Machine, on_gpu: bool) -> str | None:
    return None if on_gpu or machine.trims_memory else "this system's C library has no malloc_trim"


_OWN_KERNEL = "optimizer_state 8bit and factored use other optimizers, whose kernels optimizer_kernel does not choose"


class MemorySettings(Section):
    """A variant's settings for techniques that save memory."""

    activation_checkpointing: bool | Literal["selective"] | ProperFraction = False
    activation_offload: bool = False
    gradient_accumulation: PositiveInt | Literal["auto"] = 1
    """Micro-batches per optimizer step. With a pipeline, 1 means up to four per stage."""
    loss_chunks: Count = 1
    optimizer_in_backward: bool = False
    optimizer_state: Literal["fp32", "8bit", "factored"] = "fp32"
    """The optimizer's state. 8bit and factored replace adamw, so they need train.optimizer: adamw."""
    set_to_none: bool = True
    expandable_segments: bool = False
    release_cache: bool = False


MEMORY: tuple[Entry, ...] = (
    Entry(
        name="activation_checkpointing",
        setting="activation_checkpointing: true",
        searched_for=("gradient checkpointing", "activation recomputation", "torch.utils.checkpoint", "remat"),
        does="Blocks keep only their input and run again in the backward pass",
        pays="when activations are most of the peak memory, and a larger batch or model is worth about a third more "
        "computation",
        costs="a second forward pass of the blocks, and copies of the buffers with which it must begin. Blocks whose "
        "random numbers come from Python or numpy are refused",
        source="Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016",
        changes="nothing",
        layer="blocks",
        implementation="activation_checkpointing.ActivationCheckpointing",
        recomputes=True,
    ),
    Entry(
        name="selective_checkpointing",
        setting="activation_checkpointing: selective",
        searched_for=("selective activation checkpointing", "SAC", "create_selective_checkpoint_contexts"),
        does="Blocks keep their input and the outputs of their matrix products, convolutions and attention kernels; "
        "all other operations run again in the backward pass",
        pays="when activations are most of the peak memory, and a second forward pass costs too much",
        costs="element-wise operations and normalisations run twice per step; Python code runs for every operation",
        source="Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023",
        changes="nothing",
        layer="blocks",
        implementation="activation_checkpointing.SelectiveCheckpointing",
        recomputes=True,
        excludes={
            "activation_offload": "the offloading hooks do not see the activations that selective checkpointing keeps"
        },
    ),
    Entry(
        name="checkpointing_budget",
        setting="activation_checkpointing: 0.5",
        searched_for=("activation memory budget", "checkpointing policy", "activation_memory_budget"),
        does="Some blocks run again in the backward pass, so that at most this fraction of the activations' bytes is "
        "kept; the blocks are chosen so that few operations run again",
        pays="when activations are only a little larger than the memory, and full checkpointing recomputes more than "
        "necessary",
        costs="a second forward pass of the chosen blocks",
        source="Jain et al., Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020",
        changes="nothing",
        layer="blocks",
        implementation="checkpointing_budget.CheckpointingBudget",
        recomputes=True,
        requested_if=lambda variant: isinstance(variant.activation_checkpointing, float),
    ),
    Entry(
        name="activation_offload",
        setting="activation_offload: true",
        searched_for=("CPU offload", "activation offloading", "save_on_cpu", "saved_tensors_hooks"),
        does="Activations are kept in the host's pinned memory until the backward pass",
        pays="when activations do not fit, and copying them is faster than computing them again",
        costs="every byte of activations crosses the bus twice and occupies pinned host memory",
        source="Rhu et al., vDNN: Virtualized Deep Neural Networks, MICRO 2016",
        changes="nothing",
        layer="forward",
        implementation="activation_offload.ActivationOffload",
        needs_measuring=True,
        why_not=needs_gpu,
    ),
    Entry(
        name="gradient_accumulation",
        setting="gradient_accumulation: 4",
        searched_for=("micro-batches", "accumulate gradients", "batch splitting", "no_sync"),
        does="A batch is divided into micro-batches, which run one after the other; the step adds up their gradients",
        pays="when the batch does not fit into memory; with several processes, also to reduce gradients less often",
        costs="smaller kernels, which use a device less well; BatchNorm sees only one micro-batch at a time",
        source="Ott et al., Scaling Neural Machine Translation, WMT 2018",
        changes="rounding",
        layer="forward",
        implementation="gradient_accumulation.GradientAccumulation",
        done_by=("pipeline",),
        requested_if=lambda variant: variant.gradient_accumulation not in (1, "auto"),
    ),
    Entry(
        name="auto_micro_batch",
        setting="gradient_accumulation: auto",
        searched_for=("automatic batch size", "auto_find_batch_size", "batch size finder", "out of memory", "OOM"),
        does="Before the training, a trial step is divided into more and more micro-batches until it fits into every "
        "process's memory; batch size and learning rate stay the same",
        pays="when the same job has to fit on different devices",
        costs="a few trial steps; if there is more than one micro-batch, also the costs of gradient_accumulation",
        source="Ott et al., Scaling Neural Machine Translation, WMT 2018",
        changes="rounding",
        layer="forward",
        implementation="gradient_accumulation.AutoMicroBatch",
        excludes=dict.fromkeys(
            ("fsdp", "tensor", "pipeline"),
            "if one process runs out of memory, the others wait for it in their forward pass forever",
        ),
    ),
    Entry(
        name="chunked_loss",
        setting="loss_chunks: 8",
        searched_for=("chunked cross-entropy", "large vocabulary", "logits memory"),
        does="The last linear layer and the loss compute one chunk of a micro-batch at a time, so the logits are never "
        "all in memory. A chunk is a part of the samples, or of a language model's tokens if its loss is built in",
        pays="for language models whose vocabulary is several times their width; for classifiers with many classes",
        costs="smaller matrix products, which run one after the other; compile does not fuse the last layer",
        source="Hsu et al., Liger Kernel (fused linear cross-entropy), 2024; "
        "Wijmans et al., Cut Your Losses (cut cross-entropy), ICLR 2025",
        changes="rounding",
        layer="model",
        implementation="chunked_loss.ChunkedLoss",
        requested_if=lambda variant: variant.loss_chunks > 1,
        excludes={
            "fp16": "the logits' gradients are computed before the scaler scales the loss, so small ones would be zero",
            "pipeline": "the pipeline runs the last layer in a stage, but chunked_loss runs this layer in the loss",
            "parameter_precision": "the loss gets float32 activations, but the last layer's parameters are bfloat16",
        },
    ),
    Entry(
        name="optimizer_in_backward",
        setting="optimizer_in_backward: true",
        searched_for=("optimizer in backward", "fused backward", "register_post_accumulate_grad_hook", "LOMO"),
        does="Each parameter is updated as soon as its gradient is complete, and the gradient is freed",
        pays="when parameters are most of the memory: the gradients are never all in memory",
        costs="one update per parameter instead of one update for all; no code can use all gradients together, for "
        "example to clip their norm",
        source="Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources, ACL 2024",
        changes="nothing",
        implementation="optimizer_in_backward.OptimizerInBackward",
        excludes={
            "gradient_accumulation": "a gradient is complete only after the last micro-batch, but "
            "optimizer_in_backward uses and frees it after each micro-batch",
            "parallelism": "a gradient is complete only after the devices' gradients are added up, but "
            "optimizer_in_backward updates the parameter earlier",
            "fp16": "the scaler checks all gradients before any update",
            "optimizer_kernel": "optimizer_in_backward updates one parameter at a time",
            "zeroed_gradients": "optimizer_in_backward frees each gradient after its update",
        },
    ),
    Entry(
        name="low_bit_optimizer",
        setting="optimizer_state: 8bit",
        searched_for=("8-bit Adam", "AdamW8bit", "bitsandbytes", "quantised optimizer state", "low-memory optimizer"),
        does="AdamW keeps its two moments in 8 bits, with a scale for each block of 256 values",
        pays="when optimizer state is most of the memory: it falls from 8 bytes per parameter to 2",
        costs="less precise moments, in tensors of 4096 values or more; on a GPU, the host waits for the device after "
        "each parameter",
        source="Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022",
        changes="statistics",
        layer="model",
        implementation="low_bit_optimizer.LowBitOptimizer",
        needs_measuring=True,
        why_not=needs_package("bitsandbytes", "low-bit"),
        relies_on=("bitsandbytes",),
        why_not_with=needs_adamw,
        excludes={
            "optimizer_kernel": _OWN_KERNEL,
            **dict.fromkeys(
                ("fsdp", "tensor"), "the 8-bit optimizer's kernel takes whole tensors, but a process has only shards"
            ),
        },
    ),
    Entry(
        name="factored_optimizer",
        setting="optimizer_state: factored",
        searched_for=("Adafactor", "factored second moment", "low-memory optimizer"),
        does="Adafactor replaces AdamW: it has no first moment, and keeps only the means over rows and over columns of "
        "a matrix's second moments",
        pays="when optimizer state is most of the memory: it falls from 8 bytes per parameter to almost 0",
        costs="the optimizer is not AdamW, and its learning rate is relative to the weights; on a GPU, the "
        "host waits for the device twice per parameter in each step",
        source="Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, ICML 2018",
        changes="statistics",
        layer="model",
        implementation="optimizer_choices.FactoredOptimizer",
        needs_measuring=True,
        why_not_with=needs_adamw,
        excludes={
            "optimizer_kernel": _OWN_KERNEL,
            **dict.fromkeys(
                ("fsdp", "tensor"),
                "Adafactor's means over rows and columns need whole matrices, but a process has only shards",
            ),
        },
    ),
    Entry(
        name="zeroed_gradients",
        setting="set_to_none: false",
        searched_for=("set_to_none", "zero_grad", "optimizer.zero_grad(set_to_none=False)"),
        does="Gradients keep their memory between steps and are filled with zeros, as in PyTorch before 2.0",
        pays="when other code keeps the gradients' addresses; otherwise it shows what the default, set_to_none: true, "
        "saves",
        costs="the gradients' memory during the forward pass; in each step, the time to write zeros and to add the new "
        "gradients to these. Momentum and weight decay also change a parameter in steps that do not use this parameter",
        source="PyTorch documentation: torch.optim.Optimizer.zero_grad",
        changes="nothing",
        implementation="optimizer_choices.ZeroedGradients",
    ),
    Entry(
        name="expandable_segments",
        setting="expandable_segments: true",
        searched_for=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "fragmentation", "reserved but unallocated"),
        does="CUDA's allocator maps more memory at the end of a segment instead of asking for another segment",
        pays="when tensor sizes vary, and reserved memory is much larger than allocated memory",
        costs="slower first allocations; with older drivers, processes cannot share tensors by CUDA IPC",
        source="PyTorch documentation: CUDA semantics, Optimizing memory usage with PYTORCH_ALLOC_CONF",
        changes="nothing",
        layer="model",
        implementation="allocators.ExpandableSegments",
        why_not=needs_gpu,
    ),
    Entry(
        name="release_cache",
        setting="release_cache: true",
        searched_for=("torch.cuda.empty_cache", "malloc_trim", "empty cache between epochs"),
        does="Before and after each evaluation, free memory is given back to the system",
        pays="when other processes need this memory; seldom if the job is alone on the machine",
        costs="the next phase asks the system for the same memory again",
        source="PyTorch documentation: torch.cuda.empty_cache; glibc manual: malloc_trim",
        changes="nothing",
        implementation="allocators.ReleaseCache",
        why_not=_why_no_release,
    ),
)
