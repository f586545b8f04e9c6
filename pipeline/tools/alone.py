"""Run a command alone in this checkout, which several hosts may share, until all of its processes have ended.

DVC's lock (dvc/rwlock.py) holds process ids without a host: an entry is dropped if this host has no such process, and
blocks if it has one, whatever that is. So on two hosts, two `dvc repro` could overlap, and a job that Slurm starts
again elsewhere could be blocked by a stranger. The lock here names the host, its boot, the process and the job.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from pipeline.errors import PipelineError, say
from pipeline.files import read_json, write_text
from pipeline.processes import boot_id

JOBS = Path(".cache/jobs")
"""The folder of the lock, and of the logs and exit codes of jobs."""
LOCK = JOBS / "running.json"
_DVC_LOCK = Path(".dvc/tmp/rwlock")
_ERROR_OF_DVC = 255
"""DVC's exit code."""
_ALONE = "PIPELINE_ALONE"
"""The environment variable of processes for which the lock is held: the holder's process id, and its start."""
_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}
"""Slurm's states of jobs that do not run again; a job that was put back into the queue has another."""


class NoAnswer(PipelineError):
    """squeue is not there, or cannot reach Slurm's controller."""


class Job(NamedTuple):
    """A job as squeue shows it. ``where``: its nodes, or why it waits."""

    id: str
    state: str
    where: str
    folder: str


def jobs(*filters: str) -> list[Job]:
    """Return the jobs that squeue finds, for some minutes also those that have ended. Raises NoAnswer."""
    command = ["squeue", "--noheader", "--states=all", "--format=%i|%T|%R|%Z", *filters]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswer(f"squeue does not answer: {error}; run this where Slurm is, such as on a login node.") from None
    if done.returncode and "Invalid job id" not in done.stderr:
        raise NoAnswer(f"squeue does not answer: {done.stderr.strip()}")
    return [Job(*line.split("|", 3)) for line in done.stdout.splitlines()]


def run(command: Sequence[str]) -> int:
    """Run ``command`` and return its exit code, or 128 and the number of the signal that ended it. Raises PipelineError
    if another job works in this checkout, or if there is no such command.

    A scheduler sends its signals to all processes, so this one ignores them. It returns when the processes that the
    command left behind have ended, too: SIGTERM ends DVC at once, while its stage still writes a checkpoint.
    """
    with _lock():
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        if shutil.which(command[0]) is None:
            raise PipelineError(f"there is no command {command[0]!r} on {socket.gethostname()}.")
        code = subprocess.Popen(command, env={_ALONE: _mark(_this_process())} | os.environ).wait()
        with suppress(ChildProcessError):
            while True:
                os.wait()
        if code == _ERROR_OF_DVC and _users_of_dvc() and not _dvc_lives():  # it has failed to release its lock
            say(
                "error: DVC's lock was changed while the command ran, as a command of DVC on another host changes it: "
                "run the same command again, which keeps what was finished, also the last stage.",
                file=sys.stderr,
            )
        return code if code >= 0 else 128 - code


def keep_dvc_out() -> None:
    """Hold DVC's lock of the repository until the end of this process, which is a stage of a job.

    DVC releases it while a stage runs, so a command of DVC on another host would drop the lock on the stage's files
    (``_check_blockers`` in dvc/rwlock.py), and could change them. Now it is refused. No option of DVC prevents this:
    core.hardlink_lock asks for process ids, too, and core.site_cache_dir does not move .dvc/tmp (``Repo.tmp_dir``).
    """
    with suppress(OSError):  # a command of DVC has it already, or core.hardlink_lock is set, and it is no such file
        fcntl.flock(os.open(_DVC_LOCK.with_name("lock"), os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)


def check() -> None:
    """Raise PipelineError if another job works in this checkout, or may do so."""
    try:
        if _ALONE in os.environ or _has_ended(holder := read_json(LOCK)):
            return
        who = (
            f"job {holder['job']} on {holder['host']}"
            if holder["job"]
            else f"process {holder['pid']} on {holder['host']}, or what it has started,"
        )
    except FileNotFoundError:  # there is no holder, or it has just ended
        return
    except (ValueError, LookupError, TypeError):
        who = "an unknown process"
    raise PipelineError(
        f"{who} works in this checkout: wait for its end, or use another clone; if it has ended, remove {LOCK}."
    )


@contextmanager
def _lock() -> Iterator[None]:
    """Hold the lock during the block. DVC's lock is removed if its process ids mean nothing: after the end of a holder
    on another host or boot, and at this holder's end, if these processes have ended."""
    if _ALONE in os.environ:
        yield
        return
    JOBS.mkdir(parents=True, exist_ok=True)
    with LOCK.with_suffix(".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # so that of two who find the lock of an ended job, one takes it
        check()
        this = _this_process()
        if not LOCK.exists():
            for user in _users_of_dvc():  # which may be on any host
                raise PipelineError(
                    f"{_DVC_LOCK} says that process {user['pid']} ({user['cmd']}) works in this checkout, perhaps on "
                    "another host: wait for its end; if it has ended, remove this file."
                )
        elif read_json(LOCK)["boot"] != this["boot"]:
            _DVC_LOCK.unlink(missing_ok=True)
        write_text(LOCK, json.dumps(this))
    try:
        yield
    finally:
        if not _dvc_lives():
            _DVC_LOCK.unlink(missing_ok=True)
        LOCK.unlink(missing_ok=True)


def _users_of_dvc() -> list[dict[str, Any]]:
    """Return the processes in DVC's lock, each with its "pid" and "cmd"."""
    if not _DVC_LOCK.exists():
        return []
    held = {"write": {}, "read": {}} | read_json(_DVC_LOCK)
    return [*held["write"].values(), *itertools.chain(*held["read"].values())]


def _dvc_lives() -> bool:
    """Return True if a process of this host is in DVC's lock."""
    return any(_started(user["pid"]) for user in _users_of_dvc())


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "processes": str(Path("/proc/self/ns/pid").readlink()),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def _started(pid: int) -> str | None:
    """Return the start of a process in ticks since the boot; None if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return None


def _mark(holder: Mapping[str, Any]) -> str:
    return f"{holder['pid']} {holder['started']}"


def _left_behind(holder: Mapping[str, Any]) -> bool:
    """Return True if a process of this host lives on for which a holder that was killed has held the lock."""
    readable = filter(None, (process.info["environ"] for process in psutil.process_iter(["environ"])))
    return any(variables.get(_ALONE) == _mark(holder) for variables in readable)


def _has_ended(holder: Mapping[str, Any]) -> bool:
    """Return True if the lock's holder has certainly ended."""
    this, job = _this_process(), holder["job"]
    if [holder[key] for key in ("host", "processes")] == [this[key] for key in ("host", "processes")]:
        if holder["boot"] != this["boot"]:
            return True
        return _started(holder["pid"]) != holder["started"] and not _left_behind(holder)
    with suppress(NoAnswer):  # the same job: it was put back into the queue, and has started here
        return job is not None and (job == this["job"] or all(other.state in ENDED for other in jobs(f"--job={job}")))
    return False
