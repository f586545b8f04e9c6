"""The comparison for a pull request: the verdicts first, then the table, then folded sections."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.comparison.comparison_file import Comparison
from pipeline.report import formats, sentences, tables
from pipeline.report.formats import CODE
from pipeline.report.tables import Row, Table

LIMIT = 65_536
"""Maximum number of characters of a comment on GitHub."""
CUT = "\n*This comment is cut short: comparison.html has the whole report.*\n"


def markdown(comparison: Comparison) -> str:
    """Return the report as one comment. If it is too long, whole blocks are cut from its end."""
    comparison = tables.decided_first(comparison)
    headline, *others = found = tables.tables(comparison)
    title = f"### {escaped(sentences.title(comparison))}: {formats.count(len(comparison.variants), 'variant')} compared"
    job = escaped(f"{', '.join(sentences.job(comparison))}; commit {sentences.measured_at(comparison.bench)}.")
    why, take = escaped(" ".join(sentences.banner(comparison))), escaped(sentences.advice(comparison))
    told = (sentences.sessions(comparison), sentences.champion(comparison))
    first = [f"> **{why}**" if why else "", f"**{take}**" if take else "", *map(escaped, told)]
    said = [line for text in first if text for line in (text, "")]
    blocks = [
        "\n".join([title, "", *said, *_answers(comparison)]),
        "\n".join(_table(headline)),
        _folded(
            "What the verdicts rest on", [job, "", *(f"- {escaped(text)}" for text in sentences.basis(comparison))]
        ),
    ]
    if len(comparison.sessions) > 1:
        sessions = tables.sessions(comparison)
        rows = [[escaped(cell) for cell in row] for row in sessions.rows]
        blocks.append(_folded(sessions.heading, _drawn(rows)))
    if comparison.shares:
        shares = tables.shares(comparison)
        notes = [f"- {escaped(text)}" for text in sentences.share_notes(comparison)]
        blocks.append(_folded(shares.heading, [*_table(shares), *(["", *notes] if notes else [])]))
    if known := [f"- **{escaped(name)}**: {escaped(text)}" for name, text in sentences.notes(comparison)]:
        blocks.append(_folded("Skipped, rejected, resumed", known))
    blocks += [_folded(table.heading, _table(table)) for table in others]
    definitions = [f"- **{heading}**: {text}" for table in found for heading, text in table.columns]
    blocks.append(_folded("What each number is", definitions))

    text = ""
    for block in blocks:
        if len(text) + len(block) + len(CUT) + 2 > LIMIT:
            return text + CUT
        text += ("\n" if text else "") + block + "\n"
    return text


def _answers(comparison: Comparison) -> list[str]:
    baseline, *others = comparison.variants
    lines = []
    for each in others:
        said = escaped(sentences.sentence(each, comparison))
        lines.append(f"- **{escaped(each.variant)}** {_verdict(each.verdict)}: {said}")
        lines += [
            f"  - {escaped(reason)}" for reason in [*sentences.reasons(each, comparison), *sentences.remarks(each)]
        ]
    return [*lines, f"- **{escaped(baseline.variant)}**: {escaped(sentences.sentence(baseline, comparison))}"]


def _verdict(verdict: str | None) -> str:
    """Return the verdict as the end of a sentence: ddp **pays**, bf16 is **undecided**."""
    return f"{'' if verdict in ('pays', 'trades', 'costs') else 'is '}**{verdict}**"


def _table(table: Table) -> list[str]:
    return _drawn([[table.first, *(heading for heading, _ in table.columns)], *map(_row, table.rows)])


def _row(row: Row) -> list[str]:
    verdict = f" {formats.DOT} {row.verdict}" if row.verdict else ""
    cells = ["<br>".join(map(escaped, (cell.value, *cell.beside))) for cell in row.cells]
    return [f"**{escaped(row.name)}**{verdict}<br>{escaped(row.about)}", *cells]


def _drawn(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose first row is its heading."""
    heading, *others = rows
    lines = [heading, [":--", *("--:" for _ in heading[1:])], *others]
    return [f"| {' | '.join(line)} |" for line in lines]


def _folded(summary: str, lines: Sequence[str]) -> str:
    return "\n".join([f"<details><summary>{summary}</summary>", "", *lines, "", "</details>"])


def escaped(text: str) -> str:
    """Return ``text`` on one line, with Markdown and HTML escaped. Backticks around a command or a name stay."""
    shown = re.sub(r"[ \t\n\r\f\v]+", " ", text).strip()  # a no-break space stays
    shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(rf"({CODE.pattern})|([\\`*_{{}}\[\]|#~!])", lambda found: found[1] or f"\\{found[3]}", shown)
