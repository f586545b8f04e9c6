"""Starts processes that train together: ``launch`` waits for their end, ``forked`` sends them requests.

SIGINT and SIGTERM make all ranks of a training end after the same step (``Interruption``).
"""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, TypeVar, cast

import torch.distributed as dist

from pipeline import hosts
from pipeline.distributed.worlds import STORE, World
from pipeline.errors import PipelineError, said
from pipeline.processes import launched_size

T = TypeVar("T")

PATIENCE_SECONDS = 30
"""How long launched ranks may take to end after a signal: they finish a step and save a checkpoint."""

DEATH_SECONDS = 0.5
"""How long to wait for more failures after the first failure. If a rank dies, another rank may report its lost
connection before the launcher notices the death."""

DEATH_ELSEWHERE_SECONDS = 5.0
"""The same if ranks are on several hosts: a prefix such as srun's takes a moment to report that a helper has ended."""


class WorkerError(PipelineError):
    """A worker process failed. The message names the first rank that died, or, if none died, the first that failed."""


def launch(worker: Callable[..., None], arguments: tuple[Any, ...], processes: int, on_hosts: int = 1) -> None:
    """Run ``worker(*arguments)`` in ``processes`` processes. Return when all processes have ended.

    With one process, or in a process that a launcher started, ``worker`` runs in this process. Otherwise ``forked``
    starts the processes, on ``on_hosts`` hosts. The first SIGINT or SIGTERM is passed on to the processes. When they
    have ended, this process exits with the code that shells use for the signal (130 or 143, by SystemExit). A second
    signal kills the processes. Processes that still run ``PATIENCE_SECONDS`` after the first signal are killed too.
    Works only in the main thread. If a rank fails, the other ranks are killed, and WorkerError is raised.
    """
    if processes == 1 or launched_size() is not None:
        worker(*arguments)
        return
    with forked(_launched, (worker, arguments), processes, preload=[worker.__module__], on_hosts=on_hosts) as ask:
        ask(None)
        with _passed_on_to(ask) as heard:
            try:
                code = max(ask(None))
            except WorkerError:
                if heard:  # the signal ended a rank before the rank could handle signals
                    sys.exit(128 + heard[0])
                raise
    if heard or code:
        sys.exit(128 + heard[0] if heard else code)


def _launched(worker: Callable[..., None], arguments: tuple[Any, ...]) -> Generator[int, None, None]:
    """Yield 0 when signals may come, then run ``worker`` and yield its exit code: 0 unless a signal ended it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield 0
    code = 0
    try:
        worker(*arguments)
    except SystemExit as end:
        if end.code not in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            raise
        code = end.code
    yield code


@contextmanager
def _passed_on_to(ranks: Ranks) -> Iterator[list[int]]:
    """While the block runs, pass on the first SIGINT or SIGTERM to ``ranks``; yield the list of signals received."""
    heard: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)
        if len(heard) > 1:  # a second signal, or the alarm
            sys.exit(128 + heard[0])
        signal.alarm(PATIENCE_SECONDS)
        ranks.signal(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        yield heard
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


class Ranks:
    """The ranks that ``forked`` started. Calling it sends a request to all of them, and returns their answers in rank
    order."""

    def __init__(self, host_names: Sequence[str] = ()) -> None:
        self._host_names = host_names
        """The host's name of each rank; empty if all are on this host."""
        self.ranks: list[tuple[Any, Any]] = []
        """The process of each rank, and the connection to it."""

    def __call__(self, request: Any) -> list[Any]:
        values: dict[int, Any] = {}
        failures: list[WorkerError] = []
        with suppress(BrokenPipeError):  # the rank is dead; its missing answer is noticed below
            for _, pipe in self.ranks:
                pipe.send(request)
        waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self.ranks)}
        death_seconds = DEATH_ELSEWHERE_SECONDS if self._host_names else DEATH_SECONDS
        while waiting and (ready := wait(list(waiting), death_seconds if failures else None)):
            for pipe in cast("list[Connection]", ready):
                rank = waiting.pop(pipe)
                try:
                    values[rank], failure = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):  # also in the middle of an answer
                    raise self._failed(rank, _end_of(self.ranks[rank][0])) from None
                if failure:
                    failures.append(self._failed(rank, failure))
        if failures:
            raise failures[0]
        return [values[rank] for rank in range(len(self.ranks))]

    def _failed(self, rank: int, why: str) -> WorkerError:
        return WorkerError(f"rank {rank}{f' on {self._host_names[rank]}' if self._host_names else ''}: {why}")

    def signal(self, number: int) -> None:
        """Send the signal ``number`` to all ranks."""
        for process, _ in self.ranks:
            if isinstance(process, hosts.Rank):
                process.signal(number)
            else:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def close(self) -> None:
        """Let the ranks that are still alive run to their end, and wait until all ranks have ended."""
        for _, pipe in self.ranks:
            pipe.close()
        for process, _ in self.ranks:
            process.join()

    def kill(self) -> None:
        for process, _ in self.ranks:
            process.kill()
        self.close()


