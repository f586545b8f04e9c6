"""Reach hosts on which no scheduler starts a command, such as the pods of a job on Kubernetes.

On each other host, an agent (``python -m pipeline host --listen ADDRESS``) waits for connections. The prefix ``python
-m pipeline host --on HOST`` connects to it and names a command, as with ssh. The agent starts this command, whose
input and output are the connection. Before an agent reads the command, both ends show by HMAC that they know the key
in the file that PIPELINE_KEY_FILE names. Nothing is encrypted.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import cast

from pipeline.errors import PipelineError, say
from pipeline.hosts.link import accept

KEY_FILE = "PIPELINE_KEY_FILE"
"""The environment variable that names the file with the key."""
PORT = 29400
"""The port of an agent whose address names none."""
RETRY_SECONDS = 1.0


def listen(address: str) -> None:
    """Be the agent that listens at ``address``, such as 10.0.0.2 or 10.0.0.2:29400.

    Any number of commands may run at once. Raises PipelineError if there is no key, or if nothing can listen there."""
    key = _key()
    try:
        with socket.create_server(_place(address)) as server:
            say(f"waiting for commands at {address}")
            accept(server, key, _serve)
    except OSError as error:
        raise PipelineError(f"nothing can listen at {address}: {error}") from None


def _serve(connection: Connection) -> None:
    """Start the command that the other end names."""
    words = json.loads(connection.recv_bytes())
    process = subprocess.Popen(words, stdin=connection.fileno(), stdout=connection.fileno())
    connection.close()  # it ends with the command
    process.wait()


def run(host: str, words: Sequence[str]) -> int:
    """Run a command in the same directory of ``host``, with the input and output of this process. Wait until there is
    an agent. Return 0, or 1 if the command ended first. Raises PipelineError if this process and the agent do not have
    the same key."""
    connection = _connected(host)
    connection.send_bytes(json.dumps(["env", "-C", str(Path.cwd()), *words]).encode())
    sources = [0, connection.fileno()]
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as own:
        while connection.fileno() in sources:
            for source in cast("list[int]", wait(sources)):
                some = os.read(source, 1 << 16)
                if not some:
                    sources.remove(source)
                    own.shutdown(socket.SHUT_WR)
                elif source == 0:
                    own.sendall(some)
                else:
                    sys.stdout.buffer.write(some)
                    sys.stdout.buffer.flush()
    if 0 in sources:
        say(f"host {host}: the command has ended; the log of its agent says why", file=sys.stderr)
    return int(0 in sources)


def _connected(host: str) -> Connection:
    key = _key()
    while True:
        try:
            return Client(_place(host), authkey=key)
        except AuthenticationError:
            raise PipelineError(f"the agent of {host} has another key than the file in {KEY_FILE}.") from None
        except (OSError, EOFError):  # it has not started yet; whoever started this process does not wait for ever
            time.sleep(RETRY_SECONDS)


def _place(address: str) -> tuple[str, int]:
    name, _, port = address.partition(":")
    return name, int(port or PORT)


def _key() -> bytes:
    """Return the key. Raises PipelineError if there is none."""
    file = os.environ.get(KEY_FILE, "")
    with suppress(OSError):
        if len(key := Path(file).read_bytes()) >= 16:
            return key
    raise PipelineError(f"{KEY_FILE}: expected a file of at least 16 bytes, the same on all hosts; found {file!r}.")
