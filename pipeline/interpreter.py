"""How a process of Python begins, and when it ends with the one that started it."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


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


def let_threads_sleep() -> None:
    """Let OpenMP's threads spin but shortly between two parallel regions, unless the user says what they do.

    Where other processes share the cores, a spinning thread takes the core from the very thread that it waits for. With
    a short spin, after which they sleep, the default job ran 1.2 to 17 times as fast beside one busy process on two
    cores, and up to 3 times beside two. Its price is the waking: on an idle machine nothing with AVX2, 15% of a small
    net's throughput with AVX-512. To be called before torch is loaded, which reads it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def end_with_parent() -> None:
    """Let the system kill this process as soon as the one that started it by ``multiprocessing`` has ended.

    That is the one that called ``start``, whatever this one was forked from, and not one of its threads, of which
    PR_SET_PDEATHSIG would tell. It alone holds the other end of a pipe, and Linux sends a signal when the last holder
    has gone. Elsewhere the process lives on until it next asks.
    """
    import multiprocessing  # not above: its price is a fifth of a quick command's

    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform.startswith("linux"):
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not parent.is_alive():  # it went before
        os.kill(os.getpid(), signal.SIGKILL)


def terminate_with_parent() -> None:
    """Let Linux send SIGTERM to this process, a command of its own, when the thread that started it has ended."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def importing() -> Iterator[None]:
    """A block of imports, during which nobody looks for garbage; nor among what is there by its end, ever after.

    What imports make stays. Looking through all of it, again and again as it comes, takes a quarter of the time that
    torch and its compiler need, and each later collection would look through it once more.
    """
    thresholds, modules = gc.get_threshold(), len(sys.modules)
    gc.set_threshold(0)  # gc.disable() is for the user's own modules to say
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if len(sys.modules) > modules:  # else garbage of earlier work would stay, for nothing
            gc.freeze()
            atexit.register(gc.unfreeze)  # Python's end has to find them again
