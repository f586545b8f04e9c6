"""Watching one step of a training: on the device, through what torch's allocators report to its profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _ExtraFields_Allocation
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.data.batches import Batch, Placement
from pipeline.data.prepared import Dataset
from pipeline.distributed import own_part
from pipeline.profiling.ledger.allocation_trace import Tape
from pipeline.profiling.quiet import quiet
from pipeline.results import Ledger
from pipeline.training.loop import Training

Call = tuple[str, int]
"""An operation of a micro-step: its name, and how many of that name came before."""

_INPUT, _INPUT_ENDS = "ledger: input", "/ledger: input"
_GRADIENTS = "ledger: gradients"
_FSDP, _FSDP_ENDS = "FSDP::", "/FSDP::"
"""How fully_shard names the parts of a step in which it gathers parameters and reduces gradients."""
_CALL, _CALL_ENDS = "ledger: call ", "/ledger: call "


def measured(training: Training, peak_bytes: int | None) -> Ledger | None:
    """This rank's ledger. ``training``, which is warm, takes one more step for it; all ranks call it together.

    ``peak_bytes`` is this rank's peak as it was measured before, unwatched: what the parts add up to. None, where it is
    unknown, makes the ledger unknown; so does a step that is replayed, in which nothing is allocated.
    """
    if any(technique.replays for technique in training.techniques):
        return None
    watch = DeviceWatch(training.world.device.type)
    tape = watched_step(training, watch)
    if peak_bytes is None:
        return None
    on_gpu = training.world.device.type == "cuda"
    parts = Standing(training, watch, tape).parts(tape)
    if on_gpu:
        parts["data_bytes"] += resident_bytes(training.dataset, training.batches.placement)
    known = sum(parts.values())
    return Ledger(
        **parts,
        rest_bytes=peak_bytes - known,
        peak_bytes=peak_bytes,
        tensors_bytes=peak_bytes if on_gpu else known,
    )


class Watch:
    """Writes a tape while a step runs."""

    def recording(self) -> AbstractContextManager[Tape]:
        """The tape is complete when the block ends."""
        raise NotImplementedError

    def input(self) -> AbstractContextManager[object]:
        """Inside, the next micro-batch is made."""
        return nullcontext()

    def gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """These are the parameters' gradients now."""

    def arriving(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same micro-batches."""
        while True:
            with self.input():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @staticmethod
    def key(tensor: torch.Tensor) -> int:
        """The key of the tensor's memory on the tape."""
        return own_part(tensor).untyped_storage().data_ptr()


def watched_step(training: Training, watch: Watch) -> Tape:
    """Take one step of ``training`` and watch it, from a moment at which the last step's gradients are forgotten."""
    step, parameters = training.take_step, list(training.model.parameters())

    def note() -> None:
        watch.gradients([parameter.grad for parameter in parameters if parameter.grad is not None])

    def noting(part: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted(argument: Any) -> None:
            part(argument)
            note()

        return noted

    epoch, start = divmod(training.steps, training.batches.steps_per_epoch)
    step.zero_grad()  # what the step does first; the allocator for CPUs does not say how much that frees
    # A pipeline's schedule takes the backward passes itself.
    with step.instrument(backward=noting, accumulate=noting), watch.recording() as tape:
        step(watch.arriving(training.batches.epoch(epoch, start)))
        training.world.synchronise()
    return tape


class Standing:
    """What is there during the whole step: size in bytes by key."""

    def __init__(self, training: Training, watch: Watch, tape: Tape) -> None:
        device = training.world.device.type
        model, states = training.model, training.optimizer.state.values()

        def sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
            held = (own_part(tensor) for tensor in tensors)
            return {watch.key(part): part.untyped_storage().nbytes() for part in held if part.device.type == device}

        # Of other ranks' parts of the model, a rank has the shapes alone, on the meta device.
        self.parameters = sizes(
            tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == device
        )
        self.optimizer_state = sizes(
            value for state in states for value in state.values() if isinstance(value, torch.Tensor)
        )
        gradients = sizes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        self.buckets = {key: size for key, size in gradients.items() if key not in tape.held}
        """Gradients that no block of the step holds are there all the time, in DistributedDataParallel's buckets, say.
        """
        self.communication = sum(technique.communication_bytes() for technique in training.techniques)
        """What techniques keep beside them."""

    def parts(self, tape: Tape) -> dict[str, int]:
        """The ledger's parts, without the rest."""
        buckets = sum(self.buckets.values())
        # While gradients accumulate they are beside the buckets, and move into them with the last micro-batch.
        beside = tape.at_peak("gradients")
        return {
            "parameters_bytes": sum(self.parameters.values()),
            "gradients_bytes": max(buckets, beside),
            "optimizer_state_bytes": sum(self.optimizer_state.values()),
            "activations_bytes": tape.at_peak("activations"),
            "communication_bytes": min(buckets, beside) + self.communication + tape.at_peak("communication"),
            "data_bytes": tape.at_peak("data"),
        }

    def rounding_bytes(self, block_bytes: int) -> int:
        """What an allocator adds that hands out multiples of ``block_bytes``."""
        sizes = [*self.parameters.values(), *self.optimizer_state.values(), *self.buckets.values()]
        return sum(-size % block_bytes for size in sizes)


class DeviceWatch(Watch):
    """Reads what the allocators report to torch's profiler."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._noted: list[list[int]] = []

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        tape = Tape()
        with quiet(), profiler.profile(profile_memory=True) as profile:
            yield tape
        events = list(_events(profile, self._device))
        held: set[int] = set()
        for event in events:  # what was there before and goes during the step; the CPU's allocator does not report it
            if event.size > 0:
                held.add(event.key)
            elif event.size < 0 and event.key not in held:
                tape.take(event.key, -event.size)
            else:
                held.discard(event.key)
        noted = iter(self._noted)
        for event in events:
            if event.size > 0:
                tape.take(event.key, event.size)
            elif event.size < 0:
                tape.give_back(event.key)
            elif event.name == _GRADIENTS:
                tape.gradients(next(noted))
            elif event.name in (_INPUT, _INPUT_ENDS):
                tape.input(event.name == _INPUT)
            elif event.name.startswith((_FSDP, _FSDP_ENDS)):
                tape.communication(event.name.startswith(_FSDP))

    def input(self) -> AbstractContextManager[object]:
        return profiler.record_function(_INPUT)

    def gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        self._noted.append([self.key(gradient) for gradient in gradients])
        with profiler.record_function(_GRADIENTS):
            pass


class KernelWatch(Watch, TorchDispatchMode):
    """Finds out what each operation of a micro-step takes inside, beyond its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = Calls()
        self.inside: dict[Call, int] = {}

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        with quiet(), profiler.profile(profile_memory=True) as profile, self:
            yield Tape()
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
        self._calls.restart()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, number = self._calls.next(func)
        with profiler.record_function(f"{_CALL}{name} {number}"):
            return func(*args, **(kwargs or {}))


class Calls:
    """Tells the operations of a micro-step apart, so that those of two runs can be matched."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def restart(self) -> None:
        """A micro-step begins."""
        self._seen.clear()

    def next(self, func: Any) -> Call:
        name = str(func)
        self._seen[name] += 1
        return name, self._seen[name]


@dataclass(frozen=True)
class _Event:
    """Of a profile: memory taken (size above 0) or given back (below), or the begin ("NAME") or end ("/NAME") of a
    part of ours."""

    time: int
    name: str = ""
    key: int = 0
    size: int = 0


def _events(profile: profiler.profile, device: str) -> list[_Event]:
    """In order of time."""
    assert profile.kineto_results is not None
    found: list[_Event] = []
    tree = list(profile.kineto_results.experimental_event_tree())
    while tree:
        event = tree.pop()
        tree += event.children
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation):
            if fields.device.type == device and fields.ptr:
                found.append(_Event(event.start_time_ns, key=fields.ptr, size=fields.alloc_size))
        elif event.name.startswith(("ledger: ", _FSDP)):
            found.append(_Event(event.start_time_ns, event.name))
            found.append(_Event(event.end_time_ns, f"/{event.name}"))
    return sorted(found, key=lambda event: event.time)


def resident_bytes(dataset: Dataset, placement: Placement) -> int:
    """What a GPU holds of the training set all the time."""
    labels, images = dataset.train.labels.nbytes, dataset.train.images.nbytes
    return {"resident": labels + images, "streamed": labels, "dataloader": 0}[placement]
