"""Intervals, drawn as whiskers: the variants' differences from the baseline, and the effects of single techniques."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.comparison.comparison_file import Comparison
from pipeline.comparison.verdicts import Accuracy, Noise, Ratio
from pipeline.report import formats, sentences
from pipeline.report.formats import UNTRUSTED
from pipeline.report.pictures.scales import Tick, padded, plain


class Mark(NamedTuple):
    """An interval and its estimate, as values that ``_forest`` turns into positions. None means unknown."""

    caption: str
    value: str
    at: float | None = None
    low: float | None = None
    high: float | None = None
    look: str = ""
    """The decision; for the baseline against itself, "noise" or "untrusted"; empty if nothing was measured."""


class Row(NamedTuple):
    label: str
    marks: tuple[Mark, ...]
    """Empty if the row's technique was not measured."""


class Forest(NamedTuple):
    title: str
    alt: str
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    band: tuple[float, float]
    """Left end and width of the band that shows the margin."""
    none: float
    """Position that means no difference."""


def forests(comparison: Comparison) -> list[Forest]:
    """Return the intervals of every variant's throughput, memory and accuracy against the baseline. For throughput and
    memory, the last row is the A/A control."""
    others, margins = comparison.variants[1:], comparison.margins
    made = []
    for title, field in (("Throughput", "throughput"), ("Peak memory", "memory")):
        rows = [Row(each.variant, (_mark(getattr(each, field)),)) for each in others]
        noise = _mark(getattr(comparison, f"noise_{field}"))
        control = Row(f"{comparison.baseline}, A/A control", (noise,))
        made.append(_forest(title, [*rows, control], getattr(margins, field)))
    accuracies = [Row(each.variant, (_mark(each.accuracy),)) for each in others]
    return [
        *made,
        _forest(formats.heading(sentences.score(comparison)), accuracies, 100 * margins.accuracy, ratios=False),
    ]


def share_forests(comparison: Comparison) -> list[Forest]:
    """Return each technique's ratios in each ablated variant: added alone to the baseline, and combined with
    the variant's other techniques."""
    made = []
    for variant in dict.fromkeys(share.variant for share in comparison.shares):
        for title, field in (("Throughput", "throughput"), ("Peak memory", "memory")):
            rows = []
            for share in comparison.shares:
                if share.variant == variant:
                    added, stacked = getattr(share, f"added_{field}"), getattr(share, f"stacked_{field}")
                    marks = (_mark(added, "added"), _mark(stacked, "in the stack"))
                    rows.append(Row(share.technique, () if share.why_not else marks))
            made.append(_forest(f"{title}: the techniques of {variant}", rows, getattr(comparison.margins, field)))
    return made


def _mark(each: Ratio | Noise | Accuracy | None, caption: str = "") -> Mark:
    if each is None:
        return Mark(caption, "not measured")
    if isinstance(each, Accuracy):
        low, high = (None if end is None else 100 * end for end in (each.low_fraction, each.high_fraction))
        return Mark(caption, formats.text(each), 100 * each.mean_fraction, low, high, each.decision)
    look = each.decision if isinstance(each, Ratio) else UNTRUSTED if each.why_untrusted else "noise"
    return Mark(caption, formats.text(each), each.estimate, each.low, each.high, look)


def _forest(title: str, rows: Sequence[Row], margin: float, *, ratios: bool = True) -> Forest:
    """Draw ``rows`` on a common scale. No difference is a ratio of 1, or 0 percentage points."""
    none, band = (1.0, (1 / (1 + margin), 1 + margin)) if ratios else (0.0, (-margin, margin))
    marks = [mark for row in rows for mark in row.marks]
    known = [value for mark in marks for value in (mark.at, mark.low, mark.high) if value is not None]
    scale = padded([*known, *band], 0.04, logarithmic=ratios)

    def drawn(mark: Mark) -> Mark:
        at, low, high = (None if value is None else scale.at(value) for value in (mark.at, mark.low, mark.high))
        return mark._replace(at=at, low=low, high=high)

    left, right = scale.at(band[0]), scale.at(band[1])
    numbers = [
        " ".join(filter(None, (row.label, mark.caption))) + f": {mark.value}" for row in rows for mark in row.marks
    ]
    return Forest(
        title, f"Intervals. {'; '.join(numbers)}.",
        tuple(row._replace(marks=tuple(map(drawn, row.marks))) for row in rows),
        scale.ticks(plain), (left, round(right - left, 2)), scale.at(none),
    )  # fmt: skip
