from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.comparison import verdicts
from pipeline.comparison.advice import accuracy_reasons
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import Decision
from pipeline.comparison.verdicts import ANY, MEMORY, THROUGHPUT, Noise, Outcomes, Quantity, Ratio, verdict
from pipeline.results import Arm
from tests.factories import make_arm, make_window

TEN_IN_TEN_MINUTES = RoundCost("bench.max_minutes", 10, 600.0)
CALM = Noise(estimate=1.0, low=0.99, high=1.01, pairs=12, max_spread=0.15, why_untrusted=None)


def arm(figures: Sequence[float | str | None], quantity: Quantity = THROUGHPUT) -> Arm:
    """Return an arm with one figure per round. A text is the reason for a rejection; None is an unknown figure."""
    samples = []
    for figure in figures:
        known: dict[str, Any] = {quantity.field: figure}
        if isinstance(figure, str):
            known = {quantity.field: None, "rejections": (figure,)}
        samples.append(make_window().model_copy(update=known))
    return make_arm(samples=tuple(samples))


def ratio(over: Sequence[Any], under: Sequence[Any], quantity: Quantity = THROUGHPUT, margin: float = 0.03) -> Ratio:
    return verdicts.ratio(arm(over, quantity), arm(under, quantity), quantity, margin, CALM)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    found = ratio([20.0, 40.0, 90.0, 66.0, 63.0, 40.0, 22.0], [10.0, 20.0, 30.0, 33.0, 30.0, 20.0, 10.0])
    assert found.estimate == pytest.approx(2.0)  # the ratio of the medians is 2, too; the ratio of the means is 2.23
    assert (found.low, found.high) == pytest.approx((2.0, 3.0))
    assert (found.pairs, found.rejected, found.decision, found.margin) == (7, 0, "better", 0.03)
    assert (found.more_pairs, found.why_untrusted) == (None, None)


def test_what_the_baseline_differs_from_itself_is_in_every_ratio() -> None:
    """Half of the A/A interval's width and the A/A ratio's distance from 1 are added in quadrature. So if the A/A ratio
    is 1.03 (1.0 to 1.08), a ratio of 1.05 is undecided."""
    half, offset = math.log(1.08) / 2, math.log(1.03)
    noise = CALM.model_copy(update={"estimate": 1.03, "low": 1.0, "high": 1.08})
    assert noise.doubt == pytest.approx(math.sqrt(half**2 + offset**2))
    assert CALM.model_copy(update={"low": None, "high": None}).doubt == 0
    faster = arm([1050.0] * 8), arm([1000.0] * 8), THROUGHPUT, 0.03, noise
    assert verdicts.ratio(*faster).decision == "better"
    found = verdicts.ratio(*faster, widen=True)
    assert (found.low, found.high) == pytest.approx((1.05 / math.exp(noise.doubt), 1.05 * math.exp(noise.doubt)))
    assert found.decision == "undecided"


def test_two_processes_may_differ_by_two_heaps_and_on_a_gpu_there_is_none() -> None:
    one = arm([2.0**25] * 8, MEMORY)
    two = one.model_copy(update={"world_size": 2})
    doubts = [verdicts.doubt_of(CALM, MEMORY, each, one) for each in (one, two)]
    assert doubts == pytest.approx([math.hypot(CALM.doubt, math.log1p(heaps / 64)) for heaps in (1, 2)])
    found = verdicts.ratio(one, one, MEMORY, 0.03, CALM, widen=True)
    assert math.log(found.interval.high) == pytest.approx(doubts[0])
    on_gpu = [each.model_copy(update={"peak_reserved_bytes": 1}) for each in one.samples]
    assert verdicts.doubt_of(CALM, MEMORY, one.model_copy(update={"samples": tuple(on_gpu)})) == CALM.doubt
    assert verdicts.doubt_of(CALM, THROUGHPUT, two) == CALM.doubt


def test_more_memory_is_worse_and_more_throughput_better() -> None:
    more, less = [1100.0] * 6, [1000.0] * 6
    assert ratio(more, less, THROUGHPUT).decision == "better"
    assert ratio(more, less, MEMORY).decision == "worse"
    assert ratio(less, more, MEMORY).decision == "better"


