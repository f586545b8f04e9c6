"""Measure time and memory of one rank's steps; ``training.measured.window_of`` combines the figures of all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from time import perf_counter  # bound here, before the user's code can replace it
from typing import Any, ClassVar, TypeVar

import numpy as np
import pynvml
import torch

T = TypeVar("T")


class Resumable:
    """Saves and restores a run's counts: all attributes whose names do not begin with an underscore."""

    def state(self) -> dict[str, Any]:
        """Return the counts that a resumed run needs to go on counting."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def restore(self, state: dict[str, Any]) -> None:
        """Set the counts to those that the method ``state`` returned."""
        vars(self).update(state)


class Clock(Resumable):
    """Times a run's steps without waiting for the device inside a step.

    A *window* is a series of steps. ``open`` and ``close`` wait for the device, so a window's wall time is exact.
    Inside a window, each step is timed from one mark to the next. On a GPU a mark is a CUDA event: the device
    notes the time when it reaches the mark, so the host does not wait. On a CPU, where work is synchronous, a mark is
    a reading of the host's clock. ``watch`` times the wait for input with the same kind of marks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[Any] = []
        self._inputs: list[Any] = []
        """Pairs of marks: one when a wait for input begins, one when the input arrives."""
        self._opened = 0.0
        self.train_seconds = 0.0
        """Wall time of all closed windows, warm-up included."""
        self.measured_seconds = 0.0
        """Wall time of the closed windows that are measured."""
        self.step_seconds: list[float] = []
        """The time of each step of the measured windows."""
        self.input_seconds = 0.0
        """Time spent waiting for input in the measured windows."""
        self.first_step_seconds: float | None = None
        """Wall time of the first window. In a new run, this window contains only the first step."""

    def now(self) -> float:
        """Wait for the device to finish its work and return the seconds of a monotonic clock."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()

    def open(self) -> None:
        """Start a window now."""
        self._opened = self.now()
        self._steps, self._inputs = [self.mark()], []

    def step(self) -> None:
        """Mark the end of a step."""
        self._steps.append(self.mark())

    def close(self, *, measured: bool) -> None:
        """End the window. Every window counts as time spent in training; only measured windows count for the speeds."""
        seconds = self.now() - self._opened
        self.train_seconds += seconds
        if self.first_step_seconds is None:
            self.first_step_seconds = seconds
        if measured:
            self.measured_seconds += seconds
            self.step_seconds += [self.between(a, b) for a, b in pairwise(self._steps)]
            self.input_seconds += sum(map(self.between, self._inputs[::2], self._inputs[1::2]))

    def train_seconds_now(self) -> float:
        """Wait for the device and return the time spent in training so far, the open window included."""
        return self.train_seconds + self.now() - self._opened

    def watch(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the ``items``, and count the time until each item arrives as waiting for input."""
        while True:
            start = self.mark()
            try:
                item = next(items)
            except StopIteration:
                return
            self._inputs += (start, self.mark())
            yield item

    def mark(self) -> Any:
        """Return a mark of the present time on the device's queue."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return perf_counter()

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks that the device has reached."""
        seconds: float = start.elapsed_time(end) / 1e3 if self._device.type == "cuda" else end - start
        return seconds


def percentile_ms(seconds: list[float], percent: float) -> float | None:
    """Return a percentile of step times, in milliseconds, linearly interpolated. None if there are no steps."""
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else None


