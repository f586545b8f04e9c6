"""The benchmarks of what differs between sittings: known answers."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.levels import components
from benchmarks.sessions import coverage


@pytest.mark.parametrize(
    ("servers", "processes", "turns"), [(0.1, 0.0, 0.02), (0.0, 0.1, 0.02), (0.05, 0.1, 0.2), (0.0, 0.0, 0.1)]
)
def test_the_components_of_variance_are_those_that_were_drawn(servers: float, processes: float, turns: float) -> None:
    random, shape = np.random.default_rng(0), (400, 6, 8)
    logs = (
        random.normal(0, servers, (shape[0], 1, 1))
        + random.normal(0, processes, (*shape[:2], 1))
        + random.normal(0, turns, shape)
    )
    assert components(logs) == pytest.approx({"servers": servers, "processes": processes, "turns": turns}, abs=0.012)


@pytest.mark.slow
def test_one_session_holds_the_truth_too_seldom_where_sittings_differ_and_three_do_not() -> None:
    one, three = (coverage(0.1, 0.05, sessions, trials=80)["coverage"] for sessions in (1, 3))
    assert one < 0.6
    assert three > 0.85
