from __future__ import annotations

import math

from pipeline.comparison import planning, stats, verdicts
from pipeline.comparison.advice import ODDS, accuracy_reasons, certain, ratio_reasons
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import Decision
from pipeline.comparison.verdicts import ANY, THROUGHPUT, Accuracy, Outcomes, Ratio, SessionRatio
from tests.test_verdicts import TEN_IN_TEN_MINUTES, ratio


def reason(found: Ratio, cost: RoundCost = TEN_IN_TEN_MINUTES) -> str:
    (text,) = ratio_reasons(found, THROUGHPUT, cost)
    return text


UNDECIDED = [1000.0, 1010.0, 1025.0, 1030.0, 1040.0, 1060.0]


def test_a_decided_figure_needs_no_reason() -> None:
    assert ratio_reasons(ratio([12.0] * 6, [10.0] * 6), THROUGHPUT, TEN_IN_TEN_MINUTES) == []
    assert accuracy_reasons(verdicts.accuracy([0.0, 0.0, 0.0], 0.01, 0.9)) == []


def test_an_undecided_ratio_says_what_would_decide_it() -> None:
    undecided = ratio(UNDECIDED, [1000.0] * 6).model_copy(update={"more_pairs": 4})

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
    outcomes: list[Outcomes] = [(each,) if isinstance(each, str) else each for each in quantities]
    return certain(dict(zip(("throughput", "accuracy", "peak memory"), outcomes, strict=False)))


def test_over_several_sessions_it_is_sessions_that_would_decide() -> None:
    undecided = ratio(UNDECIDED, [1000.0] * 6)
    told = [SessionRatio(start_utc=f"2026-11-2{day}", low=0.9, high=1.1, trusted=True) for day in range(3)]
    over = undecided.model_copy(update={"sessions": tuple(told), "more_sessions": 2})
    expected = f"throughput is undecided over 3 sessions: about 2 more sessions will suffice, {ODDS} (bench --again"
    assert reason(over).startswith(expected)
    assert "bench.max_minutes" in reason(over.model_copy(update={"more_sessions": None}))


def test_pairs_too_few_for_an_interval_say_how_to_get_enough() -> None:
    few = "throughput is undecided: at least 6 accepted rounds are needed"
    assert reason(ratio([9.0] * 3, [9.0] * 3)) == f"{few} (set bench.max_minutes: 7)"
    lost = ratio([9.0, 9.0, 9.0, "hot", "hot"], [9.0] * 5)
    assert reason(lost) == f"{few}, but 2 of 5 rounds had to be rejected (set bench.max_minutes: 11)"
    slow = RoundCost("bench.max_minutes", 1, 900.0)
    assert "6 rounds would take 105 minutes here; fewer variants" in reason(ratio([9.0] * 3, [9.0] * 3), slow)


def test_more_than_an_hour_is_no_advice() -> None:
    undecided = ratio(UNDECIDED, [1000.0] * 6).model_copy(update={"more_pairs": 53})
    assert f"60 min of rounds in all will suffice, {ODDS} (set bench.max_minutes: 60)" in reason(undecided)
    interval = stats.Interval(undecided.estimate or 0.0, undecided.low or 0.0, undecided.high or 0.0, 6)
    for more_pairs in (54, None):
        beyond = undecided.model_copy(update={"more_pairs": more_pairs})
        assert reason(beyond) == (
            "throughput is undecided at the margin of 3.0%; with 60 minutes of rounds, a margin of "
            f"{planning.margin_decided(interval, 59):.1%} allows a decision (compare.margins)"
        )


def test_minutes_that_were_not_used_up_are_not_advised() -> None:
    undecided = ratio([10.3, 10.7, 10.4, 10.6, 10.2, 10.8], [10.0] * 6)
    allowed = TEN_IN_TEN_MINUTES._replace(seconds=100.0)
    assert "set bench.max_minutes: 2.5" in reason(undecided, allowed)
    assert "(bench --again)" in reason(undecided, allowed._replace(minutes=2.5))


def test_undecided_accuracy_says_how_many_seeds_would_decide() -> None:
    def reason(found: Accuracy) -> str:
        (text,) = accuracy_reasons(found)
        return text

    assert reason(verdicts.accuracy([0.0], 0.01, 0.9)).startswith("accuracy is undecided: one seed shows no variation")
    two = verdicts.accuracy([0.0, 0.0], 0.01, 0.9)
    assert reason(two).startswith(f"accuracy is undecided with 2 seeds: about 1 more seed will suffice, {ODDS}")
    some = verdicts.accuracy([-0.009, 0.006, 0.004], 0.01, 0.9)
    assert reason(some) == (
        f"accuracy is undecided with 3 seeds: about {some.more_seeds} more seed will suffice, {ODDS} (train.seeds)"
    )
    for more_seeds in (21, None):
        half = some.mean_fraction - (some.low_fraction or 0.0)
        margin = planning.margin_of_seeds(some.mean_fraction, half, 3, 23)
        assert reason(some.model_copy(update={"more_seeds": more_seeds})) == (
            "accuracy is undecided with 3 seeds at the margin of 1 percentage point; with 20 more seeds, a margin "
            f"of {math.ceil(1e4 * margin) / 100:g} points allows a decision (compare.margins.accuracy)"
        )
