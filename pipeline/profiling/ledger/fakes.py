"""A model and a data set of fake tensors, which have shapes but no memory, and a tracker of their storages."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeline.data.prepared import Split
from pipeline.models.keeping import copied
from pipeline.profiling.ledger.allocation_trace import AllocationTrace
from pipeline.profiling.ledger.tracker import Call, Calls, Tracker
from pipeline.tasks import Task
from pipeline.training.losses import HostLosses

_IN_FLOAT32 = {
    *(F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy),
    *(torch.layer_norm, torch.group_norm, torch.softmax, torch.log_softmax),
    *(torch.Tensor.softmax, torch.Tensor.log_softmax),
}
_KEEPS_ITS_TERMS = {
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
}
"""Losses whose result, a scalar, keeps memory for all its terms: torch shrinks the result, but not its memory
(aten/src/ATen/native/Loss.cpp). The result of a fake tensor does not."""
_NO_STORAGE = 0
"""The key of an operation's temporary memory, which belongs to no tensor."""


class UnreadLosses(HostLosses):
    """Discards losses, because the losses of fake tensors have no value."""

    def add(self, loss: torch.Tensor) -> None:
        pass


class FakeTracker(Tracker, TorchDispatchMode):
    """Records when storages of fake tensors are allocated and freed. Storages that exist before the tracker is entered
    are not recorded."""

    def __init__(self, block_bytes: int, inside: Callable[[Call], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block_bytes = block_bytes
        self._inside = inside
        self._calls = Calls()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._trace = AllocationTrace()

    @contextmanager
    def recording(self) -> Iterator[AllocationTrace]:
        self._trace = AllocationTrace()
        yield self._trace
        self._trace = AllocationTrace()

    @contextmanager
    def input(self) -> Iterator[None]:
        self._trace.section("data", begins=True)
        yield
        self._trace.section("data", begins=False)
        self._calls.restart()

    def gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        self._trace.gradients(map(self.key, gradients))

    @staticmethod
    def key(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._follow(tensor)
        result = func(*args, **(kwargs or {}))
        least = args[0].nbytes if str(func) in _KEEPS_ITS_TERMS else 0
        for tensor in _tensors(result):
            if self._follow(tensor):
                self._trace.allocate(self.key(tensor), self._blocks(max(tensor.untyped_storage().nbytes(), least)))
        inside = self._inside(self._calls.next(func))
        if inside:
            self._trace.allocate(_NO_STORAGE, self._blocks(inside))
            self._trace.free(_NO_STORAGE)
        return result

    def _follow(self, tensor: torch.Tensor) -> bool:
        """Track the tensor's storage until it is freed. Return True if the storage is new."""
        key = self.key(tensor)
        if key in self._storages:
            return False
        self._storages[key] = weakref.ref(tensor.untyped_storage(), functools.partial(self._forget, key))
        return True

    def _forget(self, key: int, _: object) -> None:
        del self._storages[key]
        self._trace.free(key)

    def _blocks(self, size: int) -> int:
        return size + -size % self._block_bytes


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def faked(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Return a copy of ``model`` whose parameters and buffers are fake tensors."""
    copied_model = copied(model, lambda tensor: fake.from_tensor(tensor.detach()))
    # Module.to swaps the contents of fake parameters. Swapping fails for tensors with weak references, and all fake
    # parameters have weak references.
    vars(copied_model)["_apply"] = functools.partial(_apply, copied_model)
    return copied_model


def _apply(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Do what ``Module._apply`` does, but with new parameters in place of the old ones. Tied parameters stay tied."""
    changed = copied(model, lambda tensor: convert(tensor.detach()))
    for module, new in zip(model.modules(), changed.modules(), strict=True):
        module._parameters, module._buffers = new._parameters, new._buffers
    return model


def faked_task(task: Task) -> Task:
    """Return the same task on fake tensors of the same shapes and dtypes. Call this in fake mode."""

    def empty(split: Split) -> Split:
        return Split({name: torch.empty(each.shape, dtype=each.dtype) for name, each in split.arrays.items()})

    dataset = task.dataset
    return replace(task, dataset=replace(dataset, train=empty(dataset.train), test=empty(dataset.test)))


class CudaAutocast(TorchFunctionMode):
    """Under autocast on a CPU, runs the functions in ``_IN_FLOAT32`` in float32, as autocast on CUDA does. Without
    this class, autocast on a CPU runs them in 16 bits.

    Source: "CUDA Ops that can autocast to float32" in the documentation of torch.amp.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, args)
        return func(*args, **(kwargs or {}))
