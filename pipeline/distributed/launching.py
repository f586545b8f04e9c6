"""Processes of this host that make a world: launched to run to their end, or forked to answer requests."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

from pipeline.distributed.worlds import STORE, launched_size
from pipeline.errors import PipelineError, said
from pipeline.interpreter import end_with_parent

T = TypeVar("T")

PATIENCE_SECONDS = 30
"""How long launched ranks have to end after a signal: to finish a step and save."""


class WorkerError(PipelineError):
    """A worker process failed. The message is that of the rank that failed first."""


def launch(worker: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> None:
    """Run ``worker(*arguments)`` in ``processes`` processes of this host; return when all have.

    One process is this one. A process that a launcher started is a worker already and runs it once. Others are started
    like ``forked``'s. SIGINT and SIGTERM are passed on to them, to end in their own way with the exit code that shells
    give the signal (130, 143), which is then this process's (SystemExit); a second signal, or ``PATIENCE_SECONDS``
    without their end, ends them. For the main thread. Raises WorkerError with the message of the rank that failed
    first; the other ranks are ended.
    """
    if processes == 1 or launched_size() is not None:
        worker(*arguments)
        return
    with (
        forked(_launched, (worker, arguments), processes, preload=[worker.__module__]) as ask,
        _passed_on_to(ask(None)) as heard,
    ):
        try:
            code = max(ask(None))
        except WorkerError:
            if heard:  # a rank that was not yet as far as to end in its own way
                sys.exit(128 + heard[0])
            raise
    if heard or code:
        sys.exit(128 + heard[0] if heard else code)


def _launched(worker: Callable[..., None], arguments: tuple[Any, ...]) -> Generator[int, None, None]:
    """A launched process: its number, then the exit code of ``worker``, 0 unless a signal ended it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield os.getpid()
    code = 0
    try:
        worker(*arguments)
    except SystemExit as end:
        if end.code not in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            raise
        code = end.code
    yield code


@contextmanager
def _passed_on_to(pids: Sequence[int]) -> Iterator[list[int]]:
    """While the block runs, the first SIGINT or SIGTERM is passed on to ``pids``; yields the list of those heard."""
    heard: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)
        if len(heard) > 1:  # SIGALRM among them
            sys.exit(128 + heard[0])
        signal.alarm(PATIENCE_SECONDS)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        yield heard
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def forked(
    worker: Callable[..., Generator[T, Any, None]],
    arguments: tuple[Any, ...],
    processes: int,
    *,
    preload: Sequence[str],
) -> Iterator[Callable[[Any], list[T]]]:
    """``worker(*arguments)`` in ``processes`` fresh processes of this host, which live as long as the block.

    ``worker`` is a generator function. The block gets ``ask``: it sends a request to the generator of every rank and
    returns what each yields for it, in rank order; the first request, which starts the generators, is None. When the
    block ends they run on to their own end, with None for requests. Each process is a fork of a server that has
    imported the modules ``preload`` and done nothing else, so it is as fresh as a new interpreter, without paying for
    the imports again; the server starts with the first call. ``worker``, its arguments, the requests and the answers
    must be picklable. The processes find each other by a file that nobody else can open; no port takes part. They end
    with this process, however it ends. Raises WorkerError with the message of a rank that failed; the others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    started: list[Any] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory() as private:
        try:
            for rank in range(processes):
                here, there = context.Pipe()
                variables = _variables(rank, processes, Path(private, "store"))
                process = context.Process(target=_forked, args=(there, variables, worker, arguments))
                process.start()
                there.close()
                started.append(process)
                pipes.append(here)
            yield partial(_ask, pipes)
        except BaseException:
            for process in started:
                process.kill()
            raise
        finally:
            for pipe in pipes:
                pipe.close()
            for process in started:
                process.join()


def _variables(rank: int, size: int, store: Path) -> dict[str, str]:
    """What a launcher says to a rank; nothing to a process that is alone."""
    if size == 1:
        return {}
    of_rank = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    return of_rank | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)) | {STORE: str(store)}


def _ask(pipes: Sequence[Connection], request: Any) -> list[Any]:
    values: dict[int, Any] = {}
    with suppress(BrokenPipeError):  # the rank is dead, which its answer says
        for pipe in pipes:
            pipe.send(request)
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        for pipe in cast("list[Connection]", wait(list(waiting))):
            rank = waiting.pop(pipe)
            try:
                value, failure = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                value, failure = None, "the process died; the system may have run out of memory"
            if failure:
                raise WorkerError(f"rank {rank}: {failure}")
            values[rank] = value
    return [values[rank] for rank in range(len(pipes))]


def _forked(
    pipe: Connection,
    variables: dict[str, str],
    worker: Callable[..., Generator[Any, Any, None]],
    arguments: tuple[Any, ...],
) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that forked this one hears it, and ends this one
    os.environ |= variables
    answers = worker(*arguments)
    while True:
        try:
            request = pipe.recv()
        except EOFError:  # nobody asks any more
            break
        value, failure = None, None
        try:
            value = answers.send(request)
        except BaseException as error:
            failure = said(error) or traceback.format_exc()
        # Plain pickle: torch's own would hand tensors over by a socket that dies with this process.
        pipe.send_bytes(pickle.dumps((value, failure)))
    if inspect.getgeneratorstate(answers) != inspect.GEN_CREATED:
        for _ in answers:
            pass
