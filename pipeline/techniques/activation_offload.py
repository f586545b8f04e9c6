"""Activation offload: what the forward pass keeps for the backward pass waits in the host's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from pipeline.step import TrainingStep
from pipeline.techniques.base import Technique

LEAST_BYTES = 2**16
"""Of a tensor, for it to be moved: a smaller copy costs more than the memory is worth."""
IN_FLIGHT = 4
"""So many copies may be on their way out; the computation waits for the oldest before it goes on, or the host, which
is ahead of the device, would have the memory of all at once."""


class ActivationOffload(Technique):
    """Kept activations are copied to pinned memory while the forward pass goes on, and back when they are due.

    The copies out run on a stream of their own, beside the computation. Parameters, which stay where they are, are not
    copied, nor is what is smaller than ``LEAST_BYTES``. Values and strides are the same, so are all results.
    """

    name = "activation_offload"
    estimable = False

    def change_step(self, step: TrainingStep) -> None:
        forward, copies = step.forward, torch.cuda.Stream(self.world.device)

        def offloaded(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with _offloaded(copies, {_storage(tensor) for tensor in (*step.model.parameters(), images)}):
                return forward(images, labels)

        step.forward = offloaded


@dataclass(frozen=True)
class _Away:
    """A tensor that waits in pinned memory."""

    waiting: torch.Tensor
    device: torch.device
    copied: torch.cuda.Event
    """When it is complete."""


@contextmanager
def _offloaded(copies: torch.cuda.Stream, staying: set[int]) -> Iterator[None]:
    """Tensors that are kept inside go to the host; storages that are ``staying`` do not."""

    leaving: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()  # not copied yet for all that the host knows

    def let_go() -> None:
        copied, tensor = leaving.popleft()
        torch.cuda.current_stream(tensor.device).wait_event(copied)  # whatever takes its memory next comes after that

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Away:
        if not tensor.is_cuda or tensor.nbytes < LEAST_BYTES or _storage(tensor) in staying:
            return tensor
        waiting = torch.empty_like(tensor, device="cpu", pin_memory=True)  # with the same strides
        copies.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(copies):
            waiting.copy_(tensor, non_blocking=True)
        copied = copies.record_event()
        leaving.append((copied, tensor.detach()))
        if len(leaving) > IN_FLIGHT:
            let_go()
        return _Away(waiting, tensor.device, copied)

    def unpack(packed: torch.Tensor | _Away) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        torch.cuda.current_stream(packed.device).wait_event(packed.copied)
        return packed.waiting.to(packed.device, non_blocking=True)

    with saved_tensors_hooks(pack, unpack):
        yield
    while leaving:
        let_go()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
