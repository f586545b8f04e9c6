"""The machine, as plans see it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Machine(BaseModel):
    """What the machine offers, as far as a variant's plan depends on it; see ``environment.machine``."""

    model_config = ConfigDict(frozen=True)

    gpus: int
    why_no_gpu: str | None = None
    """Why no GPU can be used, although something indicates one."""
    gpu_native_bf16: bool
    cpu_native_bf16: bool
    gpu_tf32: bool = False
    """Whether every GPU has TF32 (compute capability 8.0)."""
    gpu_float8: bool = False
    """Whether every GPU has products of float8 numbers (compute capability 8.9)."""
    trims_memory: bool = True
    """Whether the C library can give freed memory back to the system (glibc's malloc_trim)."""
    installed: frozenset[str] = frozenset()
    """Names of the optional libraries that are installed."""
    no_cpu_kernels: str | None = None
    """Why torch.compile cannot build kernels for the CPU, and the remedy; None if it can."""
    no_gpu_kernels: str | None = None
    """Why torch.compile cannot build kernels for GPUs, and the remedy; None if it can."""
