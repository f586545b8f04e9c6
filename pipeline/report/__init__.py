"""Write the comparison to files: JSON for programs, Markdown for a pull request, one HTML page for a person, and data
for ``dvc metrics`` and ``dvc plots``.

The same comparison always gives the same bytes. The HTML page is self-contained: it needs no network and no script.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.comparison.comparison_file import Comparison
from pipeline.errors import spelled
from pipeline.files import write_texts
from pipeline.report.data import accuracy_csv, loss_csv, metrics, ratios_csv, verdicts
from pipeline.report.markdown import markdown
from pipeline.report.page import html
from pipeline.report.pictures import Histories
from pipeline.results import REPORTS

__all__ = ["REPORTS", "accuracy_csv", "html", "loss_csv", "markdown", "metrics", "ratios_csv", "write"]


def write(comparison: Comparison, histories: Histories, directory: Path = REPORTS) -> None:
    """Write the whole report into ``directory``: all files, or none if the disk has no room for all.

    The files are ``comparison.{json,md,html}``; ``verdicts.json``, the data of ``dvc metrics show`` and ``diff``;
    ``metrics/<variant>.json``, all figures of a variant; ``accuracy.csv``, ``loss.csv`` and ``ratios.csv``, the data of
    ``dvc plots show``. Removes the files in ``metrics/`` whose variants are no longer compared.
    """
    values: dict[str, object] = {f"metrics/{each.variant}.json": metrics(each) for each in comparison.variants}
    values["verdicts.json"] = verdicts(comparison)
    texts = {
        "comparison.json": comparison.to_json(),
        "comparison.md": markdown(comparison),
        "comparison.html": html(comparison, histories),
        "accuracy.csv": accuracy_csv(comparison, histories),
        "loss.csv": loss_csv(comparison, histories),
        "ratios.csv": ratios_csv(comparison),
        **{name: json.dumps(content, indent=2, allow_nan=False) + "\n" for name, content in values.items()},
    }
    files = {directory / name: spelled(text) for name, text in texts.items()}
    write_texts(files)
    for stale in set((directory / "metrics").glob("*.json")) - files.keys():
        stale.unlink()
