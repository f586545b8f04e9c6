from __future__ import annotations

import math

from pipeline.comparison import planning
from pipeline.comparison.advice import (
    ODDS,
    accuracy_reasons,
    certain,
    correlation_reasons,
    ratio_reasons,
    seeds_outlook,
)
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import ANY, Decision, Difference, Outcomes, decide
from pipeline.results.figures import MEMORY, THROUGHPUT
from tests.factories import TEN_IN_TEN_MINUTES, make_accuracy, make_ratio, ratio_of


def reason(difference: Difference, cost: RoundCost = TEN_IN_TEN_MINUTES) -> str:
    (text,) = ratio_reasons(difference, THROUGHPUT, cost)
    return text


UNDECIDED = [1000.0, 1010.0, 1025.0, 1030.0, 1040.0, 1060.0]


def test_a_decided_figure_needs_no_reason() -> None:
    assert ratio_reasons(ratio_of([12.0] * 6, [10.0] * 6), THROUGHPUT, TEN_IN_TEN_MINUTES) == []
    assert accuracy_reasons(make_accuracy([0.0, 0.0, 0.0])) == []


def test_an_undecided_ratio_says_what_would_decide_it() -> None:
    undecided = ratio_of(UNDECIDED, [1000.0] * 6).model_copy(update={"more_pairs": 4})

    def said(text: str, remedy: str) -> str:
        return f"throughput is undecided: about {text} in all will suffice, {ODDS} ({remedy})"

    # Ten rounds take ten minutes. One more minute is added, because some rounds take longer than the mean.
    assert reason(undecided) == said("11 min of rounds", "set bench.max_minutes: 11")
    cost = RoundCost("bench.max_minutes", 100, 100.0)
    assert reason(undecided, cost) == said("0.5 min of rounds", "set bench.max_minutes: 0.5")
    eight = undecided.model_copy(update={"pairs": 8, "more_pairs": 2})
    assert "undecided: another session helps most (bench --again); about " in reason(eight)
    no_forecast = reason(eight.model_copy(update={"more_pairs": None}))
    assert "; another session helps most (bench --again); with 60 minutes of rounds" in no_forecast
    cost = RoundCost("bench.max_rounds", 6, 100.0)
    assert reason(undecided, cost) == said("3.5 min of rounds", "set bench.max_rounds: 10")
    rejected = undecided.model_copy(update={"rejected": 6})  # half of the rounds were rejected
    assert reason(rejected) == reason(eight).replace("11 min", "21 min").replace("minutes: 11", "minutes: 21")


def test_what_an_undecided_verdict_leaves_certain_is_said() -> None:
    assert said_of(ANY, "same", "better") == ["saves memory; pays or trades"]
    assert said_of(("same", "worse"), "same", "better") == ["saves memory; pays or trades"]
    assert said_of(("better", "same"), "same", "better") == []  # it pays either way
    assert said_of("worse", ANY) == ["slower; trades or costs"]
    assert said_of(ANY, "same", "same") == []  # no quantity is certainly better or worse
    assert said_of("better", "same", "worse") == []  # the verdict is decided
    assert said_of("untrusted", "same", "better") == ["decided nevertheless: saves memory"]
    assert said_of("untrusted", "same", "untrusted") == []


def said_of(*quantities: Outcomes | Decision) -> list[str]:
    outcomes: list[Outcomes] = [(quantity,) if isinstance(quantity, str) else quantity for quantity in quantities]
    return certain(dict(zip(("throughput", "accuracy", "peak memory"), outcomes, strict=False)))


def test_over_several_sessions_it_is_sessions_that_would_decide() -> None:
    undecided = ratio_of(UNDECIDED, [1000.0] * 6)
    over = undecided.model_copy(update={"parts": dict.fromkeys("123", undecided), "more_sessions": 2})
    expected = f"throughput is undecided over 3 sessions: about 2 more sessions will suffice, {ODDS} (bench --again"
    assert reason(over).startswith(expected)
    assert "bench.max_minutes" in reason(over.model_copy(update={"more_sessions": None}))


def test_too_few_pairs_say_how_to_get_enough() -> None:
    few = "throughput is undecided: at least 6 accepted rounds are needed"
    assert reason(ratio_of([9.0] * 3, [9.0] * 3)) == f"{few} (set bench.max_minutes: 7)"
    lost = ratio_of([9.0, 9.0, 9.0, "hot", "hot"], [9.0] * 5)
    assert reason(lost) == f"{few}, but 2 of 5 rounds had to be rejected (set bench.max_minutes: 11)"
    slow = RoundCost("bench.max_minutes", 1, 900.0)
    assert "6 rounds would take 105 minutes here; fewer variants" in reason(ratio_of([9.0] * 3, [9.0] * 3), slow)


