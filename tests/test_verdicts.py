from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.comparison import looks, verdicts
from pipeline.comparison.advice import accuracy_reasons, ratio_reasons
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import ANY, Decision, Difference, Outcomes
from pipeline.comparison.verdicts import verdict
from pipeline.params import Compare, Margins
from pipeline.report import facts
from pipeline.results import Arm
from pipeline.results.figures import MEMORY, OUTSIDE, THROUGHPUT, Figure
from pipeline.results.rejections import rejection
from tests.factories import (
    CALM,
    TEN_IN_TEN_MINUTES,
    arm_with,
    known,
    make_accuracy,
    make_arm,
    make_ratio,
    make_window,
    ratio_of,
)


def test_a_ratio_is_paired_by_round() -> None:
    ratio = ratio_of([20.0, 40.0, 90.0, 66.0, 63.0, 40.0, 22.0], [10.0, 20.0, 30.0, 33.0, 30.0, 20.0, 10.0])
    assert ratio.estimate == pytest.approx(2.073, abs=1e-3)  # the ratio of the means is 2.23
    assert (ratio.pairs, ratio.rejected, ratio.decision, ratio.margin) == (7, 0, "better", 0.03)
    assert (ratio.more_pairs, ratio.why_untrusted) == (None, None)


def test_the_reference_is_the_geometric_mean_of_equal_arms() -> None:
    baseline, control = arm_with([1000.0] * 6), arm_with([1210.0] * 5 + [THROTTLED])
    ratio = verdicts.ratio(arm_with([1100.0] * 6), [baseline, control], THROUGHPUT, 0.03, CALM)
    assert ratio.estimate == pytest.approx(1.0)
    assert (ratio.pairs, ratio.rejected) == (6, 0)
    alone = verdicts.ratio(
        arm_with([1100.0] * 6), [arm_with([1000.0] * 5 + [THROTTLED]), control], THROUGHPUT, 0.03, CALM
    )
    assert (alone.pairs, alone.rejected) == (5, 1)


def test_rounds_that_follow_each_other_count_for_fewer() -> None:
    """A slow drift of one arm: each round tells little that the one before did not."""
    drift = [1000.0 * math.exp(0.02 * math.sin(number / 4)) for number in range(24)]
    mixed = [drift[place] for place in np.random.default_rng(0).permutation(24)]
    wide, narrow = (ratio_of(speeds, [1000.0] * 24) for speeds in (drift, mixed))
    assert wide.estimate == pytest.approx(narrow.estimate)
    assert (wide.correlation > 0.4, narrow.correlation < 0.1) == (True, True)
    assert wide.widths[0] > 1.3 * narrow.widths[0]


@pytest.mark.parametrize(
    ("speed", "decision"), [(1.0, "untrusted"), (0.98, "untrusted"), (1.2, "better"), (0.8, "worse")]
)
def test_rounds_that_drift_must_all_agree(speed: float, decision: Decision) -> None:
    """One arm gets faster by 8%, round by round. Scattered in any other order, the same rounds have an interval."""
    drift = [1000 * speed * math.exp(0.08 * number / 15) for number in range(16)]
    ratio = ratio_of(drift, [1000.0] * 16)
    assert ratio.decision == decision
    assert (ratio.low, ratio.high) == pytest.approx((drift[0] / 1000, drift[-1] / 1000))
    assert ("throughput: the ratio drifted between" in (ratio.why_untrusted or "")) is (decision == "untrusted")
    mixed = [drift[place] for place in np.random.default_rng(0).permutation(16)]
    narrow = ratio_of(mixed, [1000.0] * 16)
    assert narrow.decision != "untrusted"
    assert narrow.spread < ratio.spread / 2


def test_the_baseline_s_own_difference_is_in_every_ratio() -> None:
    """If the A/A ratio is 1.03 and its standard error 1%, a bias of sqrt(log(1.03)^2 - 0.01^2) is added in quadrature.
    So a ratio of 1.05 is undecided."""
    half = 0.01 * 2.364624  # t_7's 97.5% quantile
    noise = CALM.model_copy(
        update={"estimate": 1.03, "low": 1.03 * math.exp(-half), "high": 1.03 * math.exp(half), "pairs": 8}
    )
    assert noise.bias == pytest.approx(math.sqrt(math.log(1.03) ** 2 - 0.01**2), abs=1e-6)
    assert CALM.bias == CALM.model_copy(update={"low": None, "high": None}).bias == 0, "no more than chance gives"
    faster = arm_with([1050.0] * 8), [arm_with([1000.0] * 8)], THROUGHPUT, 0.03
    assert verdicts.ratio(*faster, CALM).decision == "better"
    ratio = verdicts.ratio(*faster, noise)
    assert ratio.widths == pytest.approx((noise.bias, noise.bias))
    assert ratio.decision == "undecided"


