from __future__ import annotations

import pytest

from tests.report.golden import FILES, PAGES, REPORTS, texts


@pytest.mark.parametrize("name", [*REPORTS, *PAGES])
def test_a_page_equals_its_stored_text(name: str) -> None:
    said = texts(name)
    kept = {file: (FILES / file).read_text(encoding="utf-8") for file in said}
    assert said == kept, "if the change is intended, run `python -m tests.report.golden` and read the diff"
