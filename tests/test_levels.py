"""Known answers for the benchmarks that estimate or simulate variance and error rates."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gate import bounds
from benchmarks.levels import components
from benchmarks.simulations import best_of, equal_arms, looking, over_many


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
def test_one_session_holds_the_truth_too_seldom_where_sessions_differ_and_three_do_not() -> None:
    one, three = (over_many(sessions, between=0.1, within=0.05, trials=80)["coverage"] for sessions in (1, 3))
    assert one < 0.6
    assert three > 0.85


def test_a_bias_that_a_a_does_not_see_is_in_the_widened_interval() -> None:
    beside = equal_arms(0.03, 0.05, trials=120)["beside"]
    assert beside["plain"] > 0.15
    assert beside["with_offset"] < 0.05


def test_the_best_of_ten_seems_too_good_unless_other_rounds_chose_it() -> None:
    found = best_of(10, 1.06, trials=120)
    assert found["seen"] > 1.07
    assert found["told"] == pytest.approx(1.06, abs=0.005)


def test_settled_variants_stop_early_without_wrong_decisions() -> None:
    whole, stopped = looking(1.1, 0.02, 0.0, (10,), trials=60).values()
    assert (whole["rounds"], whole["wrong"], stopped["wrong"]) == (30, 0, 0)
    assert stopped["rounds"] < 15
    assert stopped["coverage"] > 0.9
    _, noisy = looking(1.6, 0.08, 0.0, (10,), trials=60).values()
    assert noisy["rounds"] < 25
    assert noisy["untrusted"] < 0.1  # it would be 0.42 if the rule did not wait until equal arms look equal


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [  # without errors in n gates, the bound is 1 - 0.05 ** (1 / n)
        (
            {"equal": ["passed"] * 11, "slower": ["worse: throughput"] * 60},
            ("0 of 11 gates; with 95% confidence, the rate is at most 24%", "5%"),
        ),
        (
            {"equal": ["worse: memory"], "slower": ["undecided", "passed"]},
            ("1 of 1 gates; with 95% confidence, the rate is at most 100%", "97%"),
        ),
    ],
)
def test_what_complete_gates_support(outcomes: dict[str, list[str]], said: tuple[str, str]) -> None:
    trials = [{"head": head, "outcome": outcome} for head, each in outcomes.items() for outcome in each]
    equal, slower = bounds(trials)
    assert equal.endswith(said[0])
    assert slower.endswith(f"at most {said[1]}")
