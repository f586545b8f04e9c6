"""Which process or host the others wait for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeline.comparison.comparison_file import Slowest
from pipeline.comparison.waiting import of_ranks
from pipeline.training.measured import waits
from tests.factories import make_arm, make_window


@pytest.mark.parametrize(
    ("rounds", "slowest"),
    [
        ([(4, 4, 4, 6)] * 6, Slowest(host=1, rank=3, rounds=6, wait_fraction=0.2)),
        ([(4, 4, 4, 6)] * 5 + [(4, 6, 4, 4)], Slowest(host=1, rank=3, rounds=5, wait_fraction=0.2)),
        ([(4, 4, 4, 6), (4, 4, 6, 4)] * 3, Slowest(host=1, rank=None, rounds=6, wait_fraction=0.2)),
        ([(4, 4, 4, 6), (6, 4, 4, 4)] * 3, None),
        ([(4, 4, 4, 4.9)] * 6, None),
        ([(4, 4, 4, 6)] * 5, None),
        ([()] * 6, None),
    ],
    ids=["process", "nearly always", "host", "changing", "short wait", "few rounds", "unknown"],
)
def test_who_is_waited_for_is_always_the_slowest(rounds: Sequence[Sequence[float]], slowest: Slowest | None) -> None:
    samples = tuple(
        make_window(processes=4).model_copy(
            update={"arithmetic_rank_ms": times} | (waits(times, 10.0, 0.0) if times else {})
        )
        for times in rounds
    )
    assert of_ranks(make_arm(samples=samples, world_size=4, hosts=2))["slowest"] == slowest
