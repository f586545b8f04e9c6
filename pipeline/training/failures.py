"""Recognise failures of a step: out of memory, too few samples, an operation without a deterministic form."""

from __future__ import annotations

import re

import torch

from pipeline.errors import PipelineError


class OutOfMemory(PipelineError):
    """A device does not have enough memory for a training step."""


class TooFewSamples(PipelineError):
    """A model cannot train with so few samples in a micro-batch."""


_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|CUDA( driver)? error: out of memory|CUDA ran out of memory|\[CUDA\]: out of memory"
    r"|ALLOC(ATION)?_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|Cuda failure (\d+ )?'out of memory'"
)
"""Out-of-memory messages of torch, Triton, cuDNN, cuBLAS and NCCL. Without memory for its workspace, cuBLAS says that
it is not initialised."""
_NO_ENGINE = re.compile(r"(GET|FIND) was unable to find an engine to execute this computation")
"""torch's message if every cuDNN engine lacks memory for its workspace, or if no engine supports the computation."""
LITTLE_MEMORY = 0.1
"""If less than this share of a GPU's memory is free, a missing engine counts as out of memory."""


def is_out_of_memory(error: Exception) -> bool:
    """True if ``error`` says or suggests that torch's allocator or a CUDA library ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(str(error)):
        return True
    return bool(_NO_ENGINE.search(str(error))) and _free_memory_fraction() < LITTLE_MEMORY


def is_too_few_samples(error: Exception) -> bool:
    """True if ``error`` says that a normalisation got only one value per channel, such as one sample of one pixel."""
    return "Expected more than 1 value per channel when training" in str(error)


def _free_memory_fraction() -> float:
    """Return the share of memory that is free; 1 without a GPU.

    This is the smaller of two shares: the free share of the current GPU's memory, and the free share of this process's
    limit on that GPU.
    """
    if not torch.cuda.is_available():
        return 1.0
    free, total = torch.cuda.mem_get_info()
    allowed = torch.cuda.get_per_process_memory_fraction() * total
    return min(free / total, 1 - torch.cuda.memory_reserved() / allowed)


def without_deterministic_form(error: BaseException) -> str | None:
    """Return the operation that torch refused under ``use_deterministic_algorithms``; None for other errors."""
    operation, refused, _ = str(error).partition(" does not have a deterministic implementation")
    if refused:
        return operation.rpartition("\n")[2]
    return "cuBLAS" if "not deterministic because it uses CuBLAS" in str(error) else None
