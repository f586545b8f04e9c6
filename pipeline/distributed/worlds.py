"""The processes that train together, from the view of one process: ranks, devices and collectives."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from pipeline import hosts
from pipeline.distributed.meeting import TIMEOUT, met
from pipeline.errors import PipelineError
from pipeline.processes import default_environment, launched_size

T = TypeVar("T")

A_GPU_EACH = "Start one process per GPU."

STORE = "PIPELINE_STORE"
"""The environment variable that names the file through which ranks of ``forked`` find each other or, if they are on
several hosts, the address and port of their store. Ranks that another launcher started use MASTER_ADDR and a port,
which is open on all network interfaces."""


@dataclass(frozen=True)
class World:
    """The processes that train together, from the view of one process."""

    rank: int
    size: int
    device: torch.device
    backend: str | None
    """nccl or gloo; None for a process that no launcher started, which needs no process group."""
    host: str = platform.node()
    """The name of this process's host."""
    local_rank: int = 0
    """The rank among the processes of this host."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints messages."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's ``value`` (picklable), in rank order, on every rank. Waits for all ranks.

        Values without tensors take two collectives, whatever the number of ranks. Tensors in dictionaries, lists and
        tuples are sent one by one and arrive on the host, so a GPU holds a copy of only one tensor at a time.
        """
        if self.size == 1:
            return [value]
        forms: list[Any] = [None] * self.size
        dist.all_gather_object(forms, tree_map_only(torch.Tensor, _form, value))
        forms[self.rank] = value
        return [self.sent(form, rank) for rank, form in enumerate(forms)]

    def broadcast(self, value: T) -> T:
        """Return the main rank's ``value`` (picklable) on every rank; tensors are sent as in ``gather``."""
        return self.sent(self.announced(value)) if self.size > 1 else value

    def announced(self, value: T) -> T:
        """Return the main rank's ``value`` (picklable). On other ranks, its tensors are on the meta device, without
        content; ``sent`` sends the content."""
        if self.size == 1:
            return value
        forms = [tree_map_only(torch.Tensor, _form, value) if self.is_main else None]
        dist.broadcast_object_list(forms, src=0, device=self.device)
        return value if self.is_main else cast("T", forms[0])

    def sent(self, announced: T, source: int = 0) -> T:
        """Return ``announced`` with copies of rank ``source``'s tensors, on every rank's host.

        The argument must be what the method ``announced`` returned for rank ``source``, or a part of this value that is
        the same on every rank.
        """
        return cast("T", tree_map_only(torch.Tensor, lambda tensor: self._sent(tensor, source), announced))

    def wholes_on_main(self, value: T) -> T:
        """Return ``value`` with each DTensor replaced: on the main rank by the whole tensor, on other ranks by None.

        Whole tensors are on the host. They are gathered one by one, so a GPU holds only one whole tensor at a time.
        """

        def gathered(part: Any) -> torch.Tensor | None:
            tensor = whole(part)
            return tensor.cpu() if self.is_main else None

        return cast("T", tree_map_only(_is_part, gathered, value))

    def _sent(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return a copy, on this rank's host, of rank ``source``'s ``tensor``; other ranks' values are ignored."""
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if self.size == 1:
            copy.copy_(tensor.detach())
        elif copy.numel():
            held = tensor.detach() if self.rank == source else torch.empty(tensor.shape, dtype=tensor.dtype)
            flat = held.to(self.device).flatten().view(torch.uint8).contiguous()  # as bytes, to send any dtype
            dist.broadcast(flat, src=source)
            copy.copy_(flat.cpu().view(tensor.dtype).view(tensor.shape))
        return copy

    def sum_(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Replace ``tensor`` by its sum over the ranks of ``group`` (None: all), in place, on each of these ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` by its element-wise maximum over the ranks, in place, on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def average_(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Replace each tensor by its mean over the ranks of ``group`` (None: all), in place, on each of these ranks.

        The call needs one all-reduce, and memory for a second copy of the tensors.
        """
        if self.size == 1:
            return
        with torch.no_grad():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat, group=group)
            flat.div_(dist.get_world_size(group))
            for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(mean.view(tensor.shape))

    def check_same(self, **record: Any) -> None:
        """Raise PipelineError, on every rank, if the ranks' records of plain values differ."""
        hosts.refuse_differences(self.gather((f"{self.host} (rank {self.rank})", record)))

    def barrier(self) -> None:
        """Wait until all ranks have called ``barrier``."""
        if self.size > 1:
            dist.barrier()

    def broadcast_buffers_(self, model: nn.Module) -> None:
        """Copy the main rank's buffers to every rank, because BatchNorm's running statistics differ between ranks."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def devices(self, count: int) -> list[torch.device]:
        """Return this process's devices: its own device, or the first ``count`` GPUs if ``count`` is more than one."""
        return [self.device] if count == 1 else [torch.device("cuda", index) for index in range(count)]

    def mesh(self, **dimensions: int) -> DeviceMesh:
        """Return all ranks as a mesh with these named dimensions; along the last dimension, ranks are consecutive.

        Each mesh is created once; all ranks must call this together.
        """
        return _mesh(self.device.type, tuple(dimensions.items()))

    def synchronise(self) -> None:
        """Wait until this rank's device has finished all work that was queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _form(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` on the meta device, without its values."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _is_part(value: Any) -> bool:
    return hasattr(value, "to_local")  # only DTensors have it; importing DTensor for isinstance takes seconds


def own_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of ``tensor``, without a copy: a DTensor's local part, any other tensor as it is."""
    with torch.no_grad():
        return cast("torch.Tensor", tensor.to_local() if _is_part(tensor) else tensor)


def whole(tensor: Any) -> torch.Tensor:
    """Return a DTensor as a whole tensor on its mesh's device, any other tensor as it is.

    All ranks must call this together.
    """
    full = tensor.detach().to(tensor.device_mesh.device_type).full_tensor() if _is_part(tensor) else tensor
    return cast("torch.Tensor", full)


@cache
def _mesh(device: str, dimensions: tuple[tuple[str, int], ...]) -> DeviceMesh:
    names, shape = zip(*dimensions, strict=True)
    return init_device_mesh(device, shape, mesh_dim_names=names)


ALONE = World(rank=0, size=1, device=torch.device("cpu"), backend=None)
"""A single process on the CPU."""


def launched_hosts() -> int:
    """Return the number of hosts among which a launcher has divided the processes equally; 1 if it does not say."""
    size, local_size = launched_size() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return size // local_size if local_size and size % local_size == 0 else 1


@contextmanager
def world(
    device: Literal["cpu", "cuda"], cores: float = 1, record: Callable[[], Mapping[str, Any]] = dict
) -> Iterator[World]:
    """Yield this process's world. The process group lives as long as the block.

    ``record`` returns the plain values on which the world's numbers depend, except for the number of threads. They must
    be the same on all ranks that another launcher than ``forked`` started (``meeting.met``).

    A process that no launcher started is a world of one process, without a process group. On CUDA, the backend is NCCL,
    and the local rank selects the GPU unless only one GPU is visible. On the CPU, the backend is gloo, and the
    number of threads of each rank is an equal share of ``cores`` unless OMP_NUM_THREADS is set. If all ranks
    are on one host, they use the loopback interface, else the interface of the route to the host of rank 0, unless
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set. Raises PipelineError if there is no GPU for this rank.
    """
    size = launched_size()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    variables = {}
    if device == "cuda":
        own_device = _gpu(local_rank)
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without this, cuBLAS may vary the order of sums
    else:
        own_device = torch.device("cpu")
    meeting_place, host = os.environ.get(STORE), os.environ.get(hosts.NAME, platform.node())
    if size is not None:
        main_address = (meeting_place or os.environ.get("MASTER_ADDR", "")).partition(":")[0]
        if interface := hosts.interface_to("127.0.0.1" if size == local_size else main_address):
            variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    with default_environment(variables), share_of(cores, local_size) if device == "cpu" else nullcontext():
        if size is None:
            yield World(rank=0, size=1, device=own_device, backend=None)
            return
        backend = "nccl" if device == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend,
                timeout=TIMEOUT,
                store=_store_of_forked(meeting_place) or met({**record(), "threads": torch.get_num_threads()}),
                rank=int(os.environ["RANK"]),
                world_size=size,
                device_id=own_device if device == "cuda" else None,
            )
        except dist.DistBackendError as error:
            if "Duplicate GPU" not in str(error):
                raise
            raise PipelineError(
                f"rank {os.environ['RANK']} and another rank of this host were given the same GPU. {A_GPU_EACH}"
            ) from None
        _mesh.cache_clear()
        joined = World(dist.get_rank(), dist.get_world_size(), own_device, backend, host, local_rank)
        if meeting_place and size != local_size:  # the hosts have compared the rest (``hosts.others``)
            joined.check_same(threads=torch.get_num_threads())
        yield joined
        # Skipped after an error: the ranks may then be at different steps, and destroying the group may wait for them
        # forever. The launcher ends the processes.
        dist.destroy_process_group()


def _store_of_forked(meeting_place: str | None) -> Any:
    """Return the store through which ranks of ``forked`` find each other; None for ranks of another launcher."""
    if meeting_place is None or "/" in meeting_place:
        return meeting_place and dist.FileStore(meeting_place)  # type: ignore[attr-defined]
    address, _, port = meeting_place.partition(":")
    return dist.TCPStore(address, int(port), is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]


@contextmanager
def share_of(cores: float, processes: int) -> Iterator[None]:
    """While the block runs, torch uses ``cores / processes`` threads, rounded down but at least one, unless
    OMP_NUM_THREADS is set."""
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(cores / processes)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _gpu(local_rank: int) -> torch.device:
    """Make this rank's GPU the current GPU and return it. Raises PipelineError if this rank has no GPU."""
    try:
        count = torch.cuda.device_count()
        index = 0 if count == 1 else local_rank  # a launcher, such as Slurm, may show each rank one GPU
        if index < count:
            torch.cuda.set_device(index)
            torch.cuda.init()
            return torch.device("cuda", index)
    except RuntimeError as error:
        raise PipelineError(
            f"train.device: PyTorch cannot use the GPU ({error}). Set train.device to 'cpu', or install a driver for "
            f"torch {torch.__version__}."
        ) from None
    remedy = A_GPU_EACH if count else "Check the driver and CUDA_VISIBLE_DEVICES, and that torch is a build for CUDA."
    raise PipelineError(f"local rank {local_rank} has no GPU: PyTorch sees {count} GPUs on this host. {remedy}")
