"""Simulated GPUs: code for CUDA runs on a machine without a GPU, with real arithmetic on the CPU.

While ``as_if_cuda()`` lasts, ``torch.cuda``, NVML and NCCL answer as on a machine with GPUs: in this process, in its
threads, and in the processes that ``pipeline.distributed`` starts. A tensor "on" a GPU is a CPU tensor whose storage
has the GPU's index as an attribute. The results of an operation get the index of its inputs, in the backward pass too.
So the simulation detects

- operations that would fail on a GPU: host and device tensors in one operation, host tensors in one of NCCL's
  collectives, a value that the host reads while a graph is recorded, more live tensors than fit in the GPU's memory;
- operations that make the host wait for the device while ``torch.cuda.set_sync_debug_mode`` is on: reads of values
  (item, bool, float, int, tolist, cpu, to), copies from and to the host that are not ``non_blocking``, results whose
  shape depends on values (nonzero, masks), and calls of ``synchronize``. ``Gpus.waits`` names the lines.

It also simulates CUDA graphs: recording notes the operations, and a replay repeats them on the same memory. ``Traffic``
counts collectives, on simulated GPUs and on CPUs.

It cannot show what depends on kernels: their speed and rounding, the order of their sums, and what cuDNN, cuBLAS and
Triton choose. The CPU's only fused kernel of attention replaces all others, and ``torch.compile`` returns the model
unchanged. It cannot show the order of streams either, because every operation runs at once; nor the allocator's cache
and fragmentation, NCCL's own limits, or the driver. The CPU's generator draws all random numbers.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
import torch._dynamo  # before anything is patched: it inspects all of torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.nn.attention import SDPBackend
from torch.nn.parallel import comm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.distributed import launching

NAME = "NVIDIA H100 80GB HBM3"
MEMORY_BYTES = 80 << 30
UNDECIDED = -1
"""The place of memory that C++ code allocates, such as DistributedDataParallel's buckets, until an operation also has a
tensor on a GPU: then the memory belongs to that GPU."""

_really_forked = launching._forked
_CPU = torch.device("cpu")
_real_device: Callable[[torch.Tensor], torch.device] = torch._C.TensorBase.device.__get__
_copied = torch.ops.aten._to_copy.default
_INDEXING = [getattr(torch.ops.aten, name) for name in ("index", "_unsafe_index", "index_put", "index_put_")]
_A_VALUE_DECIDES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Gpus:
    """The simulated GPUs, with the state that a test can read and set."""

    def __init__(self, count: int, memory_bytes: int) -> None:
        self.count, self.memory_bytes = count, memory_bytes
        self.waits: list[str] = []
        """The operations that made the host wait for a device in the synchronisation debug mode, each with its line."""
        self.throttling = 0
        """NVML's bit mask of the reasons why a clock is reduced."""
        self.allocated, self.peaks = [0] * count, [0] * count
        """Bytes of live tensors on each GPU: now, and at most since the last reset."""
        self.debug_mode = "default"
        self.nccl = False
        """Whether the process group was opened with the backend NCCL."""
        self.graph: _Graph | None = None
        """The CUDA graph that is being recorded; None if none is."""
        self._thread = threading.local()

    @property
    def current(self) -> int:
        """This thread's GPU."""
        return int(getattr(self._thread, "current", 0))

    def select(self, device: Any) -> int:
        """Make ``device`` this thread's current GPU; return the previous one."""
        before, index = self.current, self.index(device)
        if not 0 <= index < self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self._thread.current = index
        return before

    def index(self, device: Any = None) -> int:
        """Return the index of ``device``: a name, a ``torch.device``, an index, or None for the current GPU."""
        named = torch.device(device) if isinstance(device, str) else device
        number = named.index if isinstance(named, torch.device) else named
        return self.current if number is None else int(number)

    def wait(self, what: str) -> None:
        """Add ``what`` to ``waits`` if the debug mode is on. Raises RuntimeError where CUDA would."""
        if self.graph is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        if self.debug_mode != "default":
            self.waits.append(f"{what} at {_where()}")
            if self.debug_mode == "error":
                raise RuntimeError(f"called a synchronizing CUDA operation: {self.waits[-1]}")

    def take(self, storage: Any, index: int) -> None:
        """Mark the storage as memory of GPU ``index`` and count its bytes there, unless the place is UNDECIDED.

        Raises OutOfMemoryError if the GPU has too little memory.
        """
        storage.place = index
        if index == UNDECIDED:
            return
        size, free = storage.nbytes(), self.memory_bytes - self.allocated[index]
        if size > free:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes. GPU {index} has {free} bytes free."
            )
        storage.taken = taken = [0]
        self.resize(storage, size)
        weakref.finalize(storage, self._free, index, taken).atexit = False

    def resize(self, storage: Any, size: int) -> None:
        """Count ``size`` bytes for a storage on a GPU, instead of its previous size."""
        index, taken = storage.place, storage.taken
        self.allocated[index] += size - taken[0]
        self.peaks[index] = max(self.peaks[index], self.allocated[index])
        taken[0] = size

    def _free(self, index: int, taken: list[int]) -> None:
        self.allocated[index] -= taken[0]


