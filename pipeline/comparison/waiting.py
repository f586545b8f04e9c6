"""Which process or host the other processes of a variant wait for."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from pipeline.comparison.comparison_file import Slowest
from pipeline.results import Arm
from pipeline.results.bench_file import FEWEST_PAIRS
from pipeline.results.figures import RANK_WAIT

NOTABLE = 0.1
"""A shorter wait, as a share of the step, is not worth a sentence."""
ALMOST_ALL = 0.8
"""The slowest process or host is named if it was the slowest in this share of the rounds; noise makes it change."""


def of_ranks(arm: Arm) -> dict[str, Any]:
    """Return the fields of Compared about the ranks' arithmetic."""
    known = [sample.arithmetic_rank_ms for sample in arm.samples if sample.arithmetic_rank_ms]
    return {
        "arithmetic_rank_ms": tuple(statistics.median(times) for times in zip(*known, strict=True)),
        "slowest": _slowest([times.index(max(times)) for times in known], arm) if known else None,
    }


def _slowest(ranks: list[int], arm: Arm) -> Slowest | None:
    """``ranks``: the slowest rank of each round."""
    wait = statistics.median(RANK_WAIT.known(arm.samples))
    if len(ranks) < FEWEST_PAIRS or wait < NOTABLE:
        return None
    of_host = arm.world_size // arm.hosts
    (rank, rank_rounds), *_ = Counter(ranks).most_common(1)
    (host, host_rounds), *_ = Counter(rank // of_host for rank in ranks).most_common(1)
    always = ALMOST_ALL * len(ranks)
    if rank_rounds >= always:
        return Slowest(host=rank // of_host, rank=rank, rounds=rank_rounds, wait_fraction=wait)
    if arm.hosts > 1 and host_rounds >= always:
        return Slowest(host=host, rank=None, rounds=host_rounds, wait_fraction=wait)
    return None
