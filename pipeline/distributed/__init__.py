"""Processes that train together. Only this package reads the environment variables that launchers set."""

from pipeline.distributed.interruptions import Interruption, interruption
from pipeline.distributed.launching import WorkerError, forked, launch
from pipeline.distributed.worlds import ALONE, World, launched_size, own_part, share_of, whole, world

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
    "share_of",
    "whole",
    "world",
]
