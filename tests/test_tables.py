"""The tables of docs/how-we-know hold the recorded figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables import MARKED, PAGES, TABLES, rewritten


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.name)
def test_the_tables_are_those_of_the_figures(page: Path) -> None:
    assert rewritten(page) == page.read_text(encoding="utf-8"), "run `make docs`"


def test_each_table_stands_in_one_page() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES.glob("*.md")]
    assert sorted(name for text in texts for name in MARKED.findall(text)) == sorted(TABLES)
