"""Write the comparison to files: JSON for programs, Markdown for a pull request, one HTML page for a person, and data
for ``dvc metrics`` and ``dvc plots``.

The same comparison always gives the same bytes. The HTML page is self-contained: it needs no network and no script.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from markupsafe import escape

from pipeline.comparison.comparison_file import Compared, Comparison, Trend
from pipeline.comparison.stats import Difference
from pipeline.comparison.trends import FEWEST_SESSIONS
from pipeline.errors import say, spelled
from pipeline.files import write_texts
from pipeline.pages import render
from pipeline.report import facts, pictures, tables
from pipeline.report.pictures import Histories
from pipeline.results import REPORTS, figures
from pipeline.results.figures import FIGURES, Figure

__all__ = [
    "REPORTS",
    "history_csv",
    "html",
    "markdown",
    "metrics",
    "ratios_csv",
    "say_verdicts",
    "write",
    "write_history",
    "write_pages",
]

LIMIT = 65_536
"""Maximum number of characters of a comment on GitHub."""
CUT = "\n*This comment is cut short: comparison.html has the whole report.*\n"
_BLOCK = "<!-- block -->\n"
"""Ends a block in comparison.md."""
HUES = 6
"""Number of colours for variants in comparison.html. Colours repeat after six variants, but colour and dash pattern
together repeat only after twelve."""
DASHES = 4


def say_verdicts(comparison: Comparison, directory: Path = REPORTS) -> None:
    """Print each variant's verdict, its ratios and its reasons, what stands first in the report, and where it is."""
    for compared in comparison.variants[1:]:
        ratios = (f"{figure.noun} {facts.text(ratio)}" for figure, ratio in compared.ratios.items())
        say(f"{compared.variant}: {compared.verdict}: {', '.join(ratios)}")
        for sentence in facts.sentences(compared.reasons):
            say(f"  {sentence}")
    noises = (f"{figure.noun} {facts.text(noise)}" for figure, noise in comparison.noises.items())
    say(f"{comparison.bench.baseline} against itself: {', '.join(noises)}")
    for sentence in filter(None, [*facts.banner(comparison), facts.advice(comparison)]):
        say(sentence)
    say(f"report: {directory / 'comparison.html'}, and comparison.md for a terminal")


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
        "accuracy.csv": history_csv(comparison, histories, "test_accuracy"),
        "loss.csv": history_csv(comparison, histories, "train_loss"),
        "ratios.csv": ratios_csv(comparison),
        **{name: json.dumps(content, indent=2, allow_nan=False) + "\n" for name, content in values.items()},
    }
    files = {directory / name: spelled(text) for name, text in texts.items()}
    write_texts(files)
    for stale in set((directory / "metrics").glob("*.json")) - files.keys():
        stale.unlink()


def write_history(trends: Sequence[Trend], directory: Path = REPORTS) -> None:
    """Write ``history.html`` and ``history.md``, and print the Markdown."""
    content: dict[str, Any] = {"trends": trends, "pictures": pictures, "facts": facts, "fewest": 2 * FEWEST_SESSIONS}
    say(write_pages("history", directory, escape="markdown", **content), end="")


def write_pages(
    name: str, directory: Path, as_json: str = "", *, escape: Literal["markdown"] | None = None, **content: Any
) -> str:
    """Write ``<name>.md`` and ``<name>.html`` from the templates of these names and, if it is given, ``<name>.json``:
    all files, or none if the disk has no room for all. Return the Markdown, whose values ``render`` escapes as
    ``escape`` says."""
    markdown = spelled(render(f"{name}.md", escape=escape, **content))
    texts = {"json": as_json, "md": markdown, "html": spelled(render(f"{name}.html", escape="html", **content))}
    write_texts({directory / f"{name}.{ending}": text for ending, text in texts.items() if text})
    return markdown


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
        looks={name: f"v{index % HUES} d{index % DASHES}" for index, name in enumerate(names)},
        described={heading: escape(yaml.safe_dump(values, sort_keys=False)) for heading, values in described.items()},
    )