def test_most_rounds_rejected_is_untrusted_with_the_reason_given_most_often() -> None:
    bad = ["1 other process held the GPU", *[f"the GPU throttled in {looks} of 20 looks" for looks in (7, 3, 11)]]
    found = ratio([*bad, *[12.0] * 3], [10.0] * 7)
    assert (found.decision, found.pairs, found.rejected) == ("untrusted", 3, 4)
    assert found.why_untrusted == (
        "throughput: 4 of 7 rounds had to be rejected, most often because the GPU throttled in 7 of 20 looks"
    )
    assert ratio([*bad, *[12.0] * 4], [10.0] * 8).why_untrusted is None  # half of the rounds are not most of them


def test_what_no_round_knows_has_no_ratio() -> None:
    found = ratio([None] * 8, [None] * 8, MEMORY)
    assert (found.estimate, found.low, found.high, found.pairs, found.rejected) == (None, None, None, 0, 8)
    assert found.decision == "untrusted"
    assert found.why_untrusted is not None
    assert "peak memory: 8 of 8 rounds" in found.why_untrusted
    assert "this machine does not report the figure" in found.why_untrusted
    assert ratio([], []).why_untrusted == "throughput: no round was measured"


def test_too_few_pairs_have_an_estimate_and_no_interval() -> None:
    found = ratio([12.0] * 5, [10.0] * 5)
    assert found.estimate == pytest.approx(1.2)
    assert (found.low, found.high, found.decision, found.more_pairs) == (None, None, "undecided", None)


# The baseline against itself


def noise(control: Sequence[Any], baseline: Sequence[Any], max_spread: float = 0.15) -> Noise:
    return verdicts.noise_between(arm(baseline), arm(control), THROUGHPUT, max_spread, TEN_IN_TEN_MINUTES)


STEADY = [100.0, 101.0, 99.0, 100.5, 99.5, 100.2, 99.8, 100.0, 100.7, 99.3]


def test_a_calm_machine_is_trusted() -> None:
    found = noise(STEADY[::-1], STEADY)
    assert found.why_untrusted is None
    assert found.pairs == 10
    assert found.low is not None
    assert found.high is not None
    assert found.low < 1 < found.high
    assert noise(STEADY, STEADY).why_untrusted is None  # no difference at all, as in a GPU's memory


THROTTLED = "the GPU throttled"
QUIET = "let nothing else run here"


@pytest.mark.parametrize(
    ("control", "baseline", "why", "remedy"),
    [
        ([1.05 * each for each in STEADY], STEADY, "which excludes 1", QUIET),
        (
            [each * (1.1 if index % 2 else 0.92) for index, each in enumerate(STEADY)],
            STEADY,
            "at most 15.0%",
            # (log(1.1 / 0.92) / log(1.15))^2 = 1.63, so 17 rounds instead of ten, and one more.
            f"set bench.max_minutes: 18; or {QUIET}",
        ),
        (
            [each * (1.3 if index % 2 else 0.75) for index, each in enumerate(STEADY)],
            STEADY,
            "at most 15.0%",
            QUIET,  # 155 rounds would take more than an hour
        ),
        (STEADY[:5], STEADY[:5], "5 accepted rounds, but at least 6 are needed", "set bench.max_minutes: 7"),
        (
            [*[THROTTLED] * 5, *STEADY[5:]],
            STEADY,
            "5 accepted rounds, but at least 6 are needed",
            f"5 of 10 rounds had to be rejected, most often because {THROTTLED}; or set bench.max_minutes: 13",
        ),
        ([THROTTLED] * 10, STEADY, "10 of 10 rounds had to be rejected", THROTTLED),
    ],
    ids=["biased", "spread", "wide spread", "few", "half rejected", "all rejected"],
)
def test_a_noisy_machine_makes_every_ratio_untrusted(
    control: list[Any], baseline: list[Any], why: str, remedy: str
) -> None:
    found = noise(control, baseline)
    assert found.why_untrusted is not None
    assert found.why_untrusted.startswith("throughput: ")
    assert why in found.why_untrusted
    assert found.why_untrusted.endswith(remedy)
    clear = verdicts.ratio(arm([20.0] * 10), arm([10.0] * 10), THROUGHPUT, 0.03, found)
    assert (clear.decision, clear.why_untrusted, clear.more_pairs) == ("untrusted", found.why_untrusted, None)
    assert clear.estimate == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("on_gpu", "more_mib", "trusted"), [(False, 0.1, True), (False, 2.0, False), (True, 0.1, False)]
)
def test_on_a_cpu_equal_processes_may_differ_by_what_lies_free_in_their_heap(
    on_gpu: bool, more_mib: float, trusted: bool
) -> None:
    """The peaks are from a real bench. On a GPU, free blocks do not count, because the allocator counts every byte."""
    peaks = [35.48, 35.48, 35.5, 35.53, 35.51, 35.52, 35.47, 35.51, 35.59, 35.48, 35.48]

    def of(peaks_mib: Sequence[float]) -> Arm:
        held = {"peak_reserved_bytes": 2**26} if on_gpu else {}
        samples = (make_window(peak_memory_bytes=round(each * 2**20)).model_copy(update=held) for each in peaks_mib)
        return make_arm(samples=tuple(samples))

    found = verdicts.noise_between(of(peaks), of([each + more_mib for each in peaks]), MEMORY, 0.15, TEN_IN_TEN_MINUTES)
    assert (found.why_untrusted is None) is trusted


