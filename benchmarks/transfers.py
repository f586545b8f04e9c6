"""Measure copies to and within all GPUs of this machine at once. ``python -m pipeline probe`` times their collectives.

    python -m benchmarks.transfers

Without a GPU, two processes try out the benchmark on the CPU. Wrong data raise an error, because a broken link or
broken memory can still be fast.
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

    def __str__(self) -> str:
        speed = self.size / self.seconds / 1e9
        return f"{self.what:24} {self.size:>11} B {self.seconds * 1e6:>12.1f} us {speed:>9.2f} GB/s"


def measure(device: Literal["cpu", "cuda"], processes: int, sizes: Sequence[int] = SIZES) -> list[Transfer]:
    """Measure every transfer at each of ``sizes`` (bytes, multiples of 4), in all ``processes`` at once.

    Raises WorkerError if a rank fails, or if the received data differ from the data that were sent.
    """
    with forked(_rank, (device, tuple(sizes)), processes, preload=["pipeline.distributed"]) as ask:
        ranks = ask(None)
    return [replace(rows[0], seconds=max(row.seconds for row in rows)) for rows in zip(*ranks, strict=True)]


def _rank(device: Literal["cpu", "cuda"], sizes: Sequence[int]) -> Generator[list[Transfer], None, None]:
    with world(device) as joined:
        yield [row for size in sizes for row in _copies(joined, size)]


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
    for row in measure("cuda", gpus) if gpus else measure("cpu", 2, SIZES[:3]):
        print(row, flush=True)


if __name__ == "__main__":
    main()
