"""A background thread that reads rows ahead of the steps, from memory maps or from files."""

from __future__ import annotations

import io
import os
import queue
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from pipeline.data.prepared import MemoryMap, Split

READ_AHEAD = 4
"""Largest number of micro-batches that the background thread reads ahead."""

_Loaded = tuple[list[Tensor], torch.cuda.Event | None]
"""The rows of each array, and the event that marks the end of their copies to the GPU (None on the CPU)."""


class OpenRows(io.FileIO):
    """The open file of an array that the page cache might not keep.

    Reading a row takes less processor time than mapping its pages, which would be used once and then unmapped.
    """

    def __init__(self, array: MemoryMap) -> None:
        super().__init__(str(array.filename))
        self._offset, self._row_bytes = array.offset, array.strides[0]
        os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def announce(self, rows: Tensor) -> None:
        """Tell the system which rows come next, so that it reads many of them from the disk at once.

        Otherwise the system would read each row only when it is requested, one row after another.
        """
        for row in rows.flatten().tolist():
            place = self._offset + row * self._row_bytes
            os.posix_fadvise(self.fileno(), place, self._row_bytes, os.POSIX_FADV_WILLNEED)

    def fill(self, out: Tensor, rows: Tensor) -> None:
        """Read ``rows`` [b] into ``out`` [b, ...]. Raises OSError if the file has become shorter."""
        for row, values in zip(rows.tolist(), out.view(len(rows), -1).view(torch.uint8).numpy(), strict=True):
            if os.preadv(self.fileno(), [values], self._offset + row * self._row_bytes) != self._row_bytes:
                raise OSError(f"{self.name}: row {row} cannot be read whole; run `dvc repro --force prepare`")


class Reader:
    """Gathers rows of the arrays ``names`` of ``split`` in a background thread, at most ``READ_AHEAD`` micro-batches
    ahead.

    ``order`` [m, b] has the indices of each micro-batch's rows. Rows of an array in ``split.beyond_cache`` are read
    from its file, all others from the array's memory map.

    On CUDA, rows go through pinned memory and are copied on a separate stream. torch's caching host allocator
    reuses a pinned buffer only after its copy has ended. ``record_stream`` makes torch reuse the rows' memory on the
    device only after the training stream has used these rows.
    """

    def __init__(self, split: Split, names: Sequence[str], order: Tensor, device: torch.device) -> None:
        self._arrays = [split.arrays[name] for name in names]
        self._large = [split.beyond_cache.get(name) for name in names]
        self._order = order
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._room = threading.Semaphore(READ_AHEAD)
        self._may_go = threading.Event()
        self._may_go.set()
        self._ready: queue.SimpleQueue[_Loaded | BaseException] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
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
            for array_rows in rows:
                array_rows.record_stream(stream)
        return rows

    def hold(self) -> None:
        """Read no further micro-batch until the next call of ``take``."""
        self._may_go.clear()

    def stop(self) -> None:
        """End the thread and wait for its end. ``stop`` can be called more than once."""
        self._stopped = True
        self._may_go.set()
        self._room.release()
        self._thread.join()
        self._ready.put(StopIteration())  # wakes a consumer that waits in another thread

    def _run(self) -> None:
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._device)  # without this, a new thread would open a context on device 0
            with ExitStack() as stack:
                opened = [stack.enter_context(OpenRows(array)) if array is not None else None for array in self._large]
                for file in filter(None, opened):
                    file.announce(self._order[:1])
                for index, rows in enumerate(self._order):
                    for file in filter(None, opened):
                        file.announce(self._order[index + 1 : index + 2])
                    self._room.acquire()
                    self._may_go.wait()
                    if self._stopped:
                        return
                    self._ready.put(self._load(rows, opened))
        except BaseException as error:
            self._ready.put(error)

    def _load(self, rows: Tensor, opened: Sequence[OpenRows | None]) -> _Loaded:
        loaded = []
        for array, file in zip(self._arrays, opened, strict=True):
            shape = len(rows), *array.shape[1:]
            gathered = torch.empty(shape, dtype=array.dtype, pin_memory=self._stream is not None)
            if file is None:
                torch.index_select(array, 0, rows, out=gathered)
            else:
                file.fill(gathered, rows)
            with torch.cuda.stream(self._stream):  # does nothing on the CPU
                loaded.append(gathered.to(self._device, non_blocking=True))
        return loaded, None if self._stream is None else self._stream.record_event()
