"""The top of the report: which variant to use, then the decided verdicts, then the other verdicts."""

from __future__ import annotations

import re

import pytest

from pipeline.report import html, sentences
from pipeline.report.markdown import markdown
from tests.factories import make_result, make_run
from tests.report.conftest import REASON, Made, made, plain
from tests.report.golden import REPORTS
from tests.report.reader import Page


def advised(found: Made) -> str:
    return plain(sentences.advice(found.comparison))


def test_the_advice_names_what_pays_and_what_is_worth_its_price(usual: Made) -> None:
    assert re.fullmatch(
        r"Take `ddp`: 1\.5\d to 1\.6\d times the throughput; `memory` if memory is short: 0\.5\d+ to 0\.5\d+ times the "
        r"memory at 0\.7\d to 0\.8\d times the speed\.",
        advised(usual),
    )


def test_the_advice_says_if_nothing_is_faster_and_what_is_not_decided() -> None:
    names = ("baseline", "small", "open")
    measured = [make_result(name, [make_run(seed, test_correct=9000) for seed in range(3)]) for name in names]
    both = made(measured, throughput={"small": 0.8, "open": 1.04}, memory={"small": 0.5}, rejected={})
    assert advised(both).endswith(" times the speed; `open` is not decided yet.")
    alone = made(measured[:2], throughput={"small": 0.8}, memory={"small": 0.5}, rejected={})
    assert advised(alone).endswith(" times the speed; nothing here is faster.")
    slow = made(measured[:2], throughput={"small": 0.8}, rejected={})
    assert advised(slow) == "Keep `baseline`: nothing here is better."
    noisy = made(
        measured,
        throughput={"small": 0.8, "open": 1.5},
        memory={"small": 0.5},
        rejected={"open": dict.fromkeys(range(2, 10), "noise")},
    )
    assert advised(noisy).endswith(" times the speed; `open` is not to be trusted.")


def test_the_advice_names_a_saving_whose_price_is_not_decided() -> None:
    def of(seeds: int) -> Made:
        measured = [
            make_result(name, [make_run(seed, test_correct=correct) for seed in range(seeds)])
            for name, correct in (("baseline", 9000), ("small", 9001))
        ]
        return made(measured, throughput={"small": 0.96}, memory={"small": 0.5}, rejected={}, noise=0.02)

    assert re.fullmatch(
        r"Take `small` if memory is short: 0\.\d+ to 0\.5\d* times the memory at 0\.9\d to 1\.\d\d times the speed "
        r"\(not decided yet\)\.",
        advised(of(3)),
    )
    assert advised(of(1)) == "`small` is not decided yet.", "one seed bounds no loss of accuracy"


@pytest.mark.parametrize("name", ["alone", "stopped"])
def test_there_is_no_advice_where_nothing_is_trusted(name: str) -> None:
    assert advised(REPORTS[name]()) == ""


def test_decided_quantities_of_an_untrusted_variant_are_named() -> None:
    runs = [make_run(seed, test_correct=9000) for seed in range(3)]
    measured = [make_result(name, runs) for name in ("baseline", "m")]
    both = {arm: dict.fromkeys(range(2, 10), REASON) for arm in ("baseline", "m")}
    found = made(measured, memory={"m": 0.5}, rejected=both)
    assert re.fullmatch(r"Decided nevertheless: `m` has 0\.\d+ to 0\.5\d* times the memory\.", advised(found))


def test_the_advice_comes_first_and_decided_verdicts_before_the_others(mixed: Made) -> None:
    text = markdown(mixed.comparison)
    order = ["**Take `", "- **pays**", "- **neutral**", "- **trades**", "- **undecided**", "- **untrusted**", "\n| "]
    assert sorted(order, key=text.index) == order
    heard = Page(html(*mixed)).heard
    assert heard.index("Take pays") < heard.index("[The answer]")
    rows = [line.split()[0] for line in heard.partition("[The comparison]")[2].splitlines()[2:9]]
    assert rows == ["baseline", "pays", "costs", "neutral", "trades", "undecided", "untrusted"]


def test_all_faults_of_a_bench_are_in_one_banner() -> None:
    found = REPORTS["stopped"]()
    assert len(sentences.banner(found.comparison)) == 2  # the bench has too few pairs, and it was interrupted
    assert len(re.findall("^> ", markdown(found.comparison), re.MULTILINE)) == 1
    assert len(Page(html(*found)).all("section", "banner")) == 1


def test_names_and_commands_are_code(usual: Made) -> None:
    page = html(*usual)
    assert "<code>python -m pipeline bench --again</code>" in page
    assert "`" not in Page(page).heard
    assert "Take `ddp`" in markdown(usual.comparison)
