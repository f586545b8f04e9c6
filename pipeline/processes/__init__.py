"""How a Python process starts, and how it ends together with its parent process."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""
STAT = Path("/proc/stat")


def launched_size() -> int | None:
    """Return the world size if a launcher (``distributed.forked``, torchrun, a wrapper for Slurm or Kubernetes) started
    this process, else None. ``distributed`` reads all other variables of launchers, but imports torch."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def age_seconds() -> float:
    """Return the seconds since this process began, to a hundredth.

    On Linux, the process's start and the present time are both read as times since boot. psutil's ``create_time`` is
    used only on other systems. On Linux it can be a second off, because it adds the time of the boot, which Linux
    gives in whole seconds.
    """
    if not sys.platform.startswith("linux"):
        import psutil  # imported here: this module loads before a missing package can be reported

        return time.time() - psutil.Process().create_time()
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of the line; field 2 can hold spaces
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def boot_id() -> str | None:
    """Return the id of this machine's boot, which its containers share; None if the system has none."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text(encoding="ascii").strip() if file.exists() else None


SHORT_SPINS, LONG_SPINS = 1_000, 300_000
"""How often a waiting OpenMP thread looks for work before it sleeps. The long spin is libgomp's own value."""
_BUSY_CORES = 0.15
"""If other processes use more than this many cores, a machine is busy."""


def set_openmp_spins(*, measures: bool) -> None:
    """Set GOMP_SPINCOUNT for this process and its children, unless the user has set it or OMP_WAIT_POLICY. Call this
    before torch is loaded, because torch's OpenMP library reads GOMP_SPINCOUNT when it is loaded.

    If other processes use the cores too, a spinning thread can take the core from the thread that it waits for: beside
    one or two busy processes, training on two cores ran up to ten times as fast with short spins. But waking a thread
    takes time: on an idle machine, a small model ran 10% faster with long spins (``benchmarks.spins``). So a process
    that ``measures`` looks at the load for a quarter of a second, and spins long if the machine is idle. All arms of
    the measurement are its children, and inherit the value. Other processes, and processes that a launcher has started
    together, spin shortly.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        is_idle = measures and launched_size() is None and _cores_in_use() < _BUSY_CORES
        os.environ["GOMP_SPINCOUNT"] = str(LONG_SPINS if is_idle else SHORT_SPINS)


def _cores_in_use(seconds: float = 0.25) -> float:
    """Return how many of the cores on which this process may run are in use by others during the next ``seconds``.
    Infinity if the system does not say."""

    def used() -> float:
        rows = (line.split() for line in STAT.read_text(encoding="ascii").splitlines())
        times = {row[0]: list(map(int, row[1:9])) for row in rows if row[0].startswith("cpu")}
        # user, nice, system, idle, iowait, irq, softirq, steal
        ticks = sum(sum(times[f"cpu{core}"]) - sum(times[f"cpu{core}"][3:5]) for core in os.sched_getaffinity(0))
        return ticks / os.sysconf("SC_CLK_TCK")

    if not STAT.exists():
        return float("inf")
    before, started = used(), time.monotonic()
    time.sleep(seconds)
    return (used() - before) / (time.monotonic() - started)


def end_with_parent() -> None:
    """Make the system kill this process as soon as its ``multiprocessing`` parent has ended.

    The parent is the process that called ``start``, even if this process was forked from another process.
    PR_SET_PDEATHSIG is not used, because it would react to the end of one thread of the parent. Instead, this
    process holds one end of a pipe, and only the parent holds the other end. Linux sends a signal when that other end
    is closed. On other systems, this process continues until it next checks its parent.
    """
    import multiprocessing  # imported here: the import takes a fifth of a quick command's time

    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform.startswith("linux"):
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not parent.is_alive():  # the parent ended earlier
        os.kill(os.getpid(), signal.SIGKILL)


def terminate_with_parent() -> None:
    """Make Linux send SIGTERM to this process when the thread that started it ends; do nothing on other systems."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def hush_torchao() -> None:
    """Hide what torch would warn of in each process: a word of ``torchao``, which ``transformers`` imports."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def load_bitsandbytes() -> None:
    """Import bitsandbytes without the package ``kernels``, by which it would fetch a kernel for inference from a hub on
    CPUs with bf16, and without its word that it could not. Afterwards, ``kernels`` cannot be imported, unless it
    already was."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").disabled = True
    kernels, sys.modules["kernels"] = sys.modules.get("kernels"), None  # type: ignore[assignment]
    import bitsandbytes  # noqa: F401

    sys.modules["kernels"] = kernels  # type: ignore[assignment]


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during a block of imports, and freeze all objects that exist at its end.

    Imported objects stay alive, so scanning them is useless. Repeated scans would take a quarter of the import time of
    torch and its compiler. Each later collection would also scan these objects again, and those at Python's end would
    take a second, or half a minute beside much other work.
    """
    hush_torchao()
    thresholds, modules = gc.get_threshold(), len(sys.modules)
    gc.set_threshold(0)  # not gc.disable(), which the user's own modules may call
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if len(sys.modules) > modules:  # otherwise, freezing would only keep earlier garbage
            gc.freeze()
            atexit.register(_unfreeze)


def _unfreeze() -> None:
    if "triton" in sys.modules:  # it prints what Python's end has not collected
        gc.unfreeze()


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give the attribute ``name`` of ``owner`` another value while the block runs."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def default_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """While the block runs, set the environment ``variables``, except for variables that the user has set."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ |= ours
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
