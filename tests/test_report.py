from __future__ import annotations

import base64
import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline import report
from pipeline.comparison import Comparison, compare
from pipeline.config import Compare
from pipeline.results import HistoryRow, Result
from tests.factories import ENVIRONMENT, make_history, make_result, make_run

Histories = dict[str, list[HistoryRow]]


def made(*measured: Result, target: float = 0.85, **histories: list[HistoryRow]) -> tuple[Comparison, Histories]:
    known = {result.variant: make_history([run.seed for run in result.runs]) for result in measured} | histories
    return compare(measured, known, Compare(target_accuracy=target), ENVIRONMENT), known


FAST = make_result(
    "fast",
    [
        make_run(seed, test_correct=9000 + 10 * seed, samples_per_second=30_000.0, peak_memory_bytes=500 * 2**20)
        for seed in (0, 1, 2)
    ],
    applied={"parallelism": "ddp"},
    backend="gloo",
    world_size=2,
)


@pytest.fixture(scope="module")
def usual() -> tuple[Comparison, Histories]:
    return made(make_result("baseline"), FAST, fast=make_history(seconds_per_epoch=2.0))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without pictures, which take the time: for tests of something else."""
    monkeypatch.setattr(report, "_pictures", lambda *_: [])


class Page(HTMLParser):
    """Every element with its attributes, and the text outside <style>."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.style = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "style":
            self.style += data
        else:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def page(usual: tuple[Comparison, Histories]) -> Page:
    return Page(report.html(*usual))


def spaced(text: str) -> str:
    """``text`` with ordinary spaces and hyphens."""
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-")


def test_the_answer_in_plain_words(usual: tuple[Comparison, Histories]) -> None:
    comparison, _ = usual
    assert spaced(report.sentence(comparison.variants[0], comparison)) == (
        "The reference. Trains at 20,000 samples/s with a peak memory of 200 MiB. Test accuracy is 90.00 % (mean of "
        "3 seeds). Reaches 85 % after 6.00 s of training."
    )
    assert spaced(report.sentence(comparison.variants[1], comparison)) == (
        "Trains 1.50 times as fast as baseline (30,000 against 20,000 samples/s). Peak memory (its largest process) is "
        "2.50 times as large (500 MiB against 200 MiB). Test accuracy differs by +0.10 points (mean of 3 seeds, from "
        "0.00 to +0.20). Reaches 85 % after 4.00 s of training, baseline after 6.00 s."
    )


@pytest.mark.usefixtures("undrawn")
def test_what_is_unknown_is_called_unknown() -> None:
    runs = [make_run(seed, samples_per_second=None, peak_memory_bytes=None, step_p50_ms=None) for seed in (0, 1, 2)]
    comparison, histories = made(make_result("baseline"), make_result("other", runs))
    said = spaced(report.sentence(comparison.variants[1], comparison))
    assert "Its throughput beside baseline is unknown (unknown against 20,000 samples/s)" in said
    assert "Its peak memory beside baseline is unknown (unknown against 200 MiB)" in said
    row = next(line for line in report.markdown(comparison).splitlines() if line.startswith("| **other**"))
    assert row.count("unknown<br>unknown") == 2
    assert "unknown" in Page(report.html(comparison, histories)).text


def test_a_page_is_made_without_any_speed_or_memory() -> None:
    runs = [make_run(seed, samples_per_second=None, peak_memory_bytes=None) for seed in (0, 1, 2)]
    page = Page(report.html(*made(make_result("baseline", runs))))
    assert len(page.all("img")) == 4  # no scatter


@pytest.mark.parametrize(
    ("target", "said", "cell"),
    [
        (0.85, "Reaches 85 % with 2 of 3 seeds only", "not by every seed<br>2 of 3 seeds"),
        (0.95, "Does not reach 95 %", "not reached<br>0 of 3 seeds"),
    ],
)
def test_a_target_that_was_not_reached(target: float, said: str, cell: str) -> None:
    late = [*make_history((0, 1)), *make_history((2,), (0.5, 0.6, 0.7))]
    comparison, _ = made(make_result("baseline"), make_result("late"), target=target, late=late)
    assert said in spaced(report.sentence(comparison.variants[1], comparison))
    assert cell in report.markdown(comparison)


def test_one_seed_claims_no_spread() -> None:
    one = [make_run(0)]
    comparison, _ = made(make_result("baseline", one), make_result("other", [make_run(0, test_correct=8950)]))
    assert "differs by -0.50 points (a single seed)" in spaced(report.sentence(comparison.variants[1], comparison))
    assert "\N{PLUS-MINUS SIGN} 0" not in report.markdown(comparison)


