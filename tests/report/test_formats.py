from __future__ import annotations

from typing import Any

import pytest

from pipeline import pages
from pipeline.comparison.stats import Difference
from pipeline.report import facts
from pipeline.results import Unit, figures
from tests.factories import make_accuracy
from tests.report.conftest import plain


def ratio(**changes: Any) -> Difference:
    values: dict[str, Any] = {"estimate": 1.42, "low": 1.38, "high": 1.47, "pairs": 12, "margin": 0.03}
    return Difference(**values | {"decision": "better"} | changes)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (pages.number(20_000.4, "samples/s"), "20,000 samples/s"),
        (pages.number(12.345, "ms"), "12.3 ms"),
        (pages.number(0.0042), "0.0042"),
        (pages.number(-0.05), "-0.050"),
        (pages.number(None, "ms"), "unknown"),
        (pages.price(999.4), "999"),
        (pages.of_figure(figures.PRICE, 0.25, Unit()), "0.25"),
        (pages.price(999.7), "1,000"),
        (pages.size(-5 * 2**20), "-5.00 MiB"),
        (pages.size(0), "0 B"),
        (pages.size(88 * 2**10), "88.0 KiB"),
        (pages.size(200 * 2**20), "200 MiB"),
        (pages.size(3 * 2**29), "1.50 GiB"),
        (pages.scaled(6_300_000, "FLOP"), "6.30 MFLOP"),
        (pages.scaled(1.2e12, "FLOP/s"), "1.20 TFLOP/s"),
        (pages.percent(0.9, 2), "90.00%"),
        (pages.plain_percent(0.03), "3%"),
        (pages.points(None), "unknown"),
        (pages.points(-0.00001), "0.00"),
        (pages.points(-0.0123), "-1.23"),
        (pages.times(1.5), "1.50x"),
        (pages.times(0.0456), "0.046x"),
        (pages.count(1, "process"), "1 process"),
        (pages.count(2, "process"), "2 processes"),
    ],
)
def test_numbers_have_their_digits_and_their_unit(shown: str, text: str) -> None:
    assert plain(shown) == text


def test_a_narrow_interval_has_two_different_ends() -> None:
    assert plain(facts.text(ratio())) == "1.42x (1.38 to 1.47)"
    narrow = ratio(estimate=0.5502, low=0.5488, high=0.5511)
    assert plain(facts.text(narrow)) == "0.550x (0.549 to 0.551)"


def test_an_untrusted_ratio_is_in_brackets() -> None:
    noisy = ratio(decision="untrusted", why_untrusted="throughput: too noisy")
    assert plain(facts.text(noisy)) == "untrusted [1.42x, 1.38 to 1.47]"
    few = noisy.model_copy(update={"low": None, "high": None, "pairs": 3})
    assert plain(facts.text(few)) == "untrusted [1.42x, too few accepted rounds (3) for an interval]"
    unknown = few.model_copy(update={"estimate": None, "pairs": 0})
    assert facts.text(unknown) == "untrusted"


def test_too_few_pairs_have_no_interval() -> None:
    few = ratio(low=None, high=None, pairs=4, decision="undecided")
    assert plain(facts.text(few)) == "1.42x undecided (too few accepted rounds (4) for an interval)"
    assert plain(facts.text(make_accuracy([0.0003]))) == "+0.03 points undecided (too few seeds (1) for an interval)"


@pytest.mark.parametrize(
    ("noun", "low", "high", "text"),
    [
        ("throughput", 0.79, 0.83, "17 to 21% slower"),
        ("peak memory", 0.43, 0.46, "54 to 57% less memory"),
        ("throughput", 1.382, 1.384, "38.2 to 38.4% faster"),
        ("throughput", 0.96, 1.02, "4% slower to 2% faster"),
        ("peak memory", 0.55, 0.55, "45.0% less memory"),
        ("energy a sample", 2.1, 2.4, "2.10 to 2.40 times the energy a sample"),
    ],
)
def test_a_change_speaks_in_per_cent(noun: str, low: float, high: float, text: str) -> None:
    assert plain(facts.change(noun, ratio(estimate=(low * high) ** 0.5, low=low, high=high))) == text
