"""The memory ledgers, which divide the peak memory into parts, as stacked bars."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.comparison.comparison_file import Comparison
from pipeline.report import formats, sentences
from pipeline.report.pictures.scales import Scale, Tick, plain
from pipeline.report.sentences import LEDGER_PARTS
from pipeline.results import Ledger


class Segment(NamedTuple):
    part: str
    left: float
    width: float


class Bar(NamedTuple):
    caption: str
    value: str
    segments: tuple[Segment, ...]
    tensors: float | None
    """Position at which the memory of tensors ends; None if that is the bar's end."""


class Bars(NamedTuple):
    title: str
    alt: str
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]
    """Pairs (variant, its bars)."""
    ticks: tuple[Tick, ...]
    parts: tuple[str, ...]
    """The parts that occur in a bar, for the legend."""


def bars(comparison: Comparison) -> Bars | None:
    """Return bars of the measured and the predicted ledgers; None if no variant has a ledger."""
    ledgers = sentences.ledgers(comparison)
    if not ledgers:
        return None
    largest = max(1, *(ledger.peak_bytes for *_, ledger in ledgers))
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    scale = Scale(0, 1.02 * largest / unit)
    rows = tuple(
        (variant, tuple(_bar(kind, ledger, scale, unit) for name, kind, ledger in ledgers if name == variant))
        for variant in dict.fromkeys(variant for variant, *_ in ledgers)
    )
    used = {segment.part for _, row in rows for bar in row for segment in bar.segments}
    numbers = "; ".join(f"{variant} {kind} {formats.size(ledger.peak_bytes)}" for variant, kind, ledger in ledgers)
    ticks = scale.ticks(lambda value, decimals: f"{plain(value, decimals)}{f' {name}' if value == 0 else ''}")
    return Bars(
        f"Peak memory of the largest process, by kind of content ({name})",
        f"Stacked bars of the peak's parts. {numbers}.", rows, ticks,
        tuple(part for part in LEDGER_PARTS if part in used),
    )  # fmt: skip


def _bar(kind: str, ledger: Ledger, scale: Scale, unit: int) -> Bar:
    segments, below = [], 0
    for part in LEDGER_PARTS:
        amount = getattr(ledger, f"{part}_bytes")
        if amount > 0:
            left = scale.at(below / unit)
            below += amount
            segments.append(Segment(part, left, round(scale.at(below / unit) - left, 2)))
    beyond = ledger.tensors_bytes < ledger.peak_bytes
    tensors = scale.at(ledger.tensors_bytes / unit) if beyond else None
    return Bar(kind, formats.size(ledger.peak_bytes), tuple(segments), tensors)
