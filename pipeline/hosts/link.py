"""How the first host's process and a helper hear from each other: messages, and signs of life.

Messages take the pipes of the prefix. Signs of life take a connection over the network that the ranks use, so a lost
network and a stopped host are noticed, and end the ranks at both ends.
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
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

from pipeline.errors import PipelineError, say

BEAT_SECONDS = 2.0
"""How often an end says that it is alive."""
LOST_SECONDS = 30.0
"""An end that has been silent for so long is lost."""
_MARK = b"\x1epipeline:"
"""How a message begins; a prefix may print lines of its own."""


class Link:
    """Messages over a pair of pipes, as lines, because srun passes on whole lines. Whoever can write into the pipes can
    run code here: only processes of one user hold them."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._incoming = incoming
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=self._write, args=(outgoing,), daemon=True).start()

    def say(self, *message: Any) -> None:
        """Send a message. Never waits, so that a signal's handler may call it."""
        self._messages.put(b64encode(pickle.dumps(message)))

    def _write(self, outgoing: IO[bytes]) -> None:
        with suppress(OSError), outgoing:  # the other end has ended, which ``heard`` reports
            while True:
                outgoing.write(b"\n" + _MARK + self._messages.get() + b"\n")  # first ends a line of the prefix
                outgoing.flush()

    def heard(self) -> Iterator[Any]:
        """Yield the other end's messages until it ends."""
        with self._incoming as lines:
            for line in lines:
                if line.startswith(_MARK):
                    yield pickle.loads(b64decode(line.removeprefix(_MARK)))
                elif line.strip():
                    say(line.decode(errors="replace"), file=sys.stderr, end="")


def accept(server: socket.socket, key: bytes, greet: Callable[[Connection], object]) -> None:
    """Accept connections until ``server`` is shut down, which raises OSError. Call ``greet`` with those whose other end
    knows the key."""
    while True:
        connection = Connection(server.accept()[0].detach())
        Thread(target=_accept, args=(connection, key, greet), daemon=True).start()


def _accept(connection: Connection, key: bytes, greet: Callable[[Connection], object]) -> None:
    """Greet a connection. A stranger may be silent, so no other connection waits for it."""
    with connection, suppress(AuthenticationError, OSError, EOFError):
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        greet(connection)


def beat_to(listener: tuple[str, int], key: bytes, name: str) -> None:
    """In the helper of the host ``name``: connect to the first host, and end when it is lost. Raises PipelineError."""
    try:
        connection: Connection = Client(listener, authkey=key)
    except OSError as error:
        raise PipelineError(
            f"{listener[0]}, where the first host listens, cannot be reached ({error}); set launch.address to an "
            "address that can, or open the network between the hosts."
        ) from None
    connection.send_bytes(name.encode())
    # Later than the first host gives up this one, so that it is the first host which says what has happened.
    Thread(target=watch, args=(connection, lambda _: os._exit(1), LOST_SECONDS + BEAT_SECONDS), daemon=True).start()


def watch(connection: Connection, lose: Callable[[float], object], patience_seconds: float) -> None:
    """Exchange signs of life with the other end of a connection. If it is silent, call ``lose`` with the seconds."""
    with connection:
        try:
            connection.send_bytes(b"")
            while connection.poll(patience_seconds):
                connection.recv_bytes(0)
                time.sleep(BEAT_SECONDS)
                connection.send_bytes(b"")
        except EOFError:  # an end that closes it has ended, which the pipes report
            return
        except OSError:  # it has ended, or a firewall has cut the connection, after which it is silent
            time.sleep(patience_seconds)
        lose(patience_seconds)
