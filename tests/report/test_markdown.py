from __future__ import annotations

import re

from pipeline.report.markdown import CUT, LIMIT, markdown
from pipeline.tracking.labels import NOTE_LIMIT
from tests.factories import make_result
from tests.report.conftest import REASON, Made, made, plain

VERDICTS = ("pays", "trades", "costs", "neutral", "undecided", "untrusted")


def test_the_verdicts_come_first(mixed: Made) -> None:
    text = plain(markdown(mixed.comparison))
    answers = text[: text.index("\n| ")]
    for verdict in VERDICTS:
        assert re.search(rf"^- \*\*{verdict}\*\* (is )?\*\*{verdict}\*\*: ", answers, flags=re.MULTILINE), verdict
    assert re.search(r"\*\*pays\*\*: 1\.\d\dx the throughput \(1\.\d\d to 1\.\d\d\), peak memory unchanged", answers)
    assert "  - Throughput is undecided: about" in answers


def test_what_is_untrusted_says_why_and_stands_in_brackets(mixed: Made) -> None:
    text = markdown(mixed.comparison)
    answer = next(line for line in text.splitlines() if line.startswith("- **untrusted**"))
    assert re.search(r"Throughput untrusted \\\[1\.[45]\dx, no interval from 4 pairs\\\], ", plain(answer))
    [reason] = [line for line in text.splitlines() if line.startswith("  - Throughput: 8 of 12")]
    assert REASON in reason
    row = next(line for line in text.splitlines() if line.startswith("| **untrusted**"))
    assert re.search(r"<br>untrusted<br>\\\[1\.[45]\dx, no interval from 4 pairs\\\] $", plain(row.split("|")[2]))


def test_a_machine_that_is_not_trusted_is_named_once_and_first(noisy: Made) -> None:
    text = markdown(noisy.comparison)
    why = (noisy.comparison.noise_throughput.why_untrusted or "").replace("_", "\\_")
    assert text.count(why) == 1
    assert text.index(why) < text.index("- **ddp**")


def test_tables_are_rectangular_with_the_baseline_first(usual: Made) -> None:
    tables = re.findall(r"(?:^\|.*\|\n)+", markdown(usual.comparison), flags=re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        rows = [line.strip("|").split("|") for line in table.splitlines()]
        assert len({len(row) for row in rows}) == 1
    for table in (tables[0], *tables[2:]):  # the second is of techniques
        names = [line.split("|")[1].strip().split("<br>")[0] for line in table.splitlines()[2:]]
        assert names == ["**baseline**", "**ddp** \N{MIDDLE DOT} pays", "**memory** \N{MIDDLE DOT} trades"]


def test_intervals_stand_in_the_table(usual: Made) -> None:
    row = next(line for line in markdown(usual.comparison).splitlines() if line.startswith("| **memory**"))
    _, _, throughput, memory, accuracy, _, _ = plain(row).split("|")
    assert throughput == " 16,143 samples/s<br>0.798x<br>0.793 to 0.804 "
    assert memory == " 110 MiB<br>0.550x<br>0.549 to 0.551 "
    assert accuracy == " 90.07%<br>0.00 points<br>-0.15 to +0.15 "


def test_the_usual_report_is_a_note_in_mlflow(usual: Made) -> None:
    text = markdown(usual.comparison)
    assert len(text) <= NOTE_LIMIT
    assert text.count("<details>") == text.count("</details>") == 6


def test_any_report_is_a_comment_on_github() -> None:
    names = [f"a-variant-with-quite-a-long-name-{index}" for index in range(150)]
    many, _ = made([make_result("baseline"), *(make_result(name) for name in names)], rounds=6)
    text = markdown(many)
    assert len(text) <= LIMIT
    assert text.endswith(CUT)
    assert all(f"- **{name}** " in text for name in names)


def test_names_cannot_break_it(hostile: Made) -> None:
    text = markdown(hostile.comparison)
    assert "<img" not in text
    row = next(line for line in text.splitlines() if line.startswith("| **") and "&lt;img" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 6
    assert "$\\\\x\\_1$" in row


def test_a_baseline_alone(alone: Made) -> None:
    assert "- **baseline**: The reference: throughput unknown" in markdown(alone.comparison)
