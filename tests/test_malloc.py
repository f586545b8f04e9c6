from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

RESIDENT_AFTER_FREEING = """
import sys
import psutil
from pipeline.processes import malloc
for how in sys.argv[3:]:
    getattr(malloc, f"{how}_freed_memory")()
before = psutil.Process().memory_info().rss
bytes(b"1") * (int(sys.argv[1]) * 2**20)
if sys.argv[2] == "trim":
    malloc.trim()
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc's malloc")
def test_freed_memory_is_kept_for_the_next_tensor_or_returned() -> None:
    def resident(*how: str, mib: int = 24, then: str = "") -> int:
        command = [sys.executable, "-c", RESIDENT_AFTER_FREEING, str(mib), then, *how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)

    assert resident("keep") > 20 * 2**20
    assert resident("keep", mib=40) > 36 * 2**20, "glibc's largest threshold is 32 MiB"
    assert resident("keep", then="trim") < 4 * 2**20
    assert resident("return") < 4 * 2**20
    assert resident("keep", "return") < 4 * 2**20
    assert resident() < 8 * 2**20
