"""Techniques that save time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pipeline.params.catalogue.base import COMPILER, Entry, needs_gpu
from pipeline.params.machine import Machine
from pipeline.params.sections import Section, Train

if TYPE_CHECKING:
    from pipeline.params.catalogue import Variant

GRAPH_WARMUP_STEPS = 3
"""Number of steps that run before a step is recorded as a CUDA graph. PyTorch's documentation and tests use 3."""


def _needs_compiler(machine: Machine, on_gpu: bool) -> str | None:
    return machine.no_gpu_kernels if on_gpu else machine.no_cpu_kernels


def _records_within_warmup(train: Train) -> str | None:
    reason = f"it records a step before the measured window, so train.warmup_steps must be above {GRAPH_WARMUP_STEPS}"
    return None if train.warmup_steps > GRAPH_WARMUP_STEPS else reason


def _loses_gradients(variant: Variant, on_gpu: bool) -> str | None:
    if not on_gpu or variant.compile not in ("reduce-overhead", "max-autotune"):
        return None
    if variant.gradient_accumulation == 1 and variant.set_to_none:
        return None
    return (
        "this mode records CUDA graphs (the mode default does not), and the next forward pass overwrites the graphs' "
        "gradients; gradient_accumulation and set_to_none: false need these gradients longer (PyTorch issue 169545)"
    )


def _needs_16_bits(variant: Variant, on_gpu: bool) -> str | None:
    needs_16_bits = on_gpu and variant.attention in ("flash", "cudnn")
    has_32_bits = variant.precision in ("fp32", "tf32") and variant.parameter_precision == "fp32"
    return "on GPUs this kernel needs precision: bf16 or fp16" if needs_16_bits and has_32_bits else None


class SpeedSettings(Section):
    """A variant's settings for techniques that save time."""

    attention: Literal["auto", "flash", "efficient", "math", "cudnn"] = "auto"
    channels_last: bool = False
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = "none"
    cuda_graph: bool = False
    cudnn_benchmark: bool = False
    optimizer_kernel: Literal["fused", "foreach", "for_loop"] = "fused"