@contextmanager
def forked(
    worker: Callable[..., Generator[T, Any, None]],
    arguments: tuple[Any, ...],
    processes: int,
    *,
    preload: Sequence[str],
    on_hosts: int = 1,
) -> Iterator[Ranks]:
    """Run ``worker(*arguments)`` in ``processes`` fresh processes, which live as long as the block.

    ``worker`` is a generator function. The block gets the object ``ask``; calling it sends a request to every rank's
    generator and returns the values that the generators yield, in rank order. The first request, which starts the
    generators, is None. When the block ends, the generators run to their end, and each further ``yield`` gives None.

    The processes are divided equally among the first ``on_hosts`` hosts (``hosts.names``), and the ranks of a host are
    consecutive. Each process is a fork of a server that has only imported the modules ``preload``. So each process is
    like a new interpreter that has imported these modules. The first call of ``forked`` starts the server. ``worker``,
    its arguments, the requests and the answers must be picklable. On one host, the processes find each other through a
    file that other users cannot open; no port is opened. The processes end when this process ends, even if this process
    is killed. If a rank fails, the other ranks are killed, and WorkerError is raised with the message of the failed
    rank.
    """
    elsewhere = hosts.others()[: on_hosts - 1] if on_hosts > 1 else []
    places = [(hosts.names()[0], hosts.started), *((host.name, host.start) for host in elsewhere)]
    of_host, work = processes // on_hosts, pickle.dumps((_forked, worker, arguments))
    ranks = Ranks([name for name, _ in places for _ in range(of_host)] if elsewhere else ())
    with _meeting_place(alone=not elsewhere) as place:
        variables = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(of_host), STORE: place}
        try:
            for rank in reversed(range(processes)):  # this host last: its server may have to import the modules first
                name, start = places[rank // of_host]
                own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank % of_host)} if processes > 1 else {}
                own |= {hosts.NAME: name} if elsewhere else {}
                ranks.ranks.insert(0, start(preload, own, work))
            yield ranks
            ranks.close()
        except BaseException:  # a signal's handler may raise it, even while the ranks run to their end
            ranks.kill()
            raise


@contextmanager
def _meeting_place(*, alone: bool) -> Iterator[str]:
    """Yield where the ranks find each other: a private file or, if they are not ``alone`` on this host, the address and
    port of a store, which listens on this one address. It asks for no password, but holds no pickles."""
    if alone:
        with tempfile.TemporaryDirectory() as private:
            yield f"{private}/store"
        return
    listener = hosts.server()
    name, port = listener.getsockname()[:2]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        name, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    yield f"{name}:{port}"
    del store


