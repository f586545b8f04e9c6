"""The machine's properties that plans depend on."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Machine(BaseModel):
    """The hardware and software that a variant's plan depends on; ``environment.machine`` detects both."""

    model_config = ConfigDict(frozen=True)

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
