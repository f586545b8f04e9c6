"""Which hosts there are, and how the other hosts reach this one."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.params import Launch
from pipeline.processes import launched_size

NAME = "PIPELINE_HOST"
"""The environment variable that names the host of a rank."""
PODS = "PIPELINE_PODS"
"""The environment variable with the names of the pods of `submit kubernetes`, the one that runs the command first."""
_INTERACTIVE_STEP = "4294967290"
"""The id of the step in which `salloc` may run a shell on the first node (SLURM_INTERACTIVE_STEP in slurm.h)."""

_launch = Launch(hosts=[socket.gethostname()])
_record: Callable[[], Mapping[str, Any]] = dict


def use(launch: Launch, record: Callable[[], Mapping[str, Any]]) -> int:
    """From now on, divide processes among the hosts that ``launch`` names. Return their number, this host included.

    ``record`` returns the plain values on which numbers depend, and which must be the same on all hosts (``others``).
    """
    global _launch, _record
    _launch, _record = launch, record
    return len(names())


def record() -> Callable[[], Mapping[str, Any]]:
    """Return the ``record`` that ``use`` was given."""
    return _record


def names() -> list[str]:
    """Return the names of the hosts, this host's first; one name if this host is alone."""
    if launched_size() is not None:  # a launcher has divided the processes
        return [socket.gethostname()]
    if _launch.hosts != "auto":
        return _launch.hosts
    if PODS in os.environ:
        return os.environ[PODS].split()
    here, step = os.environ.get("SLURMD_NODENAME"), os.environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP)
    if here is None or step != _INTERACTIVE_STEP or os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return [socket.gethostname()]
    nodes = _scontrol("show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    return sorted(nodes, key=lambda node: node != here)


def on_host() -> str:
    """Return the words that run a command on another host, in which {host} stands for its name."""
    if _launch.hosts == "auto" and PODS in os.environ:
        return f"{shlex.quote(sys.executable)} -m pipeline host --on {{host}}"
    return _launch.on_host


def idle_nodes() -> str | None:
    """Say that a Slurm job has nodes that stay idle, because this is not its batch script; None if there are none."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes == "1" or len(names()) > 1 or _launch.hosts != "auto" or launched_size() is not None:
        return None
    return f"this Slurm job has {nodes} nodes, but only this one is used, because this is not the job's batch script"


@cache
def _scontrol(*arguments: str) -> str:
    try:
        return subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise PipelineError(
            f"launch.hosts: found 'auto' in a Slurm job of several nodes, but scontrol does not answer ({error}); list "
            f"the nodes there, this one first, or this one alone: [{socket.gethostname()}]."
        ) from None


def server() -> socket.socket:
    """Return a socket that listens at the address at which the other hosts reach this one. Raises PipelineError."""
    try:
        return socket.create_server((address(), 0))
    except OSError as error:
        raise PipelineError(
            f"launch.address: found {json.dumps(_launch.address)}, but the address at which {names()[1]} reaches this "
            f"host cannot be used or found ({error}); set the right IP address."
        ) from None


def address() -> str:
    """Return the IP address at which the other hosts reach this one. Raises OSError if there is no route to them."""
    if _launch.address:
        return _launch.address
    other = names()[1]
    if "SLURMD_NODENAME" in os.environ and (known := re.search(r"NodeAddr=(\S+)", _scontrol("show", "node", other))):
        other = known[1]
    return _source_of_route(other)


def _source_of_route(address: str) -> str:
    """Return the address that this host has on its route to ``address``, a name or an IP address of version 4."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])


def interface_to(address: str) -> str | None:
    """Return the network interface of the route to ``address``, which may be this host's own; None if it is unknown."""
    import psutil  # imported here, because a command on one host needs no interface

    with suppress(OSError):
        own = _source_of_route(address)
        for name, addresses in psutil.net_if_addrs().items():
            if any(known.address == own for known in addresses):
                return name
    return None


def link_to(address: str) -> dict[str, str | int | None]:
    """Describe the link of the route to ``address``: its kind, and its speed in Mbit/s if the system knows it."""
    folder = Path("/sys/class/net", interface_to(address) or "unknown")
    kind: str | None = None
    speed: int | None = None
    with suppress(OSError, ValueError):
        code = (folder / "type").read_text(encoding="ascii").strip()  # ARPHRD_* of Linux's if_arp.h
        kind = {"1": "ethernet", "32": "infiniband", "772": "loopback"}.get(code, f"type {code}")
        speed = int((folder / "speed").read_text(encoding="ascii"))
    return {"link": kind, "megabit_per_second": None if speed == -1 else speed}
