"""The comparison as files: JSON for programs, Markdown for a pull request, one HTML page for a person, and the data
of ``dvc metrics`` and ``dvc plots``.

The same comparison gives the same bytes. The page is self-contained: it needs no network and no script.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.comparison.comparison_file import Comparison
from pipeline.files import write_text
from pipeline.report.data import accuracy_csv, loss_csv, metrics, ratios_csv, verdicts
from pipeline.report.markdown import markdown
from pipeline.report.page import html
from pipeline.report.pictures import Histories
from pipeline.results import REPORTS

__all__ = ["REPORTS", "accuracy_csv", "html", "loss_csv", "markdown", "metrics", "ratios_csv", "write"]


def write(comparison: Comparison, histories: Histories, directory: Path = REPORTS) -> None:
    """Write the whole report into ``directory``.

    The files: ``comparison.{json,md,html}``; ``verdicts.json``, the data of ``dvc metrics show`` and ``diff``;
    ``metrics/<variant>.json``, all figures of a variant; ``accuracy.csv``, ``loss.csv`` and ``ratios.csv``, the data of
    ``dvc plots show``. Metrics of variants that are no longer compared are removed.
    """
    write_text(directory / "comparison.json", comparison.to_json())
    write_text(directory / "comparison.md", markdown(comparison))
    write_text(directory / "comparison.html", html(comparison, histories))
    write_text(directory / "accuracy.csv", accuracy_csv(comparison, histories))
    write_text(directory / "loss.csv", loss_csv(comparison, histories))
    write_text(directory / "ratios.csv", ratios_csv(comparison))
    files: dict[Path, object] = {
        directory / f"metrics/{each.variant}.json": metrics(each) for each in comparison.variants
    }
    for stale in set((directory / "metrics").glob("*.json")) - files.keys():
        stale.unlink()
    for file, content in {directory / "verdicts.json": verdicts(comparison), **files}.items():
        write_text(file, json.dumps(content, indent=2, allow_nan=False) + "\n")
