"""The top of the report: which variant to use, then the decided verdicts, then the other verdicts."""

from __future__ import annotations

import re

from pipeline.report import html, sentences
from pipeline.report.markdown import markdown
from tests.factories import make_result, make_run
from tests.report.conftest import REASON, Made, made, plain
from tests.report.reader import Page


def advised(found: Made) -> str:
    return plain(sentences.advice(found.comparison))


def test_the_advice_says_if_nothing_is_faster_and_what_is_not_decided() -> None:
    names = ("baseline", "small", "open")
    measured = [make_result(name, [make_run(seed, test_correct=9000) for seed in range(3)]) for name in names]
    small = {"throughput": {"small": 0.8, "open": 1.04}, "memory": {"small": 0.5}}
    both = made(measured, **small, rejected={})
    assert advised(both).endswith(" times the speed; `open` is not decided yet.")
    noisy = made(measured, **small, rejected={"open": dict.fromkeys(range(2, 10), "noise")})
    assert advised(noisy).endswith(" times the speed; `open` is not to be trusted.")
    alone = made(measured[:2], **small, rejected={})
    assert advised(alone).endswith(" times the speed; nothing here is faster.")
    slow = made(measured[:2], throughput={"small": 0.8}, rejected={})
    assert advised(slow) == "Keep `baseline`: nothing here is better."


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
    one_seed = advised(of(1))
    assert one_seed.startswith("Take `small` if memory is short: 0.")
    assert one_seed.endswith(
        " times the speed (not decided yet) and an unknown accuracy, with too few seeds (1) for an interval."
    )


def test_decided_quantities_of_an_untrusted_variant_are_named() -> None:
    runs = [make_run(seed, test_correct=9000) for seed in range(3)]
    measured = [make_result(name, runs) for name in ("baseline", "m")]
    both = {arm: dict.fromkeys(range(2, 10), REASON) for arm in ("baseline", "m")}
    found = made(measured, memory={"m": 0.5}, rejected=both)
    assert re.fullmatch(r"Decided nevertheless: `m` has 0\.\d+ to 0\.5\d* times the memory\.", advised(found))
    measured.append(make_result("same", runs))
    beside = advised(made(measured, memory={"m": 0.5}, rejected={"m": both["m"]}))
    assert re.fullmatch(
        r"`m` is not to be trusted; decided nevertheless: `m` has 0\.\d+ to 0\.5\d* times the memory\.", beside
    )


def test_names_and_commands_are_code(usual: Made) -> None:
    page = html(*usual)
    assert "<code>python -m pipeline bench --again</code>" in page
    assert "`" not in Page(page).heard
    assert "Take `ddp`" in markdown(usual.comparison)
