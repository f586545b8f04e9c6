"""The hosts among which processes are divided: this one, and others that a command prefix such as srun's reaches.

On each other host, one helper process starts ranks as ``distributed.forked`` starts them here, passes on requests,
answers and signals, and ends with the process that started it. All of this goes through the helper's standard input and
output, which belong to the user who runs the prefix; no port is opened for it. Both ends hear from each other every few
seconds, through these pipes and over the network that the ranks use (``_watch``). So a lost link or a stopped host is
noticed, and ends the ranks at both ends.
"""

from __future__ import annotations

import atexit
import itertools
import json
import multiprocessing
import os
import pickle
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from pipeline.errors import PipelineError, count, said, say
from pipeline.files import PREPARED
from pipeline.params import Launch
from pipeline.processes import end_with_parent, launched_size

NAME = "PIPELINE_HOST"
"""The environment variable that names the host of a rank."""
BEAT_SECONDS = 2.0
"""How long an end is silent before it says that it is alive."""
LOST_SECONDS = 30.0
"""An end that has been silent for so long is lost."""
START_SECONDS = 120.0
"""How long a helper may take to say its first word: the prefix may wait, and Python's first start may be slow."""
MOST_DIFFERENCES = 8
"""Number of differing fields that a message names."""
_MARK = b"\x1epipeline:"
"""How a line of a helper begins; a prefix may print lines of its own."""
_INTERACTIVE_STEP = "4294967290"
"""The id of the step in which `salloc` may run a shell on the first node (SLURM_INTERACTIVE_STEP in slurm.h)."""

_launch: Launch | None = None
_record: Callable[[], Mapping[str, Any]] = dict
_numbers = itertools.count()


def use(launch: Launch, record: Callable[[], Mapping[str, Any]]) -> int:
    """From now on, divide processes among the hosts that ``launch`` names. Return their number, this host included.

    ``record`` returns the plain values on which numbers depend, and which must be the same on all hosts (``others``).
    """
    global _launch, _record
    _launch, _record = launch, record
    return len(names())


def names() -> list[str]:
    """Return the names of the hosts, this host's first; one name if this host is alone."""
    if _launch is None or launched_size() is not None:  # a launcher has divided the processes
        return [socket.gethostname()]
    if _launch.hosts != "auto":
        return _launch.hosts
    here, step = os.environ.get("SLURMD_NODENAME"), os.environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP)
    if here is None or step != _INTERACTIVE_STEP or os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return [socket.gethostname()]
    nodes = _scontrol("show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    return sorted(nodes, key=lambda node: node != here)


def idle_nodes() -> str | None:
    """Say that a Slurm job has nodes that stay idle, because this is not its batch script; None if there are none."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes == "1" or len(names()) > 1 or _launch is None or _launch.hosts != "auto" or launched_size() is not None:
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


def address() -> str:
    """Return the IP address at which the other hosts reach this one. Raises PipelineError if it is unknown."""
    if _launch and _launch.address:
        return _launch.address
    other = names()[1]
    if "SLURMD_NODENAME" in os.environ and (known := re.search(r"NodeAddr=(\S+)", _scontrol("show", "node", other))):
        other = known[1]
    try:
        return _source_of_route(other)
    except OSError as error:
        raise PipelineError(
            f"launch.hosts: this host finds no route to {other} ({error}); set launch.address to the IP address at "
            "which the other hosts reach this host."
        ) from None


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


@cache
def others() -> list[Host]:
    """Return the other hosts. The first call starts their helpers. Raises PipelineError if a host cannot be reached,
    does not see this directory, or differs in a value on which numbers depend."""
    first, *rest = names()
    started = [Host(name) for name in rest]
    spins = {name: value for name, value in os.environ.items() if name == "GOMP_SPINCOUNT"}
    _answers(started, _set_variables, spins)  # before ranks start; a prefix such as ssh's passes no variables
    for host in started:
        host.ask(_record)
    records = [(first, _record()), *((host.name, host.value()) for host in started)]
    refuse_differences(records)
    with tempfile.NamedTemporaryFile(dir=Path.cwd(), prefix=".hosts-") as shared:
        seen = _answers(started, os.path.exists, Path(shared.name).name)
        if blind := [host.name for host, sees in zip(started, seen, strict=True) if not sees]:
            raise PipelineError(
                f"a file in {Path.cwd()} of {first} is not in the directory of {', '.join(blind)}: run in a directory "
                "that all hosts see, or correct launch.on_host."
            )
    refuse_differences([*zip(names(), [_arrays(), *_answers(started, _arrays)], strict=True)])
    key, by_name = secrets.token_bytes(32), {host.name: host for host in started}
    try:
        listener = Listener((address(), 0), backlog=len(started), authkey=key)
    except OSError as error:
        raise PipelineError(
            f"launch.address: {address()} is no address of this host ({error}); set the one at which the other hosts "
            "reach it."
        ) from None
    Thread(target=_accept, args=(listener, by_name), daemon=True).start()
    for host in started:
        host.ask(_beat_to, listener.address, key, host.name)
    for host in started:
        host.value()
    return started


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


def _accept(listener: Listener, expected: dict[str, Host]) -> None:
    """Accept one connection of each host that knows the listener's key."""
    while expected:
        with suppress(AuthenticationError, OSError, EOFError, KeyError):  # a stranger
            connection = listener.accept()
            host = expected.pop(connection.recv_bytes(256).decode(errors="replace"))
            Thread(target=_watch, args=(connection, host.lose), daemon=True).start()
    listener.close()


def _beat_to(here: tuple[str, int], key: bytes, name: str) -> None:
    """In a helper: connect to the first host, and end when the connection is lost."""
    try:
        connection = Client(here, authkey=key)
    except OSError as error:
        raise PipelineError(
            f"{here[0]}, where the first host listens, cannot be reached ({error}); set launch.address to an address "
            "that can, or open the network between the hosts."
        ) from None
    connection.send_bytes(name.encode())
    Thread(target=_watch, args=(connection, lambda _: os._exit(1)), daemon=True).start()


def _watch(connection: Connection, lose: Callable[[str], object]) -> None:
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


def links() -> list[dict[str, str | int | None]]:
    """Return each host's link to this host (``link_to``), this host's own first; empty if this host is alone."""
    if len(names()) == 1:
        return []
    here = address()
    return [link_to(here), *_answers(others(), link_to, here)]


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


class Host:
    """Another host, from the view of the process that started its helper."""

    def __init__(self, name: str) -> None:
        assert _launch
        self.name = name
        self.why_lost: str | None = None
        """Why the helper no longer answers; None while it does."""
        self.ranks: dict[int, Rank] = {}
        self._answered = False
        # Python is named by its path, because a prefix such as ssh's finds another first. In a session of its own, the
        # prefix gets no Ctrl-C, which would make srun end the ranks before they have saved a checkpoint.
        try:
            words = [word.format(host=name, directory=Path.cwd()) for word in shlex.split(_launch.on_host)]
            self._process = subprocess.Popen(
                [*words, sys.executable, "-m", "pipeline", "host"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError, LookupError) as error:
            raise PipelineError(
                f"launch.on_host: found {_launch.on_host!r}, which cannot be run ({error!r}); expected words that run "
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
