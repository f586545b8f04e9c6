"""The time of a collective. Only ``scaling.probe`` imports this module, so its changes repeat no training."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeline.distributed.worlds import World
from pipeline.errors import PipelineError
from pipeline.results.records import Operation


def seconds_of(joined: World, operation: Operation, size_bytes: int, window_seconds: float) -> float:
    """Return the seconds of one call on the slowest rank: the mean over a window of successive calls.

    ``size_bytes``: the float32 tensor that is reduced, or that all ranks hold in the end; a multiple of 4 bytes for
    each rank. The number of calls grows until the window takes ``window_seconds``, on all ranks alike. The device may
    queue the calls; it is waited for at the window's ends only. Before, one call sets up the connections. Raises
    PipelineError if this call's result is wrong, because a broken link can still be fast.
    """
    ranks = torch.arange(1, joined.size + 1, dtype=torch.float32, device=joined.device)
    whole = torch.full((joined.size, size_bytes // 4 // joined.size), joined.rank + 1.0, device=joined.device)
    part, flat = whole[0].clone(), whole.view(-1)
    calls: dict[Operation, tuple[Any, torch.Tensor, torch.Tensor]] = {
        "all_reduce": (partial(dist.all_reduce, flat), flat, ranks.sum()),
        "reduce_scatter": (partial(dist.reduce_scatter_tensor, part, flat), part, ranks.sum()),
        "all_gather": (partial(dist.all_gather_into_tensor, flat, part), whole, ranks.unsqueeze(1)),
    }
    call, result, right = calls[operation]
    call()
    if not bool((result == right).all()):
        raise PipelineError(
            f"{operation} of {size_bytes} bytes: rank {joined.rank} received wrong data, because a link or the memory "
            "is broken; do not use this machine."
        )
    whole.zero_()  # repeated sums of sums would overflow
    part.zero_()
    number = 1
    while True:
        joined.barrier()
        joined.synchronise()
        started = time.perf_counter()
        for _ in range(number):
            call()
        joined.synchronise()
        own = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=joined.device)
        seconds = float(joined.max_(own))
        if seconds >= window_seconds:
            return seconds / number
        number = min(8 * number, math.ceil(1.2 * number * window_seconds / seconds))
