"""What a step can fail with: memory that is out, an operation without a deterministic form."""

from __future__ import annotations

import re

import torch

from pipeline.errors import PipelineError


class OutOfMemory(PipelineError):
    """A device had not the memory for a step of the training."""


class TooFewSamples(PipelineError):
    """A model cannot train with so few samples at once."""


_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|CUDA( driver)? error: out of memory|CUDA ran out of memory|\[CUDA\]: out of memory"
    r"|ALLOC(ATION)?_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|Cuda failure (\d+ )?'out of memory'"
)
"""What torch, Triton, cuDNN, cuBLAS and NCCL say. cuBLAS cannot be initialised where its workspace does not fit."""
_NO_ENGINE = re.compile(r"(GET|FIND) was unable to find an engine to execute this computation")
"""What torch says where none of cuDNN's engines gets its workspace; or where none can do it, with any memory."""
LITTLE_MEMORY = 0.1
"""The share of a GPU's memory below which it is taken for the reason why there is no engine."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocator of torch said so, or one of CUDA's libraries."""
    if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(str(error)):
        return True
    return bool(_NO_ENGINE.search(str(error))) and _free_memory_fraction() < LITTLE_MEMORY


def is_too_few_samples(error: Exception) -> bool:
    """Whether a normalisation had a single value, which has no variance: BatchNorm, with one sample of one pixel."""
    return "Expected more than 1 value per channel when training" in str(error)


def _free_memory_fraction() -> float:
    """Of the current GPU's memory, or of the part of it that this process may take; 1 without a GPU."""
    if not torch.cuda.is_available():
        return 1.0
    free, total = torch.cuda.mem_get_info()
    allowed = torch.cuda.get_per_process_memory_fraction() * total
    return min(free / total, 1 - torch.cuda.memory_reserved() / allowed)


def without_deterministic_form(error: BaseException) -> str | None:
    """The operation that torch refused in its strict mode (``use_deterministic_algorithms``); None: another error."""
    operation, refused, _ = str(error).partition(" does not have a deterministic implementation")
    if refused:
        return operation.rpartition("\n")[2]
    return "cuBLAS" if "not deterministic because it uses CuBLAS" in str(error) else None
