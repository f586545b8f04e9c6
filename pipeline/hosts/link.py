"""The link between the first host's process and a helper: messages, and signs of life.

Both ends hear from each other every few seconds, through the pipes of the messages and over the network that the ranks
use (``watch``). So a lost link or a stopped host is noticed, and ends the ranks at both ends.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from pipeline.errors import PipelineError, say

BEAT_SECONDS = 2.0
"""How long an end is silent before it says that it is alive."""
LOST_SECONDS = 30.0
"""An end that has been silent for so long is lost."""
START_SECONDS = 120.0
"""How long a helper may take to say its first word: the prefix may wait, and Python's first start may be slow."""
LOOK_SECONDS = 0.2
"""How often a thread that accepts connections looks whether all have come."""
BURST_BYTES = 1 << 20
BURSTS_SECONDS = 0.5
"""How long a link is timed. The fastest burst counts, because other work can only delay it."""
_MARK = b"\x1epipeline:"
"""How a line of a helper begins; a prefix may print lines of its own."""


class Link:
    """Messages over a pair of pipes, as lines. Whoever can write into the pipes can run code here: only processes of
    one user hold them."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming = incoming
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = Thread(target=self._write, args=(outgoing,), daemon=True)
        self._writer.start()

    def say(self, *message: Any) -> None:
        """Send a message. Never waits, so that a signal's handler may call it."""
        self._messages.put(pickle.dumps(message))

    def end(self) -> None:
        """Wait until nothing more is written."""
        self._messages.put(None)
        self._writer.join()

    def _write(self, outgoing: int) -> None:
        with suppress(OSError):  # the other end has ended, which ``heard`` reports
            while True:
                text = b""  # only says that this end is alive
                with suppress(Empty):
                    if (message := self._messages.get(timeout=BEAT_SECONDS)) is None:
                        return
                    text = b64encode(message)
                line = memoryview(_MARK + text + b"\n")
                while line:
                    line = line[os.write(outgoing, line) :]

    def heard(self) -> Iterator[Any]:
        """Yield the other end's messages until it ends. Raises TimeoutError if it is lost."""
        patience, begun = START_SECONDS, list[bytes]()
        deadline = time.monotonic() + patience
        while wait([self._incoming], max(0.0, deadline - time.monotonic())):
            got = os.read(self._incoming, 1 << 16)
            if not got:
                return
            *lines, rest = got.split(b"\n")
            if lines:
                lines[0] = b"".join([*begun, lines[0]])
                begun.clear()
            begun.append(rest)
            for line in lines:
                if line.startswith(_MARK):
                    patience = LOST_SECONDS
                    deadline = time.monotonic() + patience
                    if text := line.removeprefix(_MARK):
                        yield pickle.loads(b64decode(text))
                elif line:
                    say(line.decode(errors="replace"), file=sys.stderr)
            if time.monotonic() > deadline:  # the prefix only prints lines of its own
                break
        raise TimeoutError(f"{patience:.0f} s")


def accept(server: socket.socket, key: bytes, greet: dict[str, Callable[[Connection], object]]) -> None:
    """Accept one connection of each host that knows the key. ``greet``: what to call with a host's connection."""
    with server:
        while greet:
            if wait([server], LOOK_SECONDS):
                connection = Connection(server.accept()[0].detach())
                Thread(target=_accept, args=(connection, key, greet), daemon=True).start()


def _accept(connection: Connection, key: bytes, greet: dict[str, Callable[[Connection], object]]) -> None:
    """Greet a connection if it is a host's. A stranger may be silent, so no other connection waits for it."""
    with connection, suppress(AuthenticationError, OSError, EOFError, KeyError):
        prove(connection, key)
        greet.pop(connection.recv_bytes(256).decode(errors="replace"))(connection)


def prove(connection: Connection, key: bytes) -> None:
    """Let both ends of an accepted connection show that they know the key. Raises AuthenticationError, OSError or
    EOFError if the other end does not."""
    deliver_challenge(connection, key)
    answer_challenge(connection, key)


def _connected(here: tuple[str, int], key: bytes, name: str) -> Connection:
    """In a helper: connect to the first host, which ``accept`` lets listen. Raises PipelineError."""
    try:
        connection: Connection = Client(here, authkey=key)
    except OSError as error:
        raise PipelineError(
            f"{here[0]}, where the first host listens, cannot be reached ({error}); set launch.address to an address "
            "that can, or open the network between the hosts."
        ) from None
    connection.send_bytes(name.encode())
    return connection


def beat_to(here: tuple[str, int], key: bytes, name: str) -> None:
    """In a helper: connect to the first host, and end when the connection is lost."""
    Thread(target=watch, args=(_connected(here, key, name), lambda _: os._exit(1)), daemon=True).start()


def timed_to(here: tuple[str, int], key: bytes, name: str) -> float:
    """In a helper: return the bytes per second that the link to the first host carries, up to the speed of Python."""
    seconds, end = list[float](), time.monotonic() + BURSTS_SECONDS
    with _connected(here, key, name) as connection:
        while not seconds or time.monotonic() < end:
            began = time.monotonic()
            connection.send_bytes(bytes(BURST_BYTES))
            connection.recv_bytes(0)
            seconds.append(time.monotonic() - began)
    return BURST_BYTES / min(seconds)


def acknowledge(connection: Connection) -> None:
    """Answer each burst of ``timed_to`` at once. Raises EOFError after the last one."""
    while True:
        connection.recv_bytes(BURST_BYTES)
        connection.send_bytes(b"")


def watch(connection: Connection, lose: Callable[[str], object]) -> None:
    """Let the other end of a connection know that this end is alive. Call ``lose`` if the other end is silent."""

    def beat() -> None:
        with suppress(OSError):
            while True:
                connection.send_bytes(b"")
                time.sleep(BEAT_SECONDS)

    Thread(target=beat, daemon=True).start()
    with connection, suppress(OSError, EOFError):  # an end that closes it has ended, which the pipes report
        while connection.poll(LOST_SECONDS):
            connection.recv_bytes(0)
        lose(f"{LOST_SECONDS:.0f} s")
