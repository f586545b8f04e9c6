"""Runs a function in several gloo processes, as stand-ins for several GPUs."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from pipeline.distributed import world

# The server process imports torch once, before any thread exists, and each rank is a fork of it.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pipeline.training"])


class RankFailed(Exception):
    """A rank raised; the message is its traceback."""


def run_ranks(function: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Any]:
    """``function(world, *arguments)`` on each of ``size`` ranks; what each returned, in rank order.

    ``function`` must be importable (a module's own), its arguments and values picklable.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(size):
        receiving, sending = _context.Pipe(duplex=False)
        process = _context.Process(target=_rank, args=(sending, rank, size, port, function, arguments))
        process.start()
        sending.close()
        pipes.append(receiving)
        processes.append(process)
    values, failures = [], []
    for rank, pipe in enumerate(pipes):
        try:
            value, failure = pickle.loads(pipe.recv_bytes())
        except EOFError:
            value, failure = None, "the process died"
        values.append(value)
        failures += [f"rank {rank}: {failure}"] if failure else []
    for process in processes:
        process.join()
    if failures:
        raise RankFailed("\n".join(failures))
    return values


def _rank(
    sending: Connection, rank: int, size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    try:
        with world("cpu") as joined:
            value, failure = function(joined, *arguments), None
    except BaseException:
        value, failure = None, traceback.format_exc()
    # Plain pickle: torch's own would hand tensors over by a socket that dies with this process.
    sending.send_bytes(pickle.dumps((value, failure)))
