"""The comparison for a pull request: the verdicts first, then the table, then folded sections."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.comparison.comparison_file import Compared, Comparison
from pipeline.report import formats, sentences
from pipeline.report.formats import CODE
from pipeline.report.tables import (
    Column,
    decided_first,
    session_headings,
    session_rows,
    share_headings,
    share_rows,
    tables,
)

LIMIT = 65_536
"""Maximum number of characters of a comment on GitHub."""
CUT = "\n*This comment is cut short: comparison.html has the whole report.*\n"


def markdown(comparison: Comparison) -> str:
    """Return the report as one comment. If it is too long, whole blocks are cut from its end."""
    comparison = decided_first(comparison)
    headline, *others = tables(comparison)
    title = f"### {escaped(sentences.title(comparison))}: {formats.count(len(comparison.variants), 'variant')} compared"
    job = escaped(f"{', '.join(sentences.job(comparison))}; commit {sentences.measured_at(comparison.bench)}.")
    told = (sentences.sessions(comparison), sentences.champion(comparison))
    said = [line for text in told if text for line in (escaped(text), "")]
    blocks = [
        "\n".join([title, "", *_first(comparison), *said, *_answers(comparison)]),
        "\n".join(_table(comparison, headline.columns)),
        _folded(
            "What the verdicts rest on", [job, "", *(f"- {escaped(text)}" for text in sentences.basis(comparison))]
        ),
    ]
    known = [f"- **{escaped(name)}**: {escaped(text)}" for name, text in sentences.notes(comparison)]
    if len(comparison.sessions) > 1:
        rows = [[escaped(cell) for cell in row] for row in session_rows(comparison)]
        blocks.append(_folded("The sessions", _drawn([escaped(each) for each in session_headings(comparison)], rows)))
    if comparison.shares:
        blocks.append(_folded("Each technique's own share", _shares(comparison)))
    if known:
        blocks.append(_folded("Skipped, rejected, resumed", known))
    blocks += [_folded(table.heading, _table(comparison, table.columns)) for table in others]
    columns = [column for table in (headline, *others) for column in table.columns]
    blocks.append(_folded("What each number is", [f"- **{each.heading}**: {each.definition}" for each in columns]))

    text = ""
    for block in blocks:
        if len(text) + len(block) + len(CUT) + 2 > LIMIT:
            return text + CUT
        text += ("\n" if text else "") + block + "\n"
    return text


def _first(comparison: Comparison) -> list[str]:
    why, take = escaped(" ".join(sentences.banner(comparison))), escaped(sentences.advice(comparison))
    return [*([f"> **{why}**", ""] if why else []), *([f"**{take}**", ""] if take else [])]


def _answers(comparison: Comparison) -> list[str]:
    baseline, *others = comparison.variants
    lines = []
    for each in others:
        said = escaped(sentences.sentence(each, comparison))
        decided = f" ({text})" if (text := sentences.decided(each)) else ""
        lines.append(f"- **{escaped(each.variant)}** {_verdict(each.verdict)}{decided}: {said}")
        lines += [
            f"  - {escaped(reason)}" for reason in [*sentences.reasons(each, comparison), *sentences.remarks(each)]
        ]
    return [*lines, f"- **{escaped(baseline.variant)}**: {escaped(sentences.sentence(baseline, comparison))}"]


def _verdict(verdict: str | None) -> str:
    """Return the verdict as the end of a sentence: ddp **pays**, memory is **undecided**."""
    return f"{'' if verdict in ('pays', 'trades', 'costs') else 'is '}**{verdict}**"


def _table(comparison: Comparison, columns: Sequence[Column]) -> list[str]:
    rows = [[_name(each), *(_cell(column, each) for column in columns)] for each in comparison.variants]
    return _drawn(["Variant", *(column.heading for column in columns)], rows)


def _name(each: Compared) -> str:
    verdict = f" {formats.DOT} {each.verdict}" if each.verdict else ""
    return f"**{escaped(each.variant)}**{verdict}<br>{escaped(sentences.techniques(each))}"


def _cell(column: Column, each: Compared) -> str:
    cell = column.cell(each)
    return "<br>".join(map(escaped, (cell.value, *cell.beside)))


def _shares(comparison: Comparison) -> list[str]:
    rows = [
        [
            f"**{escaped(technique)}**<br>in {escaped(variant)}",
            verdict or formats.DASH,
            *("<br>".join(map(escaped, lines)) for _, lines in cells),
        ]
        for variant, technique, verdict, cells in share_rows(comparison)
    ]
    notes = [f"- {escaped(text)}" for text in sentences.share_notes(comparison)]
    return [*_drawn(share_headings(), rows), *(["", *notes] if notes else [])]


def _drawn(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [headings, [":--", *("--:" for _ in headings[1:])], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _folded(summary: str, lines: Sequence[str]) -> str:
    return "\n".join([f"<details><summary>{summary}</summary>", "", *lines, "", "</details>"])


def escaped(text: str) -> str:
    """Return ``text`` on one line, with Markdown and HTML escaped. Backticks around a command or a name stay."""
    shown = re.sub(r"[ \t\n\r\f\v]+", " ", text).strip()  # a no-break space stays
    shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(rf"({CODE.pattern})|([\\`*_{{}}\[\]|#~!])", lambda found: found[1] or f"\\{found[3]}", shown)
