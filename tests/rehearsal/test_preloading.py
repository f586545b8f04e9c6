"""The server from which measuring processes are forked has imported torch, but has not queried a driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from pipeline.benchmark import arm
from pipeline.environment import software
from pipeline.tools.verification import observing
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or software.torch_build()["cuda"] is None,
    reason="needs glibc, which reports who loads a library, and a build of torch for GPUs",
)


def drivers_loaded(code: str) -> set[tuple[str, str]]:
    """Run ``code`` in Python. Return which of the driver's libraries are searched for, and by which library."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"LD_DEBUG": "files", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(re.findall(r"file=(libcuda|libnvidia-ml)\.so\S* .*loaded by (\S+)", done.stderr))


@pytest.mark.slow
def test_a_server_of_forks_asks_no_driver() -> None:
    modules = {arm.__name__, observing.__name__, "torch._dynamo"}
    by_libraries = drivers_loaded("import torch")  # some of NVIDIA's libraries load the driver's, but query nothing
    assert drivers_loaded(f"import {', '.join(modules)}") == by_libraries
    asked = drivers_loaded(
        "import contextlib, torch, pynvml\n"
        "with contextlib.suppress(pynvml.NVMLError):\n"
        "    torch.cuda.device_count(), pynvml.nvmlInit()"
    )
    assert {"libcuda", "libnvidia-ml"} <= {name for name, _ in asked - by_libraries}