def _where() -> str:
    """Return the innermost line of code outside torch and this file, and the pipeline's line that led to it."""
    stack = [site for site in traceback.extract_stack() if site.filename != __file__ and "/torch/" not in site.filename]
    ours = [f"{site.filename}:{site.lineno}" for site in reversed(stack)]
    return " in ".join(dict.fromkeys((ours[0], next((line for line in ours if "/pipeline/" in line), ours[0]))))


_PLAYED: list[Gpus] = []


def played() -> Gpus:
    """Return the simulated GPUs of this process."""
    return _PLAYED[-1]


def place_of(tensor: torch.Tensor) -> int | None:
    """Return the index of the GPU that holds the tensor's memory; None if the host holds it."""
    while hasattr(tensor, "__tensor_flatten__"):  # a wrapper subclass: ask its inner tensor
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    try:
        place: int | None = getattr(tensor.untyped_storage(), "place", None)
    except (NotImplementedError, RuntimeError):  # the tensor has no storage
        return None
    return place


@contextmanager
def as_if_cuda(count: int = 1, memory_bytes: int = MEMORY_BYTES) -> Iterator[Gpus]:
    """Simulate ``count`` GPUs while the block runs, each with ``memory_bytes`` bytes for tensors.

    Skips the test on a machine with real GPUs.
    """
    assert not _PLAYED, "this process simulates GPUs already"
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs, so none are simulated")
    gpus = Gpus(count, memory_bytes)
    with pytest.MonkeyPatch.context() as patch, _sync_batchnorm():
        for owner, names in _patches(gpus).items():
            for name, value in names.items():
                patch.setattr(owner, name, value)
        _PLAYED.append(gpus)
        try:
            with _Play(gpus):
                yield gpus
        finally:
            _PLAYED.pop()


def _forked(count: int, memory_bytes: int, *arguments: Any) -> None:
    """Run the work of a process that the pipeline started, with as many simulated GPUs as its parent has."""
    with as_if_cuda(count, memory_bytes):
        _really_forked(*arguments)


