"""The Markdown pages of the documentation, their fenced blocks, and the commands in these blocks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = (*DOCS, ROOT / "SECURITY.md", *sorted(ROOT.glob("examples/*/README.md")))


def blocks(page: Path, language: str) -> list[str]:
    """Return the texts of the page's fenced blocks in ``language``, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """Return the commands in the page's console blocks, in order, without comments. Commands joined by && are one."""
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]
