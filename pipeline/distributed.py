"""Processes that train together. The only module that knows ranks, launcher variables and torch.distributed."""

from __future__ import annotations

import ctypes
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
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.config import PipelineError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=5)
"""How long a collective waits for a rank that does not come. Covers one rank's slow disk, not a dead rank."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's malloc.h"""


class WorkerError(PipelineError):
    """A worker process failed. The message is that of the rank that failed first."""


@dataclass(frozen=True)
class World:
    """The processes that train together, as one of them sees it."""

    rank: int
    size: int
    device: torch.device
    backend: str | None
    """nccl, gloo, or None for a single process, which needs no process group."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value`` (picklable), in rank order, on every rank. Waits for all ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """The main rank's ``value`` (picklable) on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over ranks, in place, on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum of ``tensor`` over ranks, in place, on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def average_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give each tensor its mean over ranks, in place, on every rank. Takes their memory once more."""
        if self.size == 1:
            return
        with torch.no_grad():
            flat = self.sum_(torch.cat([tensor.reshape(-1) for tensor in tensors])).div_(self.size)
            for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(mean.view(tensor.shape))

    def meet(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def broadcast_buffers_(self, model: nn.Module) -> None:
        """Give every rank the main rank's buffers (BatchNorm's running statistics differ by rank in training)."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def devices(self, count: int) -> list[torch.device]:
        """What this process computes on: its own device, or, if they are more than one, the first ``count`` GPUs."""
        return [self.device] if count == 1 else [torch.device("cuda", index) for index in range(count)]

    def mesh(self, **dimensions: int) -> DeviceMesh:
        """All ranks as a grid with these named dimensions, neighbours of the last one being neighbouring ranks.

        Made once; all ranks must ask for the same one together.
        """
        key = tuple(dimensions.items())
        if key not in _MESHES:
            names, shape = zip(*key, strict=True)
            _MESHES[key] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return _MESHES[key]

    def synchronise(self) -> None:
        """Wait until this rank's device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``, in the same memory: of a DTensor its own part, of any other tensor all."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


_MESHES: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
"""Those of the process group that lives."""

ALONE = World(rank=0, size=1, device=torch.device("cpu"), backend=None)
"""A single process on the CPU."""


def launched_size() -> int | None:
    """World size if a launcher (torchrun, Slurm's or Kubernetes' wrapper of it) started this process, else None."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


@contextmanager
def world(device: Literal["cpu", "cuda"], cores: float = 1) -> Iterator[World]:
    """This process's world; the process group lives as long as the block.

    A process that no launcher started is a world of its own, without a process group. On CUDA the
    backend is NCCL and the local rank chooses the GPU; on CPU it is gloo, and this host's ``cores`` are
    shared out evenly unless OMP_NUM_THREADS says otherwise. Raises PipelineError if there is no GPU for
    this rank.
    """
    size = launched_size()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == "cuda":
        here = _gpu(local_rank)
    else:
        here = torch.device("cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, int(cores / local_size)))
    if size is None:
        yield World(rank=0, size=1, device=here, backend=None)
        return
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=here if device == "cuda" else None)
    _MESHES.clear()
    yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=here, backend=backend)
    # Not after an error: to end a group whose ranks are out of step can mean to wait for them. The launcher ends them.
    dist.destroy_process_group()


class Interruption:
    """SIGINT and SIGTERM, heard as the wish to end after a step: the same step on every rank.

    The first signal waits for the step. A single process takes a second one literally and ends at once; ranks cannot
    tell it from their launcher's, which passes on what the whole group has heard, so they stay with the first.

    ``free_steps``: how many steps a rank may be ahead of the main one, because not every step waits for all ranks.
    """

    def __init__(self, world: World, free_steps: int = 0) -> None:
        self.world, self.free_steps = world, free_steps
        self.signal: int | None = None
        """The signal that this process has heard."""
        self._steps = 0
        self._announced = False
        self._last: int | None = None

    @property
    def exit_code(self) -> int:
        """As shells say it: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.signal or 0)

    def agreed(self) -> bool:
        """Whether all ranks end here. To be called after every step, on every rank.

        Costs nothing until a signal comes. Then each rank that has heard it says so in the group's store, and once all
        have, the main rank names its next step as the last, or the one after the free steps. No rank can be past that
        step by then: from its signal on a rank waits for its device after a step, and no step but a free one ends
        before the main rank has taken part in it. Where not all ranks hear it, the training goes on until the launcher
        ends it.
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
                store.set("last_step", str(self._steps + 1 + self.free_steps))
            if self._last is None and store.check(["last_step"]):
                self._last = int(store.get("last_step"))
        except RuntimeError:  # the launcher is gone, and the store with it: its end was the signal
            sys.exit(self.exit_code)
        return self._last is not None and self._steps >= self._last

    def _hear(self, number: int, _: FrameType | None) -> None:
        again = self.signal is not None
        self.signal = number
        if again and self.world.size == 1:
            sys.exit(self.exit_code)


@contextmanager
def interruption(world: World, free_steps: int = 0) -> Iterator[Interruption]:
    """While the block runs, SIGINT and SIGTERM end no process; see ``Interruption``. For the main thread."""
    heard = Interruption(world, free_steps)
    before = {number: signal.signal(number, heard._hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def keep_freed_memory() -> None:
    """Let this process keep the CPU memory that it frees, for its next tensors.

    By default glibc gives large blocks back to the system when they are freed, and every step pays for the same pages
    again: some 2,000 page faults a step of the default job, and a fifth to a third of its throughput. Its price is that
    the peak depends on where in the heap blocks happen to lie: see ``return_freed_memory``. Does nothing where the C
    library is another, or MALLOC_* or LD_PRELOAD say what the user wants.
    """
    _mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that it takes; larger blocks still go back
    _mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Let this process give blocks of 128 KiB and more back to the system at once when it frees them.

    So its resident memory is what its tensors take, the same in every process. With kept memory, equal processes that
    were forked from different servers differed by a fifth in their peaks; like this by a hundredth. Does nothing where
    ``keep_freed_memory`` does nothing.
    """
    _mallopt(_M_MMAP_THRESHOLD, 128 * 2**10)  # glibc's own start; saying so keeps it from growing


def _mallopt(parameter: int, value: int) -> None:
    if any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


def _gpu(local_rank: int) -> torch.device:
    """This rank's GPU, made the current one."""
    try:
        count = torch.cuda.device_count()
        if local_rank < count:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may sum in another order
            torch.cuda.set_device(local_rank)
            torch.cuda.init()
            return torch.device("cuda", local_rank)
    except RuntimeError as error:
        raise PipelineError(
            f"train.device: PyTorch cannot use the GPU ({error}). Set train.device to 'cpu', or install a driver for "
            f"torch {torch.__version__}."
        ) from None
    raise PipelineError(
        f"local rank {local_rank} has no GPU: PyTorch sees {count} on this host. Start one process a GPU."
    )
