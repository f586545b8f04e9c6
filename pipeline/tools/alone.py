"""Run a command alone in this checkout, which several hosts may share, until all of its processes have ended.

DVC's lock (dvc/rwlock.py) holds process ids without a host: an entry is dropped if this host has no such process, and
blocks if it has one, whatever that is. So on two hosts, two `dvc repro` could overlap, and a job that Slurm starts
again elsewhere could be blocked by a stranger. The lock here is the system's (flock), which ends with the processes
that hold it. It names the host, its boot and the job, since not every file system passes such locks on to other hosts.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from pipeline.errors import PipelineError
from pipeline.files import read_json
from pipeline.processes import boot_id

JOBS = Path(".cache/jobs")
"""The folder of the lock, and of the logs and exit codes of jobs."""
LOCK = JOBS / "running.json"
"""The locked file: who holds the lock; empty if nobody does."""
_DVC_LOCK = Path(".dvc/tmp/rwlock")
_ALONE = "PIPELINE_ALONE"
"""The environment variable of processes for which the lock is held."""
_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""


class NoAnswer(PipelineError):
    """squeue is not there, or cannot reach Slurm's controller."""


class Job(NamedTuple):
    """A job as squeue shows it. ``where``: its nodes, or why it waits."""

    id: str
    state: str
    where: str
    folder: str


def jobs(*filters: str) -> list[Job]:
    """Return the jobs that squeue shows: those that wait, also again, run or end. Raises NoAnswer."""
    command = ["squeue", "--noheader", "--format=%i|%T|%R|%Z", *filters]
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
    with _lock() as held:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        if shutil.which(command[0]) is None:
            raise PipelineError(f"there is no command {command[0]!r} on {socket.gethostname()}.")
        code = subprocess.Popen(command, env=os.environ | {_ALONE: "yes"}, pass_fds=held).wait()
        with suppress(ChildProcessError):
            while True:
                os.wait()
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
    if _ALONE not in os.environ and LOCK.exists():
        with LOCK.open("a") as file:
            _take(file)


def _take(file: IO[str]) -> Any:
    """Lock ``LOCK``, which is open. Return its last holder; None if that has removed its name. Raises PipelineError if
    the holder works, or may work."""
    who = "an unknown process"
    with suppress(BlockingIOError, ValueError, LookupError, TypeError):
        holder: Any = json.loads(LOCK.read_text(encoding="utf-8") or "null")
        who = holder["who"] if holder else who
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if holder is None or _has_ended(holder):
            return holder
    raise PipelineError(
        f"{who} works in this checkout: wait for its end, or use another clone; if it has ended, remove {LOCK}."
    )


@contextmanager
def _lock() -> Iterator[list[int]]:
    """Hold the lock during the block; yield the file that processes keep open that hold it, too.

    DVC's lock is removed if its process ids mean nothing: after the end of a holder on another host or boot, and at
    this holder's end, if these processes have ended."""
    if _ALONE in os.environ:
        yield []
        return
    JOBS.mkdir(parents=True, exist_ok=True)
    with LOCK.open("a") as file:
        before, this = _take(file), _this_process()
        if before is None:
            for user in _users_of_dvc():  # which may be on any host
                raise PipelineError(
                    f"{_DVC_LOCK} says that process {user['pid']} ({user['cmd']}) works in this checkout, perhaps on "
                    "another host: wait for its end; if it has ended, remove this file."
                )
        elif before["boot"] != this["boot"]:
            _DVC_LOCK.unlink(missing_ok=True)
        LOCK.write_text(json.dumps(this), encoding="utf-8")  # the same file: no other must be locked
        try:
            yield [file.fileno()]
        finally:
            if not any(psutil.pid_exists(user["pid"]) for user in _users_of_dvc()):  # on this host
                _DVC_LOCK.unlink(missing_ok=True)
            LOCK.write_text("", encoding="utf-8")


def _users_of_dvc() -> list[dict[str, Any]]:
    """Return the processes in DVC's lock, each with its "pid" and "cmd"."""
    if not _DVC_LOCK.exists():
        return []
    held = {"write": {}, "read": {}} | read_json(_DVC_LOCK)
    return [*held["write"].values(), *itertools.chain(*held["read"].values())]


def _this_process() -> dict[str, Any]:
    host, job = socket.gethostname(), os.environ.get("SLURM_JOB_ID")
    who = f"job {job} on {host}" if job else f"process {os.getpid()} on {host}, or what it has started,"
    return {"host": host, "boot": boot_id(), "job": job, "who": who}


def _has_ended(holder: Mapping[str, Any]) -> bool:
    """Return True if the holder of a lock that is free here has certainly ended."""
    this, job = _this_process(), holder["job"]
    if holder["host"] == this["host"] or holder["boot"] == this["boot"]:  # the system knows the locks of this machine
        return True
    with suppress(NoAnswer):  # the same job: it was put back into the queue, and has started here
        return job is not None and (job == this["job"] or not jobs(f"--job={job}"))
    return False
