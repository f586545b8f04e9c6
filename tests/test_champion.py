"""The choice of the best variant among those that pay, and the text about this choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.comparison.champion import champion_of, choices, no_narrower
from pipeline.comparison.compare import compare
from pipeline.comparison.comparison_file import Champion, Comparison
from pipeline.comparison.sessions import table_of
from pipeline.comparison.stats import over_sessions
from pipeline.params import Compare
from pipeline.report import html, markdown
from pipeline.results import Arm, Bench
from pipeline.results.figures import MEMORY, THROUGHPUT
from pipeline.tracking import contents
from pipeline.tracking.promoting import sessions_of
from tests.factories import (
    ENVIRONMENT,
    known,
    make_bench,
    make_histories,
    make_ratio,
    make_result,
    make_session,
    with_speeds,
)
from tests.report.conftest import plain
from tests.report.reader import Page

NAMES = ("baseline", "one", "two", "three")
MEASURED = [make_result(name) for name in NAMES]


def session(day: int, **changes: Any) -> Bench:
    start = make_session(f"2026-11-{day:02}T12:00")
    usual: dict[str, Any] = {"session": start, "keys": dict.fromkeys(NAMES, "k"), "rejected": {}, "noise": 0.002}
    return make_bench(MEASURED, **usual | changes)


def over(*sessions: Bench) -> Comparison:
    return compare(MEASURED, make_histories(MEASURED), sessions, Compare(), ENVIRONMENT)


def best(*sessions: Bench) -> Champion:
    return known(over(*sessions).champion)


@pytest.mark.parametrize(
    ("throughput", "memory", "champion", "quantity"),
    [
        ({"one": 1.5, "two": 1.6}, {}, "two", "throughput"),
        ({"one": 1.5, "two": 2.0}, {"two": 1.2}, "one", "throughput"),  # the verdict on ``two`` is trades
        ({"one": 1.005}, {"one": 0.9, "two": 0.5}, "two", "peak memory"),  # a gain within the margin does not count
        ({"one": 1.1}, {"two": 0.5}, "one", "throughput"),
    ],
)
def test_it_is_what_pays_most_speed_then_memory(
    throughput: dict[str, float], memory: dict[str, float], champion: str, quantity: str
) -> None:
    chosen = best(session(1, throughput=throughput, memory=memory))
    assert (chosen.variant, chosen.quantity) == (champion, quantity)


def test_one_that_pays_was_not_chosen() -> None:
    comparison = over(session(1, throughput={"one": 1.5}))
    champion = known(comparison.champion)
    assert (champion.among, champion.runner_up, champion.ratio) == (1, None, comparison.variants[1].throughput)
    nothing = over(session(1))
    assert nothing.champion is None
    assert "The best of the" not in markdown(comparison) + markdown(nothing)


def test_what_pays_by_its_accuracy_alone_has_no_gain() -> None:
    same = make_ratio(1.0, 0.99, 1.01, margin=0.03, decision="same")
    champion = known(champion_of({"one": {THROUGHPUT: same, MEMORY: same}}, table_of([session(1)], 0.15, {})))
    assert (champion.variant, champion.quantity, champion.ratio) == ("one", None, None)


def test_each_part_is_measured_for_what_the_others_choose() -> None:
    gains = np.array([[3.0, 0.0, 0.0], [1.0, 1.0, 1.5]])
    assert choices(gains) == [1, 0, 0]  # without its lucky first part, the first candidate is worse
    assert choices(gains, middle=np.median) == [1, 0, 0]


def test_a_choice_is_no_surer_than_the_best() -> None:
    narrow, wide = make_ratio(1.0, 0.9, 1.05, 8), make_ratio(2.0, 1.9, 2.2, 9)
    assert no_narrower(narrow, wide) == make_ratio(1.0, 0.9, 1.1, 8)


def test_over_sessions_each_tells_what_the_others_chose() -> None:
    """By the mean of all three sessions, ``one`` is the best. The best of each session would gain 1.5, 1.4 and 1.4."""
    faster = [{"one": 1.5, "two": 1.3}, {"one": 1.3, "two": 1.4}, {"one": 1.4, "two": 1.35}]
    comparison = over(*(session(day, throughput=speed) for day, speed in enumerate(faster, 1)))
    champion, own = known(comparison.champion), known(comparison.variants[1].throughput)
    assert (champion.variant, champion.runner_up, champion.among) == ("one", "two", 2)
    gain, head_to_head = known(champion.ratio), known(champion.head_to_head)
    # Without the first session, ``two`` is better (1.374 against 1.349). Without the second or the third, ``one`` is.
    assert gain.estimate == pytest.approx((1.3 * 1.3 * 1.4) ** (1 / 3), rel=0.005)
    assert [start[8:10] for start in gain.parts] == ["01", "02", "03"]
    expected = no_narrower(over_sessions(list(gain.parts.values())), own)
    assert (gain.low, gain.high) == (expected.low, expected.high)
    assert (head_to_head.session_count, head_to_head.decision) == (3, "undecided")
    assert head_to_head.estimate == pytest.approx((1.5 / 1.3 * 1.3 / 1.4 * 1.4 / 1.35) ** (1 / 3), rel=0.005)


def test_within_a_session_its_rounds_choose_for_each_other() -> None:
    """The luckiest of three equally fast variants gains less in the rounds that were not used to choose it."""
    comparison = over(session(1, throughput=dict.fromkeys(NAMES[1:], 1.3), noise=0.02))
    champion = known(comparison.champion)
    seen = [known(known(variant.throughput).estimate) for variant in comparison.variants[1:]]
    gain = known(champion.ratio)
    assert known(gain.estimate) < max(seen)
    assert (gain.pairs, gain.decision) == (12, "better")
    assert known(champion.head_to_head).decision in ("same", "undecided")


def test_memory_that_few_rounds_measured_has_a_gain() -> None:
    """On a CPU, rounds leave out memory once it is known."""
    bench = session(1, memory={"one": 0.5, "two": 0.6})
    unmeasured = {"peak_memory_bytes": None, "peak_memory_rank_bytes": ()}
    arms = [
        arm.model_copy(
            update={"samples": (*arm.samples[:3], *(of.model_copy(update=unmeasured) for of in arm.samples[3:]))}
        )
        for arm in bench.arms
    ]
    gain = known(best(bench.model_copy(update={"arms": tuple(arms)})).ratio)
    assert gain.estimate == pytest.approx(0.5, rel=0.001)
    assert (gain.pairs, gain.decision) == (3, "better")


def test_settled_early_two_differ_by_equal_arms_until_then() -> None:
    """In later rounds, the control's speed varies. This says nothing about the rounds in which the two took part."""

    def told(control: list[float]) -> Champion:
        def factor(arm: Arm, number: int) -> float:
            return control[number] if arm.role == "aa_control" else number < 10 or arm.variant == "baseline"

        return best(with_speeds(session(1, throughput={"one": 1.5, "two": 1.3}, rounds=30), factor))

    assert told([1.0] * 10 + [0.9, 1.1] * 10) == told([1.0] * 30)


