"""Processes that train together. Only this package, and ``processes.launched_size``, read the environment variables
that launchers set."""

from pipeline.distributed.launching import Interruption, WorkerError, forked, interruption, launch
from pipeline.distributed.meeting import live
from pipeline.distributed.worlds import ALONE, World, launched_hosts, own_part, share_of, whole, world
from pipeline.processes import launched_size