def _end_of(process: Any) -> str:
    """Describe how a process that no longer answers has ended."""
    process.join(PATIENCE_SECONDS)
    if isinstance(process, hosts.Rank) and process.host.why_lost:
        return process.host.why_lost
    if process.exitcode == -signal.SIGKILL:
        return (
            "the process was killed, most likely because this machine or its container ran out of memory. Give it more "
            "memory, or lower train.batch_size; `python -m pipeline predict-memory` shows how much is needed."
        )
    return f"the process ended with exit code {process.exitcode}; its output is above."


def _forked(pipe: Connection, worker: Callable[..., Generator[Any, Any, None]], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives this signal too, and ends this process
    from numpy import random  # imported here, because this module loads before quick commands end

    gc.freeze()  # the server's objects stay alive, so no collection needs to scan them, and to copy their pages
    random.seed()  # not the server's state; Python's own generator does the same after a fork
    answers = worker(*arguments)
    while True:
        try:
            request = pipe.recv()
        except EOFError:  # the parent has closed its end
            break
        value, failure = None, None
        try:
            value = answers.send(request)
        except BaseException as error:
            failure = said(error) or traceback.format_exc()
        # Plain pickle, because torch's pickling would pass tensors through a socket that closes when this process ends.
        pipe.send_bytes(pickle.dumps((value, failure)))
    if inspect.getgeneratorstate(answers) != inspect.GEN_CREATED:
        for _ in answers:
            pass


class Interruption:
    """Lets SIGINT and SIGTERM end the training after a step, which is the same step on every rank.

    After the first signal, the step is finished. In a training of one process, a second signal ends the process at
    once. In a training of several ranks, a second signal is ignored, because a launcher may send the same signal more
    than once.

    ``max_step_skew`` is the number of steps by which a rank may be ahead of the main rank. It is above 0 if ranks do
    not wait for each other in every step.
    """

    def __init__(self, world: World, max_step_skew: int = 0) -> None:
        self.world, self.max_step_skew = world, max_step_skew
        self.signal: int | None = None
        """The last signal that this process has received; None before the first."""
        self._steps = 0
        self._announced = False
        self._last: int | None = None

    @property
    def exit_code(self) -> int:
        """The exit code that shells use: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.signal or 0)

    def agreed(self) -> bool:
        """Return True if all ranks end after this step. Call it after every step, on every rank.

        The call costs nothing until a signal comes. Each rank that has received the signal records it in the group's
        store. Once all ranks have recorded the signal, the main rank sets the last step: its next step, plus
        ``max_step_skew``. No rank can be past this step already. A rank that has received the signal waits for its
        device after each step. So it is at most ``max_step_skew`` steps ahead of the main rank. If a rank gets no
        signal, the training continues until the launcher ends it.
        """
        self._steps += 1
        if self.signal is None or self.world.size == 1:
            return self.signal is not None
        self.world.synchronise()
        try:
            store = dist.distributed_c10d._get_default_store()
            if not self._announced:
                store.add("interrupted", 1)
                self._announced = True
            if self.world.is_main and self._last is None and store.add("interrupted", 0) == self.world.size:
                store.set("last_step", str(self._steps + 1 + self.max_step_skew))
            if self._last is None and store.check(["last_step"]):
                self._last = int(store.get("last_step"))
        except RuntimeError:  # the launcher, which ran the store, is gone: exit without a checkpoint
            sys.exit(self.exit_code)
        return self._last is not None and self._steps >= self._last

    def _hear(self, number: int, _: FrameType | None) -> None:
        again = self.signal is not None
        self.signal = number
        if again and self.world.size == 1:
            sys.exit(self.exit_code)


@contextmanager
def interruption(world: World, max_step_skew: int = 0) -> Iterator[Interruption]:
    """While the block runs, SIGINT and SIGTERM do not kill the process; see ``Interruption``.

    Works only in the main thread. A rank that has received a signal also ignores signals after the block, because a
    launcher may send the same signal again later. The rank then ends by itself.
    """
    heard = Interruption(world, max_step_skew)
    before = {number: signal.signal(number, heard._hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if heard.signal and world.size > 1 else handler)
