"""How a process of Python begins and ends, and how quickly: with torch come half a million objects."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


def age_seconds() -> float:
    """Seconds since this process began, to a hundredth.

    Linux counts both from its start. As a time of day it knows its start in whole seconds only, and psutil's
    ``create_time``, which is used elsewhere, is off by as much there.
    """
    if not sys.platform.startswith("linux"):
        import psutil  # not above: this module is loaded before anybody can say that something is not installed

        return time.time() - psutil.Process().create_time()
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd of all; the second can hold spaces
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


@contextmanager
def importing() -> Iterator[None]:
    """A block of imports, during which nobody looks for garbage; nor among what is there by its end, ever after.

    What imports make stays. Looking through all of it, again and again as it comes, takes a quarter of the time that
    torch and its compiler need, and each later collection would look through it once more.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run(main: Callable[[], int]) -> NoReturn:
    """End the process with the exit code that ``main`` returns, and leave the rest to the system. Call it once, first.

    At its end Python takes its modules apart, object by object: with torch that is a second, after which the system
    takes back the memory anyway. Threads are waited for, and what is registered with ``atexit`` runs, as ever.
    """
    code = 1  # after an exception that nobody catches

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)  # what compiled code has printed
        os._exit(code)

    atexit.register(leave)  # the first to be registered is called last
    try:
        code = main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        raise
    sys.exit(code)