@pytest.mark.usefixtures("undrawn")
def test_notes_say_what_was_left_out_refused_and_resumed() -> None:
    runs = [
        make_run(0),
        make_run(1, refusals=("the GPU throttled",)),
        make_run(2, refusals=("the GPU throttled", "something recompiled."), resumes=1),
    ]
    comparison, histories = made(
        make_result("baseline"), make_result("memory", runs, left_out={"bf16": "this CPU would emulate it"})
    )
    texts = [
        "Left out: bf16, as this CPU would emulate it.",
        "Refused, seed 1, 2: the GPU throttled.",
        "Refused, seed 2: something recompiled.",
        "Interrupted and resumed: seed 2.",
    ]
    assert report.notes(comparison) == [("memory", text) for text in texts]
    page, markdown = Page(report.html(comparison, histories)).text, report.markdown(comparison)
    for text in texts:
        assert text in page
        assert f"- **memory**: {text}" in markdown


def test_no_significance_is_claimed(usual: tuple[Comparison, Histories], page: Page) -> None:
    assert "descriptive" in page.text
    assert "no verdicts" in page.text
    assert "descriptive" in report.markdown(usual[0])


def test_markdown_tables_are_rectangular_with_the_baseline_first(usual: tuple[Comparison, Histories]) -> None:
    tables = re.findall(r"(?:^\|.*\|\n)+", report.markdown(usual[0]), flags=re.MULTILINE)
    assert len(tables) == 2
    for table, columns in zip(tables, (5, 6), strict=True):
        rows = [line.strip("|").split("|") for line in table.splitlines()]
        assert [len(row) for row in rows] == [columns] * 4  # heading, rule, two variants
        assert [row[0].strip().split("<br>")[0] for row in rows[2:]] == ["**baseline**", "**fast**"]
    assert "| 30,000 samples/s<br>1.50\N{MULTIPLICATION SIGN} |" in tables[0].replace("\N{NO-BREAK SPACE}", " ")


HOSTILE = "$\\x_1$<img src=x onerror=alert(1)>|`*\"'&"


@pytest.fixture(scope="module")
def hostile() -> tuple[Comparison, Histories]:
    baseline = make_result("baseline")
    config: dict[str, Any] = {**baseline.config, "train": {**baseline.config["train"], "model": HOSTILE}}
    other = make_result(HOSTILE, config=config, left_out={HOSTILE: HOSTILE}, device=HOSTILE)
    return made(baseline.model_copy(update={"config": config, "device": HOSTILE}), other)


def test_names_cannot_become_elements_of_the_page(hostile: tuple[Comparison, Histories]) -> None:
    page = Page(report.html(*hostile))
    assert len(page.all("img")) == 6
    assert all(image["src"].startswith("data:") and "onerror" not in image for image in page.all("img"))
    assert page.text.count(HOSTILE) >= 8  # the name is still shown as it is