def test_two_processes_may_differ_by_two_heaps() -> None:
    alone = arm_with([2.0**25] * 8, MEMORY)
    two = alone.model_copy(update={"world_size": 2})
    assert verdicts.heap_doubt(MEMORY, alone, alone) == pytest.approx(math.log1p(1 / 64))
    assert verdicts.heap_doubt(MEMORY, two, alone) == pytest.approx(math.log1p(2 / 64))
    assert verdicts.ratio(alone, [alone], MEMORY, 0.03, CALM).logs[2] == pytest.approx(math.log1p(1 / 64))
    assert verdicts.ratio(alone, [alone], MEMORY, 0.03, CALM, heaps_differ=False).logs[2] == 0
    on_gpu = [sample.model_copy(update={"peak_reserved_bytes": 1}) for sample in alone.samples]
    assert verdicts.heap_doubt(MEMORY, alone.model_copy(update={"samples": tuple(on_gpu)})) == 0
    assert verdicts.heap_doubt(THROUGHPUT, two) == 0


def test_most_rounds_rejected_is_untrusted() -> None:
    load = {"taken_seconds": 1.0, "due_seconds": 2.0, "share": 0.5, "limit": 0.1}
    bad = [
        rejection("foreign_load", **load),
        *(rejection("gpu_shared", others=others, gpu="it") for others in (1, 2, 3)),
    ]
    diff = ratio_of([*bad, *[12.0] * 3], [10.0] * 7)
    assert (diff.decision, diff.pairs, diff.rejected) == ("untrusted", 3, 4)
    assert diff.why_untrusted == (
        "throughput: 4 of 7 rounds had to be rejected, most often because 1 other process used it; end all other "
        "processes (nvidia-smi lists them) and measure again"
    )
    assert ratio_of([*bad, *[12.0] * 4], [10.0] * 8).why_untrusted is None  # half of the rounds are not most of them


def steps_beside(share: float, speed: float, base: float = 0.19, control: float = 0.19) -> Difference:
    """Return the ratio of speeds of an arm, of whose windows this share is outside of steps. The base's speed is 1000,
    so with a share of 0.19 a sample takes 0.23 ms outside of steps and 1.23 ms in all."""

    def arm(speed: float, share: float) -> Arm:
        samples = [sample.model_copy(update={OUTSIDE.field: share}) for sample in arm_with([speed] * 6).samples]
        return make_arm(samples=tuple(samples))

    return verdicts.ratio(arm(speed, share), [arm(1000.0, base), arm(1000.0, control)], THROUGHPUT, 0.03, CALM)


def test_more_time_outside_of_steps_voids_a_speed() -> None:
    stalls = steps_beside(0.6, 990.0)
    assert stalls.decision == "untrusted"
    said = "throughput: 60% of its window is outside of steps, the base's 19%: "
    assert known(stalls.why_untrusted).startswith(said)
    assert steps_beside(0.6, 1500.0).decision == "untrusted"
    assert steps_beside(0.6, 500.0).decision == "worse", "whole time is worse, too"
    assert [steps_beside(share, 1000.0).decision for share in (0.0, 0.19, 0.25, 0.27)] == ["same"] * 3 + ["untrusted"]


def test_equal_work_outside_of_steps_is_no_stall() -> None:
    outside = 0.19 / 0.81 / 1000
    share = outside / (outside + 1 / 3000)
    assert share == pytest.approx(0.41, abs=0.01)
    assert steps_beside(share, 3000.0).decision == "better"


def test_what_the_base_s_copies_differ_is_no_stall() -> None:
    assert steps_beside(0.4, 1000.0, 0.1, 0.19).decision == "untrusted"
    assert steps_beside(0.4, 1000.0, 0.0, 0.33).decision == "same"
    assert steps_beside(1.0, 1000.0).decision == "untrusted"