class _Play(TorchDispatchMode):
    """Propagates the GPU's index from an operation's inputs to its outputs."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpus = gpus

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpus, kwargs = self._gpus, dict(kwargs or {})
        if _is_fake(types):
            return func(*args, **kwargs)
        if _is_composed(types):
            return NotImplemented
        asked = kwargs.get("device")
        arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        tensors = [tensor for tensor in arguments if not tensor.is_meta]
        if asked.type == "meta" if asked is not None else len(tensors) < len(arguments):
            return func(*args, **kwargs)
        places, pinned = [place_of(tensor) for tensor in tensors], kwargs.pop("pin_memory", None)
        target = max((place for place in places if place is not None), default=None)
        if asked is not None:
            kwargs["device"] = _CPU
            if asked.type == "cuda":
                target = gpus.index(asked)
            elif pinned is not None:  # Python always passes pin_memory, and C++ never does
                target = None
            elif not tensors:
                target = UNDECIDED
        self._check(func, args, kwargs, tensors, places, target)
        result = _in_order(func, args, kwargs)
        if gpus.graph is not None:
            gpus.graph.note(func, args, kwargs, result)
        if target is not None or pinned:
            self._place(target, tensors, [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        return result

    def _place(self, target: int | None, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Mark new memory as allocated on GPU ``target`` or, if ``target`` is None, as pinned."""
        held = {
            input_.untyped_storage()._cdata for input_ in inputs if place_of(input_) is None
        }  # host memory to which an operation writes stays on the host
        for tensor in (*outputs, *inputs):
            storage = tensor.untyped_storage()
            if target is None:
                storage.pinned = True  # type: ignore[attr-defined]
            elif place_of(tensor) in (None, UNDECIDED) and place_of(tensor) != target and storage._cdata not in held:
                self._gpus.take(storage, target)

    def _check(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        places: list[int | None],
        target: int | None,
    ) -> None:
        """Note an operation that would wait for the device; raise an error for one that would not run on GPUs."""
        known = {place for place in places if place != UNDECIDED}
        on_gpus = known - {None}
        if func.namespace in ("c10d", "_c10d_functional"):
            if self._gpus.nccl and None in known:
                raise RuntimeError(f"No backend type associated with device type cpu ({func})")
        elif func is _copied or func is torch.ops.aten.copy_.default:
            ends = {target if func is _copied else places[0], places[-1]}
            if None in ends and ends - {None, UNDECIDED} and not (kwargs.get("non_blocking") or args[2:] == (True,)):
                self._gpus.wait(str(func))
        elif func.overloadpacket in _INDEXING:
            indices = [index for index in args[1] if index is not None]
            if on_gpus and any(
                index.dtype in (torch.bool, torch.uint8) or place_of(index) is None for index in indices
            ):
                self._gpus.wait(str(func))
        elif on_gpus:
            if _A_VALUE_DECIDES.intersection(func.tags):
                self._gpus.wait(str(func))
            numbers = [
                tensor for tensor, place in zip(tensors, places, strict=True) if place is None and not tensor.dim()
            ]
            apart = known if len(numbers) < places.count(None) else on_gpus  # a host scalar may be an operand
            if len(apart) > 1:
                raise RuntimeError(f"Expected all tensors to be on the same device, but found {apart} in {func}")


def _in_order(func: Any, args: Any, kwargs: Any) -> Any:
    """Call ``func`` and wait for its collective: NCCL runs collectives in the order of the calls."""
    result = func(*args, **kwargs)
    if func.namespace == "c10d" and func._opname not in ("send", "recv_"):
        (work,) = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.ScriptObject))
        Work.unbox(work).wait()
    return result


def _is_fake(types: Sequence[type]) -> bool:
    """Return whether an operation is on fake tensors, which store their device themselves."""
    return FakeTensor in types or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _is_composed(types: Sequence[type]) -> bool:
    """Return whether an operation has tensor subclasses as inputs: they call it again with their inner tensors."""
    return any(type_ not in (torch.Tensor, torch.nn.Parameter) for type_ in types)


class Traffic(TorchDispatchMode):
    """Counts the communication between ranks, on GPUs and on CPUs alike."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        """The bytes of the tensors in the first argument: the outputs, if the operation writes into an argument."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_composed(types) and not _is_fake(types):
            return NotImplemented
        kind = func._opname.strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and kind not in ("wait_tensor", "wrap_tensor_autograd"):
            self.calls[kind] += 1
            self.bytes[kind] += sum(leaf.nbytes for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor))
        return _in_order(func, args, kwargs or {})