class Memory(Resumable):
    """Peak memory of a run's measured windows.

    On CUDA, the figure is the peak of allocated bytes (``max_memory_allocated``) plus ``graphs_bytes``, which this peak
    does not include. With several GPUs, it is the largest of these sums. On a CPU, the figure is the process's peak
    resident memory (``own_peak_bytes``) minus its peak after the imports and before any work. Only Linux lets a process
    reset its peak; on other systems the CPU figure is unknown.
    """

    imported_bytes: ClassVar[int | None] = None
    """The process's own peak after its imports; ``note_imports`` sets it for the whole process."""

    def __init__(self, *devices: torch.device) -> None:
        self._devices = devices
        self._on_gpu = devices[0].type == "cuda"
        self._retries = 0
        self._resets = True
        self.peak_bytes: int | None = None
        """The peak; None until a measured window has ended, or if this machine cannot measure the peak."""
        self.reserved_bytes: int | None = None
        """The highest ``max_memory_reserved``; None until a measured window has ended, and on a CPU."""
        self.driver_bytes: int | None = None
        """The highest result of ``driver_bytes`` at the end of a measured window. None if unknown, and on a CPU."""
        self.retries: int | None = None
        """How often the CUDA allocator had to flush its cache and try again. None until a measured window has ended,
        and on a CPU."""

    @classmethod
    def note_imports(cls) -> None:
        """Record the peak after the imports. Call once, after all imports and before any work."""
        cls.imported_bytes = own_peak_bytes()

    def open(self) -> None:
        """Start a window: reset the peak."""
        if self._on_gpu:
            for device in self._devices:
                torch.cuda.reset_peak_memory_stats(device)
            self._retries = self._retries_so_far()
        else:
            self._resets = False
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
                self._resets = True

    def close(self, *, measured: bool) -> None:
        """End the window. Keep the highest peak of the measured windows."""
        if not measured:
            return
        if self._on_gpu:
            peaks = (torch.cuda.max_memory_allocated(device) + graphs_bytes(device) for device in self._devices)
            self.peak_bytes = max(self.peak_bytes or 0, *peaks)
            self.reserved_bytes = max(self.reserved_bytes or 0, *map(torch.cuda.max_memory_reserved, self._devices))
            reported = [driver_bytes(device) for device in self._devices]
            self.driver_bytes = max((held for held in [*reported, self.driver_bytes] if held is not None), default=None)
            self.retries = (self.retries or 0) + self._retries_so_far() - self._retries
        elif self._resets and self.imported_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, (own_peak_bytes() or 0) - self.imported_bytes)

    def _retries_so_far(self) -> int:
        return sum(torch.cuda.memory_stats(device)["num_alloc_retries"] for device in self._devices)


def graphs_bytes(device: torch.device) -> int:
    """Return the bytes that CUDA graphs on ``device`` keep for their replays, beyond the tensors that are alive now.

    A replay writes to the addresses of its capture, which belong to a private memory pool. It allocates nothing. So the
    allocator's statistics do not include the activations of a replayed step.
    """
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def driver_bytes(device: torch.device) -> int | None:
    """Return the bytes that the driver counts for this process on ``device``: allocator cache, CUDA context, libraries.

    Returns None if the driver does not report these bytes. Also returns None in a container with its own process ids,
    because the driver lists the host's ids.
    """
    running = answer(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle_of(device)))
    own = [process.usedGpuMemory for process in running or () if process.pid == os.getpid()]
    return None if None in own or not own else sum(own)


def own_peak_bytes() -> int | None:
    """Return this process's peak resident memory since its start or the last reset, without the pages of mapped files.

    Mapped files are code and memory-mapped data sets. Processes share the pages of mapped files, and the system drops
    these pages when memory is short. How many of them are resident depends on how the process was started.

    Linux reports the peak of all pages (VmHWM) and the current pages of files (RssFile). While memory is not short, a
    run only adds file pages, and after some steps it adds none. Then VmHWM - RssFile is the peak of the other pages.
    Returns None if the system does not report both values.
    """
    try:
        lines = (line.partition(":") for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
        sizes = {name: int(size.split()[0]) * 1024 for name, _, size in lines if name in ("VmHWM", "RssFile")}
        return sizes["VmHWM"] - sizes["RssFile"]
    except (OSError, KeyError):
        return None


def handle_of(device: torch.device | str) -> Any:
    """Return NVML's handle of torch's ``device`` or of the UUID that torch gives, by UUID, because NVML's indices
    ignore CUDA_VISIBLE_DEVICES.

    Raises NVMLError.
    """
    pynvml.nvmlInit()
    uuid = device if isinstance(device, str) else torch.cuda.get_device_properties(device).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def answer(ask: Callable[..., T], *arguments: Any) -> T | None:
    """Return ``ask(*arguments)``; None if it raises NVMLError, because the driver does not provide the answer."""
    try:
        return ask(*arguments)
    except pynvml.NVMLError:
        return None
