"""Run a module as on a machine with two GPUs: ``python -m tests.rehearsal.played PYTHON MODULE ...``."""

from __future__ import annotations

import runpy
import sys

from tests.as_if_cuda import as_if_cuda

if __name__ == "__main__":
    sys.executable = sys.argv[1]  # PYTHON starts further processes, which must see the GPUs, too
    del sys.argv[:2]
    with as_if_cuda(2):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
