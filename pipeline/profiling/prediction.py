"""Run a step on fake tensors, which have shapes but no memory, to predict the memory that a real step will need.

``Estimate`` predicts. Below it are the parts that make a model and a data set of fake tensors (``faked``,
``faked_task``) and record their storages (``FakeTracker``).
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from pipeline.data.reader import READ_AHEAD
from pipeline.distributed import ALONE, share_of
from pipeline.environment import cores
from pipeline.errors import PipelineError, count, first_line
from pipeline.models.keeping import copied, storage_of
from pipeline.params import catalogue
from pipeline.plans import Plan
from pipeline.processes import randomness
from pipeline.profiling import ledger
from pipeline.profiling.ledger import AllocationTrace, Call, Calls, KernelTracker, Tracker
from pipeline.results import Ledger
from pipeline.step import Losses
from pipeline.tasks import Task
from pipeline.tasks.batches import Placement
from pipeline.techniques import of_plan
from pipeline.training.assembly import batches_of, compose
from pipeline.training.loop import Training
from pipeline.training.outcomes import DeviceLosses, HostLosses

RESERVE_FRACTION = {"cuda": 0.1, "cpu": 0.4}
"""Share of a device's memory that is kept free for memory that no prediction includes. On CUDA, such memory is the
context, the libraries' workspaces and fragmentation. On a CPU, it is mostly free blocks between a process's tensors.
With a share of 0.4, these blocks can take two thirds as much memory as the tensors. In the measured ledgers
(``benchmarks/ledgers.py``), ``rest_bytes`` was at most 0.54 of the tensors' memory in jobs with more than 100 MiB of
tensors. In smaller jobs, the ratio was larger."""
TRIED_SAMPLES = (16, 32)
"""Sizes of the micro-batches with which the CPU's kernels are tried. For fewer than 16 samples, torch uses other
convolutions (``use_mkldnn`` in aten/src/ATen/native/Convolution.cpp). So a smaller micro-batch is tried with its own
size."""
CUDA_BLOCK_BYTES = 512
"""Sizes in torch's CUDA allocator are multiples of this number (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)."""
CUBLAS_WORKSPACE_BYTES = 8 * 4096 * 1024
"""cuBLAS's workspace under CUBLAS_WORKSPACE_CONFIG=:4096:8, which ``distributed.world`` sets. torch allocates it with
its own allocator (aten/src/ATen/cuda/CublasHandlePool.cpp)."""

