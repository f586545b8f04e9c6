"""Record the allocations of one training step on the device with torch's profiler, and find the peak of their
bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._C._profiler import _ExtraFields_Allocation
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.distributed import own_part
from pipeline.processes import default_environment
from pipeline.profiling import QUIET, each_within
from pipeline.results import Ledger
from pipeline.tasks import Task
from pipeline.tasks.batches import Placement
from pipeline.training.loop import Training

Call = tuple[str, int]
"""An operation of a micro-step, which is the work for one micro-batch: the operation's name, and its number among the
operations of that name, counted from 1."""

_INPUT, _INPUT_ENDS = "ledger: input", "/ledger: input"
_GRADIENTS = "ledger: gradients"
_FSDP, _FSDP_ENDS = "FSDP::", "/FSDP::"
"""Prefixes of the annotations in which fully_shard gathers parameters and reduces gradients."""
_CALL, _CALL_ENDS = "ledger: call ", "/ledger: call "


def measured(training: Training, peak_bytes: int | None) -> Ledger | None:
    """Take one more step of ``training`` and return this rank's ledger, which divides its peak memory into parts.

    The warm-up must be over. All ranks call this function together.

    ``peak_bytes`` is this rank's peak, measured earlier without a tracker. The ledger's parts and its rest add up to
    this peak. Returns None if the peak is unknown, or if the step is replayed from a CUDA graph, which allocates
    nothing.
    """
    if training.setup.replays:
        return None
    tracker = DeviceTracker(training.world.device.type)
    trace = tracked_step(training, tracker)
    if peak_bytes is None:
        return None
    on_gpu = training.world.device.type == "cuda"
    parts, _ = ledger_parts(training, tracker, trace)
    if on_gpu:
        parts["data_bytes"] += resident_bytes(training.task, training.batches.placement)
    known = sum(parts.values())
    return Ledger(
        **parts,
        rest_bytes=peak_bytes - known,
        peak_bytes=peak_bytes,
        tensors_bytes=peak_bytes if on_gpu else known,
    )


class Tracker:
    """Records the allocations of a step in a trace."""

    def recording(self) -> AbstractContextManager[AllocationTrace]:
        """Record a trace while the ``with`` block runs; the trace is complete when the block ends."""
        raise NotImplementedError

    def input(self) -> AbstractContextManager[object]:
        """Mark the ``with`` block as the preparation of the next micro-batch."""
        return nullcontext()

    def gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Record that ``gradients`` are now the parameters' gradients."""

    @staticmethod
    def key(tensor: torch.Tensor) -> int:
        """Return the key of the tensor's memory in the trace."""
        return own_part(tensor).untyped_storage().data_ptr()