def test_what_no_round_tells_is_unknown_in_tags() -> None:
    gone = {"one": dict.fromkeys(range(6), "x"), "two": dict.fromkeys(range(6, 12), "x")}
    comparison = over(session(1, throughput={"one": 1.5, "two": 1.3}, rejected=gone))
    assert contents.champion(comparison)["champion.head_to_head"].startswith("unknown")


def test_one_session_s_gain_counts_for_itself_alone() -> None:
    """The best pays in five sessions. Four of them lack the other variant, so only one session measured the gain."""
    before = dict.fromkeys(NAMES, "k") | {"two": "before"}
    faster = {"one": 1.5, "two": 1.3}
    sessions = [session(5, throughput=faster)]
    sessions += [session(day, throughput={"one": 1.5 + day / 100, "two": 1.3}, keys=before) for day in (1, 2, 3, 4)]
    comparison = over(*sessions)
    assert len(known(comparison.variants[1].throughput).parts) == 5
    assert sessions_of(comparison, "one") == 1


def test_a_session_without_one_says_nothing_of_choices() -> None:
    before = dict.fromkeys(NAMES, "k") | {"two": "before"}
    faster = {"one": 1.3, "two": 1.5}
    champion = best(session(1, throughput=faster, keys=before), session(2, throughput=faster))
    gain = known(champion.ratio)
    assert (champion.variant, gain.session_count, gain.pairs) == ("two", 1, 12)


def test_report_and_mlflow_say_if_it_is_ahead() -> None:
    comparison = over(session(1, throughput={"one": 1.5, "two": 1.3, "three": 1.3}))
    [said] = [line for line in plain(markdown(comparison)).splitlines() if line.startswith("The best of the 3")]
    assert said.startswith("The best of the 3 variants that pay by throughput is one: 1.499x the throughput (1.49")
    assert "in rounds that were not used for this choice." in said
    assert said.endswith(": better.")
    assert said in plain(Page(html(comparison, make_histories(MEASURED))).heard)
    tags = contents.champion(comparison)
    assert tags["champion"] == "one"
    assert tags["champion.gain"].endswith(" the throughput")
    assert tags["champion.head_to_head"].endswith(": better")
    nothing = contents.champion(over(session(1)))
    assert set(nothing.values()) == {"baseline", "none"}