SPEED: tuple[Entry, ...] = (
    Entry(
        name="attention",
        setting="attention: math",
        searched_for=("scaled_dot_product_attention", "sdpa_kernel", "memory-efficient attention", "cuDNN attention"),
        does="The named kernel computes a step's attention, instead of PyTorch's choice: `flash`, `efficient` and "
        "`cudnn` fuse products and softmax, and `math` computes them one by one",
        pays="for long sequences, whose fastest kernel depends on device and shapes; math shows what fusing saves",
        costs="math keeps, for each head, a value for each pair of tokens. On GPUs flash and cudnn need bf16 or fp16, "
        "and cudnn needs train.deterministic: false",
        source="Dao et al., FlashAttention, 2022; Rabe and Staats, Self-attention Does Not Need O(n^2) Memory, 2021",
        changes="rounding",
        layer="model",
        implementation="attention.Attention",
        requested_if=lambda variant: variant.attention != "auto",
        why_not_value={"efficient": needs_gpu, "cudnn": needs_gpu},
        why_not_beside=_needs_16_bits,
    ),
    Entry(
        name="channels_last",
        setting="channels_last: true",
        searched_for=("NHWC", "memory format", "torch.channels_last"),
        does="Images (or volumes) and weights are stored with the channels innermost. Convolution kernels for Tensor "
        "Cores read this order",
        pays="for convolutional models in 16 bits on GPUs, and on CPUs with oneDNN",
        costs="a copy if an operation has no kernel for this format. Every 4-D and 5-D parameter is rearranged, so "
        "code that relies on its strides, such as view and view_as_complex, fails. With fsdp, which shards only "
        "contiguous weights, a convolution's weights are copied whenever the convolution runs",
        source="PyTorch tutorial: Channels Last Memory Format in PyTorch",
        changes="rounding",
        layer="model",
        implementation="channels_last.ChannelsLast",
    ),
    Entry(
        name="compile",
        setting="compile: default",
        searched_for=(
            "torch.compile",
            "TorchInductor",
            "TorchDynamo",
            "Triton",
            "kernel fusion",
            "reduce-overhead",
            "max-autotune",
            "CUDA graphs",
        ),
        does="The model runs as one graph of fused, generated kernels; reduce-overhead and, on GPUs, max-autotune also "
        "record CUDA graphs. max-autotune also tries several kernels for matrix products (on a CPU, only for batched "
        "products). While train.deterministic is true, it tries only kernels with the same rounding",
        pays="for models with many small operations, in runs long enough to make up for the compilation",
        costs="tens of seconds before the first step, fewer with a warm cache; it needs a C++ compiler and a model "
        "without graph breaks. reduce-overhead and, on GPUs, max-autotune exclude gradient_accumulation and "
        "set_to_none: false, which keep gradients during the next forward pass",
        source="Ansel et al., PyTorch 2, ASPLOS 2024",
        changes="rounding",
        layer="compiler",
        implementation="compile.Compile",
        needs_measuring=True,
        requested_if=lambda variant: variant.compile != "none",
        excludes={
            "data_parallel": "DataParallel makes new replicas in each step, but compiled code belongs to one model",
            "pipeline": "a stage runs only its part of the model, but compile compiles the whole model",
            "fsdp": "fsdp gathers parameters between the blocks, and one graph cannot contain this communication",
            "sync_batchnorm": "it is not known whether SyncBatchNorm's exchange of statistics compiles in one graph",
            "activation_offload": "it is not known whether activations that compiled code keeps are offloaded",
        },
        why_not=_needs_compiler,
        relies_on=(COMPILER,),
        why_not_value={"reduce-overhead": needs_gpu},
        why_not_beside=_loses_gradients,
    ),
    Entry(
        name="cuda_graph",
        setting="cuda_graph: true",
        searched_for=("CUDA graphs", "torch.cuda.CUDAGraph", "whole-network capture", "launch-bound"),
        does="Forward pass, backward pass and update are recorded once; from then on, one call per step replays them",
        pays="for small models and batches, whose kernels end before the CPU has launched the next kernel",
        costs="memory that only the recorded step can use; Python code in a step runs only once, during the recording",
        source="PyTorch documentation: CUDA semantics, CUDA Graphs",
        changes="rounding",
        implementation="cuda_graph.CudaGraph",
        needs_measuring=True,
        excludes={
            **dict.fromkeys(
                ("ddp", "pipeline", "data_parallel"), "only a step on one GPU, without communication, can be recorded"
            ),
            "compile": "compile's mode reduce-overhead already records CUDA graphs",
            "fp16": "with a gradient scaler, the host decides in each step whether to update the weights",
            "activation_checkpointing": "to run a block again, the host asks for the random generator's state, which a "
            "recording forbids",
            "auto_micro_batch": "a recorded step cannot be divided into more micro-batches",
            "activation_offload": "the copies of activations to the host are not part of a recording",
            "optimizer_in_backward": "the recording would repeat the learning rate of the recorded step",
            **dict.fromkeys(
                ("optimizer_state", "optimizer_kernel"),
                "only fused optimizers are known to read, on the device, the learning rate and whether the loss is "
                "finite",
            ),
        },
        why_not=needs_gpu,
        why_not_with=_records_within_warmup,
    ),
    Entry(
        name="cudnn_benchmark",
        setting="cudnn_benchmark: true",
        searched_for=("torch.backends.cudnn.benchmark", "cuDNN autotuning", "convolution algorithm search"),
        does="cuDNN tries its algorithms once for each shape of convolution and takes the fastest; while "
        "train.deterministic is true, it tries only deterministic algorithms",
        pays="for convolutional models with fixed shapes",
        costs="a search in the first step. The fastest algorithm, and with it the rounding, can differ from run to run",
        source="PyTorch documentation: torch.backends.cudnn",
        changes="rounding",
        repeats=False,
        implementation="cudnn_benchmark.CudnnBenchmark",
        why_not=needs_gpu,
    ),
    Entry(
        name="foreach_optimizer",
        setting="optimizer_kernel: foreach",
        searched_for=("foreach", "multi-tensor", "torch._foreach", "horizontal fusion"),
        does="The update runs one kernel per operation for all parameters; the default, fused, runs one kernel for all "
        "operations and parameters",
        pays="when an optimizer has no fused form; otherwise it shows what the default, fused, gains",
        costs="temporary tensors of the parameters' size",
        source="PyTorch documentation: torch.optim, How to adjust performance",
        changes="rounding",
        layer="model",
        implementation="optimizer_choices.ForeachOptimizer",
    ),
    Entry(
        name="for_loop_optimizer",
        setting="optimizer_kernel: for_loop",
        searched_for=("single-tensor optimizer", "foreach=False", "fused=False"),
        does="The update runs one kernel per operation and parameter",
        pays="when the update's temporary tensors must be small; otherwise it shows what the default, fused, gains",
        costs="many small kernels",
        source="PyTorch documentation: torch.optim, How to adjust performance",
        changes="rounding",
        layer="model",
        implementation="optimizer_choices.ForLoopOptimizer",
    ),
)
