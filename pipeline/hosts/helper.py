"""The helper of another host, seen from both ends.

On each other host, one helper process starts ranks as they are started here, and ends with the process that started
it. What a rank's connection carries, calls and signals go through the helper's standard input and output, which belong
to the user who runs the prefix; no port is opened for them.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import pickle
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from pipeline.errors import PipelineError, said
from pipeline.hosts.link import LOST_SECONDS, Link, watch
from pipeline.processes import end_with_parent

ANSWER_SECONDS = 180.0
"""How long a helper may take for an answer: the prefix may wait, Python's first start may be slow, and a system tries
for about two minutes to reach an address."""
_numbers = itertools.count()


class Host:
    """Another host, from the view of the process that started its helper."""

    def __init__(self, name: str, on_host: str) -> None:
        self.name = name
        self.why_lost: str | None = None
        """Why the helper no longer answers; None while it does."""
        self.about: dict[str, Any] = {}
        self._ranks: dict[int, tuple[Rank, Connection]] = {}
        self._values: SimpleQueue[tuple[Any, str | None]] = SimpleQueue()
        # Ranks there must wait for work as the ranks here do, but a prefix such as ssh's passes on no variables, and
        # finds another Python first. In a session of its own, the prefix gets no Ctrl-C, which would make srun end the
        # ranks before they have saved a checkpoint.
        spins = [f"GOMP_SPINCOUNT={os.environ['GOMP_SPINCOUNT']}"] if "GOMP_SPINCOUNT" in os.environ else []
        helper = ["env", *spins, sys.executable, "-m", "pipeline", "host"]
        try:
            words = [word.format(host=name, directory=Path.cwd()) for word in shlex.split(on_host)]
            self._process = subprocess.Popen(
                [*words, *helper], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except (OSError, ValueError, LookupError) as error:
            raise PipelineError(
                f"launch.on_host: found {on_host!r}, which cannot be run ({error!r}); expected words that run "
                "a command on another host, in which only {host} and {directory} are filled in."
            ) from None
        atexit.register(self._kill, "the command has ended")
        assert self._process.stdin
        assert self._process.stdout
        self._link = Link(self._process.stdout, self._process.stdin)
        self.say = self._link.say
        Thread(target=self._listen, daemon=True).start()

    def value(self) -> Any:
        """Wait for the value of what the helper was told to call. Raises PipelineError if the call failed, or if the
        host is lost."""
        try:
            value, failure = self._values.get(timeout=ANSWER_SECONDS)
        except Empty:
            value, failure = None, self.lose(ANSWER_SECONDS)
        if failure:
            raise PipelineError(f"host {self.name}: {failure}")
        return value

    def start(self, preload: Sequence[str], variables: Mapping[str, str], work: bytes) -> tuple[Rank, Connection]:
        """Start a rank there; the counterpart of ``started``. Raises PipelineError if the host is lost."""
        ours, theirs = multiprocessing.Pipe()
        rank = Rank(self, next(_numbers))
        self._ranks[rank.number] = rank, theirs
        self.say("start", rank.number, preload, variables, work)
        Thread(target=self._pass_on, args=(rank.number, theirs), daemon=True).start()
        if self.why_lost:  # perhaps too late for ``_listen`` to end this rank
            raise PipelineError(f"host {self.name}: {self.why_lost}")
        return rank, ours

    def watch(self, connection: Connection) -> None:
        """Give up the host when it is silent. A helper that has connected ends by itself when the command ends."""
        atexit.unregister(self._kill)
        watch(connection, self.lose, LOST_SECONDS)

    def lose(self, silent_seconds: float) -> str:
        return self._kill(f"it is silent for {silent_seconds:.0f} s: it hangs, or the network to it is broken")

    def _kill(self, why: str) -> str:
        self.why_lost = self.why_lost or why
        if self._process.poll() is None:  # else another process may have its number
            with suppress(OSError):  # it has just ended, or belongs to another user
                os.killpg(self._process.pid, signal.SIGKILL)
        return self.why_lost

    def _pass_on(self, number: int, pipe: Connection) -> None:
        with pipe:
            _carry(pipe, partial(self.say, "carry", number))
        self.say("carry", number, None)

    def _end(self, number: int, code: int | None) -> None:
        rank, pipe = self._ranks.pop(number)
        rank.exitcode = code
        rank.ended.set()
        _deliver(pipe, None)

    def _listen(self) -> None:
        try:
            for kind, *rest in self._link.heard():
                if kind == "value":
                    self._values.put((rest[0], rest[1]))
                elif kind == "carry":
                    _deliver(self._ranks[rest[0]][1], rest[1])
                else:
                    self._end(*rest)
        except Exception as error:  # something else wrote into the pipe
            self._kill(f"its helper's output cannot be read ({error!r})")
        code = self._process.wait()
        self.why_lost = self.why_lost or f"its helper has ended with exit code {code}; the output above says why"
        for number in list(self._ranks):
            self._end(number, None)
        self._values.put((None, self.why_lost))


class Rank:
    """The process of a rank on another host."""

    def __init__(self, host: Host, number: int) -> None:
        self.host, self.number = host, number
        self.exitcode: int | None = None
        self.ended = Event()

    def signal(self, number: int) -> None:
        self.host.say("signal", self.number, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        self.ended.wait(timeout)


def serve() -> None:
    """Be the helper of this host: answer the messages of the process that started it, and end with that process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which a scheduler sends to all; the other process decides
        signal.signal(number, lambda *_: None)
    link = Link(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # a user's model may print
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # or start a program that reads its input
    ranks: dict[int, tuple[Any, Connection]] = {}

    def follow(number: int) -> None:
        """Pass on what the rank answers, and how it ends."""
        process, pipe = ranks[number]
        _carry(pipe, partial(link.say, "carry", number))
        process.join()
        del ranks[number]
        link.say("end", number, process.exitcode)

    for message in link.heard():
        match message:
            case "call", function, *arguments:
                link.say("value", *_called(function, arguments))
            case "start", number, *how:
                ranks[number] = started(*how)
                Thread(target=follow, args=(number,), daemon=True).start()
            case "carry", number, content if number in ranks:
                _deliver(ranks[number][1], content)
            case "signal", number, which if number in ranks:
                with suppress(ProcessLookupError):
                    os.kill(ranks[number][0].pid, which)
    os._exit(0)  # the ranks end with this process


def _called(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, str | None]:
    try:
        return function(*arguments), None
    except Exception as error:
        return None, said(error) or traceback.format_exc()


def _carry(pipe: Connection, say: Callable[[bytes], object]) -> None:
    """Pass on what comes out of ``pipe`` until its other end is closed."""
    with suppress(EOFError, OSError):
        while True:
            say(pipe.recv_bytes())


def _deliver(pipe: Connection, content: bytes | None) -> None:
    """Send ``content`` into ``pipe``. None: nothing follows, but what comes out can still be read."""
    with suppress(OSError):  # the other end is closed
        if content is None:
            with socket.socket(fileno=os.dup(pipe.fileno())) as sending:
                sending.shutdown(socket.SHUT_WR)
        else:
            pipe.send_bytes(content)


def started(preload: Sequence[str], variables: Mapping[str, str], work: bytes) -> tuple[Any, Connection]:
    """Start a rank on this host: a fork of a server that has only imported the modules ``preload``. Return its process,
    and the connection to it.

    ``variables``: its own environment variables. ``work``: the pickle of a function and arguments; the rank calls the
    function with its end of the connection and these arguments. It ends when this process ends.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipeline.processes.forkserver", *preload])
    ours, theirs = context.Pipe()
    process = context.Process(target=_rank, args=(theirs, variables, work))
    process.start()
    theirs.close()
    return process, ours


def _rank(pipe: Connection, variables: Mapping[str, str], work: bytes) -> None:
    end_with_parent()
    os.environ |= variables
    function, *arguments = pickle.loads(work)  # only here, because the helper imports no torch
    function(pipe, *arguments)
