"""What all hosts must have in common: they are asked before they train, and hosts that differ are refused."""

from __future__ import annotations

import json
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from pipeline.errors import PipelineError, count
from pipeline.hosts.allocation import address, link_to, names, on_host, record, server
from pipeline.hosts.helper import Host
from pipeline.hosts.link import accept, beat_to
from pipeline.processes import boot_id

MOST_DIFFERENCES = 8
"""Number of differing fields that a message names."""


@cache
def others() -> list[Host]:
    """Return the other hosts. The first call starts their helpers. Raises PipelineError if a host cannot be reached,
    does not see this directory, or differs in a value on which numbers depend."""
    first, *rest = names()
    key, recorded = secrets.token_bytes(32), record()
    with server() as listening, tempfile.NamedTemporaryFile(dir=Path.cwd(), prefix=".hosts-") as shared:
        started = {name: Host(name, on_host()) for name in rest}

        def listen() -> None:
            with suppress(OSError):  # when the server is shut down
                accept(listening, key, lambda beats: started[beats.recv_bytes(256).decode()].watch(beats))

        Thread(target=listen, daemon=True).start()
        for name, host in started.items():
            host.say("call", _joined, listening.getsockname(), key, name, Path(shared.name).name, recorded)
        own = recorded()
        for host in started.values():
            host.about = host.value()
        listening.shutdown(socket.SHUT_RDWR)
    refuse_differences([(first, own), *((name, host.about["record"]) for name, host in started.items())])
    if blind := [name for name, host in started.items() if not host.about["sees"]]:
        raise PipelineError(
            f"a file in {Path.cwd()} of {first} is not in the directory of {', '.join(blind)}: run in a directory "
            "that all hosts see, or correct launch.on_host."
        )
    return [*started.values()]


def _joined(
    listener: tuple[str, int], key: bytes, name: str, shared: str, recorded: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """In a helper: connect to the first host; return what it wants to know about this one."""
    beat_to(listener, key, name)
    return {"record": recorded(), "sees": Path(shared).exists(), "boot": boot_id(), "link": link_to(listener[0])}


def links() -> list[dict[str, str | int | None]]:
    """Return each host's link to this host (``link_to``), this host's own first; empty if this host is alone. With each
    link, "machine" is the number of the first host of this machine, since two names may mean one."""
    if len(names()) == 1:
        return []
    there = [host.about for host in others()]
    known = [{"boot": boot_id(), "link": link_to(address())}, *there]
    boots = [about["boot"] for about in known]
    return [about["link"] | {"machine": boots.index(about["boot"])} for about in known]


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
