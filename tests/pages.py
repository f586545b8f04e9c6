"""The Markdown pages of the documentation, their fenced blocks, the commands in these, and the technique they add."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PAGES = (*DOCS, ROOT / "SECURITY.md", *sorted(ROOT.glob("examples/*/README.md")))


def blocks(page: Path, language: str) -> list[str]:
    """Return the texts of the page's fenced blocks in ``language``, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """Return the commands in the page's console blocks, in order, without comments. Commands joined by && are one."""
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def add_technique(root: Path) -> str:
    """Add the technique of the page to the checkout ``root``, and nothing else; return the technique's name."""
    page, catalogue = ROOT / "docs/adding-a-technique.md", root / "pipeline/params/catalogue.yaml"
    (entry,), (setting, hooks) = blocks(page, "yaml pipeline/params/catalogue.yaml"), blocks(page, "python")
    group, entry = entry.split("  ...\n")
    before, after = catalogue.read_text(encoding="utf-8").split(group)
    catalogue.write_text(before + group + entry + after, encoding="utf-8")
    with (root / "pipeline/params/variants.py").open("a", encoding="utf-8") as variants:
        variants.write(setting.partition("...\n")[2])
    name, module = re.findall(r"^  (\w+):$.*implementation: (\w+)\.", entry, re.DOTALL | re.MULTILINE)[0]
    (root / f"pipeline/techniques/{module}.py").write_text(hooks, encoding="utf-8")
    return str(name)
