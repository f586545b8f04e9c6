from __future__ import annotations

import re

from pipeline.report.markdown import CUT, LIMIT, markdown
from pipeline.tracking.labels import NOTE_LIMIT
from tests.factories import make_result
from tests.report.conftest import Made, made


def test_the_usual_report_fits_into_a_note_in_mlflow(usual: Made) -> None:
    assert len(markdown(usual.comparison)) <= NOTE_LIMIT


def test_any_report_fits_into_a_comment_on_github() -> None:
    names = [f"a-variant-with-quite-a-long-name-{index}" for index in range(150)]
    many, _ = made([make_result("baseline"), *(make_result(name) for name in names)], rounds=6)
    text = markdown(many)
    assert len(text) <= LIMIT
    assert text.endswith(CUT)
    assert all(f"- **{name}** " in text for name in names)


def test_names_with_markup_cannot_break_the_markdown(hostile: Made) -> None:
    text = markdown(hostile.comparison)
    assert "<img" not in text
    row = next(line for line in text.splitlines() if line.startswith("| **") and "&lt;img" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 6
    assert "$\\\\x\\_1$" in row
