"""Processes of this host that make a world: launched to run to their end, or forked to answer requests."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar, cast

from pipeline.config import PipelineError
from pipeline.distributed.worlds import launched_size

T = TypeVar("T")


class WorkerError(PipelineError):
    """A worker process failed. The message is that of the rank that failed first."""


def launch(worker: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> None:
    """Run ``worker(*arguments)`` in ``processes`` processes of this host; return when all have.

    One process is this one. A process that a launcher started is a worker already and runs it once.
    Raises WorkerError with the message of the rank that failed first; the other ranks are ended.
    """
    if processes == 1 or launched_size() is not None:
        worker(*arguments)
        return
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What went wrong is said once, below, by the rank to which it happened first.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory:
        failures = Path(directory, "failures")
        failures.mkdir()
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=directory),
        )
        try:
            elastic_launch(settings, _reporting)(str(failures), worker, arguments)
        except ChildFailedError as error:
            raise WorkerError(_first_failure(failures) or str(error)) from None
        except SignalException as error:  # the launcher has passed it on and the ranks have ended
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            sys.exit(128 + error.sigval)


def _reporting(failures: str, worker: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """A launched process. If it fails it says so at once: a lost peer fails the other ranks a moment later, and what
    the launcher sees first is chance."""
    failed_at = None
    try:
        worker(*arguments)
    except PipelineError as error:
        failed_at, message = time.time_ns(), str(error)
    except Exception:
        failed_at, message = time.time_ns(), traceback.format_exc()
    if failed_at is not None:
        rank = os.environ["RANK"]
        Path(failures, f"{failed_at:020}").write_text(f"rank {rank}: {message}", encoding="utf-8")
        sys.exit(1)


def _first_failure(failures: Path) -> str | None:
    reports = sorted(failures.iterdir())
    return reports[0].read_text(encoding="utf-8") if reports else None


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
    must be picklable. Raises WorkerError with the message of a rank that failed; the other ranks are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(processes):
            here, there = context.Pipe()
            process = context.Process(target=_forked, args=(there, rank, processes, port, worker, arguments))
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
    rank: int,
    size: int,
    port: int,
    worker: Callable[..., Generator[Any, Any, None]],
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that forked this one hears it, and ends this one
    if size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    answers = worker(*arguments)
    while True:
        try:
            request = pipe.recv()
        except EOFError:  # nobody asks any more
            break
        value, failure = None, None
        try:
            value = answers.send(request)
        except PipelineError as error:
            failure = str(error)
        except BaseException:
            failure = traceback.format_exc()
        # Plain pickle: torch's own would hand tensors over by a socket that dies with this process.
        pipe.send_bytes(pickle.dumps((value, failure)))
    if inspect.getgeneratorstate(answers) != inspect.GEN_CREATED:
        for _ in answers:
            pass
