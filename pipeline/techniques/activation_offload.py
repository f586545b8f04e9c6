"""Activation offload: activations stay in host memory until the backward pass needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from pipeline.models.keeping import storage_of
from pipeline.step import Inputs
from pipeline.techniques.base import Setup, Technique

LEAST_BYTES = 2**16
"""Size in bytes of the smallest tensor that is copied. Copying a smaller tensor takes time, but frees little memory."""
IN_FLIGHT = 4
"""Largest number of unfinished copies to the host. If there are more, the computation waits for the oldest copy.
Without this limit all copied tensors would keep their device memory, because the host runs ahead of the device."""


class ActivationOffload(Technique):
    """Activations are copied to pinned memory during the forward pass, and back when the backward pass needs them.

    The copies to the host run on a separate stream, in parallel with the computation. Parameters, the step's inputs and
    tensors below ``LEAST_BYTES`` stay on the device. Values and strides stay the same, so all results stay the same.
    """

    name = "activation_offload"
    offloaded = 0
    """Number of activations that have left the device."""

    def change_step(self, setup: Setup) -> None:
        step, copies = setup.step, torch.cuda.Stream(self.world.device)
        forward = step.forward

        def offloaded(inputs: Inputs, targets: torch.Tensor) -> torch.Tensor:
            stay = map(storage_of, (*step.model.parameters(), *tree_leaves(inputs)))
            with _offloaded(copies, {*stay}) as sizes:
                loss = forward(inputs, targets)
            self.offloaded += len(sizes)
            return loss

        step.forward = offloaded

    def why_idle(self) -> str:
        where = self.where("activation_offload")
        small = f"no activation has {LEAST_BYTES:,} bytes or more, so all stay on the device"
        return "" if self.offloaded else f"{where}, but {small}; allowed: false, or a larger micro-batch."


@contextmanager
def _offloaded(copies: torch.cuda.Stream, staying: set[int]) -> Iterator[list[int]]:
    """While the context is active, autograd saves tensors in host memory, except small tensors and tensors whose
    storage is in ``staying``. Yields a list, to which the sizes of the offloaded tensors in bytes are added."""
    sizes: list[int] = []
    leaving: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()  # tensors whose copies may not be complete

    def let_go() -> None:
        copied, tensor = leaving.popleft()
        torch.cuda.current_stream(tensor.device).wait_event(copied)  # so that its memory is not reused during the copy

    def pack(tensor: torch.Tensor) -> torch.Tensor | Callable[[], torch.Tensor]:
        if not tensor.is_cuda or tensor.nbytes < LEAST_BYTES or storage_of(tensor) in staying:
            return tensor
        device = tensor.device
        waiting = torch.empty_like(tensor, device="cpu", pin_memory=True)  # with the same strides
        copies.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copies):
            waiting.copy_(tensor, non_blocking=True)
        copied = copies.record_event()
        leaving.append((copied, tensor.detach()))
        sizes.append(tensor.nbytes)
        if len(leaving) > IN_FLIGHT:
            let_go()

        def back() -> torch.Tensor:  # a reference to ``tensor`` here would keep its device memory
            torch.cuda.current_stream(device).wait_event(copied)
            return waiting.to(device, non_blocking=True)

        return back

    with saved_tensors_hooks(pack, lambda packed: packed if isinstance(packed, torch.Tensor) else packed()):
        yield sizes
    while leaving:
        let_go()
