"""What is certain beside an undecided verdict. The golden page ``reasons`` has what would decide a figure."""

from __future__ import annotations

import math

from pipeline.comparison import planning
from pipeline.comparison.advice import certain, ratio_reasons
from pipeline.comparison.stats import ANY, Decision, Outcomes, decide
from pipeline.results.figures import MEMORY
from tests.factories import TEN_IN_TEN_MINUTES, ratio_of


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