class _Graph:
    """``torch.cuda.CUDAGraph``: the recorded operations, which each replay but the first runs again.

    On a GPU the recording runs no kernels. Here it runs the operations, so the first replay does nothing.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._has_run = False

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not func.is_view:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._noted.append((func, args, kwargs, outputs))

    def replay(self) -> None:
        noted, self._has_run = self._noted if self._has_run else [], True
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            for func, args, kwargs, outputs in noted:
                again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
                for output, values in zip(outputs, again, strict=True):
                    output.copy_(values)


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = 0.0

    def record(self, *_: Any) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end._seconds - self._seconds) * 1e3

    def wait(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        played().wait("Event.synchronize")


class _Stream:
    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device("cuda", played().index(device))
        self.stream_id, self.device_index, self.device_type = 0, self.device.index, 1

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def wait_event(self, event: _Event) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def is_capturing(self) -> bool:
        return played().graph is not None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _patches(gpus: Gpus) -> dict[Any, dict[str, Any]]:
    """Return the attributes to patch: owner -> name -> value."""
    join, wait, start = dist.init_process_group, Work.wait, threading.Thread.run
    autocast = torch.autocast.__init__
    clone: Any = torch.UntypedStorage.clone
    resize: Any = torch.UntypedStorage.resize_
    group: Any = torch._C._group_tensors_by_device_and_dtype
    tensor, is_autocast, autocast_dtype = torch.tensor, torch.is_autocast_enabled, torch.get_autocast_dtype
    allow = torch.nn.attention._sdpa_kernel

    def joined(backend: str, *arguments: Any, device_id: torch.device | None = None, **options: Any) -> None:
        gpus.nccl = backend == "nccl"
        if gpus.nccl:
            assert device_id == torch.device("cuda", gpus.current), "the group's GPU is not the current one"
        join("gloo", *arguments, **options)

    def waited(work: Any, *arguments: Any) -> Any:
        with torch._C._DisableTorchDispatch():  # NCCL has no such copies: its kernels write the result
            return wait(work, *arguments)

    def run(thread: threading.Thread) -> None:
        with _Play(gpus):
            start(thread)

    def cloned(storage: Any) -> Any:
        copy = clone(storage)
        if hasattr(storage, "place"):
            gpus.take(copy, storage.place)
        return copy

    def resized(storage: Any, size: int) -> Any:
        if hasattr(storage, "taken"):
            gpus.resize(storage, size)
        return resize(storage, size)

    def autocast_on_cpu(context: Any, device_type: str, dtype: Any = None, *options: Any, **more: Any) -> None:
        autocast(context, "cpu", dtype or torch.float16 if device_type == "cuda" else dtype, *options, **more)

    def allowed(backends: Sequence[Any], *priority: bool) -> None:
        """Allow flash attention if any fused kernel is allowed: the CPU has no other."""
        fused = set(backends) - {SDPBackend.MATH}
        allow([*backends, SDPBackend.FLASH_ATTENTION] if fused else backends, *priority)

    def grouped(*arguments: Any) -> Any:
        result = group(*arguments)
        return {(tensors[0][0].device, dtype): (tensors, rest) for (_, dtype), (tensors, rest) in result.items()}

    def of_data(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        return tensor(data, **options) if device is None else tensor(data, **options).to(device)

    return {
        torch.Tensor: _tensor(gpus),
        torch.UntypedStorage: {"clone": cloned, "resize_": resized},
        torch.autocast: {"__init__": autocast_on_cpu},
        torch: {
            "tensor": of_data,
            "is_autocast_enabled": lambda *_: is_autocast("cpu"),
            "get_autocast_dtype": lambda *_: autocast_dtype("cpu"),
            "get_autocast_gpu_dtype": lambda: autocast_dtype("cpu"),
            "compile": lambda model, **_: model,
        },
        torch.cuda: _cuda(gpus),
        torch.cuda.memory: {"_record_memory_history": _nothing, "_dump_snapshot": lambda file: Path(file).touch()},
        torch.cuda.nccl: {"is_available": lambda _: False},
        torch.nn.attention: {"_sdpa_kernel": allowed},
        # The profiler has to believe that it can trace kernels. Otherwise it would time operations with CUDA events.
        torch.autograd.profiler: {"_supported_activities": lambda: [torch.profiler.ProfilerActivity.CUDA]},
        torch.accelerator: {
            "current_accelerator": lambda *_, **__: torch.device("cuda"),
            "current_stream": lambda *_: _Stream(),
            "current_device_index": lambda: gpus.current,
            "set_device_index": gpus.select,
        },
        torch._C: {
            "_accelerator_exchangeDevice": gpus.select,
            "_accelerator_maybeExchangeDevice": gpus.select,
            "_group_tensors_by_device_and_dtype": grouped,
        },
        comm: {
            "broadcast_coalesced": lambda tensors, devices: [[tensor.to(to) for tensor in tensors] for to in devices],
            "scatter": lambda whole, devices, sizes, dim, _: tuple(
                part.to(to)
                for part, to in zip(
                    whole.split(sizes, dim) if sizes else whole.chunk(len(devices), dim), devices, strict=False
                )
            ),
            "gather": lambda tensors, dim, to: torch.cat([tensor.to(to) for tensor in tensors], dim),
        },
        dist: {"init_process_group": joined, "_verify_params_across_processes": _nothing},
        distributed_c10d: {"_get_object_coll_device": lambda _=None: "cuda" if gpus.nccl else "cpu"},
        Work: {"wait": waited},
        threading.Thread: {"run": run},
        launching: {"_forked": partial(_forked, gpus.count, gpus.memory_bytes)},
        pynvml: _nvml(gpus),
    }


def _tensor(gpus: Gpus) -> dict[str, Any]:
    """Return the patches of tensors' device attributes and of the methods that move tensors."""
    plain = torch.Tensor
    move: Callable[..., Any] = plain.to
    tolist, numpy, make = plain.tolist, plain.numpy, plain._make_wrapper_subclass

    def index(tensor: torch.Tensor) -> int:
        place = place_of(tensor)
        return -1 if place is None else place

    def device(tensor: torch.Tensor) -> torch.device:
        return torch.device("cuda", index(tensor)) if index(tensor) >= 0 else _real_device(tensor)

    def to(tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
        if isinstance(tensor, FakeTensor):
            return move(tensor, *args, copy=copy, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        target: torch.device | None
        target, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        source = place_of(tensor)
        target_place = source if target is None else gpus.index(target) if target.type == "cuda" else None
        if hasattr(tensor, "__tensor_flatten__"):  # a wrapper subclass: its inner tensors move
            if source != target_place:
                names, about = tensor.__tensor_flatten__()
                inside = {name: getattr(tensor, name) for name in names}
                moved = {name: to(part, target) if isinstance(part, plain) else part for name, part in inside.items()}
                kind: Any = type(tensor)
                tensor = kind.__tensor_unflatten__(moved, about, tensor.shape, tensor.stride())
            return move(tensor, dtype, copy=copy) if dtype else tensor
        if source == target_place or (target is not None and target.type == "meta"):
            target = None if target is not None and target.type == "cuda" else target
            return move(tensor, target, dtype, copy=copy, memory_format=layout or torch.preserve_format)
        return _copied(
            tensor, dtype=dtype, device=target, pin_memory=False, non_blocking=non_blocking, memory_format=layout
        )

    def to_list(tensor: torch.Tensor) -> Any:
        if index(tensor) >= 0:
            gpus.wait("Tensor.tolist")
        return tolist(tensor)

    def to_numpy(tensor: torch.Tensor, **options: Any) -> Any:
        if index(tensor) >= 0:
            raise TypeError(f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() first.")
        return numpy(tensor, **options)

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        assert index(tensor) < 0, "only CPU tensors can be pinned"
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def made(cls: Any, size: Any, *, device: Any = None, **options: Any) -> Any:
        return make(cls, size, device=None if device is None else device.type.replace("cuda", "cpu"), **options)

    return {
        "device": property(device),
        "is_cuda": property(lambda tensor: index(tensor) >= 0),
        "get_device": index,
        "to": to,
        "cpu": lambda tensor: to(tensor, "cpu"),
        "cuda": lambda tensor, device=None: to(tensor, torch.device("cuda", gpus.index(device))),
        "tolist": to_list,
        "numpy": to_numpy,
        "pin_memory": pin,
        "is_pinned": lambda tensor: hasattr(tensor.untyped_storage(), "pinned"),
        "record_stream": _nothing,
        "_make_wrapper_subclass": staticmethod(made),
    }


def _cuda(gpus: Gpus) -> dict[str, Any]:
    """Return the patches of ``torch.cuda``."""

    @contextmanager
    def selected(device: Any) -> Iterator[None]:
        before = gpus.select(device)
        yield
        gpus.select(before)

    @contextmanager
    def recorded(graph: _Graph, *, capture_error_mode: str, **_: Any) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "a thread that reads ahead would end the recording"
        gpus.graph = graph
        try:
            yield
        finally:
            gpus.graph = None

    def properties(device: Any = None) -> SimpleNamespace:
        uuid = f"{gpus.index(device):032x}"
        return SimpleNamespace(
            name=NAME, uuid=uuid, major=9, minor=0, total_memory=MEMORY_BYTES, multi_processor_count=132
        )

    def allocated(device: Any = None) -> int:
        return gpus.allocated[gpus.index(device)]

    def peak(device: Any = None) -> int:
        return gpus.peaks[gpus.index(device)]

    def reset(device: Any = None) -> None:
        gpus.peaks[gpus.index(device)] = allocated(device)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: gpus.count,
        "current_device": lambda: gpus.current,
        "set_device": gpus.select,
        "device": selected,
        "get_device_name": lambda _=None: NAME,
        "get_device_properties": properties,
        "get_device_capability": lambda _=None: (9, 0),
        "is_bf16_supported": lambda *_: True,
        "synchronize": lambda _=None: gpus.wait("torch.cuda.synchronize"),
        "set_sync_debug_mode": lambda mode: setattr(gpus, "debug_mode", mode),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: _Stream(device),
        "stream": lambda _: nullcontext(),
        "CUDAGraph": _Graph,
        "graph": recorded,
        "is_current_stream_capturing": lambda: gpus.graph is not None,
        "memory_allocated": allocated,
        "max_memory_allocated": peak,
        "memory_reserved": allocated,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": reset,
        "memory_stats": lambda _=None: {"num_alloc_retries": 0},
        "memory_snapshot": lambda: [],
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (gpus.memory_bytes - allocated(device), MEMORY_BYTES),
        "get_per_process_memory_fraction": lambda _=None: gpus.memory_bytes / MEMORY_BYTES,
        "set_per_process_memory_fraction": lambda share, _=None: setattr(
            gpus, "memory_bytes", int(share * MEMORY_BYTES)
        ),
        "get_rng_state": lambda _=None: torch.get_rng_state(),
        "set_rng_state": _nothing,
        "manual_seed_all": _nothing,
    }


def _nvml(gpus: Gpus) -> dict[str, Any]:
    """Return the patches of NVML. A handle is a GPU's index."""
    return {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: gpus.count,
        "nvmlDeviceGetHandleByIndex": int,
        "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid.removeprefix("GPU-"), 16),
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle:032x}",
        "nvmlDeviceGetName": lambda _: NAME,
        "nvmlDeviceGetMigMode": lambda _: (0, 0),
        "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=MEMORY_BYTES, used=gpus.allocated[handle]),
        "nvmlDeviceGetPowerManagementLimit": lambda _: 700_000,
        "nvmlDeviceGetPowerUsage": lambda _: 100_000,
        "nvmlDeviceGetTotalEnergyConsumption": lambda _: int(100_000 * time.monotonic()),  # mJ at that power
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=50),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: gpus.throttling,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=gpus.peaks[handle] + (1 << 29))
        ],
        "nvmlDeviceGetP2PStatus": lambda *_: 0,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 4,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetFieldValues": lambda _, links: [
            SimpleNamespace(nvmlReturn=int(link >= 18), value=SimpleNamespace(uiVal=26_562)) for _, link in links
        ],
        "nvmlSystemGetDriverVersion": lambda: "595.45.04",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13020,
    }