def test_what_no_round_knows_has_no_ratio() -> None:
    diff = ratio_of([None] * 8, [None] * 8, MEMORY)
    assert (diff.estimate, diff.low, diff.high, diff.pairs, diff.rejected) == (None, None, None, 0, 8)
    assert diff.decision == "untrusted"
    assert "peak memory: 8 of 8 rounds" in known(diff.why_untrusted)
    assert "this machine does not report the figure" in known(diff.why_untrusted)
    assert ratio_of([], []).why_untrusted == "throughput: no round was measured"


def test_too_few_pairs_have_an_estimate_and_no_interval() -> None:
    diff = ratio_of([12.0] * 5, [10.0] * 5)
    assert diff.estimate == pytest.approx(1.2)
    assert (diff.low, diff.high, diff.decision, diff.more_pairs) == (None, None, "undecided", None)


# The baseline against itself


def noise(control: Sequence[Any], baseline: Sequence[Any], max_spread: float = 0.15) -> Difference:
    return verdicts.noise_between(arm_with(baseline), arm_with(control), THROUGHPUT, max_spread, TEN_IN_TEN_MINUTES)


STEADY = [100.0, 101.0, 99.0, 100.5, 99.5, 100.2, 99.8, 100.0, 100.7, 99.3]


def test_a_calm_machine_is_trusted() -> None:
    between = noise(STEADY[::-1], STEADY)
    assert (between.why_untrusted, between.pairs) == (None, 10)
    assert known(between.low) < 1 < known(between.high)
    assert noise(STEADY, STEADY).why_untrusted is None  # no difference at all, as in a GPU's memory


def test_too_few_rounds_name_the_figure_s_own_number() -> None:
    two = arm_with(STEADY[:2])
    for quantity, fewest, minutes in ((THROUGHPUT, 6, 7), (MEMORY, 3, 4)):
        why = verdicts.noise_between(two, two, quantity, 0.15, TEN_IN_TEN_MINUTES).why_untrusted or ""
        assert f"in 2 accepted rounds, but at least {fewest} are needed" in why
        assert f"set bench.max_minutes: {minutes}" in why
        [reason] = ratio_reasons(ratio_of([9.0] * 2, [9.0] * 2), quantity, TEN_IN_TEN_MINUTES)
        assert f"at least {fewest} accepted rounds are needed" in reason


THROTTLED = "the GPU throttled"
QUIET = "let nothing else run here"