_MATRIX_PRODUCTS = {f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm")}
_WORKSPACES_LAST = not hasattr(torch.backends.cuda, "cublas_workspace_size")
"""True for older releases of torch, which keep two cuBLAS workspaces: one for the forward and one for the backward
thread. Newer releases allocate a workspace for the duration of each matrix product (TORCH_CUBLAS_WORKSPACE_CACHE)."""


class PredictionError(PipelineError):
    """A variant's memory cannot be predicted. The message says why."""


def predicted(plan: Plan, task: Task, placement: Placement | None = None) -> Ledger:
    """Predict one rank's ledger without the device, by an ``Estimate``. Raises PredictionError and ModelError."""
    return Estimate(plan, task, placement).ledger(plan.micro_batch_size)


class Estimate:
    """A variant's training on fake CPU tensors: its own model, techniques, step and batches, without the arithmetic.

    The memory of the tensors is predicted exactly, within these limits:

    - Fake tensors do not show the temporary memory of a kernel, such as oneDNN's reordered copies. For a plan on the
      CPU, each operation's temporary memory is measured in real steps with ``TRIED_SAMPLES`` samples, and extrapolated
      linearly to the micro-batch. For a plan on CUDA, cuBLAS's workspaces are known, and cuDNN's are not.
    - On CUDA some operations (BatchNorm, attention) keep other small tensors than on the CPU. Autocast also
      computes other operations in float32 on CUDA than on the CPU. The prediction imitates autocast on CUDA only for
      normalisations, softmax and cross-entropy, which matter most.
    - Only one rank's step is run. DistributedDataParallel's buckets are included, and gradients are copied into them.
    - The data set of a plan on the CPU does not count: its pages belong to the mapped file, and the system drops them
      when memory is short.

    If ``placement`` is None, the placement in params.yaml is used, and ``auto`` counts as resident. Raises ModelError.
    """

    def __init__(self, plan: Plan, task: Task, placement: Placement | None = None) -> None:
        self.plan, self.task = plan, task.on(ALONE.device)
        self.placement = placement or ("streamed" if plan.train.placement == "streamed" else "resident")
        with randomness.kept():
            self.model = self.task.model()
        self._tries: dict[int, dict[Call, int]] = {}

    def ledger(self, micro_batch_size: int) -> Ledger:
        """Return the ledger for micro-batches of ``micro_batch_size`` samples. Its peak predicts a measured ledger's
        ``tensors_bytes``.

        Raises PredictionError if a technique's memory cannot be predicted, or if the model cannot run on fake tensors,
        for example because it reads a value.
        """
        unforeseen = [entry.name for entry in catalogue.in_effect(self.plan.applied) if entry.needs_measuring]
        if unforeseen:
            raise PredictionError(
                f"variants.{self.plan.name}: the memory of {' and '.join(unforeseen)} cannot be predicted; measure it."
            )
        try:
            with randomness.kept():
                return self._ledger(micro_batch_size)
        except PipelineError:
            raise
        except Exception as error:
            raise PredictionError(
                f"variants.{self.plan.name}: {self.plan.train.model} with {count(micro_batch_size, 'sample')} a "
                "micro-batch cannot run on tensors without values, so its memory cannot be predicted; measure it. "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error

    def largest_batch(self, memory_bytes: int) -> int | None:
        """Return the largest global batch whose predicted peak leaves ``RESERVE_FRACTION`` of ``memory_bytes`` free.

        Return None if not even a micro-batch of one sample fits. The batch is never larger than the training set. The
        search is a bisection, because a larger batch needs more memory.
        """
        limit = memory_bytes - round(RESERVE_FRACTION[self.plan.device] * memory_bytes)
        shares = self.plan.processes * self.plan.micro_batches
        sizes = range(1, len(self.task.dataset.train) // shares + 1)
        return bisect_right(sizes, limit, key=lambda size: self.ledger(size).peak_bytes) * shares or None

    def _ledger(self, micro_batch_size: int) -> Ledger:
        plan, on_gpu = self.plan, self.plan.device == "cuda"
        tracker = FakeTracker(CUDA_BLOCK_BYTES if on_gpu else 1, self._inside(micro_batch_size))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model = faked(self.model, fake)
        with fake, tracker, CudaAutocast() if on_gpu else nullcontext():
            # All micro-batches after the first need the same memory, because they add to existing gradients.
            micro_batches = min(2, plan.micro_batches)
            losses = DeviceLosses(ALONE) if on_gpu else UnreadLosses(ALONE)
            task = faked_task(self.task)
            training = self._training(model, task, losses, micro_batch_size, micro_batches, plan.processes)
            with _buckets(training) if plan.applied.parallelism == "ddp" else nullcontext():
                _make_optimizer_state(training)
                trace = ledger.tracked_step(training, tracker)
            parts, sizes = ledger.ledger_parts(training, tracker, trace)
        rest = 0
        if on_gpu:
            rest = sum(-size % CUDA_BLOCK_BYTES for size in sizes) + 2 * CUBLAS_WORKSPACE_BYTES * _WORKSPACES_LAST
            parts["data_bytes"] += ledger.resident_bytes(self.task, self.placement)
            if self.placement == "streamed":
                row_bytes = sum(self.task.dataset.train.arrays[name][0].nbytes for name in self.task.arrays)
                parts["data_bytes"] += READ_AHEAD * micro_batch_size * row_bytes
        peak = sum(parts.values()) + rest
        return Ledger(**parts, rest_bytes=rest, peak_bytes=peak, tensors_bytes=peak)

    def _training(
        self, model: nn.Module, task: Task, losses: Losses, micro_batch_size: int, micro_batches: int, processes: int
    ) -> Training:
        """Return one rank's training, which communicates with no other rank."""
        plan = self.plan.model_copy(
            update={
                "applied": self.plan.applied.model_copy(update={"parallelism": "none"}),
                "micro_batches": micro_batches,
                "micro_batch_size": micro_batch_size,
            }
        )
        share = plan.with_train(batch_size=micro_batch_size * micro_batches * processes)
        share = share.model_copy(update={"processes": processes, "model_processes": 1})
        batches = batches_of(share, task, ALONE, 0, "resident")
        return compose(plan, model, task, batches, ALONE, of_plan(plan), 0, losses=losses)

    def _inside(self, samples: int) -> Callable[[Call], int]:
        """Return a function that maps an operation of a micro-step to the bytes of its temporary memory.

        A micro-step is the work for one micro-batch.
        """
        if self.plan.device == "cuda":
            return _cublas_bytes
        low, high = TRIED_SAMPLES
        if samples < low:
            inside = self._tried(samples)
        else:
            few, many = self._tried(low), self._tried(high)
            inside = {
                call: max(0, round(few[call] + (many[call] - few[call]) * (samples - low) / (high - low)))
                for call in few.keys() & many.keys()
            }
        return lambda call: inside.get(call, 0)

    def _tried(self, samples: int) -> dict[Call, int]:
        """Measure the temporary memory of each operation of a micro-step with real samples on this machine's CPU."""
        if samples not in self._tries:
            task, train = self.task, self.task.dataset.train
            if samples > len(train):  # repeats samples; their content does not matter here
                repeated = train[torch.arange(samples) % len(train)]
                task = replace(task, dataset=replace(task.dataset, train=repeated))
            with randomness.kept(), share_of(cores(), self.plan.processes):
                model = copied(self.model, lambda tensor: tensor.detach().clone())
                training = self._training(model, task, UnreadLosses(ALONE), samples, 1, 1)
                tracker = KernelTracker()
                # The update is left out, because the optimizer's state can be large.
                with training.step.instrument(update=lambda _: lambda: None):
                    ledger.tracked_step(training, tracker)
            self._tries[samples] = tracker.inside
        return self._tries[samples]


def _make_optimizer_state(training: Training) -> None:
    """Take one optimizer step, so that the optimizer allocates its state; then clear the gradients."""
    for parameter in training.model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    training.optimizer.step()
    training.step.zero_grad()


def _cublas_bytes(call: Call) -> int:
    """Return the bytes of an operation's known temporary memory on CUDA: a matrix product's workspace, else 0."""
    return CUBLAS_WORKSPACE_BYTES if call[0] in _MATRIX_PRODUCTS and not _WORKSPACES_LAST else 0


def _buckets(training: Training) -> AbstractContextManager[None]:
    """Move complete gradients into persistent buckets while the block runs, as DistributedDataParallel's reducer does.

    With ``gradient_as_bucket_view``, each gradient is first a separate tensor. In the last micro-batch's backward pass,
    the gradient is copied into its place in a bucket, and is then a view of the bucket.
    """
    holding = False

    @contextmanager
    def hold() -> Iterator[None]:
        nonlocal holding
        holding = True
        yield
        holding = False

    def move(place: torch.Tensor, parameter: torch.Tensor) -> None:
        if not holding:
            place.copy_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = place

    parameters = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
    bucket = torch.empty(sum(parameter.numel() for parameter in parameters))
    start = 0
    for parameter in parameters:
        place = bucket.as_strided(parameter.shape, parameter.stride(), start)
        parameter.register_post_accumulate_grad_hook(functools.partial(move, place))
        start += parameter.numel()
    return training.step.instrument(no_sync=lambda _: hold)


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
        self._calls.clear()

    def gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        self._trace.gradients(map(self.key, gradients))

    key = staticmethod(storage_of)

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
        return Split({name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in split.arrays.items()})

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
