"""What is missing on this machine, or in this container, for the job of params.yaml, and how to put it right.

It works where things are broken: each fault is a line. What may hang is cut off; nothing is changed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TypeVar

from pipeline import environment, tracking
from pipeline.errors import redacted
from pipeline.params import PARAMS_FILE, Machine, Publish
from pipeline.tools.doctor import checkout, gpus, params, printed, probes, resources
from pipeline.tools.doctor.findings import Finding, Status

T = TypeVar("T")

PROBE_SECONDS = 30.0
"""Imports of torch or DVC take one to three; the first one, from a cold disk, much longer."""


def run(*, as_json: bool) -> int:
    """Print what was found; return 1 if there is a problem, else 0."""
    findings = [
        finding._replace(found=redacted(finding.found), remedy=redacted(finding.remedy)) for finding in examine(Path())
    ]
    if as_json:
        print(printed.as_json(findings))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        print("\n".join(printed.lines(findings, shutil.get_terminal_size().columns, colour=colour)))
    return int(any(finding.status == "problem" for finding in findings))


def examine(root: Path) -> Iterator[Finding]:
    """All checks of the checkout at ``root``, in the order in which a person would put things right."""
    container = gpus.in_container()
    dvc = _begin(lambda: probes.ask("dvc", PROBE_SECONDS))
    driver = gpus.ask_driver()
    torch = _begin(lambda: probes.ask("torch", PROBE_SECONDS))  # after the driver listed who computes on the GPUs
    names = _begin(lambda: probes.ask("names", PROBE_SECONDS))
    machine = _or(None, environment.machine)
    job = params.read(root / PARAMS_FILE, machine)
    experiment = (job.config.publish if job.config else Publish()).experiment
    store = _begin(lambda: tracking.health(root, experiment, probes.NETWORK_SECONDS))

    yield from _safely("params.yaml", lambda: params.check(job))
    yield from _safely("torch", lambda: [gpus.check_torch(job, torch.result(), driver)])
    yield from _safely("model", lambda: params.check_names(job, torch.result(), names.result()))
    yield from _safely("NVIDIA driver", lambda: [gpus.check_driver(job, torch.result(), driver, container=container)])
    yield from _safely("GPUs", lambda: gpus.check_gpus(job, torch.result(), driver, _gpus(machine)))
    yield from _safely("NCCL", lambda: [gpus.check_nccl(job, torch.result())])
    yield from _safely("CPU", lambda: [resources.check_cpu(job)])
    yield from _safely("memory", lambda: [resources.check_memory(job)])
    yield from _safely("shared memory", lambda: [resources.check_shared_memory(job)])
    yield from _safely("work tree", lambda: [checkout.check_work_tree(root, container=container)])
    yield from _safely("git", lambda: [checkout.check_git(root)])
    yield from _safely("DVC cache", lambda: [checkout.check_cache(root, dvc.result())])
    yield from _safely("DVC remote", lambda: checkout.check_remote(dvc.result()))
    yield from _safely("disk", lambda: [resources.check_disk(_places(root, dvc.result()))])
    yield from _safely("tracking", lambda: [_tracking(store)])


def _places(root: Path, dvc: probes.Answer) -> list[Path]:
    cache = [Path(dvc.found["cache"])] if "cache" in dvc.found else []
    return [root.resolve(), root.resolve() / "data", root.resolve() / "models", *cache]


def _gpus(machine: Machine | None) -> int:
    return machine.gpus if machine else 0


def _tracking(store: Future[tracking.Health]) -> Finding:
    try:
        found = store.result(2 * probes.NETWORK_SECONDS)  # a name server's silence is not in the request's time-out
    except TimeoutError:
        return Finding(
            "tracking",
            "problem",
            f"MLFLOW_TRACKING_URI: no answer within {2 * probes.NETWORK_SECONDS:g} s",
            "check the address and the name server",
        )
    status: Status = "not applicable" if found.well is None else "ok" if found.well else "problem"
    return Finding("tracking", status, found.found, found.remedy)


def _begin(work: Callable[[], T]) -> Future[T]:
    """``work`` in a thread that does not keep the program from ending."""
    future: Future[T] = Future()

    def fulfil() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    Thread(target=fulfil, daemon=True).start()
    return future


def _or(unknown: T, look: Callable[[], T]) -> T:
    """What ``look`` finds; ``unknown`` where what it needs is broken. The checks that miss it say so."""
    try:
        return look()
    except Exception:
        return unknown


def _safely(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings; a failure that no check foresaw is one too, so that the other lines still come."""
    try:
        yield from look()
    except Exception as error:
        reason = f"could not be looked at: {type(error).__name__}: {error}"
        yield Finding(check, "warning", reason, "look yourself, and report this: it is a fault of doctor")