def tracked_step(training: Training, tracker: Tracker) -> AllocationTrace:
    """Clear the last step's gradients, then take one step of ``training`` and record it with ``tracker``."""
    step, parameters = training.step, list(training.model.parameters())

    def noting(part: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted(argument: Any) -> None:
            part(argument)
            tracker.gradients([parameter.grad for parameter in parameters if parameter.grad is not None])

        return noted

    epoch, start = divmod(training.steps, training.batches.steps_per_epoch)
    # A step begins with zero_grad, which frees the last step's gradients. On a CPU, the profiler does not report
    # the freeing of memory that was allocated before the trace. So the gradients are cleared before the trace.
    step.zero_grad()
    # A pipeline's schedule runs the backward passes itself, so accumulate is instrumented too.
    with step.instrument(backward=noting, accumulate=noting), tracker.recording() as trace:
        step(each_within(tracker.input, training.batches.epoch(epoch, start)))
        training.world.synchronise()
    return trace


def ledger_parts(training: Training, tracker: Tracker, trace: AllocationTrace) -> tuple[dict[str, int], list[int]]:
    """Return the ledger's parts, without the rest, and the sizes of the blocks that exist during the whole step."""
    model, device = training.model, training.world.device.type

    def sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        held = (own_part(tensor) for tensor in tensors)
        return {tracker.key(part): part.untyped_storage().nbytes() for part in held if part.device.type == device}

    # In a pipeline, the other ranks' parts of the model are on the meta device here, with their shapes only.
    models = [model, *training.setup.kept_models]
    parameters = sizes(tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    values = (value for state in training.optimizer.state.values() for value in state.values())
    optimizer_state = sizes(value for value in values if isinstance(value, torch.Tensor))
    gradients = sizes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    # Gradients that exist during the whole step, such as those in DistributedDataParallel's buckets. While gradients
    # accumulate, they exist in addition to the buckets. The last micro-batch moves them into the buckets.
    buckets = {key: size for key, size in gradients.items() if key not in trace.held}
    bucket_bytes, beside = sum(buckets.values()), trace.at_peak("gradients")
    kept = sum(kept() for kept in training.setup.kept_bytes)
    parts = {
        "parameters_bytes": sum(parameters.values()),
        "gradients_bytes": max(bucket_bytes, beside),
        "optimizer_state_bytes": sum(optimizer_state.values()),
        "activations_bytes": trace.at_peak("activations"),
        "communication_bytes": min(bucket_bytes, beside) + kept + trace.at_peak("communication"),
        "data_bytes": trace.at_peak("data"),
    }
    return parts, [*parameters.values(), *optimizer_state.values(), *buckets.values()]


class DeviceTracker(Tracker):
    """Reads the allocations that torch's profiler records."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._noted: list[list[int]] = []

    @contextmanager
    def recording(self) -> Iterator[AllocationTrace]:
        trace = AllocationTrace()
        with default_environment(QUIET), profiler.profile(profile_memory=True) as profile:
            yield trace
        events = list(_events(profile, self._device))
        held: set[int] = set()
        # Add the blocks that were allocated before the step and are freed in it. On a CPU, none are reported.
        for event in events:
            if event.size > 0:
                held.add(event.key)
            elif event.size < 0 and event.key not in held:
                trace.allocate(event.key, -event.size)
            else:
                held.discard(event.key)
        noted = iter(self._noted)
        for event in events:
            if event.size > 0:
                trace.allocate(event.key, event.size)
            elif event.size < 0:
                trace.free(event.key)
            elif event.name == _GRADIENTS:
                trace.gradients(next(noted))
            elif event.name in (_INPUT, _INPUT_ENDS):
                trace.section("data", begins=event.name == _INPUT)
            elif event.name.startswith((_FSDP, _FSDP_ENDS)):
                trace.section("communication", begins=event.name.startswith(_FSDP))

    def input(self) -> AbstractContextManager[object]:
        return profiler.record_function(_INPUT)

    def gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        self._noted.append([self.key(gradient) for gradient in gradients])
        with profiler.record_function(_GRADIENTS):
            pass


class KernelTracker(Tracker, TorchDispatchMode):
    """Measures the temporary memory of each operation of a micro-step. The operation's results do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = Calls()
        self.inside: dict[Call, int] = {}

    @contextmanager
    def recording(self) -> Iterator[AllocationTrace]:
        with default_environment(QUIET), profiler.profile(profile_memory=True) as profile, self:
            yield AllocationTrace()
        total = before = highest = 0
        for event in _events(profile, "cpu"):
            total += event.size
            highest = max(highest, total)
            if event.name.startswith(_CALL):
                before = highest = total
            elif event.name.startswith(_CALL_ENDS):
                name, number = event.name.removeprefix(_CALL_ENDS).rsplit(" ", 1)
                self.inside[name, int(number)] = highest - max(before, total)

    @contextmanager
    def input(self) -> Iterator[None]:
        yield
        self._calls.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, number = self._calls.next(func)
        with profiler.record_function(f"{_CALL}{name} {number}"):
            return func(*args, **(kwargs or {}))


class Calls(Counter[str]):
    """Numbers the operations of a micro-step, so that the operations of two runs can be matched. ``clear`` begins a
    micro-step."""

    def next(self, func: Any) -> Call:
        name = str(func)
        self[name] += 1
        return name, self[name]


@dataclass(frozen=True)
class _Event:
    """An event of a profile. Memory is allocated (size above 0) or freed (size below 0), or an annotation begins
    ("NAME") or ends ("/NAME")."""

    time: int
    name: str = ""
    key: int = 0
    size: int = 0


def _events(profile: profiler.profile, device: str) -> list[_Event]:
    """Return the allocations and frees on ``device``, and the ledger's and FSDP's annotations, in order of time."""
    assert profile.kineto_results is not None
    events: list[_Event] = []
    tree = list(profile.kineto_results.experimental_event_tree())
    while tree:
        event = tree.pop()
        tree += event.children
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation):
            if fields.device.type == device and fields.ptr:
                events.append(_Event(event.start_time_ns, key=fields.ptr, size=fields.alloc_size))
        elif event.name.startswith(("ledger: ", _FSDP)):
            events.append(_Event(event.start_time_ns, event.name))
            events.append(_Event(event.end_time_ns, f"/{event.name}"))
    return sorted(events, key=lambda event: event.time)


def resident_bytes(task: Task, placement: Placement) -> int:
    """Return the bytes of the training set that stay on a GPU between steps; 0 unless the set is resident."""
    return sum(task.dataset.train.arrays[name].nbytes for name in task.arrays) if placement == "resident" else 0


Kind = Literal["data", "gradients", "activations", "communication"]


@dataclass
class Block:
    """Memory that was allocated while the trace ran."""

    size: int
    kind: Kind
    taken: int
    """Number of blocks allocated before this block."""
    given_back: int | None = None
    """Number of blocks that had been allocated when this block was freed; None if it is not freed."""


class AllocationTrace:
    """Blocks in the order of their allocation. A key, such as an address, stands for one block at a time."""

    def __init__(self) -> None:
        self.held: dict[int, Block] = {}
        self._blocks: list[Block] = []
        self._total = self._peak = self._peak_at = 0
        self._kinds: list[Kind] = ["activations"]

    def allocate(self, key: int, size: int) -> None:
        block = self.held[key] = Block(size, self._kinds[-1], taken=len(self._blocks))
        self._blocks.append(block)
        self._total += size
        if self._total > self._peak:
            self._peak, self._peak_at = self._total, block.taken

    def free(self, key: int) -> None:
        """Free a block. A block that was allocated before the trace began is ignored."""
        block = self.held.pop(key, None)
        if block is not None:
            block.given_back = len(self._blocks)
            self._total -= block.size

    def section(self, kind: Kind, *, begins: bool) -> None:
        """Begin or end a section in which allocated blocks are of this kind; sections may nest."""
        if begins:
            self._kinds.append(kind)
        else:
            self._kinds.pop()

    def gradients(self, keys: Iterable[int]) -> None:
        """Mark these blocks as gradients of parameters."""
        for key in keys:
            if key in self.held:
                self.held[key].kind = "gradients"

    def at_peak(self, kind: Kind) -> int:
        """Return the bytes of this kind that were allocated when the total was at its peak."""
        return sum(
            block.size
            for block in self._blocks[: self._peak_at + 1]
            if block.kind == kind and (block.given_back is None or block.given_back > self._peak_at)
        )
