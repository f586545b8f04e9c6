from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from pipeline.report import html
from tests.factories import ENVIRONMENT, make_run
from tests.report.conftest import HOSTILE, REASON, Made, plain

SHAPES = {"line", "rect", "circle", "polyline", "path"}
VOID = {"meta", "img", "br", "wbr", "hr", "input", "link"}


class Page(HTMLParser):
    """Every element with its attributes, and the text outside <style>."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.style = ""
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.text += data

    def all(self, tag: str, kind: str = "") -> list[dict[str, str]]:
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and set(kind.split()) <= set(attributes.get("class", "").split())
        ]


def spaced(text: str) -> str:
    return re.sub(r"\s+", " ", plain(text))


@pytest.fixture(scope="module")
def page(usual: Made) -> Page:
    return Page(html(*usual))


@pytest.fixture(scope="module")
def verdicts(mixed: Made) -> Page:
    return Page(html(*mixed))


def test_the_answer_comes_first(verdicts: Page) -> None:
    badges = [attributes["class"].split()[1] for attributes in verdicts.all("span", "badge")]
    names = ["pays", "costs", "neutral", "undecided", "untrusted", "trades"]
    assert badges[:6] == names
    before = spaced(verdicts.text[: verdicts.text.index("The comparison")])
    assert re.search(r"pays .*1\.\d\dx the throughput \(1\.\d\d to 1\.\d\d\), peak memory unchanged within 3%", before)
    assert "Throughput is undecided: about" in before
    assert REASON in before


def test_what_is_not_believed_is_grey_and_in_brackets(verdicts: Page, noisy: Made) -> None:
    assert len(verdicts.all("span", "unbelieved")) == 1
    assert ".unbelieved { color: var(--soft);" in verdicts.style
    assert re.search(r"Throughput untrusted \[1\.[45]\dx, no interval from 4 pairs\], peak", spaced(verdicts.text))
    assert not verdicts.all("section", "banner")
    page, why = Page(html(*noisy)), noisy.comparison.noise_throughput.why_untrusted or ""
    assert len(page.all("section", "banner")) == 1
    assert page.text.count(why) == 1
    assert page.text.index(why) < page.text.index("ddp")


def test_the_reference_and_what_the_verdicts_rest_on_follow(page: Page) -> None:
    before = spaced(page.text[: page.text.index("The comparison")])
    assert "The reference: 20,215 samples/s" in before
    assert "Speed and memory: 12 rounds" in before
    assert "A/A, baseline against itself" in before


def test_pictures_have_a_whisker_for_each_interval(page: Page, usual: Made) -> None:
    variants, shares = 2, 3
    assert len(page.all("line", "whisker")) == 3 * variants + 2 + 4 * shares  # three quantities, A/A, techniques
    arms = usual.comparison.bench.arms
    assert len(page.all("svg", "dots")) == 2 * len(arms)
    assert len(page.all("polyline", "thick")) == 2 * 3
    assert len(page.all("span", "number")) == 3
    assert len(page.all("span", "tensors")) == 3


def test_pictures_are_described_with_their_numbers(page: Page) -> None:
    alts = [spaced(attributes["aria-label"]) for _, attributes in page.elements if attributes.get("role") == "img"]
    throughput, memory, accuracy, ledger, front, over_time, loss, *_ = alts
    assert "memory: 0.798x (0.793 to 0.804)" in throughput
    assert "memory: 0.550x (0.549 to 0.551)" in memory
    assert "ddp: +0.03 points" in accuracy
    assert "baseline measured 200 MiB" in ledger
    assert "3 memory: 0.80x the throughput at 0.55x the memory with 90.07%, on the front" in front
    assert "memory ends at 90.07% after 9.00 s" in over_time
    assert "baseline ends at 0.250" in loss


def test_shapes_stand_inside_their_pictures(page: Page, verdicts: Page) -> None:
    for tag, attributes in page.elements + verdicts.elements:
        for name in ("x1", "x2", "cx", "y1", "y2", "cy"):
            value = attributes.get(name, "0")
            if tag in SHAPES and value.endswith("%"):
                assert 0 <= float(value[:-1]) <= 100


def test_techniques_have_a_section_where_they_were_measured(page: Page, verdicts: Page) -> None:
    assert "Each technique's own share" in page.text
    assert "The effect on peak memory is smaller beside the other techniques" in page.text
    assert "bf16 in memory was not measured" in page.text
    assert "Each technique's own share" not in verdicts.text


def test_names_cannot_become_elements(hostile: Made) -> None:
    page = Page(html(*hostile))
    assert not page.all("img")
    assert not any("onerror" in attributes for _, attributes in page.elements)
    assert page.text.count(HOSTILE.split("_")[1]) >= 10  # the name is still shown as it is


def test_the_page_asks_the_network_for_nothing_and_runs_nothing(page: Page) -> None:
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object", "embed", "base", "a", "img"}
    for _, attributes in page.elements:
        assert not attributes.keys() & {"src", "srcset", "href", "poster", "data", "action"}
        assert not any(name.startswith("on") for name in attributes)
        assert "url(" not in attributes.get("style", "")
    assert "url(" not in page.style
    assert "@import" not in page.style
    assert "://" not in page.text + page.style


def test_the_page_is_whole_and_accessible(page: Page) -> None:
    assert (page.open, page.wrong) == ([], [])
    assert page.all("html")[0]["lang"] == "en"
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert page.all("title")
    assert len(page.all("h1")) == 1
    assert all(heading.get("scope") in ("col", "row", "rowgroup") for heading in page.all("th"))
    assert all(box["tabindex"] == "0" and box["aria-label"] for box in page.all("div", "scroll"))
    assert all(table["role"] == "table" for table in page.all("table", "cards"))  # as cards no longer by itself
    plots = {"forest", "bars", "chart", "strips"}
    drawn = [each for each in page.all("div") if plots & set(each.get("class", "").split())]
    assert len(drawn) == 3 + 1 + 1 + 2 + 2 + 2
    assert all(each["role"] == "img" and each["aria-label"] for each in drawn)


def test_the_page_is_made_for_dark_screens_and_paper(page: Page) -> None:
    assert "@media screen and (prefers-color-scheme: dark)" in page.style
    assert "@media print" in page.style
    used = set(re.findall(r"var\(--([a-z_0-9-]+)\)", page.style))
    assert used <= set(re.findall(r"--([a-z_0-9-]+):", page.style))


def test_the_page_tells_what_variants_rely_on(usual: Made) -> None:
    def told(**versions: dict[str, str]) -> list[str]:
        environment = ENVIRONMENT | {"relied_on": {"variants": versions, "forms": {"int8": {"torchao": None}}}}
        text = Page(html(usual.comparison.model_copy(update={"environment": environment}), usual.histories)).text
        return re.findall(r"relied_on\S+\s+.*", text)

    assert told(baseline={}, ddp={}) == []
    assert [spaced(row) for row in told(baseline={}, ddp={"compiler": "g++ 14"})] == ["relied_on.ddp.compilerg++ 14"]


def test_the_page_holds_the_evidence(page: Page) -> None:
    for fact in (
        ENVIRONMENT["hash"],
        "hardware.cpu.model",
        "Example CPU @ 2.0 GHz",
        "augment.flip",
        "d" * 64,
        "c" * 12,
    ):
        assert fact in page.text
    assert page.text.count("9,000 of 10,000") == 2  # of 9 runs
    assert make_run(2).model_sha256[:12] in page.text
    assert f"Refused in 1 of 12 rounds: in round 5, {REASON}." in page.text
    assert re.search(r"ddp\s*\d\d,\d{3}(; \d\d,\d{3}){3}; refused; .*20[12]\.\d; 20[12]\.\d", page.text)  # as numbers
    assert "127 GFLOP/s" in plain(page.text)


def test_a_baseline_alone_has_a_page(alone: Made) -> None:
    page = Page(html(*alone))
    assert "throughput unknown" in page.text
    assert not page.all("div", "forest")
