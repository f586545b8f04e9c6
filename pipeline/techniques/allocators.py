"""Reduce the memory that the allocators for CUDA and the CPU hold but that no tensor uses."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
import torch

from pipeline.distributed import World
from pipeline.plans import Plan
from pipeline.processes import malloc
from pipeline.techniques.base import Technique


class ExpandableSegments(Technique):
    """torch's CUDA allocator extends a segment that is too small, instead of allocating another segment.

    The setting is made before the process's first allocation. Other settings in the user's environment variable are
    kept.
    """

    name = "expandable_segments"

    @classmethod
    def prepare_process(cls) -> None:
        requested = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        settings = ",".join(filter(None, [requested, "expandable_segments:True"]))
        torch._C._accelerator_setAllocatorSettings(settings)


class ReleaseCache(Technique):
    """Returns unused memory to the system after each epoch's training, and again after each evaluation.

    On CUDA this is the caching allocator's unused memory (``torch.cuda.empty_cache``), on a CPU the free pages of the C
    library's heap (``malloc_trim``). The result says how many bytes were returned, and how long this took.
    """

    name = "release_cache"

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__(plan, world)
        self.given_back: list[int] = []
        """Bytes returned to the system after each phase: an epoch's training, or an evaluation."""
        self.seconds = 0.0

    def between_phases(self) -> None:
        self.world.synchronise()
        held, started = self._held(), time.perf_counter()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            malloc.trim()
        self.seconds += time.perf_counter() - started
        self.given_back.append(held - self._held())

    def findings(self) -> dict[str, float]:
        return {
            "release_cache_phases": len(self.given_back),
            "release_cache_most_bytes": max(self.given_back, default=0),
            "release_cache_mean_bytes": sum(self.given_back) / max(1, len(self.given_back)),
            "release_cache_seconds": self.seconds,
        }

    def state(self) -> dict[str, Any]:
        return {"given_back": self.given_back, "seconds": self.seconds}

    def restore(self, state: dict[str, Any]) -> None:
        self.given_back, self.seconds = list(state["given_back"]), state["seconds"]

    def _held(self) -> int:
        """Return the bytes that this process holds: on CUDA, the memory that the allocator has reserved; on a CPU, the
        resident memory without the pages that are shared or belong to files."""
        if self.world.device.type == "cuda":
            return torch.cuda.memory_reserved(self.world.device)
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared
