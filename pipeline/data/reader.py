"""A background thread that reads rows from the memory map ahead of the steps."""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.data.prepared import exceeds_cache

READ_AHEAD = 4
"""Largest number of micro-batches that the background thread reads ahead."""

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_Loaded = tuple[list[Tensor], torch.cuda.Event | None]
"""Rows of each array, and the event that marks the end of the rows' copies to a GPU (None on the CPU)."""


class Reader:
    """Gathers rows of the memory-mapped arrays in a background thread, at most ``READ_AHEAD`` micro-batches ahead.

    On CUDA, rows go through pinned memory and are copied on a separate stream. torch's caching allocators reuse a
    pinned buffer only after its copy has ended. ``record_stream`` makes torch reuse the memory of the rows on the
    device only after the training's stream has used these rows.
    """

    def __init__(self, arrays: Sequence[Tensor], order: Tensor, device: torch.device) -> None:
        self._arrays = arrays
        self._on_disk = [each for each in arrays if exceeds_cache(each.nbytes)]
        self._order = order
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._room = threading.Semaphore(READ_AHEAD)
        self._may_go = threading.Event()
        self._may_go.set()
        self._ready: queue.SimpleQueue[_Loaded | BaseException] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[Tensor]:
        """Return the next micro-batch, rows [b, ...] of each array, for use in the current stream.

        Raises the error that ended the thread, if any, and RuntimeError after ``stop``.
        """
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
            for each in rows:
                each.record_stream(stream)
        return rows

    def hold(self) -> None:
        """Read no further micro-batch until one is taken."""
        self._may_go.clear()

    def stop(self) -> None:
        """End the thread and wait for its end. ``stop`` can be called more than once."""
        self._stopped = True
        self._may_go.set()
        self._room.release()
        if self._thread.is_alive():
            self._thread.join()
        self._ready.put(StopIteration())  # wakes a consumer that waits in another thread

    def _run(self) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._device)  # without this, a new thread would open a context on device 0
            self._announce(self._order[:1])
            for index, rows in enumerate(self._order):
                self._announce(self._order[index + 1 : index + 2])
                self._room.acquire()
                self._may_go.wait()
                if self._stopped:
                    return
                self._ready.put(self._load(rows))
        except BaseException as error:
            self._ready.put(error)

    def _announce(self, rows: Tensor) -> None:
        """Tell the system which rows come next, so that it reads many pages from the disk at once.

        Otherwise the system would read each page only when it is accessed, one page after another.
        """
        for array in self._on_disk:
            size = array[0].nbytes
            for row in rows.flatten().tolist():
                first = array.data_ptr() + row * size
                start = first - first % mmap.PAGESIZE
                _madvise(start, first + size - start, mmap.MADV_WILLNEED)

    def _load(self, rows: Tensor) -> _Loaded:
        if self._stream is None:
            return [array.index_select(0, rows) for array in self._arrays], None
        loaded = []
        for array in self._arrays:
            pinned = torch.empty((len(rows), *array.shape[1:]), dtype=array.dtype, pin_memory=True)
            torch.index_select(array, 0, rows, out=pinned)
            with torch.cuda.stream(self._stream):
                loaded.append(pinned.to(self._device, non_blocking=True))
        return loaded, self._stream.record_event()
