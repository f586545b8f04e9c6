"""What all hosts must have in common: they are asked before they train, and hosts that differ are refused."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from pipeline.errors import PipelineError, count
from pipeline.files import PREPARED
from pipeline.hosts.allocation import address, in_use, link_to, names, on_host
from pipeline.hosts.helper import Host
from pipeline.hosts.link import accept, acknowledge, beat_to, timed_to, watch
from pipeline.processes import boot_id

MOST_DIFFERENCES = 8
"""Number of differing fields that a message names."""


@cache
def others() -> list[Host]:
    """Return the other hosts. The first call starts their helpers. Raises PipelineError if a host cannot be reached,
    does not see this directory, or differs in a value on which numbers depend."""
    first, *rest = names()
    record = in_use()[1]
    started = [Host(name, on_host()) for name in rest]
    spins = {name: value for name, value in os.environ.items() if name == "GOMP_SPINCOUNT"}
    _answers(started, _set_variables, spins)  # before ranks start; a prefix such as ssh's passes no variables
    for host in started:
        host.ask(record)
    records = [(first, record()), *((host.name, host.value()) for host in started)]
    refuse_differences(records)
    with tempfile.NamedTemporaryFile(dir=Path.cwd(), prefix=".hosts-") as shared:
        seen = _answers(started, os.path.exists, Path(shared.name).name)
        if blind := [host.name for host, sees in zip(started, seen, strict=True) if not sees]:
            raise PipelineError(
                f"a file in {Path.cwd()} of {first} is not in the directory of {', '.join(blind)}: run in a directory "
                "that all hosts see, or correct launch.on_host."
            )
    refuse_differences([*zip(names(), [_arrays(), *_answers(started, _arrays)], strict=True)])
    here, key = _listening({host.name: partial(watch, lose=host.lose) for host in started})
    for host in started:
        host.ask(beat_to, here, key, host.name)
    for host in started:
        host.value()
    return started


def _listening(greet: dict[str, Callable[[Connection], object]]) -> tuple[tuple[str, int], bytes]:
    """Listen until each host that ``accept`` shall greet has connected. Return this host's address, and the secret."""
    key = secrets.token_bytes(32)
    try:
        server = socket.create_server((address(), 0))
    except OSError as error:
        raise PipelineError(
            f"launch.address: {address()} is no address of this host ({error}); set the one at which the other hosts "
            "reach it."
        ) from None
    here: tuple[str, int] = server.getsockname()
    Thread(target=accept, args=(server, key, greet), daemon=True).start()
    return here, key


def slowest_link() -> float | None:
    """Return the bytes per second that the slowest link to this host carries now; None if this host is alone."""
    speeds = []
    for host in others() if len(names()) > 1 else []:  # one after the other, since they share this host's link
        host.ask(timed_to, *_listening({host.name: acknowledge}), host.name)
        speeds.append(host.value())
    return min(speeds, default=None)


def _answers(asked: Sequence[Host], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Let all hosts call ``function`` at once; return their values."""
    for host in asked:
        host.ask(function, *arguments)
    return [host.value() for host in asked]


def _set_variables(values: Mapping[str, str]) -> None:
    os.environ.update(values)


def _arrays() -> dict[str, dict[str, str]]:
    """Return the identity of each prepared array, which a local copy of the folder does not have."""
    stats = {file.name: file.stat() for file in PREPARED.glob("*.npy")}
    identities = {
        name: f"file {of.st_ino}, {of.st_size} bytes, changed at {of.st_mtime_ns} ns" for name, of in stats.items()
    }
    return {"arrays": identities}


def links() -> list[dict[str, str | int | None]]:
    """Return each host's link to this host (``link_to``), this host's own first; empty if this host is alone. With each
    link, "machine" is the number of the first host of this machine, since two names may mean one."""
    if len(names()) == 1:
        return []
    here = address()
    boots = [boot_id(), *_answers(others(), boot_id)]
    known = [link_to(here), *_answers(others(), link_to, here)]
    return [link | {"machine": boots.index(boot)} for link, boot in zip(known, boots, strict=True)]


def linked_as(known: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if ``known`` can be the present ``links``, as far as this host alone can tell."""
    alone = len(names()) == 1
    own = {} if alone else link_to(address()) | {"machine": 0}
    return (0 if alone else len(names())) == len(known) and own == dict(*known[:1])


def refuse_differences(records: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise PipelineError if the records of the hosts or ranks differ; name the fields, and each value's first place.

    ``records``: place, such as a host's name, and plain values.
    """
    if all(record == records[0][1] for _, record in records):
        return
    flat, lines = [dict(_fields(record)) for _, record in records], []
    for field in sorted(set().union(*flat)):
        places: dict[str, str] = {}
        for (place, _), values in zip(records, flat, strict=True):
            places.setdefault(values.get(field, "nothing"), place)
        if len(places) > 1:
            lines.append(f"{field}: {', '.join(f'{value[:100]} on {place}' for value, place in places.items())}")
    raise PipelineError(
        f"the ranks of this job differ in {count(len(lines), 'value')} on which its numbers depend. Give all hosts the "
        "same checkout, data, image and number of threads, on equal machines:\n" + "\n".join(lines[:MOST_DIFFERENCES])
    )


def _fields(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each value inside nested mappings and lists."""
    if isinstance(value, list):
        value = {str(index): item for index, item in enumerate(value)}
    if isinstance(value, Mapping) and value:
        for name, inside in value.items():
            yield from _fields(inside, f"{path}.{name}" if path else name)
    else:
        yield path, json.dumps(value)
