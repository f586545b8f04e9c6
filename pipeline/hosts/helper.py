"""The helper of another host, seen from both ends.

On each other host, one helper process starts ranks as ``distributed.forked`` starts them here, passes on requests,
answers and signals, and ends with the process that started it. All of this goes through the helper's standard input and
output, which belong to the user who runs the prefix; no port is opened for it.
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
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from pipeline.errors import PipelineError, said
from pipeline.hosts.link import Link
from pipeline.processes import end_with_parent

_numbers = itertools.count()


class Host:
    """Another host, from the view of the process that started its helper."""

    def __init__(self, name: str, on_host: str) -> None:
        self.name = name
        self.why_lost: str | None = None
        """Why the helper no longer answers; None while it does."""
        self.ranks: dict[int, Rank] = {}
        self._answered = False
        # Python is named by its path, because a prefix such as ssh's finds another first. In a session of its own, the
        # prefix gets no Ctrl-C, which would make srun end the ranks before they have saved a checkpoint.
        try:
            words = [word.format(host=name, directory=Path.cwd()) for word in shlex.split(on_host)]
            self._process = subprocess.Popen(
                [*words, sys.executable, "-m", "pipeline", "host"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError, LookupError) as error:
            raise PipelineError(
                f"launch.on_host: found {on_host!r}, which cannot be run ({error!r}); expected words that run "
                "a command on another host, in which only {host} and {directory} are filled in."
            ) from None
        atexit.register(self._abandon)
        assert self._process.stdin
        assert self._process.stdout
        self._link = Link(self._process.stdout.fileno(), self._process.stdin.fileno())
        self._values: SimpleQueue[tuple[Any, str | None]] = SimpleQueue()
        self.say = self._link.say
        Thread(target=self._listen, daemon=True).start()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Let the helper call ``function``; ``value`` returns what it returned."""
        self.say("call", function, arguments)

    def value(self) -> Any:
        """Wait for the value of the oldest call. Raises PipelineError if the call failed or the host is lost."""
        value, failure = (None, self.why_lost) if self.why_lost else self._values.get()
        if failure:
            raise PipelineError(f"host {self.name}: {failure}")
        return value

    def lose(self, silent: str) -> None:
        """Give up the host, which has been silent for that time."""
        self._kill(f"it is silent for {silent}: it hangs, or the network to it is broken")

    def _kill(self, why: str) -> None:
        self.why_lost = self.why_lost or why
        with suppress(OSError):  # it has ended, or belongs to another user
            os.killpg(self._process.pid, signal.SIGKILL)

    def _abandon(self) -> None:
        """End a prefix that still waits for its host. A helper that has answered ends by itself."""
        if not self._answered and self._process.poll() is None:
            self._kill("the command has ended")

    def _listen(self) -> None:
        try:
            for kind, *rest in self._link.heard():
                self._answered = True
                if kind == "value":
                    self._values.put((rest[0], rest[1]))
                else:
                    number, content = rest
                    self.ranks[number].hear(kind, content)
        except TimeoutError as error:
            self.lose(str(error))
        except Exception as error:  # something else wrote into the pipe
            self._kill(f"its helper's output cannot be read ({error!r})")
        code = self._process.wait()
        self.why_lost = self.why_lost or f"its helper has ended with exit code {code}; the output above says why"
        for rank in list(self.ranks.values()):
            rank.hear("end", None)
        self._values.put((None, self.why_lost))
        self._link.end()
        with self._process:  # closes its pipes
            pass


class Rank:
    """A rank on another host. Has the methods of a local rank's process, and of the connection to it."""

    def __init__(self, host: Host, preload: Sequence[str], variables: Mapping[str, str], *work: Any) -> None:
        self.host = host
        self.exitcode: int | None = None
        self._number = next(_numbers)
        self._answers, self._answering = multiprocessing.Pipe(duplex=False)
        self._ended = Event()
        host.ranks[self._number] = self
        host.say("start", self._number, preload, dict(variables), pickle.dumps(work))
        if host.why_lost:
            self.hear("end", None)

    def hear(self, kind: str, content: Any) -> None:
        if kind == "answer":
            with suppress(OSError):  # nobody waits for it
                self._answering.send_bytes(content)
        elif self.host.ranks.pop(self._number, None):
            self.exitcode = content
            self._answering.close()
            self._ended.set()

    def send(self, request: Any) -> None:
        self.host.say("request", self._number, pickle.dumps(request))

    def recv_bytes(self) -> bytes:
        return self._answers.recv_bytes()

    def fileno(self) -> int:
        return self._answers.fileno()

    def signal(self, number: int) -> None:
        self.host.say("signal", self._number, number)

    def kill(self) -> None:
        if not self._ended.is_set():
            self.signal(signal.SIGKILL)

    def close(self) -> None:
        self.host.say("close", self._number)
        self._answers.close()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


def serve() -> None:
    """Be the helper of this host: answer the messages of the process that started it, and end with that process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which a scheduler sends to all; the other process decides
        signal.signal(number, lambda *_: None)
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # a user's model may print
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # or start a program that reads its input
    with suppress(BrokenPipeError):  # the other process has ended already, which the link reports
        os.write(outgoing, b"\n")  # ends a line that the prefix has begun
    link, messages = Link(incoming, outgoing), SimpleQueue[Any]()

    def listen() -> None:
        code = 1
        with suppress(TimeoutError):
            for message in link.heard():
                messages.put(message)
            code = 0
        os._exit(code)  # the ranks end with this process

    Thread(target=listen, daemon=True).start()
    ranks: dict[int, tuple[Any, Connection]] = {}
    while True:
        kind, *rest = messages.get()
        if kind == "call":
            link.say("value", *_called(*rest))
        elif kind == "start":
            number, *how = rest
            ranks[number] = process, pipe = _started(*how)
            Thread(target=_passed_on, args=(link, number, process, pipe), daemon=True).start()
        else:
            number, *content = rest
            process, pipe = ranks[number]
            with suppress(OSError):  # the rank has ended
                if kind == "request":
                    pipe.send_bytes(*content)
                elif kind == "signal":
                    os.kill(process.pid, *content)
                else:  # no request follows; the answers can still be read
                    with socket.socket(fileno=os.dup(pipe.fileno())) as sending:
                        sending.shutdown(socket.SHUT_WR)


def _called(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, str | None]:
    try:
        return function(*arguments), None
    except Exception as error:
        return None, said(error) or traceback.format_exc()


def _started(preload: Sequence[str], variables: dict[str, str], work: bytes) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipeline.processes.forkserver", *preload])
    ours, theirs = context.Pipe()
    process = context.Process(target=_rank, args=(theirs, variables, work))
    process.start()
    theirs.close()
    return process, ours


def _rank(pipe: Connection, variables: dict[str, str], work: bytes) -> None:
    end_with_parent()
    function, *arguments = pickle.loads(work)  # only here, because the helper imports no torch
    function(pipe, variables, *arguments)


def _passed_on(link: Link, number: int, process: Any, pipe: Connection) -> None:
    """Pass on what the rank answers, and how it ends."""
    with suppress(EOFError, OSError):
        while True:
            link.say("answer", number, pipe.recv_bytes())
    process.join()
    link.say("end", number, process.exitcode)
