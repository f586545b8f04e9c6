"""How ranks meet that another launcher, such as torchrun, has started on one host or on several.

Through the launcher's store, each rank says that it is alive, and what it is going to run. So no rank trains together
with a rank that runs something else, and no rank waits long for a rank that has failed.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from threading import Thread
from typing import Any

import torch.distributed as dist

from pipeline.errors import PipelineError
from pipeline.files import json_sha256
from pipeline.hosts import refuse_differences
from pipeline.processes import launched_size

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for another that does not join it or a collective: long enough for a rank that writes to a slow
disk. A launcher notices a dead rank earlier."""
LOST_SECONDS = 20
"""A rank that has not been heard for so long before it joined has failed, or was killed."""


@cache
def _store() -> Any:
    """Return the store of the ranks of this job, which the launcher's variables name."""
    store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))  # type: ignore[attr-defined]
    return store


def live() -> None:
    """From now on, until this process joins the other ranks, let them know that it is alive. Call this only in a
    process that a launcher has started."""
    store, own = _store(), f"alive/{os.environ['RANK']}"
    store.set(f"host of {own}", platform.node())

    def beat() -> None:
        with suppress(RuntimeError):  # the store's host has ended
            while not dist.is_initialized():
                store.add(own, 1)
                time.sleep(1)

    Thread(target=beat, daemon=True).start()


def met(record: Mapping[str, Any]) -> Any:
    """Wait for all ranks; return the store through which they can join.

    ``record``: plain values on which the numbers depend. Raises PipelineError, on all ranks, if a rank is lost, does
    not start, or has another record.
    """
    store, own, ranks = _store(), os.environ["RANK"], range(launched_size() or 1)
    try:
        store.set(f"record/{own}", json.dumps([f"{platform.node()} (rank {own})", record]))
        store.set(f"digest/{own}", json_sha256(record))
        _wait(store, ranks)
        if len({store.get(f"digest/{rank}") for rank in ranks}) > 1:
            records = [json.loads(store.get(f"record/{rank}")) for rank in ranks]
            with suppress(RuntimeError):  # a rank that holds the store must not end before the others have read
                store.add("read", 1)
                for _ in range(100):
                    time.sleep(0.1 * (store.add("read", 0) < len(ranks)))
            refuse_differences(records)
    except RuntimeError as error:
        raise PipelineError(f"the host of rank 0 ended before all ranks met ({error}). Its output says why.") from None
    return dist.PrefixStore("joined", store)  # type: ignore[attr-defined]


def _wait(store: Any, ranks: Sequence[int]) -> None:
    """Wait until all ranks have stored their digests. Raises PipelineError if a rank is lost or does not start."""
    heard = dict.fromkeys(ranks, (0, time.monotonic()))
    while missing := [rank for rank in ranks if not store.check([f"digest/{rank}"])]:
        for rank in missing:
            signs, (before, since) = store.add(f"alive/{rank}", 0), heard[rank]
            if signs != before:
                heard[rank] = signs, time.monotonic()
            elif time.monotonic() - since > (LOST_SECONDS if signs else TIMEOUT.total_seconds()):
                host = f" on {store.get(f'host of alive/{rank}').decode()}" if signs else ""
                how = "ended before it joined the others; its output says why" if signs else "has not started"
                raise PipelineError(f"rank {rank}{host} {how}. Start the job again on all hosts.")
        time.sleep(0.1)
