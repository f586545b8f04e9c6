from __future__ import annotations

import re

from pipeline.report import CUT, LIMIT, markdown
from pipeline.tracking.contents import NOTE_LIMIT
from tests.factories import make_result, make_results
from tests.report.conftest import Made, made


def test_the_usual_report_fits_into_a_note_in_mlflow() -> None:
    assert len(markdown(made(make_results(), ablate=True, window_fraction=0.5).comparison)) <= NOTE_LIMIT


def test_any_report_fits_into_a_comment_on_github() -> None:
    names = [f"a-variant-with-quite-a-long-name-{index}" for index in range(150)]
    many, _ = made([make_result("baseline"), *(make_result(name) for name in names)], rounds=6)
    text = markdown(many)
    assert len(text) <= LIMIT
    assert text.endswith(CUT)
    assert all(f"- **{name}** " in text for name in names)


def test_the_report_says_which_share_was_measured() -> None:
    """A bench of an older version does not say it."""
    shares = [markdown(made(make_results(), window_fraction=share).comparison) for share in (0.553, None)]
    assert ["12 rounds (55% of the time measured windows). In each round" in text for text in shares] == [True, False]


def test_what_all_variants_train_is_said_once() -> None:
    text = markdown(made([make_result(name, trained_count=5) for name in ("baseline", "a", "b")]).comparison)
    assert "21,840 parameters (5 of them trained), " in text
    assert "This variant trains" not in text


def test_names_with_markup_cannot_break_the_markdown(hostile: Made) -> None:
    text = markdown(hostile.comparison)
    assert "<img" not in text
    row = next(line for line in text.splitlines() if line.startswith("| **") and "&lt;img" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 6
    assert "$\\\\x\\_1$" in row
