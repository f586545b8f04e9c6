"""Measure transfers on this machine: all-reduces over all GPUs, by NCCL, and copies to and within each GPU.

    python -m benchmarks.transfers

With one GPU, only the copies are measured. Without a GPU, two processes try out the benchmark on the CPU over gloo.
Wrong data at the receiver raise an error, because a broken link or broken memory can still be fast.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from pipeline import environment
from pipeline.distributed import World, forked, world
from pipeline.errors import PipelineError

SIZES = (4, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
"""Sizes of transfers in bytes. The smallest size shows the latency, the largest the bandwidth."""


@dataclass(frozen=True)
class Transfer:
    """The time of one kind of transfer at one size."""

    what: str
    size: int
    """Bytes."""
    seconds: float
    """Median time of one transfer on the slowest rank."""
    bus_factor: float = 1.0
    """Bytes that each link carries, divided by the size: 2 (n - 1) / n for an all-reduce among n GPUs. It makes figures
    for different n comparable. Source: nccl-tests, PERFORMANCE.md."""

    def __str__(self) -> str:
        speed = self.size / self.seconds / 1e9
        figures = f"{self.seconds * 1e6:>12.1f} us {speed:>9.2f} GB/s {speed * self.bus_factor:>9.2f} GB/s on the bus"
        return f"{self.what:24} {self.size:>11} B {figures}"


def measure(device: Literal["cpu", "cuda"], processes: int, sizes: Sequence[int] = SIZES) -> list[Transfer]:
    """Measure every transfer at each of ``sizes`` (bytes, multiples of 4), in all ``processes`` at once.

    Raises WorkerError if a rank fails, or if the received data differ from the data that were sent.
    """
    with forked(_rank, (device, tuple(sizes)), processes, preload=["pipeline.distributed"]) as ask:
        ranks = ask(None)
    return [replace(rows[0], seconds=max(row.seconds for row in rows)) for rows in zip(*ranks, strict=True)]


def _rank(device: Literal["cpu", "cuda"], sizes: Sequence[int]) -> Generator[list[Transfer], None, None]:
    with world(device) as joined:
        rows = [row for size in sizes for row in _copies(joined, size)]
        if joined.size > 1:
            rows += [_all_reduce(joined, size) for size in sizes]
        yield rows


def _copies(joined: World, size: int) -> list[Transfer]:
    sent = torch.arange(size // 4, dtype=torch.int32, device=joined.device)
    target = torch.empty_like(sent)
    host = torch.arange(size // 4, dtype=torch.int32, pin_memory=joined.device.type == "cuda")
    rows = []
    for what, source in (("copy, device to device", sent), ("copy, host to device", host)):
        target.fill_(-1)
        act = partial(target.copy_, source, non_blocking=True)
        rows.append(Transfer(what, size, _timed(act, joined, size)))
        _demand(torch.equal(target, sent), rows[-1])
    return rows


def _all_reduce(joined: World, size: int) -> Transfer:
    tensor = torch.full((size // 4,), float(joined.rank + 1), device=joined.device)
    joined.sum_(tensor)
    right = bool((tensor == joined.size * (joined.size + 1) / 2).all())
    tensor.zero_()  # repeated sums of sums would overflow
    seconds = _timed(lambda: joined.sum_(tensor), joined, size)
    row = Transfer(f"all-reduce, {joined.size} by {joined.backend}", size, seconds, 2 * (joined.size - 1) / joined.size)
    _demand(right, row)
    return row


def _demand(right: bool, row: Transfer) -> None:
    if not right:
        raise PipelineError(
            f"{row.what} of {row.size} bytes: the received data are wrong, because a link or the memory is broken; do "
            "not use this machine."
        )


def _timed(act: Callable[[], object], joined: World, size: int, batches: int = 5) -> float:
    """Return the median seconds of one call of ``act``, over ``batches`` batches of calls that the device queues."""
    calls = 100 if size <= 1 << 20 else 10
    durations = []
    for _ in range(batches + 1):  # the first batch is a warm-up, which sets up links and allocates memory
        joined.synchronise()
        started = time.perf_counter()
        for _ in range(calls):
            act()
        joined.synchronise()
        durations.append((time.perf_counter() - started) / calls)
    return statistics.median(durations[1:])


def main() -> None:
    gpus = environment.machine().gpus
    if gpus == 1:
        print("one GPU: only copies are measured, because an all-reduce needs several GPUs")
    for row in measure("cuda", gpus) if gpus else measure("cpu", 2, SIZES[:3]):
        print(row, flush=True)


if __name__ == "__main__":
    main()
