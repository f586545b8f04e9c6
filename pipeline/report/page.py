"""The comparison as one self-contained HTML page, which contains its style and pictures."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import yaml
from markupsafe import Markup, escape

from pipeline.comparison.comparison_file import Comparison
from pipeline.report import formats, pictures, sentences, tables
from pipeline.report.pictures import Histories

TEMPLATE = Path(__file__).with_name("page.html")

HUES = 6
"""Number of colours for variants in page.html. Colours repeat after six variants, but colour and dash pattern
together repeat only after twelve."""
DASHES = 4


def html(comparison: Comparison, histories: Histories) -> str:
    """Return the whole page, with all names escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["marked"] = _marked
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    comparison = tables.decided_first(comparison)
    return page.render(
        comparison=comparison,
        formats=formats,
        words=sentences,
        tables=tables.tables(comparison),
        shares=tables.shares(comparison),
        grids=tables.grids(comparison),
        pictures=pictures,
        histories=histories,
        hues={each.variant: f"v{index % HUES}" for index, each in enumerate(comparison.variants)},
        dashes={each.variant: f"d{index % DASHES}" for index, each in enumerate(comparison.variants)},
        facts={
            "The job": yaml.safe_dump(comparison.train, sort_keys=False),
            "The data": yaml.safe_dump(comparison.dataset.model_dump(), sort_keys=False),
            "The environment": yaml.safe_dump(comparison.environment, sort_keys=False),
        },
    )


def _marked(text: str) -> Markup:
    """Return ``text`` as HTML: figures in brackets, which are untrusted, in grey, and words in backticks as code."""
    coded = formats.CODE.sub(r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\[[^]]*\]", r'<span class="unbelieved">\g<0></span>', coded))
