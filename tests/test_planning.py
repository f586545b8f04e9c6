from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy import stats as scipy_stats

from pipeline.comparison.planning import (
    calm_pairs,
    deviation_shown,
    margin_decided,
    margin_of_seeds,
    pairs_needed,
    seeds_for,
    seeds_needed,
)
from pipeline.comparison.stats import Difference, equivalence
from tests.factories import known, make_log_ratio, make_ratio


def log_ratio(log: float, half: float) -> Difference:
    return make_log_ratio(log, half, pairs=10)


def test_an_interval_shrinks_with_the_root_of_pairs() -> None:
    margin = math.expm1(0.02)  # 0.02 on the logarithmic scale
    assert pairs_needed(log_ratio(0.05, 0.02), margin) == 0  # decided: better
    assert pairs_needed(log_ratio(0.05, 0.059), margin) == math.ceil(10 * (0.059 / 0.03) ** 2) - 10
    assert pairs_needed(log_ratio(-0.05, 0.059), margin) == math.ceil(10 * (0.059 / 0.03) ** 2) - 10
    assert pairs_needed(log_ratio(0.005, 0.029), margin) == math.ceil(10 * (0.029 / 0.015) ** 2) - 10
    assert pairs_needed(log_ratio(0.0, 0.02001), margin) == 1


def test_pairs_do_not_reduce_an_interval_s_fixed_part() -> None:
    margin = math.expm1(0.02)
    shrinking = math.hypot(0.059, 0.01)  # 0.059, widened by 0.01 in quadrature
    count = pairs_needed(log_ratio(0.05, shrinking), margin, fixed=0.01)
    assert count == math.ceil(10 * 0.059**2 / (0.03**2 - 0.01**2)) - 10
    assert pairs_needed(log_ratio(0.05, shrinking), margin, fixed=0.03) is None, "no number of pairs is enough"
    assert margin_decided(log_ratio(0.0, 0.05), 10**9, fixed=0.04) == pytest.approx(math.expm1(0.04))
    assert margin_decided(log_ratio(0.0, 0.05), 40, fixed=0.04) == pytest.approx(math.expm1(math.hypot(0.015, 0.04)))


@pytest.mark.parametrize(
    "ratio",
    [make_ratio(1.5, pairs=3), make_ratio(1.25, 1.1, 1.4), log_ratio(0.2, 5.0)],
    ids=["no interval yet", "on the edge", "too many"],
)
def test_what_cannot_be_foreseen_is_not_guessed(ratio: Difference) -> None:
    assert pairs_needed(ratio, 0.25) is None


def test_the_margin_of_pairs_is_the_smallest() -> None:
    ratio = make_ratio(1.05, 0.98, 1.08, 9)
    assert margin_decided(ratio, 9) == pytest.approx(0.08)
    # Four times the pairs halve the logarithmic width, so the upper end becomes the geometric mean.
    quarter = math.sqrt(1.05 * 1.08) - 1
    assert margin_decided(ratio, 36) == pytest.approx(quarter)
    mirrored = make_ratio(1 / 1.05, 1 / 1.08, 1 / 0.98, 9)
    assert margin_decided(mirrored, 36) == pytest.approx(quarter)


def test_a_spread_narrows_with_the_root_of_the_pairs() -> None:
    assert calm_pairs(make_ratio(1.0, 1 / 1.21, 1.0, 8), 0.1) == 32
    assert calm_pairs(make_ratio(1.0, 0.99, 1.01, 8), 0.1) is None
    assert calm_pairs(make_ratio(1.0, pairs=5), 0.1) == 6


def test_seeds_needed_is_the_fewest_that_decide() -> None:
    three = equivalence([-0.004, 0.0, 0.004], 0.005)
    assert three.decision == "undecided"
    missing = known(seeds_needed(three))

    def decided(count: int) -> bool:
        half = scipy_stats.t.ppf(0.95, count - 1) * 0.004 / math.sqrt(count)
        return bool(half < 0.005)

    assert decided(3 + missing)
    assert not decided(2 + missing)
    assert seeds_needed(equivalence([0.0, 0.001, -0.001], 0.1)) == 0


def test_seeds_that_cannot_be_foreseen_are_not_guessed() -> None:
    on_the_edge = make_ratio(0.01, 0.0, 0.02, 5, unit="fraction", deviation=0.01, margin=0.01)
    assert seeds_needed(on_the_edge) is None
    assert seeds_needed(equivalence([1.0, -1.0, 0.0], 0.01)) is None


def test_seeds_that_show_an_equal_variant() -> None:
    """t_2 and t_4 are 2.92 and 2.132 at 95%."""
    assert deviation_shown(3, 0.01) == pytest.approx(0.01 * 3**0.5 / (2.92 + 1.2816), rel=1e-3)
    assert deviation_shown(5, 0.01) == pytest.approx(0.01 * 5**0.5 / (2.132 + 1.2816), rel=1e-3)
    assert (deviation_shown(1, 0.01), seeds_for(1.0, 0.01)) == (0.0, None)
    assert [seeds_for(deviation, 0.01) for deviation in (0.0, 0.004, 0.0042, 0.006)] == [3, 3, 4, 5]
    random = np.random.default_rng(0)
    drawn = random.normal(0, deviation_shown(5, 0.01), (400, 5))
    assert np.mean([equivalence(seeds, 0.01).decision == "same" for seeds in drawn]) == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize("differences", [[-0.02, 0.01, 0.03], [0.05, 0.02, 0.04, 0.05]])
def test_the_margin_of_seeds_is_the_smallest(differences: list[float]) -> None:
    few = equivalence(differences, 0.01)
    half = scipy_stats.t.ppf(0.95, 22) * statistics.stdev(differences) / math.sqrt(23)
    assert margin_of_seeds(few, 23) == pytest.approx(abs(statistics.fmean(differences)) + half)
    low, high = few.bounds
    assert margin_of_seeds(few, few.pairs) == pytest.approx(max(high, -low))
