from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from pipeline.comparison.planning import pairs_needed, seeds_needed
from pipeline.comparison.stats import Decision, Interval, decide, distrust, equivalence, paired_ratio, widened

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

positive = st.floats(0.01, 100.0)
pairs = st.lists(st.tuples(positive, positive), min_size=1, max_size=20)


def ratio_of(drawn: list[tuple[float, float]]) -> Interval:
    return paired_ratio([a for a, _ in drawn], [b for _, b in drawn], resamples=200)


def assert_close(found: Interval, expected: Interval) -> None:
    assert found.count == expected.count
    assert (found.estimate, found.low, found.high) == pytest.approx((expected.estimate, expected.low, expected.high))


# Ratios


def test_the_estimate_is_the_median_of_the_ratios_or_the_geometric_mean_of_the_middle_two() -> None:
    a, b = [10.0, 40.0, 90.0, 1000.0, 1.0], [10.0, 20.0, 30.0, 10.0, 10.0]
    assert paired_ratio(a, b).estimate == pytest.approx(2.0)  # the ratio of the medians is 4
    assert paired_ratio([1.0, 2.0, 8.0, 100.0], [1.0] * 4).estimate == pytest.approx(4.0)
    assert_close(paired_ratio([2.0, 4.0, 6.0] * 4, [1.0, 2.0, 3.0] * 4), Interval(2.0, 2.0, 2.0, 12))


@pytest.mark.parametrize(("count", "ranks"), [(7, (1, 7)), (9, (2, 8)), (15, (4, 12)), (21, (6, 16))])
def test_the_interval_has_the_exact_bootstrap_distributions_quantiles(count: int, ranks: tuple[int, int]) -> None:
    """For an odd n, a resample's median is at most the k-th smallest value if most of the n draws are. The number of
    such draws has a binomial distribution."""
    tail = scipy_stats.norm.cdf(math.sqrt(count / (count - 1)) * scipy_stats.t.ppf(0.025, count - 1))
    at_most = scipy_stats.binom.sf(count // 2, count, np.arange(1, count + 1) / count)
    assert np.flatnonzero(at_most >= tail)[0] + 1 == ranks[0]
    interval = paired_ratio(np.arange(1.0, count + 1), np.ones(count))
    assert (interval.low, interval.high) == pytest.approx(ranks)


def test_fewer_than_six_pairs_bound_nothing() -> None:
    five = paired_ratio([2.0, 2.1, 2.2, 2.0, 2.1], [1.0] * 5)
    assert five.estimate == pytest.approx(2.1)
    assert (five.low, five.high) == (0.0, math.inf)
    assert paired_ratio([2.0], [1.0]).high == math.inf
    assert paired_ratio([2.0, 2.1, 2.2, 2.0, 2.1, 2.0], [1.0] * 6).high == pytest.approx(2.2)
    assert paired_ratio([2.0, 2.1, 2.2, 2.0, 2.1], [1.0] * 5, confidence=0.9).high == pytest.approx(2.2)


@given(pairs, st.floats(0.001, 1000.0))
def test_a_factor_on_one_side_is_a_factor_on_the_ratio(drawn: list[tuple[float, float]], factor: float) -> None:
    plain = ratio_of(drawn)
    expected = Interval(plain.estimate * factor, plain.low * factor, plain.high * factor, plain.count)
    assert_close(ratio_of([(a * factor, b) for a, b in drawn]), expected)


@pytest.mark.parametrize(
    "a", [[], [1.0], [[1.0, 1.0]], *([1.0, bad] for bad in (0.0, -1.0, math.nan, math.inf))], ids=str
)
def test_what_makes_no_ratios_is_refused(a: list[Any]) -> None:
    for pair in ((a, [1.0, 1.0] if a else []), ([1.0, 1.0] if a else [], a)):
        with pytest.raises(ValueError, match="pairs: expected two lists of the same length"):
            paired_ratio(*pair)


NOISE: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda random, count: random.normal(size=count),
    "student_t2": lambda random, count: random.standard_t(2, size=count),
    "contaminated": lambda random, count: random.normal(size=count) * np.where(random.random(count) < 0.15, 12, 1),
    "exponential": lambda random, count: random.exponential(size=count) - math.log(2),
}
"""Distributions of noise in a ratio's logarithm. Their medians are zero."""


@pytest.mark.parametrize(("confidence", "held"), [(0.95, (0.95, 0.98)), (0.99, (0.987, 0.997))])
@pytest.mark.parametrize("count", [10, 20])
@pytest.mark.parametrize("noise", NOISE)
def test_intervals_cover_the_true_median_as_often_as_they_say(
    noise: str, count: int, confidence: float, held: tuple[float, float]
) -> None:
    random, trials, covered = np.random.default_rng(7), 500, 0
    for trial in range(trials):
        ratios = 1.1 * np.exp(0.05 * NOISE[noise](random, count))
        interval = paired_ratio(ratios, np.ones(count), confidence=confidence, resamples=500, seed=trial)
        covered += interval.low <= 1.1 <= interval.high
    least, most = scipy_stats.binom.ppf([0.001, 0.999], trials, held)
    assert least <= covered <= most


# Decisions

MIRRORED: dict[Decision, Decision] = {"better": "worse", "worse": "better"}