def _content(comparison: Comparison) -> dict[str, Any]:
    comparison = tables.decided_first(comparison)
    return {
        "comparison": comparison,
        "facts": facts,
        "figures": figures,
        "fewest": 2 * FEWEST_SESSIONS,
        "tables": tables.tables(comparison),
        "shares": tables.shares(comparison),
    }


VERDICTS = ("verdict", "throughput_ratio", "peak_memory_ratio", "accuracy_difference_mean_fraction")


def verdicts(comparison: Comparison) -> dict[str, dict[str, float | int | str]]:
    """Return figure -> variant -> value, for ``dvc metrics show`` and ``dvc metrics diff``.

    DVC sorts by name, so a number before each figure's name keeps the order of ``VERDICTS``. Unknown and untrusted
    values are left out.
    """
    known = {compared.variant: metrics(compared) for compared in comparison.variants}
    return {
        f"{number}_{name}": {variant: value for variant, of in known.items() if (value := of[name]) is not None}
        for number, name in enumerate(VERDICTS, 1)
    }


def metrics(compared: Compared) -> dict[str, float | int | str | None]:
    """Return a variant's figures for ``dvc metrics`` and MLflow's parent run. Unknown and untrusted values are None.
    Optional figures are left out if they are unknown."""
    accuracy = compared.accuracy
    values: dict[str, float | int | str | None] = {"verdict": compared.verdict}
    for figure in FIGURES:
        if figure.optional and compared.of(figure) is None:
            continue
        values[figure.field] = compared.of(figure)
        if figure.margin:
            values |= _ratio(figure.metric, compared.ratios.get(figure))
        if figure.over_rounds and figure.field in compared.trained:
            values[f"training_{figure.field}"] = compared.trained[figure.field]
    return values | {
        "rejected_samples": compared.rejected,
        "test_accuracy_mean_fraction": compared.trained["test_accuracy_mean_fraction"],
        "accuracy_difference_mean_fraction": accuracy.estimate if accuracy else None,
        "accuracy_difference_low_fraction": accuracy.low if accuracy else None,
        "accuracy_difference_high_fraction": accuracy.high if accuracy else None,
        "accuracy_more_seeds": accuracy.more_pairs if accuracy else None,
        "time_to_target_seconds": compared.time_to_target.train_seconds,
    }


def _ratio(name: str, ratio: Difference | None) -> dict[str, float | int | None]:
    trusted = ratio if ratio and not ratio.why_untrusted else None
    return {
        f"{name}_ratio": trusted.estimate if trusted else None,
        f"{name}_ratio_low": trusted.low if trusted else None,
        f"{name}_ratio_high": trusted.high if trusted else None,
        f"{name}_pairs": ratio.pairs if ratio else None,
        f"{name}_more_pairs": ratio.more_pairs if ratio else None,
        f"{name}_sessions": trusted.session_count if trusted else None,
        f"{name}_more_sessions": ratio.more_sessions if ratio else None,
    }


def ratios_csv(comparison: Comparison) -> str:
    """Return the intervals of the ratios to the baseline, and of the baseline against itself (A/A). Untrusted ratios
    and ratios without an interval are left out."""
    differences: dict[str, Mapping[Figure, Difference]] = {
        compared.variant: compared.ratios for compared in comparison.variants[1:]
    }
    differences[f"{comparison.baseline} (A/A)"] = comparison.noises
    return _csv(
        ("variant", "quantity", "estimate", "low", "high"),
        (
            (variant, figure.noun, ratio.estimate, ratio.low, ratio.high)
            for variant, ratios in differences.items()
            for figure, ratio in ratios.items()
            if not ratio.why_untrusted and ratio.low is not None
        ),
    )


def history_csv(comparison: Comparison, histories: Histories, field: str) -> str:
    """Return ``field`` of the rows of the histories that have it, for all variants and seeds. No field is blank."""
    columns = ("seed", "epoch", "step", "train_seconds", field)
    return _csv(
        ("variant", *columns),
        (
            (compared.variant, *(getattr(row, column) for column in columns))
            for compared in comparison.variants
            for row in histories[compared.variant]
            if getattr(row, field) is not None
        ),
    )


def _csv(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(rows)
    return text.getvalue()
