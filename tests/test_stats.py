from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from pipeline.comparison.champion import pareto_front
from pipeline.comparison.planning import pairs_needed, seeds_needed
from pipeline.comparison.stats import (
    Decision,
    Difference,
    autocorrelation,
    confidence_of,
    confidence_of_tests,
    decide,
    distrust,
    drift_of,
    equivalence,
    paired_ratio,
    step_down,
    widened,
)
from tests.factories import make_ratio

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

positive = st.floats(0.01, 100.0)
pairs = st.lists(st.tuples(positive, positive), min_size=1, max_size=20)


def ratio_of(drawn: list[tuple[float, float]]) -> Difference:
    return paired_ratio([a for a, _ in drawn], [b for _, b in drawn])


def assert_close(actual: Difference, expected: Difference) -> None:
    assert actual.pairs == expected.pairs
    assert (actual.estimate, *actual.bounds) == pytest.approx((expected.estimate, *expected.bounds))


# Many variants


def test_the_confidence_grows_with_the_number_of_undecided_variants() -> None:
    """Half of an interval's error, times the number of variants, is 5%; a look has a tenth of the error."""
    assert [confidence_of(number) for number in (0, 1, 2, 4, 10)] == pytest.approx([0.95, 0.95, 0.95, 0.975, 0.99])
    assert [confidence_of(number, look=True) for number in (1, 2, 10)] == pytest.approx([0.99, 0.995, 0.999])
    assert [confidence_of_tests(number) for number in (0, 1, 2, 10)] == pytest.approx([0.95, 0.95, 0.975, 0.995])


@pytest.mark.parametrize(
    ("errors", "rejected"),
    [  # the classic example of Holm's procedure: each error is compared with 5% / 4, 5% / 3, 5% / 2, 5%
        ((0.01, 0.04, 0.03, 0.005), 2),
        ((0.01, 0.02, 0.03, 0.005), 4),
        ((0.013, 0.013, 0.013, 0.013), 0),
        ((), 0),
    ],
)
def test_decided_variants_leave_their_allowance_to_the_others(errors: tuple[float, ...], rejected: int) -> None:
    def undecided(number: int) -> list[str]:
        return [str(error) for error in errors if error > 1 - confidence_of_tests(number)]

    assert len(errors) - len(undecided(step_down(undecided, len(errors)))) == rejected


# Ratios


def test_the_estimate_is_the_median_of_all_pairs_means() -> None:
    """Of the logarithms 0, 1, 2 and 10, the means of two, each with itself included, have the median 1.75."""
    assert paired_ratio(np.exp([0.0, 1.0, 2.0, 10.0]), np.ones(4)).estimate == pytest.approx(math.exp(1.75))
    assert_close(paired_ratio([2.0, 4.0, 6.0] * 4, [1.0, 2.0, 3.0] * 4), make_ratio(2.0, 2.0, 2.0, 12))


LOGS = [-0.03, 0.01, 0.02, -0.02, 0.03, -0.01, 0.0, 0.0]
"""Their estimate is 0, their deviation 0.02. t_7's 97.5% quantile is 2.364624."""


@pytest.mark.parametrize(
    ("correlation", "half"),
    [
        (0.0, 2.364624 * 0.02 * math.sqrt(math.pi / 3 / 8)),
        (-0.4, 2.364624 * 0.02 * math.sqrt(math.pi / 3 / 8)),
        (1 / 3, 3.182446 * 0.02 * math.sqrt(math.pi / 3 / 4)),  # 4 of 8 rounds count as independent: t_3
        (0.95, 4.302653 * 0.02 * math.sqrt(math.pi / 3 / (8 / 9))),  # as 0.8, with the fewest degrees of freedom, 2
    ],
)
def test_the_interval_by_hand(correlation: float, half: float) -> None:
    interval = paired_ratio(np.exp(LOGS), np.ones(8), correlation=correlation)
    assert interval.logs == pytest.approx((0.0, -half, half), abs=1e-7)


