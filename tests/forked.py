"""Import what ranks need. The server that forks the tests' ranks preloads this module."""

from __future__ import annotations

from importlib import import_module

from pipeline.processes import importing

with importing():
    for _name in ("pipeline.benchmark.arm", "pipeline.tools.verification.observing", "torch._dynamo"):
        import_module(_name)
    for _name in ("tests.as_if_cuda", "tests.parallel", "tests.trainings", "tests.workspaces"):
        import_module(_name)

import_module("tqdm").tqdm.get_lock()  # otherwise each rank would create a semaphore, and a killed rank leaks it
