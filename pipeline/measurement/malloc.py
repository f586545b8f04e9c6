"""What becomes of the CPU memory that this process frees: kept for its next tensors, or given back at once."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's malloc.h"""


def keep_freed_memory() -> None:
    """Let this process keep the CPU memory that it frees, for its next tensors.

    By default glibc gives large blocks back to the system when they are freed, and every step pays for the same pages
    again: some 2,000 page faults a step of the default job, and a fifth to a third of its throughput. Its price is that
    the peak depends on where in the heap blocks happen to lie: see ``return_freed_memory``. Does nothing where the C
    library is another, or MALLOC_* or LD_PRELOAD say what the user wants.
    """
    _mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that it takes; larger blocks still go back
    _mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Let this process give blocks of 128 KiB and more back to the system at once when it frees them.

    So its resident memory is what its tensors take, the same in every process. With kept memory, equal processes that
    were forked from different servers differed by a fifth in their peaks of 35 MiB; like this by less than 1 MiB. Does
    nothing where ``keep_freed_memory`` does nothing.
    """
    _mallopt(_M_MMAP_THRESHOLD, 128 * 2**10)  # glibc's own start; saying so keeps it from growing


def _mallopt(parameter: int, value: int) -> None:
    if any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