def test_a_correlation_by_hand() -> None:
    """The products of neighbours sum to -0.0014, the squares to 0.0028; (8 r + 1) / 5 corrects the bias."""
    assert autocorrelation(np.exp(LOGS), np.ones(8)) == pytest.approx((8 * -0.5 + 1) / 5)
    assert autocorrelation([2.0] * 8, [1.0] * 8) == autocorrelation([2.0, 1.0, 2.0, 1.0, 2.0], [1.0] * 5) == 0


def test_a_drift_by_hand() -> None:
    """Deviations of -2.5 to 2.5 have the partial sums -2.5, -4, -4.5, -4, -2.5, 0, whose squares sum up to 64.75; their
    own squares sum up to 17.5."""
    ones, up = np.ones(6), np.exp(np.arange(6.0))
    assert drift_of(up, ones) == pytest.approx(6 * 64.75 / (6 * 17.5))
    assert drift_of(up, ones) == pytest.approx(drift_of(ones, up)) == pytest.approx(drift_of(up[::-1], ones))
    assert drift_of(np.exp([1.0, -1.0] * 3), ones) == pytest.approx(6 * 3 / (6 * 6))
    assert drift_of(up[:5], ones[:5]) == drift_of(ones, ones) == 1.0
    random = np.random.default_rng(0)
    assert np.mean([drift_of(np.exp(random.normal(size=12)), np.ones(12)) for _ in range(500)]) == pytest.approx(1, 0.1)


def test_fewer_than_six_pairs_bound_nothing() -> None:
    five = paired_ratio([2.0, 2.1, 2.2, 2.0, 2.1], [1.0] * 5)
    assert five.estimate == pytest.approx(2.1, abs=0.02)
    assert (five.low, five.high, five.bounds) == (None, None, (0.0, math.inf))
    assert paired_ratio([2.0], [1.0]).high is None
    assert paired_ratio([2.0, 2.1, 2.2, 2.0, 2.1, 2.0], [1.0] * 6, confidence=0.995).high is not None


@given(pairs, st.floats(0.001, 1000.0))
def test_a_factor_on_one_side_factors_the_ratio(drawn: list[tuple[float, float]], factor: float) -> None:
    plain, scaled = ratio_of(drawn), ratio_of([(a * factor, b) for a, b in drawn])
    figures = [(difference.estimate or 0.0, *difference.bounds) for difference in (plain, scaled)]
    assert figures[1] == pytest.approx([bound * factor for bound in figures[0]])


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
    "skewed": lambda random, count: random.exponential(size=count) - random.exponential(size=count) / 3 - 2 / 3,
}
"""Distributions of noise in a ratio's logarithm."""


def correlated(noise: Array, correlation: float) -> Array:
    for index in range(1, len(noise)):
        noise[index] = correlation * noise[index - 1] + math.sqrt(1 - correlation**2) * noise[index]
    return noise


@pytest.mark.parametrize(("confidence", "held"), [(0.95, (0.92, 0.99)), (0.99, (0.98, 1.0))])
@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("count", [8, 20])
@pytest.mark.parametrize("noise", NOISE)
def test_intervals_cover_the_ratio_as_they_say(
    noise: str, count: int, correlation: float, confidence: float, held: tuple[float, float]
) -> None:
    random, trials, covered = np.random.default_rng(7), 500, 0
    for _ in range(trials):
        ratios, control = (np.exp(0.05 * correlated(NOISE[noise](random, count), correlation)) for _ in range(2))
        known = (autocorrelation(ratios, np.ones(count)) + autocorrelation(control, np.ones(count))) / 2
        low, high = paired_ratio(1.1 * ratios, np.ones(count), confidence=confidence, correlation=known).bounds
        covered += low <= 1.1 <= high
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
        (None, None, "undecided"),
    ],
)
def test_all_of_an_interval_decides_a_difference(low: float | None, high: float | None, decision: Decision) -> None:
    interval = make_ratio(1.0, low, high)
    assert decide(interval, 0.02) == decision
    assert decide(interval, 0.02, higher_is_better=False) == MIRRORED.get(decision, decision)


