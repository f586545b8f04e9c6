"""Write the comparison to files: JSON for programs, Markdown for a pull request, one HTML page for a person, and data
for ``dvc metrics`` and ``dvc plots``.

The same comparison always gives the same bytes. The HTML page is self-contained: it needs no network and no script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from markupsafe import escape

from pipeline.comparison.comparison_file import Comparison
from pipeline.errors import spelled
from pipeline.files import write_texts
from pipeline.pages import render
from pipeline.report import differences, facts, pictures, tables
from pipeline.report.data import accuracy_csv, loss_csv, metrics, ratios_csv, verdicts
from pipeline.report.pictures import Histories
from pipeline.results import REPORTS, figures

__all__ = ["REPORTS", "accuracy_csv", "html", "loss_csv", "markdown", "metrics", "ratios_csv", "write"]


LIMIT = 65_536
"""Maximum number of characters of a comment on GitHub."""
CUT = "\n*This comment is cut short: comparison.html has the whole report.*\n"
_BLOCK = "<!-- block -->\n"
"""Ends a block in comparison.md."""
HUES = 6
"""Number of colours for variants in comparison.html. Colours repeat after six variants, but colour and dash pattern
together repeat only after twelve."""
DASHES = 4


def write(comparison: Comparison, histories: Histories, directory: Path = REPORTS) -> None:
    """Write the whole report into ``directory``: all files, or none if the disk has no room for all.

    The files are ``comparison.{json,md,html}``; ``verdicts.json``, the data of ``dvc metrics show`` and ``diff``;
    ``metrics/<variant>.json``, all figures of a variant; ``accuracy.csv``, ``loss.csv`` and ``ratios.csv``, the data of
    ``dvc plots show``. Removes the files in ``metrics/`` whose variants are no longer compared.
    """
    values: dict[str, object] = {"verdicts.json": verdicts(comparison)}
    values |= {f"metrics/{compared.variant}.json": metrics(compared) for compared in comparison.variants}
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


def markdown(comparison: Comparison) -> str:
    """Return the report as one comment for a pull request: the verdicts first, then the table, then folded sections. If
    it is too long, whole blocks are cut from its end."""
    text = render("comparison.md", escape="markdown", **_content(comparison))
    kept = ""
    for block in text.split(_BLOCK):
        if len(kept) + len(block) + len(CUT) > LIMIT:
            return kept + CUT
        kept += block
    return kept


def html(comparison: Comparison, histories: Histories) -> str:
    """Return the whole page, with all names escaped."""
    content = _content(comparison)
    names = [compared.variant for compared in content["comparison"].variants]
    described = {
        "The job": comparison.train,
        "The data": comparison.dataset.model_dump() if comparison.dataset else "unknown",
        "The environment": comparison.environment,
        "The session of the bench": comparison.bench.session.model_dump(exclude={"boot_id"}),
    }
    return render(
        "comparison.html",
        escape="html",
        **content,
        pictures=pictures,
        histories=histories,
        hues={name: f"v{index % HUES}" for index, name in enumerate(names)},
        dashes={name: f"d{index % DASHES}" for index, name in enumerate(names)},
        described={heading: escape(yaml.safe_dump(values, sort_keys=False)) for heading, values in described.items()},
    )


def _content(comparison: Comparison) -> dict[str, Any]:
    comparison = tables.decided_first(comparison)
    return {
        "comparison": comparison,
        "facts": facts,
        "differences": differences,
        "figures": figures,
        "tables": tables.tables(comparison),
        "shares": tables.shares(comparison),
    }