def test_names_cannot_break_the_markdown(hostile: tuple[Comparison, Histories]) -> None:
    markdown = report.markdown(hostile[0])
    assert "<img" not in markdown
    row = next(line for line in markdown.splitlines() if line.startswith("| **") and "&lt;img" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 6
    assert "$\\\\x\\_1$" in row


@pytest.mark.usefixtures("undrawn")
def test_names_stay_inside_the_directory(hostile: tuple[Comparison, Histories], tmp_path: Path) -> None:
    comparison, histories = hostile
    bad = "../../outside"
    renamed = comparison.variants[1].model_copy(update={"variant": bad})
    comparison = comparison.model_copy(update={"variants": (comparison.variants[0], renamed)})
    report.write(comparison, {**histories, bad: histories[HOSTILE]}, tmp_path / "a" / "b" / "reports")
    assert {path.name for path in (tmp_path / "a" / "b" / "reports" / "metrics").iterdir()} == {
        "baseline.json",
        "..%2F..%2Foutside.json",
    }


def test_the_page_asks_the_network_for_nothing(page: Page) -> None:
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object", "embed", "base", "a"}
    for _, attributes in page.elements:
        for name in ("src", "srcset", "href", "poster", "data", "action"):
            assert attributes.get(name, "data:").startswith("data:")
    assert "url(" not in page.style
    assert "@import" not in page.style


def test_pictures_are_whole_and_refer_to_nothing_outside(page: Page) -> None:
    images = page.all("img")
    assert len(images) == 6  # three pictures, light and dark
    assert len({image["src"] for image in images}) == 6
    for image in images:
        svg = ET.fromstring(base64.b64decode(image["src"].removeprefix("data:image/svg+xml;base64,")))
        assert svg.tag == "{http://www.w3.org/2000/svg}svg"
        references = [value for node in svg.iter() for key, value in node.attrib.items() if key.endswith("href")]
        assert references
        assert all(reference.startswith("#") for reference in references)


def test_pictures_are_described_with_their_numbers(page: Page) -> None:
    accuracy, _, loss, _, scatter, _ = (spaced(image["alt"]) for image in page.all("img"))
    assert "fast ends at 90.10 % after 9.00 s" in accuracy
    assert "baseline ends at 0.250" in loss
    assert "fast: 30,000 samples/s at 500 MiB" in scatter


def test_the_page_is_accessible(page: Page) -> None:
    assert page.all("html")[0]["lang"] == "en"
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert page.all("title")
    assert len(page.all("h1")) == 1
    assert all(heading.get("scope") in ("col", "row") for heading in page.all("th"))
    assert all(box["tabindex"] == "0" and box["aria-label"] for box in page.all("div") if box.get("class") == "scroll")
    for cards in (table for table in page.all("table") if table.get("class") == "cards"):
        assert cards["role"] == "table"  # as cards it would no longer be one for a screen reader


def test_the_page_holds_the_evidence(page: Page) -> None:
    for fact in (ENVIRONMENT["hash"], "hardware.cpu.model", "Example CPU @ 2.0 GHz", "augment.flip", "d" * 64):
        assert fact in page.text
    assert page.text.count("9,000 of 10,000") == 4  # three seeds of the baseline and one of the other
    assert make_run(2).model_sha256[:12] in page.text


def test_lists_of_devices_are_shown_key_by_key() -> None:
    assert report._flat({"gpus": [{"model": "A"}, {"model": "B"}], "none": [], "flags": ["x"]}) == [
        ("gpus.0.model", "A"),
        ("gpus.1.model", "B"),
        ("none", "[]"),
        ("flags", '["x"]'),
    ]


def test_the_same_comparison_gives_the_same_bytes(usual: tuple[Comparison, Histories], tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        report.write(*usual, tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == [
        "accuracy.csv",
        "comparison.html",
        "comparison.json",
        "comparison.md",
        "loss.csv",
        "metrics/baseline.json",
        "metrics/fast.json",
    ]
    assert contents[0]["comparison.json"].decode() == usual[0].to_json()


@pytest.mark.usefixtures("undrawn")
def test_metrics_of_a_variant_that_is_gone_are_removed(usual: tuple[Comparison, Histories], tmp_path: Path) -> None:
    report.write(*usual, tmp_path)
    report.write(*made(make_result("baseline")), tmp_path)
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == ["baseline.json"]


@pytest.mark.usefixtures("undrawn")
def test_metrics_are_flat_numbers(usual: tuple[Comparison, Histories], tmp_path: Path) -> None:
    report.write(*usual, tmp_path)
    values = json.loads((tmp_path / "metrics" / "fast.json").read_text(encoding="utf-8"))
    assert values["throughput_ratio"] == 1.5
    assert values["peak_memory_ratio"] == 2.5
    assert values["accuracy_difference_mean_fraction"] == pytest.approx(0.001)
    assert values["time_to_target_seconds"] == 4.0
    assert all(isinstance(value, int | float) for value in values.values())


def test_plot_data_has_every_run_and_no_blank_field(usual: tuple[Comparison, Histories]) -> None:
    accuracy = list(csv.DictReader(io.StringIO(report.accuracy_csv(*usual))))
    loss = list(csv.DictReader(io.StringIO(report.loss_csv(*usual))))
    assert len(accuracy) == 2 * 3 * 3  # variants, seeds, evaluations
    assert len(loss) == 2 * 3 * 12  # rows of history
    assert all(value for row in (*accuracy, *loss) for value in row.values())
    assert accuracy[0] == {
        "variant": "baseline",
        "seed": "0",
        "epoch": "1.0",
        "step": "235",
        "train_seconds": "3.0",
        "test_accuracy": "0.8",
    }


def test_many_variants_and_long_names_fit_the_pictures() -> None:
    long = [make_result(f"a-variant-with-quite-a-long-name-{index}") for index in range(3)]
    page = Page(report.html(*made(make_result("baseline"), *long)))
    few = Page(report.html(*made(make_result("baseline"))))
    assert int(page.all("img")[0]["height"]) > int(few.all("img")[0]["height"])  # the legend takes no room from it