@pytest.mark.parametrize(
    ("low", "high", "decision"),
    [
        (1.021, 1.5, "better"),
        (1.019, 1.5, "undecided"),
        (0.99, 1.019, "same"),
        (0.99, 1.021, "undecided"),
        (0.9805, 1.0, "same"),  # 1 / 1.02 is 0.9804
        (0.9803, 1.0, "undecided"),
        (0.5, 0.9803, "worse"),
        (0.5, 1.5, "undecided"),
        (0.0, math.inf, "undecided"),
    ],
)
def test_a_difference_counts_only_if_all_of_the_interval_says_so(low: float, high: float, decision: Decision) -> None:
    interval = Interval((low + high) / 2, low, high, 10)
    assert decide(interval, 0.02) == decision
    assert decide(interval, 0.02, higher_is_better=False) == MIRRORED.get(decision, decision)


@given(st.tuples(positive, positive, positive), st.floats(0.001, 1.0))
def test_a_ratio_and_its_reciprocal_are_decided_alike(values: tuple[float, float, float], margin: float) -> None:
    low, estimate, high = sorted(values)
    interval, reciprocal = Interval(estimate, low, high, 10), Interval(1 / estimate, 1 / high, 1 / low, 10)
    assert decide(interval, margin) == decide(reciprocal, margin, higher_is_better=False)
    assert pairs_needed(interval, margin) == pytest.approx(pairs_needed(reciprocal, margin), abs=1)


@pytest.mark.parametrize(
    ("aa", "wide", "reason"),
    [
        ((0.99, 1.01), (0.98, 1.02), None),
        ((1.001, 1.03), (0.999, 1.04), None),  # excludes 1 at 95% but not at 99%
        ((1.01, 1.03), (1.005, 1.04), "ratio of 1.020 (1.005 to 1.040, 99%), which excludes 1"),
        ((0.96, 0.98), (0.95, 0.99), "which excludes 1"),
        ((0.9, 1.08), (0.85, 1.1), "(0.900 to 1.080), a spread of 20.0%; at most 5.0% is allowed"),
        ((0.99, 1.01), (0.0, math.inf), None),  # enough pairs for 95%, too few for 99%
        ((1.01, 1.03), (0.0, math.inf), "ratio of 1.020 (1.010 to 1.030, 95%), which excludes 1"),
        ((0.0, math.inf), (0.0, math.inf), "in 3 accepted rounds, but at least 6 are needed"),
    ],
)
def test_a_noisy_machine_is_not_trusted(aa: tuple[float, float], wide: tuple[float, float], reason: str | None) -> None:
    count = 10 if aa[0] else 3
    estimate = (aa[0] + aa[1]) / 2 if aa[0] else 1.0
    found = distrust(Interval(estimate, *aa, count), Interval(estimate, *wide, count), 0.05)
    assert found == reason or (found is not None and reason is not None and reason in found)


# Equivalence


def test_a_doubt_is_added_in_quadrature_to_each_side_of_the_logarithm() -> None:
    found = widened(Interval(math.exp(0.5), math.exp(0.47), math.exp(0.58), 8), 0.04)
    assert [math.log(each) for each in (found.low, found.estimate, found.high)] == pytest.approx(
        [0.45, 0.5, 0.5 + math.sqrt(0.08**2 + 0.04**2)]
    )
    bounds_nothing = Interval(1.2, 0.0, math.inf, 3)
    assert widened(bounds_nothing, 0.04) == bounds_nothing


def test_equivalence_by_hand() -> None:
    """Mean 2, deviation 1, three values: half the 90% interval is 2.919986 (t_2's 95% quantile) / sqrt(3)."""
    result = equivalence([1.0, 2.0, 3.0], 4.0)
    assert (result.mean, result.deviation, result.count) == (2.0, 1.0, 3)
    assert (result.low, result.high) == pytest.approx((2 - 1.685855, 2 + 1.685855), abs=1e-6)
    assert (result.decision, equivalence([1.0, 2.0, 3.0], 3.6).decision) == ("same", "undecided")


differences = st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=10).filter(lambda values: np.std(values) > 1e-3)


@given(differences, st.floats(0.01, 1.0))
def test_it_is_the_same_where_two_one_sided_t_tests_reject(values: list[float], margin: float) -> None:
    result = equivalence(values, margin)
    lower = scipy_stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    upper = scipy_stats.ttest_1samp(values, margin, alternative="less").pvalue
    if min(abs(lower - 0.05), abs(upper - 0.05)) > 1e-9:
        assert (result.low > -margin) == (lower < 0.05)
        assert (result.decision == "same") == (max(lower, upper) < 0.05)


def test_one_seed_supports_nothing() -> None:
    result = equivalence([0.5], 0.01)
    assert (result.low, result.high, result.decision) == (-math.inf, math.inf, "undecided")
    assert seeds_needed(result) is None


@pytest.mark.parametrize(
    ("difference", "decision"), [(0.0, "same"), (-0.02, "worse"), (0.02, "better"), (-0.01, "undecided")]
)
def test_differences_that_are_all_the_same_leave_no_doubt(difference: float, decision: Decision) -> None:
    result = equivalence([difference] * 3, 0.01)
    assert (result.low, result.high, result.decision) == (difference, difference, decision)


@pytest.mark.parametrize("values", [[], [math.nan, 1.0]])
def test_differences_that_are_no_numbers_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="differences: expected a finite number per seed"):
        equivalence(values, 0.01)
