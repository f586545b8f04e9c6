"""The processes that train together, as one of them sees it: ranks, devices and collectives."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from pipeline.errors import PipelineError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=5)
"""How long a collective waits for a rank that does not come. Covers one rank's slow disk, not a dead rank."""

A_GPU_EACH = "Start one process a GPU."

STORE = "PIPELINE_STORE"
"""The variable that names the file by which ranks of our own find each other; those of other launchers do so by
MASTER_ADDR, where a port listens on all interfaces."""


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
        """Every rank's ``value`` (picklable), in rank order, on every rank. Waits for all ranks.

        Tensors, in dictionaries, lists and tuples, come to the host one by one, so that a GPU needs memory for one.
        """
        if self.size == 1:
            return [value]
        forms: list[Any] = [None] * self.size
        dist.all_gather_object(forms, tree_map_only(torch.Tensor, _form, value))
        return [self._filled(form, value, rank) for rank, form in enumerate(forms)]

    def broadcast(self, value: T) -> T:
        """The main rank's ``value`` (picklable) on every rank; its tensors as by ``gather``."""
        if self.size == 1:
            return value
        forms = [tree_map_only(torch.Tensor, _form, value) if self.is_main else None]
        dist.broadcast_object_list(forms, src=0, device=self.device)
        return self._filled(cast("T", forms[0]), value, 0)

    def _filled(self, form: T, value: T, source: int) -> T:
        """``form`` with the tensors of what is ``value`` on rank ``source``, and anything on the others."""
        own = iter(tree_leaves(value))

        def filled(leaf: Any) -> Any:
            mine = next(own) if self.rank == source else leaf
            return self._sent(leaf, mine, source) if isinstance(leaf, torch.Tensor) else leaf

        return cast("T", tree_map(filled, form))

    def _sent(self, form: torch.Tensor, value: torch.Tensor, source: int) -> torch.Tensor:
        """The ``value`` of rank ``source``, on every rank's host. Another rank's is as empty as ``form``."""
        whole = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype)
        if whole.numel():
            held = value.detach() if self.rank == source else torch.empty(form.shape, dtype=form.dtype)
            flat = held.to(self.device).flatten().view(torch.uint8).contiguous()  # bytes, for the sake of any type
            dist.broadcast(flat, src=source)
            whole.copy_(flat.cpu().view(form.dtype).view(form.shape))
        return whole

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

    def average_(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Give each tensor its mean over the ranks of ``group`` (None: all), in place, on every one of them.

        In one all-reduce. Takes the tensors' memory once more.
        """
        if self.size == 1:
            return
        with torch.no_grad():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat, group=group)
            flat.div_(dist.get_world_size(group))
            for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(mean.view(tensor.shape))

    def barrier(self) -> None:
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


def _form(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its values."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


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

    A process that no launcher started is a world of its own, without a process group. On CUDA the backend is NCCL and
    the local rank chooses the GPU, unless one alone is visible; on CPU it is gloo, and this host's ``cores`` are shared
    out evenly unless OMP_NUM_THREADS says otherwise. On one host the ranks meet on the loopback interface, unless
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME says otherwise. Raises PipelineError if there is no GPU for this rank.
    """
    size = launched_size()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    variables = {}
    if device == "cuda":
        here = _gpu(local_rank)
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS may sum in another order
    else:
        here = torch.device("cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, int(cores / local_size)))
    if size == local_size and (loopback := _loopback()):
        variables |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    with _environment(variables):
        if size is None:
            yield World(rank=0, size=1, device=here, backend=None)
            return
        backend = "nccl" if device == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend,
                timeout=TIMEOUT,
                store=dist.FileStore(os.environ[STORE]) if STORE in os.environ else None,  # type: ignore[attr-defined]
                rank=int(os.environ["RANK"]),
                world_size=size,
                device_id=here if device == "cuda" else None,
            )
        except dist.DistBackendError as error:
            if "Duplicate GPU" not in str(error):
                raise
            raise PipelineError(
                f"rank {os.environ['RANK']} and another one of this host were given the same GPU. {A_GPU_EACH}"
            ) from None
        _MESHES.clear()
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=here, backend=backend)
        # Not after an error: to end a group whose ranks are out of step can mean to wait for them. The launcher ends
        # them.
        dist.destroy_process_group()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Those of ``variables`` that the user has not set, for the block."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ |= ours
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _loopback() -> str | None:
    """The network interface that nobody else can reach, by the name that this system gives it."""
    addresses = psutil.net_if_addrs()
    return next((name for name in addresses if any(each.address == "127.0.0.1" for each in addresses[name])), None)


def _gpu(local_rank: int) -> torch.device:
    """This rank's GPU, made the current one."""
    try:
        count = torch.cuda.device_count()
        index = 0 if count == 1 else local_rank  # a launcher, such as Slurm, can have bound one to each rank
        if index < count:
            torch.cuda.set_device(index)
            torch.cuda.init()
            return torch.device("cuda", index)
    except RuntimeError as error:
        raise PipelineError(
            f"train.device: PyTorch cannot use the GPU ({error}). Set train.device to 'cpu', or install a driver for "
            f"torch {torch.__version__}."
        ) from None
    raise PipelineError(f"local rank {local_rank} has no GPU: PyTorch sees {count} on this host. {A_GPU_EACH}")