@contextmanager
def _sync_batchnorm() -> Iterator[None]:
    """While the block runs, define for CPUs the operators of SyncBatchNorm that PyTorch has only for GPUs."""

    def wide(values: Any, images: Any) -> Any:
        return values.view(1, -1, *[1] * (images.dim() - 2))

    def over(images: Any) -> list[int]:
        return [0, *range(2, images.dim())]

    def stats(images: Any, eps: float) -> Any:
        return images.mean(over(images)), (images.var(over(images), correction=0) + eps).rsqrt()

    def gathered(_: Any, mean: Any, invstd: Any, running_mean: Any, running_var: Any, *numbers: Any) -> Any:
        momentum, eps, counts = numbers
        shares = (counts / counts.sum()).view(-1, 1)
        whole = (shares * mean).sum(0)
        variance = (shares * (invstd**-2 - eps + mean**2)).sum(0) - whole**2
        running_mean.lerp_(whole, momentum)
        running_var.lerp_(variance * counts.sum() / (counts.sum() - 1), momentum)
        return whole, (variance + eps).rsqrt()

    def normalised(images: Any, weight: Any, bias: Any, mean: Any, invstd: Any, _: float) -> Any:
        return (images - wide(mean, images)) * wide(invstd * weight, images) + wide(bias, images)

    def reduced(gradient: Any, images: Any, mean: Any, invstd: Any, *_: Any) -> Any:
        total, product = gradient.sum(over(images)), (gradient * (images - wide(mean, images))).sum(over(images))
        return total, product, product * invstd, total

    def backward(gradient: Any, images: Any, mean: Any, invstd: Any, weight: Any, *sums: Any) -> Any:
        total, product, counts = sums
        centred = (images - wide(mean, images)) * wide(invstd**2 * product / counts.sum(), images)
        return (gradient - wide(total / counts.sum(), images) - centred) * wide(invstd * weight, images)

    library = torch.library.Library("aten", "IMPL")
    library.impl("batch_norm_stats", stats, "CPU")
    library.impl("batch_norm_gather_stats_with_counts", gathered, "CPU")
    library.impl("batch_norm_elemt", normalised, "CPU")
    library.impl("batch_norm_backward_reduce", reduced, "CPU")
    library.impl("batch_norm_backward_elemt", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()