# Properties

figure = st.floats(10.0, 1000.0)
rounds = st.lists(st.tuples(figure, figure), min_size=1, max_size=14)
quantities = st.sampled_from([THROUGHPUT, MEMORY])
MIRRORED: dict[Decision, Decision] = {"better": "worse", "worse": "better"}


def of(drawn: Sequence[tuple[float, float]], quantity: Quantity) -> Ratio:
    whole = round if quantity is MEMORY else float  # bytes are whole numbers
    over, under = ([whole(1e6 * each) for each in side] for side in zip(*drawn, strict=True))
    return ratio(over, under, quantity, margin=0.1)


@given(rounds, quantities, st.randoms(use_true_random=False))
def test_the_order_of_the_rounds_does_not_matter(drawn: list[Any], quantity: Quantity, random: Any) -> None:
    shuffled = list(drawn)
    random.shuffle(shuffled)
    assert of(shuffled, quantity) == of(drawn, quantity)


@given(rounds, quantities, st.data())
def test_rejecting_samples_is_as_if_their_rounds_had_not_been(drawn: list[Any], quantity: Quantity, data: Any) -> None:
    sides = data.draw(st.lists(st.sampled_from(["", "", "", "arm", "reference", "both"]), max_size=len(drawn)))
    sides += [""] * (len(drawn) - len(sides))
    over = ["rejected" if side in ("arm", "both") else round(a) for side, (a, _) in zip(sides, drawn, strict=True)]
    under = [
        "rejected" if side in ("reference", "both") else round(b) for side, (_, b) in zip(sides, drawn, strict=True)
    ]
    found = ratio(over, under, quantity)
    kept = [index for index, side in enumerate(sides) if not side]
    alone = ratio([over[index] for index in kept], [under[index] for index in kept], quantity)
    assert (found.estimate, found.low, found.high, found.pairs) == (alone.estimate, alone.low, alone.high, alone.pairs)
    assert found.rejected == len(drawn) - len(kept)
    if found.rejected <= len(kept):
        assert found.decision == alone.decision
    else:
        assert found.decision == "untrusted"


def test_what_all_suffer_from_comes_before_a_variants_own_rejections() -> None:
    noisy = CALM.model_copy(update={"why_untrusted": "throughput: noise"})
    throttled = arm([*["it throttled"] * 5, 9.0])
    found = [
        verdicts.ratio(throttled, arm([9.0] * 6), THROUGHPUT, 0.03, each).why_untrusted or "" for each in (CALM, noisy)
    ]
    assert (found[0].partition(",")[0], found[1]) == (
        "throughput: 5 of 6 rounds had to be rejected",
        "throughput: noise",
    )


# Accuracy


@pytest.mark.parametrize(
    ("differences", "decision"),
    [
        ([-0.02, -0.021, -0.019], "worse"),
        ([0.02, 0.021, 0.019], "better"),
        ([-0.001, 0.002, 0.0], "same"),
        ([-0.02, 0.02, 0.0], "undecided"),
        ([-0.5], "undecided"),
        ([-0.2, -0.2], "undecided"),
    ],
)
def test_accuracy_is_decided_at_the_margin(differences: list[float], decision: Decision) -> None:
    found, one = verdicts.accuracy(differences, 0.01, 0.9), len(differences) == 1
    assert (found.decision, found.seeds) == (decision, len(differences))
    assert found.mean_fraction == pytest.approx(statistics.fmean(differences))
    assert (found.more_seeds is None) == (decision != "undecided" or one)
    assert ((found.low_fraction, found.high_fraction) == (None, None)) == one