@pytest.mark.parametrize(
    ("control", "baseline", "why", "remedy"),
    [
        ([1.05 * speed for speed in STEADY], STEADY, "which excludes 1", QUIET),
        (
            [speed * (1.12 if index % 2 else 0.9) for index, speed in enumerate(STEADY)],
            STEADY,
            "at most 15.0%",
            # (log(1.184) / log(1.15))^2 = 1.46, so 15 rounds instead of ten, and one more.
            f"set bench.max_minutes: 16; or {QUIET}",
        ),
        (
            [speed * (1.3 if index % 2 else 0.75) for index, speed in enumerate(STEADY)],
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
    between = noise(control, baseline)
    assert why in known(between.why_untrusted)
    assert known(between.why_untrusted).endswith(remedy)
    clear = verdicts.ratio(arm_with([20.0] * 10), [arm_with([10.0] * 10)], THROUGHPUT, 0.03, between)
    assert (clear.decision, clear.more_pairs) == ("untrusted", None)
    assert clear.why_untrusted == f"throughput: {between.why_untrusted}"
    assert clear.estimate == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("memory", "shift", "decision"),
    [
        (0.32, 1.0, "better"),  # far beyond what equal arms differ by
        (3.1, 1.0, "worse"),
        (0.85, 1.0, "untrusted"),
        (0.32, 1.4, "untrusted"),  # equal arms are treated unequally, and nobody knows by how much others are
    ],
)
def test_far_beyond_the_noise_a_side_is_known(memory: float, shift: float, decision: Decision) -> None:
    scattered = [math.exp(0.16 * (-1) ** number * math.sin(1 + number)) for number in range(10)]
    base, control = (arm_with([factor * 2.0**30 for factor in of_arm], MEMORY) for of_arm in
                     ([1.0] * 10, [shift * factor for factor in scattered]))  # fmt: skip
    between = verdicts.noise_between(base, control, MEMORY, 0.15, TEN_IN_TEN_MINUTES)
    assert between.why_untrusted
    arm = arm_with([memory * factor * 2.0**30 for factor in reversed(scattered)], MEMORY)
    ratio = verdicts.ratio(arm, [base, control], MEMORY, 0.03, between, sides=True)
    assert (ratio.decision, ratio.counts) == (decision, False)
    assert known(ratio.why_untrusted).startswith("peak memory: the baseline measured against itself")
    assert (", size uncertain (" in facts.text(ratio)) is (decision != "untrusted")
    as_gate = verdicts.ratio(arm, [base, control], MEMORY, 0.03, between)
    assert (as_gate.decision, as_gate.bounds) == ("untrusted", ratio.bounds)


@pytest.mark.parametrize(
    ("on_gpu", "more_mib", "trusted"), [(False, 0.1, True), (False, 2.0, False), (True, 0.1, False)]
)
def test_equal_processes_may_differ_by_free_heap(on_gpu: bool, more_mib: float, trusted: bool) -> None:
    """The peaks are from a real bench. On a GPU, free blocks do not count, because the allocator counts every byte."""
    peaks = [35.48, 35.48, 35.5, 35.53, 35.51, 35.52, 35.47, 35.51, 35.59, 35.48, 35.48]

    def of(peaks_mib: Sequence[float]) -> Arm:
        held = {"peak_reserved_bytes": 2**26} if on_gpu else {}
        samples = (make_window(peak_memory_bytes=round(peak * 2**20)).model_copy(update=held) for peak in peaks_mib)
        return make_arm(samples=tuple(samples))

    between = verdicts.noise_between(
        of(peaks), of([peak + more_mib for peak in peaks]), MEMORY, 0.15, TEN_IN_TEN_MINUTES
    )
    assert (between.why_untrusted is None) is trusted


# Settled variants


def windows(speed: float, mib: float = 200.0, **changes: Any) -> Arm:
    """Return an arm with ten rounds that scatter by 1%."""
    scatter = np.random.default_rng(round(speed + mib)).normal(0, 0.01, 10)
    samples = [
        make_window(samples_per_second=speed * math.exp(noise), peak_memory_bytes=round(mib * 2**20))
        for noise in scatter
    ]
    return make_arm(samples=tuple(samples)).model_copy(update=changes)


def settled(*arms: Arm, control: float = 1001.0, max_spread: float = 0.15, **changes: Any) -> set[str]:
    machine = windows(1000.0, variant="base"), windows(control, variant="base", role="aa_control", **changes)
    settings = Compare(baseline="base", max_spread=max_spread, margins=Margins(memory=0.05))
    return looks.settled([*machine, *arms], settings)


@pytest.mark.parametrize(
    ("speed", "mib", "is_settled"),
    [
        pytest.param(1500, 200, True, id="better, and the same memory"),
        pytest.param(700, 100, True, id="worse, and better memory"),
        pytest.param(1030, 200, False, id="the margin is in the interval"),
        pytest.param(1500, 210, True, id="on the margin of memory, whose heaps more rounds do not make more alike"),
    ],
)
def test_a_variant_is_settled_when_figures_are_decided(speed: float, mib: float, is_settled: bool) -> None:
    assert settled(windows(speed, mib, variant="v")) == ({"v"} if is_settled else set())


def test_settled_alone_may_be_open_among_many() -> None:
    """A look at ten undecided variants has a confidence of 99.9% instead of 99%."""
    alike = [windows(1050 + 0.01 * number, variant=f"v{number}") for number in range(10)]
    assert settled(alike[0]) == {"v0"}
    assert settled(*alike) == set()
    assert settled(alike[0], windows(1500, variant="fast")) == {"v0", "fast"}


def test_nothing_is_settled_on_an_untrusted_machine() -> None:
    fast = windows(1500, variant="v")
    assert settled(fast) == {"v"}
    assert settled(fast, control=1050.0) == settled(fast, max_spread=0.001) == set()


def test_unknown_memory_keeps_no_variant_open() -> None:
    unknown = [
        arm.model_copy(
            update={"samples": tuple(sample.model_copy(update={"peak_memory_bytes": None}) for sample in arm.samples)}
        )
        for arm in (
            windows(1000, variant="b"),
            windows(1001, variant="b", role="aa_control"),
            windows(1500, variant="v"),
        )
    ]
    assert looks.settled(unknown, Compare(baseline="b")) == {"v"}


def test_rounds_without_a_measurement_of_memory_reject_nothing() -> None:
    """Three peaks are enough for an interval, because they scatter little."""

    def first(arm: Arm, peaks: int) -> Arm:
        left_out = {"peak_memory_bytes": None, "peak_memory_rank_bytes": ()}
        later = [sample.model_copy(update=left_out) for sample in arm.samples[peaks:]]
        return arm.model_copy(update={"samples": (*arm.samples[:peaks], *later)})

    machine = windows(1000.0, variant="b"), windows(1001.0, variant="b", role="aa_control")
    variant, settings = windows(1500.0, 100.0, variant="v"), Compare(baseline="b")
    for peaks, is_known in ((2, False), (3, True), (10, True)):
        arms = [first(arm, peaks) for arm in (*machine, variant)]
        assert looks.memory_known(arms, settings) is is_known
        assert looks.settled(arms, settings) == ({"v"} if is_known else set())
        noise = verdicts.noise_between(arms[0], arms[1], MEMORY, 0.15, RoundCost("bench.max_minutes", 10, 1.0))
        ratio = verdicts.ratio(arms[2], arms[:2], MEMORY, 0.03, noise)
        assert (ratio.pairs, ratio.rejected, ratio.low is not None) == (peaks, 0, is_known)
    small = windows(1500.0, 206.5, variant="v")  # on the margin; more rounds would make the interval narrower
    scattered = [
        sample.model_copy(update={"peak_memory_bytes": round((203 + 3 * (number % 3)) * 2**20)})
        for number, sample in enumerate(small.samples)
    ]
    arms = [*machine, small.model_copy(update={"samples": tuple(scattered)})]
    assert not looks.memory_known(arms, settings)


@pytest.mark.parametrize(("without", "is_settled"), [(1200.0, True), (1460.0, False)])
def test_an_ablated_variant_is_settled_with_its_techniques(without: float, is_settled: bool) -> None:
    """The arm without the technique is compared with the whole variant: the ratio is 1.25 or 1.027."""
    arms = [windows(1500, variant="v")]
    arms += [windows(1300, variant="v", role="with", technique="compile", name="with")]
    arms += [windows(without, variant="v", role="without", technique="compile", name="without")]
    assert settled(*arms) == ({"v"} if is_settled else set())


# Properties

figure = st.floats(10.0, 1000.0)
rounds = st.lists(st.tuples(figure, figure), min_size=1, max_size=14)
quantities = st.sampled_from([THROUGHPUT, MEMORY])


def of(drawn: Sequence[tuple[float, float]], quantity: Figure) -> Difference:
    whole = round if quantity is MEMORY else float  # bytes are whole numbers
    over, under = ([whole(1e6 * value) for value in side] for side in zip(*drawn, strict=True))
    return ratio_of(over, under, quantity, margin=0.1)


@given(rounds, quantities)
def test_the_direction_of_time_does_not_matter(drawn: list[Any], quantity: Figure) -> None:
    forward, backward = of(drawn, quantity), of(drawn[::-1], quantity)
    assert backward.bounds == pytest.approx(forward.bounds)
    assert backward.estimate == pytest.approx(forward.estimate)
    assert backward.decision == forward.decision


@given(rounds, quantities, st.data())
def test_rejected_samples_are_as_if_never_measured(drawn: list[Any], quantity: Figure, data: Any) -> None:
    sides = data.draw(st.lists(st.sampled_from(["", "", "", "arm", "reference", "both"]), max_size=len(drawn)))
    sides += [""] * (len(drawn) - len(sides))
    scale = 2**40  # bytes of memory beside which heaps are nothing
    over, under = (
        ["rejected" if side in (arm, "both") else round(scale * pair[place])
         for side, pair in zip(sides, drawn, strict=True)]
        for place, arm in enumerate(("arm", "reference"))
    )  # fmt: skip
    diff = ratio_of(over, under, quantity)
    kept = [index for index, side in enumerate(sides) if not side]
    alone = ratio_of([over[index] for index in kept], [under[index] for index in kept], quantity)
    assert diff.estimate == alone.estimate
    assert diff.bounds == pytest.approx(alone.bounds, rel=1e-6)
    assert diff.pairs == alone.pairs
    assert diff.rejected == len(drawn) - len(kept)
    if diff.rejected <= len(kept):
        assert diff.decision == alone.decision
    else:
        assert diff.decision == "untrusted"


def test_what_all_suffer_from_comes_first() -> None:
    noisy = CALM.model_copy(update={"why_untrusted": "noise"})
    throttled = arm_with([*["it throttled"] * 5, 9.0])
    reasons = [
        verdicts.ratio(throttled, [arm_with([9.0] * 6)], THROUGHPUT, 0.03, machine).why_untrusted or ""
        for machine in (CALM, noisy)
    ]
    assert (reasons[0].partition(",")[0], reasons[1]) == (
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
    diff, single = make_accuracy(differences), len(differences) == 1
    assert (diff.decision, diff.pairs) == (decision, len(differences))
    assert diff.estimate == pytest.approx(statistics.fmean(differences))
    assert (diff.more_pairs is None) == (decision != "undecided" or single)
    assert ((diff.low, diff.high) == (None, None)) == single


def test_the_baseline_s_weights_have_its_accuracy() -> None:
    for seeds in (1, 2, 3):
        diff = make_accuracy([0.0] * seeds, resolution=0.02, identical=True)
        assert (diff.decision, diff.low, diff.high, diff.pairs) == ("same", 0.0, 0.0, seeds)
        assert accuracy_reasons(diff) == []


def test_no_bound_lies_beyond_what_is_possible() -> None:
    diff = make_accuracy([0.25, -0.05, 0.0, 0.3], base=0.7)
    half = 2.353363 * statistics.stdev([0.25, -0.05, 0.0, 0.3]) / 2  # t's 95% quantile with three degrees of freedom
    assert (diff.low, diff.high) == pytest.approx((0.125 - half, 0.3))
    mirrored = make_accuracy([-0.25, 0.05, 0.0, -0.3], base=0.3)
    assert (mirrored.low, mirrored.high) == pytest.approx((-0.3, half - 0.125))
    advice = (accuracy_reasons(diff.model_copy(update={"more_pairs": None})) for diff in (diff, mirrored))
    assert len({text for (text,) in advice}) == 1  # the advice uses the whole interval, not the part that is shown


# The verdict of all decisions

OUTCOMES: tuple[Outcomes, ...] = (
    ("better",), ("same",), ("worse",), ("untrusted",), ("better", "same"), ("same", "worse"), ANY,
)  # fmt: skip


@pytest.mark.parametrize("quantities", list(product(OUTCOMES, repeat=3)))
def test_the_verdict_is_what_all_outcomes_have_in_common(quantities: tuple[Outcomes, ...]) -> None:
    """Derive the verdict of all 343 combinations in another way: from the certain and the possible decisions."""
    combined = verdict(quantities)
    can = ["better" in sum(quantities, ()), "worse" in sum(quantities, ())]
    must = [("better",) in quantities, ("worse",) in quantities]
    words = {(True, True): "trades", (True, False): "pays", (False, True): "costs", (False, False): "neutral"}
    if ("untrusted",) in quantities:
        assert combined == "untrusted"
    elif all(must) or can == must:
        assert combined == words[must[0], must[1]]
    else:
        assert combined == "undecided"


@pytest.mark.parametrize(
    ("low", "high", "faster", "smaller"),
    [
        (0.93, 1.01, ("same", "worse"), ("better", "same")),
        (0.99, 1.07, ("better", "same"), ("same", "worse")),
        (0.93, 1.07, ANY, ANY),
        (None, None, ANY, ANY),
    ],
)
def test_an_undecided_ratio_ends_within_its_interval(
    low: float | None, high: float | None, faster: Outcomes, smaller: Outcomes
) -> None:
    diff = make_ratio(1.0, low, high, margin=0.02)
    assert set(diff.outcomes()) == set(faster)
    assert set(diff.outcomes(higher_is_better=False)) == set(smaller)


def test_an_undecided_accuracy_ends_within_its_interval() -> None:
    lost = make_accuracy([-0.02, -0.01, 0.0])
    assert (lost.decision, lost.outcomes()) == ("undecided", ("same", "worse"))
    assert make_accuracy([-0.02, -0.01]).outcomes() == ANY  # too few seeds to say
    assert make_accuracy([-0.02, -0.021, -0.022]).outcomes() == ("worse",)
    on_the_margin = make_accuracy([-0.01] * 3)
    assert (on_the_margin.decision, on_the_margin.outcomes()) == ("undecided", ("same", "worse"))
