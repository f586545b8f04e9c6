from __future__ import annotations

import re

import pytest

from pipeline.report import html, markdown
from tests.factories import make_result, make_run
from tests.report.conftest import HOSTILE, Made, made
from tests.report.reader import Page

SHAPES = {"line", "rect", "circle", "polyline", "path"}


@pytest.fixture(scope="module")
def page(usual: Made) -> Page:
    return Page(html(*usual))


@pytest.fixture(scope="module")
def verdicts(mixed: Made) -> Page:
    return Page(html(*mixed))


def test_colours_and_brackets_show_the_decisions(verdicts: Page) -> None:
    badges = [attributes["class"].split()[1] for attributes in verdicts.all("span", "badge")]
    assert badges[:6] == ["pays", "costs", "neutral", "trades", "undecided", "untrusted"]
    assert [len(verdicts.all("span", kind)) for kind in ("better", "worse")] == [2, 2]
    assert len(verdicts.all("span", "unbelieved")) == 1  # in the card
    assert ".unbelieved { color: var(--soft);" in verdicts.style


def test_a_badge_names_the_two_verdicts_that_remain() -> None:
    measured = [make_result(name, [make_run(seed) for seed in range(3)]) for name in ("baseline", "other")]
    slightly = made(measured, throughput={"other": 1.03}, memory={"other": 1.2}, rejected={})
    assert slightly.comparison.variants[1].verdict == "undecided"
    assert "trades or costs" in Page(html(*slightly)).heard
    assert "is **trades or costs**" in markdown(slightly.comparison)


def test_the_answer_has_large_numerals_below_the_intervals(page: Page) -> None:
    heard = page.heard
    assert heard.index("[Intervals. ddp") < heard.index("[The answer]") < heard.index("What the verdicts rest on")
    assert len(page.all("dl", "numerals")) == 2  # the baseline has none
    assert page.all("circle", "")
    assert page.all("g", "point")


def test_pictures_have_a_whisker_for_each_interval(page: Page, usual: Made) -> None:
    variants, shares = 2, 3
    assert len(page.all("line", "whisker")) == 3 * variants + 2 + 4 * shares  # three quantities, A/A, techniques
    assert len(page.all("svg", "dots")) == 2 * len(usual.comparison.bench.arms)
    assert len(page.all("polyline", "thick")) == 2 * 3
    assert len(page.all("span", "number")) == 3
    assert len(page.all("span", "tensors")) == 3


def test_shapes_stand_inside_their_pictures(page: Page, verdicts: Page) -> None:
    for tag, attributes in page.elements + verdicts.elements:
        for name in ("x1", "x2", "cx", "y1", "y2", "cy"):
            value = attributes.get(name, "0")
            if tag in SHAPES and value.endswith("%"):
                assert 0 <= float(value[:-1]) <= 100


def test_names_cannot_become_elements(hostile: Made) -> None:
    page = Page(html(*hostile))
    assert not page.all("img")
    assert not any("onerror" in attributes for _, attributes in page.elements)
    assert page.text.count(HOSTILE.split("_")[1]) >= 10  # the name is still shown as it is


def test_a_reason_with_line_breaks_stays_one_sentence() -> None:
    broken = make_result("other", skipped={"bf16": "first\nsecond\u2028third\x1cfourth"})
    page = made([make_result("baseline"), broken])
    for text in (markdown(page.comparison), Page(html(*page)).heard):
        assert "Skipped: bf16, because first second third fourth." in text


def test_names_and_commands_are_code(usual: Made, page: Page) -> None:
    assert "<code>python -m pipeline bench --again</code>" in html(*usual)
    assert "`" not in page.heard
    assert "Take `ddp`" in markdown(usual.comparison)


def test_the_page_loads_nothing_and_runs_no_script(page: Page) -> None:
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object", "embed", "base", "a", "img"}
    for _, attributes in page.elements:
        assert not attributes.keys() & {"src", "srcset", "href", "poster", "data", "action"}
        assert not any(name.startswith("on") for name in attributes)
        assert "url(" not in attributes.get("style", "")
    assert "url(" not in page.style
    assert "@import" not in page.style
    assert "://" not in page.text + page.style


def test_the_page_is_well_formed_and_accessible(page: Page) -> None:
    assert (page.open, page.wrong) == ([], [])
    assert page.all("html")[0]["lang"] == "en"
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert page.all("title")
    assert len(page.all("h1")) == 1
    assert all(heading.get("scope") in ("col", "row", "rowgroup") for heading in page.all("th"))
    assert all(box["tabindex"] == "0" and box["aria-label"] for box in page.all("div", "scroll"))
    # The style of cards, "display: block", removes a table's own role.
    assert all(table["role"] == "table" for table in page.all("table", "cards"))
    plots = {"forest", "bars", "chart", "strips"}
    drawn = [element for element in page.all("div") if plots & set(element.get("class", "").split())]
    assert len(drawn) == 3 + 1 + 1 + 2 + 2 + 2
    assert all(element["role"] == "img" and element["aria-label"] for element in drawn)


def test_the_page_is_made_for_dark_screens_and_paper(page: Page) -> None:
    assert "@media screen and (prefers-color-scheme: dark)" in page.style
    assert "@media print" in page.style
    used = set(re.findall(r"var\(--([a-z_0-9-]+)\)", page.style))
    assert used <= set(re.findall(r"--([a-z_0-9-]+):", page.style))
