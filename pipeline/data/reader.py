"""A background thread that reads inputs from the memory map ahead of the steps."""

from __future__ import annotations

import queue
import threading

import torch
from torch import Tensor

READ_AHEAD = 4
"""Micro-batches that the background thread may be ahead."""


class Reader:
    """Gathers rows of the memory map in a background thread, at most ``READ_AHEAD`` micro-batches ahead.

    On CUDA, rows go through pinned memory and are copied on a stream of their own. torch's caching allocators keep
    a pinned buffer, and through ``record_stream`` the copy on the device, until the streams are done with them.
    """

    def __init__(self, array: Tensor, order: Tensor, device: torch.device) -> None:
        self._array = array
        self._order = order
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._room = threading.Semaphore(READ_AHEAD)
        self._may_go = threading.Event()
        self._may_go.set()
        self._ready: queue.SimpleQueue[tuple[Tensor, torch.cuda.Event | None] | BaseException] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Tensor:
        """Return the next micro-batch, rows [b, ...], ready for the current stream; raises the thread's error."""
        self._may_go.set()
        taken = self._ready.get()
        if self._stopped:
            raise RuntimeError("these batches were closed before the epoch's end")
        if isinstance(taken, BaseException):
            raise taken
        self._room.release()
        rows, copied = taken
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            rows.record_stream(stream)
        return rows

    def hold(self) -> None:
        """Read no further micro-batch until one is taken."""
        self._may_go.clear()

    def stop(self) -> None:
        """End the thread and wait for it; can be called more than once."""
        self._stopped = True
        self._may_go.set()
        self._room.release()
        if self._thread.is_alive():
            self._thread.join()
        self._ready.put(StopIteration())  # wakes a consumer that waits in another thread

    def _run(self) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._device)  # else a new thread would open a context on device 0
            for rows in self._order:
                self._room.acquire()
                self._may_go.wait()
                if self._stopped:
                    return
                self._ready.put(self._load(rows))
        except BaseException as error:
            self._ready.put(error)

    def _load(self, rows: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if self._stream is None:
            return self._array.index_select(0, rows), None
        pinned = torch.empty((len(rows), *self._array.shape[1:]), dtype=self._array.dtype, pin_memory=True)
        torch.index_select(self._array, 0, rows, out=pinned)
        with torch.cuda.stream(self._stream):
            return pinned.to(self._device, non_blocking=True), self._stream.record_event()