def test_what_correlated_rounds_did_to_an_interval_is_said() -> None:
    """12 rounds with a correlation of 1/2 count as 4: t_3 is 3.1824, t_11 2.2010."""
    ratio = make_ratio(1.1, 1.05, 1.15, 12, correlation=0.5, margin=0.03)
    assert correlation_reasons(ratio, THROUGHPUT) == [
        "rounds resemble the round before (correlation 0.50): 12 rounds count as 4, so the interval of throughput "
        f"is {3.1824 / 2.2010 * math.sqrt(3):.1f} times as wide"
    ]
    for changes in ({"correlation": 0.1}, {"decision": "better"}):
        assert correlation_reasons(ratio.model_copy(update=changes), THROUGHPUT) == []


def test_more_than_an_hour_is_no_advice() -> None:
    undecided = ratio_of(UNDECIDED, [1000.0] * 6).model_copy(update={"more_pairs": 53})
    assert f"60 min of rounds in all will suffice, {ODDS} (set bench.max_minutes: 60)" in reason(undecided)
    for more_pairs in (54, None):
        beyond = undecided.model_copy(update={"more_pairs": more_pairs})
        assert reason(beyond) == (
            "throughput is undecided at the margin of 3.0%; with 60 minutes of rounds, a margin of "
            f"{planning.margin_decided(undecided, 59):.1%} allows a decision (compare.margins)"
        )


def test_memory_of_heaps_cannot_be_decided() -> None:
    """A peak of 3.4 MiB: half a MiB of free blocks is 14.7% of it. Neither an hour nor a session more is advised."""
    peaks = [round(3.4 * 2**20) + round(1000 * value) for value in (0, 1, 2, 3, 4, 5, 6)]
    ratio = ratio_of([1.03 * peak for peak in peaks], peaks, MEMORY)
    (low, high), margin = ratio.bounds, f"{math.ceil(1e3 * (ratio.bounds[1] - 1)) / 1e3:.1%}"
    assert (ratio.decision, round(low, 1), round(high, 2)) == ("undecided", 0.9, 1.18)
    for undecided in (ratio, ratio.model_copy(update={"parts": dict.fromkeys("123", ratio)})):
        (text,) = ratio_reasons(undecided, MEMORY, TEN_IN_TEN_MINUTES, stopped=True)
        assert text.startswith("peak memory cannot be decided on a CPU at the margin of 3.0%")
        assert "equal processes change this ratio by up to 15%; a margin of " + margin in text
        assert decide(ratio, float(margin[:-1]) / 100, higher_is_better=False) == "same"
    wide = [peak * factor for peak, factor in zip(peaks, (0.8, 1.2, 0.7, 1.3, 0.9, 1.1, 1.0), strict=True)]
    beyond = ratio_of([1.3 * value for value in wide], peaks, MEMORY)
    assert planning.rounds_help(beyond)  # with more rounds, the heaps leave room for a decision
    assert not planning.rounds_help(ratio_of([1.1 * value for value in wide], peaks, MEMORY))


def test_minutes_that_were_not_used_up_are_not_advised() -> None:
    undecided = ratio_of([10.3, 10.7, 10.4, 10.6, 10.2, 10.8], [10.0] * 6)
    allowed = TEN_IN_TEN_MINUTES._replace(seconds=100.0)
    assert "set bench.max_minutes: 2)" in reason(undecided, allowed)
    assert "(bench --again)" in reason(undecided, allowed._replace(minutes=2.0))


def test_a_training_is_told_how_many_seeds_it_needs() -> None:
    assert seeds_outlook(3, 0.01, None).startswith("accuracy: 3 seeds, margin 1 percentage point; an equal variant is")
    assert "deviates from seed to seed by at most 0.41 points, which only the first report shows" in seeds_outlook(
        3, 0.01, None
    )
    known = make_accuracy([-0.006, 0.0, 0.006])  # its deviation is 0.6 points
    assert seeds_outlook(3, 0.01, known).endswith(
        "deviated from seed to seed by 0.60 points, for which about 5 seeds would show that an equal variant is the "
        "same; python -m pipeline seeds adds seeds until all is decided"
    )
    assert seeds_outlook(5, 0.01, known).endswith("that an equal variant is the same")
    assert seeds_outlook(3, 0.01, make_accuracy([0.004])) == seeds_outlook(3, 0.01, None)  # one seed has no deviation


def test_undecided_accuracy_says_how_many_seeds_would_decide() -> None:
    def reason(difference: Difference) -> str:
        (text,) = accuracy_reasons(difference)
        return text

    assert reason(make_accuracy([0.0])).startswith("accuracy is undecided: one seed shows no variation")
    two = make_accuracy([0.0, 0.0])
    assert reason(two).startswith(f"accuracy is undecided with 2 seeds: about 1 more seed will suffice, {ODDS}")
    some = make_accuracy([-0.009, 0.006, 0.004])
    assert reason(some) == (
        f"accuracy is undecided with 3 seeds: about {some.more_pairs} more seed will suffice, {ODDS} "
        "(python -m pipeline seeds)"
    )
    for more_seeds in (21, None):
        margin = planning.margin_of_seeds(some, 23)
        assert reason(some.model_copy(update={"more_pairs": more_seeds})) == (
            "accuracy is undecided with 3 seeds at the margin of 1 percentage point; with 20 more seeds, a margin "
            f"of {math.ceil(1e4 * margin) / 100:g} points allows a decision (compare.margins.accuracy)"
        )
