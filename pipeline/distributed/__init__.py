"""Processes that train together. The only package that knows ranks, launcher variables and torch.distributed."""

from pipeline.distributed.interruptions import Interruption, interruption
from pipeline.distributed.launching import WorkerError, forked, launch
from pipeline.distributed.worlds import ALONE, World, launched_size, own_part, world

__all__ = [
    "ALONE",
    "Interruption",
    "WorkerError",
    "World",
    "forked",
    "interruption",
    "launch",
    "launched_size",
    "own_part",
    "world",
]