def test_the_baselines_weights_have_its_accuracy_whatever_the_number_of_seeds() -> None:
    for seeds in (1, 2, 3):
        found = verdicts.accuracy([0.0] * seeds, 0.01, 0.9, 0.02, identical=True)
        assert (found.decision, found.low_fraction, found.high_fraction, found.seeds) == ("same", 0.0, 0.0, seeds)
        assert accuracy_reasons(found) == []


def test_no_bound_lies_beyond_what_is_possible() -> None:
    found = verdicts.accuracy([0.25, -0.05, 0.0, 0.3], 0.01, 0.7)
    half = 2.353363 * statistics.stdev([0.25, -0.05, 0.0, 0.3]) / 2  # t's 95% quantile with three degrees of freedom
    assert (found.low_fraction, found.high_fraction) == pytest.approx((0.125 - half, 0.3))
    mirrored = verdicts.accuracy([-0.25, 0.05, 0.0, -0.3], 0.01, 0.3)
    assert (mirrored.low_fraction, mirrored.high_fraction) == pytest.approx((-0.3, half - 0.125))
    advice = (accuracy_reasons(each.model_copy(update={"more_seeds": None})) for each in (found, mirrored))
    assert len({text for (text,) in advice}) == 1  # the advice uses the whole interval, not the part that is shown


# The verdict of all decisions

OUTCOMES: tuple[Outcomes, ...] = (
    ("better",), ("same",), ("worse",), ("untrusted",), ("better", "same"), ("same", "worse"), ANY,
)  # fmt: skip


@pytest.mark.parametrize("quantities", list(product(OUTCOMES, repeat=3)))
def test_the_verdict_is_what_all_outcomes_have_in_common(quantities: tuple[Outcomes, ...]) -> None:
    """Derive the verdict of all 343 combinations in another way: from the certain and the possible decisions."""
    found = verdict(quantities)
    can = ["better" in sum(quantities, ()), "worse" in sum(quantities, ())]
    must = [("better",) in quantities, ("worse",) in quantities]
    words = {(True, True): "trades", (True, False): "pays", (False, True): "costs", (False, False): "neutral"}
    if ("untrusted",) in quantities:
        assert found == "untrusted"
    elif all(must) or can == must:
        assert found == words[must[0], must[1]]
    else:
        assert found == "undecided"


@pytest.mark.parametrize(
    ("low", "high", "faster", "smaller"),
    [
        (0.93, 1.01, ("same", "worse"), ("better", "same")),
        (0.99, 1.07, ("better", "same"), ("same", "worse")),
        (0.93, 1.07, ANY, ANY),
        (None, None, ANY, ANY),
    ],
)
def test_an_undecided_ratio_can_turn_out_as_its_interval_allows(
    low: float | None, high: float | None, faster: Outcomes, smaller: Outcomes
) -> None:
    found = verdicts.Ratio(estimate=1.0, low=low, high=high, pairs=6, margin=0.02, decision="undecided")
    assert set(found.outcomes(verdicts.THROUGHPUT)) == set(faster)
    assert set(found.outcomes(verdicts.MEMORY)) == set(smaller)


def test_an_undecided_accuracy_can_turn_out_as_its_interval_allows() -> None:
    lost = verdicts.accuracy([-0.02, -0.01, 0.0], 0.01, 0.9)
    assert (lost.decision, lost.outcomes) == ("undecided", ("same", "worse"))
    assert verdicts.accuracy([-0.02, -0.01], 0.01, 0.9).outcomes == ANY  # too few seeds to say
    assert verdicts.accuracy([-0.02, -0.021, -0.022], 0.01, 0.9).outcomes == ("worse",)
    on_the_margin = verdicts.accuracy([-0.01] * 3, 0.01, 0.9)
    assert (on_the_margin.decision, on_the_margin.outcomes) == ("undecided", ("same", "worse"))