@given(st.tuples(positive, positive, positive), st.floats(0.001, 1.0))
def test_a_ratio_and_its_reciprocal_are_decided_alike(values: tuple[float, float, float], margin: float) -> None:
    low, estimate, high = sorted(values)
    interval, reciprocal = make_ratio(estimate, low, high), make_ratio(1 / estimate, 1 / high, 1 / low)
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
        ((0.99, 1.01), (None, None), None),  # enough pairs for 95%, too few for 99%
        ((1.01, 1.03), (None, None), "ratio of 1.020 (1.010 to 1.030, 95%), which excludes 1"),
        ((None, None), (None, None), "in 3 accepted rounds, but at least 6 are needed"),
    ],
)
def test_a_noisy_machine_is_not_trusted(aa: tuple[Any, Any], wide: tuple[Any, Any], reason: str | None) -> None:
    pairs = 10 if aa[0] else 3
    estimate = (aa[0] + aa[1]) / 2 if aa[0] else 1.0
    difference = distrust(make_ratio(estimate, *aa, pairs), make_ratio(estimate, *wide, pairs), 0.05)
    assert difference == reason or (difference is not None and reason is not None and reason in difference)


# Equivalence


def test_a_doubt_is_added_in_quadrature() -> None:
    difference = widened(make_ratio(math.exp(0.5), math.exp(0.47), math.exp(0.58), 8), 0.04)
    assert difference.logs == pytest.approx((0.5, 0.45, 0.5 + math.sqrt(0.08**2 + 0.04**2)))
    bounds_nothing = make_ratio(1.2, pairs=3)
    assert widened(bounds_nothing, 0.04) == bounds_nothing


def test_equivalence_by_hand() -> None:
    """Mean 2, deviation 1, three values: half the 90% interval is 2.919986 (t_2's 95% quantile) / sqrt(3)."""
    result = equivalence([1.0, 2.0, 3.0], 4.0)
    assert (result.estimate, result.deviation, result.pairs) == (2.0, 1.0, 3)
    assert (result.low, result.high) == pytest.approx((2 - 1.685855, 2 + 1.685855), abs=1e-6)
    assert (result.decision, equivalence([1.0, 2.0, 3.0], 3.6).decision) == ("same", "undecided")


differences = st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=10).filter(lambda values: np.std(values) > 1e-3)


@given(differences, st.floats(0.01, 1.0))
def test_two_one_sided_tests_decide_what_is_same(values: list[float], margin: float) -> None:
    result = equivalence(values, margin)
    lower = scipy_stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    upper = scipy_stats.ttest_1samp(values, margin, alternative="less").pvalue
    if min(abs(lower - 0.05), abs(upper - 0.05)) > 1e-9:
        assert (result.bounds[0] > -margin) == (lower < 0.05)
        assert (result.decision == "same") == (max(lower, upper) < 0.05)


def test_one_seed_supports_nothing() -> None:
    result = equivalence([0.5], 0.01)
    assert (result.bounds, result.decision) == ((-math.inf, math.inf), "undecided")
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


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=12), st.tuples(*[st.booleans()] * 3))
def test_a_point_on_the_front_beats_each_other(
    points: list[tuple[int, int, int]], higher_is_better: tuple[bool, bool, bool]
) -> None:
    def beats(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
        gains = [(a - b) * (1 if higher else -1) for a, b, higher in zip(first, second, higher_is_better, strict=True)]
        return min(gains) >= 0 and max(gains) > 0

    front = pareto_front(points, higher_is_better)
    for index, point in enumerate(points):
        beaten = any(beats(points[best], point) for best in front)
        assert beaten == (index not in front)
