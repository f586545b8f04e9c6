"""What the ranks of tests are forked from: it has imported what they need, in which they look for no garbage."""

from __future__ import annotations

from importlib import import_module

from pipeline.interpreter import importing

with importing():
    for _name in ("pipeline.benchmark.arm", "pipeline.tools.verification.observing", "torch._dynamo"):
        import_module(_name)
    for _name in ("tests.as_if_cuda", "tests.parallel", "tests.test_job"):
        import_module(_name)

import_module("tqdm").tqdm.get_lock()  # else each has a semaphore of its own, which one that is killed leaves behind
