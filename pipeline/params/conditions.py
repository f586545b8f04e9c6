"""The conditions that ``catalogue.yaml`` names: on which machines, for which jobs and beside which settings a technique
cannot run. A condition returns the reason; None if the technique can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict

from pipeline.params.sections import Train
from pipeline.params.variants import Variant


class Machine(BaseModel):
    """The hardware and software that a variant's plan depends on; ``environment.machine`` detects both."""

    model_config = ConfigDict(frozen=True)

    hosts: int = 1
    """Number of hosts among which processes can be divided. The other fields hold for each of them."""
    gpus: int
    why_no_gpu: str | None = None
    """The reason why no GPU can be used although the machine may have one; otherwise None."""
    gpu_native_bf16: bool
    cpu_native_bf16: bool
    gpu_tf32: bool = False
    """Whether every GPU supports TF32 (compute capability 8.0 or above); False without a GPU."""
    gpu_float8: bool = False
    """Whether every GPU can multiply float8 numbers (compute capability 8.9 or above); False without a GPU."""
    trims_memory: bool = True
    """Whether the C library can give freed memory back to the system (glibc's malloc_trim)."""
    installed: frozenset[str] = frozenset()
    """Names of the optional libraries that are installed."""
    no_cpu_kernels: str | None = None
    """Why torch.compile cannot build kernels for the CPU, and the remedy; None if it can."""
    no_gpu_kernels: str | None = None
    """Why torch.compile cannot build kernels for GPUs, and the remedy; None if it can."""


GRAPH_WARMUP_STEPS = 3
"""Number of steps that run before a step is recorded as a CUDA graph. PyTorch's documentation and tests use 3."""


def never(*_: object) -> None:
    """Return None: there is no reason against the technique."""


# Machine, and whether the job runs on GPUs


def needs_gpu(_: Machine, on_gpu: bool) -> str | None:
    return None if on_gpu else "it needs a GPU, and this run is on the CPU"


def needs_package(package: str, extra: str) -> Callable[[Machine, bool], str | None]:
    """Return the condition of a technique that needs ``package``, which pip's extra ``extra`` installs."""
    reason = f"{package} is not installed (pip install '.[{extra}]')"
    return lambda machine, _: None if package in machine.installed else reason


needs_bitsandbytes = needs_package("bitsandbytes", "low-bit")
needs_torchao = needs_package("torchao", "float8")


def needs_compiler(machine: Machine, on_gpu: bool) -> str | None:
    return machine.no_gpu_kernels if on_gpu else machine.no_cpu_kernels


def needs_malloc_trim(machine: Machine, on_gpu: bool) -> str | None:
    return None if on_gpu or machine.trims_memory else "this system's C library has no malloc_trim"


def needs_tf32(machine: Machine, on_gpu: bool) -> str | None:
    return None if on_gpu and machine.gpu_tf32 else "it needs a GPU with TF32 (compute capability 8.0 or above)"


def without_native_float8(machine: Machine, on_gpu: bool) -> str | None:
    return None if on_gpu and machine.gpu_float8 else "only GPUs from compute capability 8.9 multiply in float8"


def without_native_bf16(machine: Machine, on_gpu: bool) -> str | None:
    if machine.gpu_native_bf16 if on_gpu else machine.cpu_native_bf16:
        return None
    if on_gpu:
        return "this GPU has no native bf16 (compute capability below 8.0) and would emulate it"
    return "this CPU has no native bf16 (AVX-512 BF16, AMX or Arm BF16) and would emulate it, several times slower"


# The job


def needs_adamw(train: Train) -> str | None:
    return None if train.optimizer == "adamw" else f"it replaces adamw, and train.optimizer is {train.optimizer}"


def records_within_warmup(train: Train) -> str | None:
    reason = f"it records a step before the measured window, so train.warmup_steps must be above {GRAPH_WARMUP_STEPS}"
    return None if train.warmup_steps > GRAPH_WARMUP_STEPS else reason


def without_all_gradients(train: Train) -> str | None:
    reason = f"it frees gradients before all are complete, and train.clip_norm {train.clip_norm} is for all together"
    return reason if train.clip_norm else None


def averages_itself(train: Train) -> str | None:
    reason = f"its processes have different weights between averagings, and train.ema_decay is {train.ema_decay}"
    return reason if train.ema_decay else None


# The variant's other settings, and whether the job runs on GPUs


def needs_a_mebibyte(variant: Variant, _: bool) -> str | None:
    if variant.compile == "none" or variant.bucket_mb is None or variant.bucket_mb >= 1:
        return None
    return "compile makes one graph per bucket, and the first bucket has 1 MiB, so bucket_mb must be at least 1"


def needs_16_bits(variant: Variant, on_gpu: bool) -> str | None:
    needs_16_bits = on_gpu and variant.attention in ("flash", "cudnn")
    has_32_bits = variant.precision in ("fp32", "tf32") and variant.parameter_precision == "fp32"
    return "on GPUs this kernel needs precision: bf16 or fp16" if needs_16_bits and has_32_bits else None


def needs_compiled(variant: Variant, _: bool) -> str | None:
    return None if variant.compile != "none" else "its kernel is generated by compile: set compile, such as to 'blocks'"


def loses_gradients(variant: Variant, on_gpu: bool) -> str | None:
    if not on_gpu or variant.compile not in ("reduce-overhead", "max-autotune"):
        return None
    if variant.gradient_accumulation == 1 and variant.set_to_none:
        return None
    return (
        "this mode records CUDA graphs (the mode default does not), and the next forward pass overwrites the graphs' "
        "gradients; gradient_accumulation and set_to_none: false need these gradients longer (PyTorch issue 169545)"
    )


# The variant -> changed settings with which the technique runs but has no effect


def learning_nothing(variant: Variant) -> dict[str, Any]:
    assert variant.distillation is not None
    return {"distillation": variant.distillation.model_copy(update={"alpha": 0.0})}
