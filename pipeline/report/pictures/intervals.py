"""Intervals drawn as whiskers: of the variants' ratios to the baseline, and of the effects of single techniques."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.comparison.ablation import Share
from pipeline.comparison.comparison_file import Comparison
from pipeline.comparison.verdicts import Accuracy, Noise, Ratio
from pipeline.report import formats, sentences
from pipeline.report.formats import UNTRUSTED
from pipeline.report.pictures.scales import Scale, Tick, padded, plain


class Whisker(NamedTuple):
    at: float
    low: float | None
    high: float | None
    look: str
    """The decision, or "noise" for the baseline against itself."""


class Mark(NamedTuple):
    caption: str
    value: str
    whisker: Whisker | None
    """None if the ratio is unknown."""


class Row(NamedTuple):
    label: str
    marks: tuple[Mark, ...]
    note: str = ""


class Forest(NamedTuple):
    title: str
    alt: str
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    band: tuple[float, float]
    """Left end and width of the band that shows the margin."""
    none: float
    """Position that means no difference."""


class _Estimate(NamedTuple):
    caption: str
    value: str
    estimate: float | None
    low: float | None
    high: float | None
    look: str


_Row = tuple[str, Sequence[_Estimate], str]
"""Label, estimates and a note."""


def forests(comparison: Comparison) -> list[Forest]:
    """Return the intervals of every variant's throughput, memory and accuracy against the baseline. For throughput and
    memory, the last row is the A/A control."""
    others, margins = comparison.variants[1:], comparison.margins
    control = f"{comparison.baseline}, A/A control"
    made = [
        _forest(
            "Throughput",
            [
                *((each.variant, [_of_ratio(each.throughput)], "") for each in others),
                (control, [_of_noise(comparison.noise_throughput)], ""),
            ],
            margins.throughput,
            ratios=True,
        ),
        _forest(
            "Peak memory",
            [
                *((each.variant, [_of_ratio(each.memory)], "") for each in others),
                (control, [_of_noise(comparison.noise_memory)], ""),
            ],
            margins.memory,
            ratios=True,
        ),
    ]
    accuracies: list[_Row] = [(each.variant, [_of_accuracy(each.accuracy)], "") for each in others if each.accuracy]
    if accuracies:
        made.append(
            _forest(formats.heading(sentences.score(comparison)), accuracies, 100 * margins.accuracy, ratios=False)
        )
    return made


def share_forests(comparison: Comparison) -> list[Forest]:
    """Return each technique's ratios in each ablated variant: added alone to the baseline, and within the stack."""
    margins, made = comparison.margins, []
    for variant in dict.fromkeys(share.variant for share in comparison.shares):
        shares = [share for share in comparison.shares if share.variant == variant]
        of_throughput = [_share_row(each, each.added_throughput, each.stacked_throughput) for each in shares]
        of_memory = [_share_row(each, each.added_memory, each.stacked_memory) for each in shares]
        made += [
            _forest(f"Throughput: the techniques of {variant}", of_throughput, margins.throughput, ratios=True),
            _forest(f"Peak memory: the techniques of {variant}", of_memory, margins.memory, ratios=True),
        ]
    return made


def _of_ratio(ratio: Ratio | None, caption: str = "") -> _Estimate:
    if ratio is None:
        return _Estimate(caption, "not measured", None, None, None, "")
    return _Estimate(caption, formats.ratio_text(ratio), ratio.estimate, ratio.low, ratio.high, ratio.decision)


def _of_noise(noise: Noise) -> _Estimate:
    look = UNTRUSTED if noise.why_untrusted else "noise"
    return _Estimate("", sentences.noise_text(noise), noise.estimate, noise.low, noise.high, look)


def _of_accuracy(accuracy: Accuracy) -> _Estimate:
    ends = (accuracy.low_fraction, accuracy.high_fraction)
    low, high = (None if end is None else 100 * end for end in ends)
    line, interval = formats.accuracy_lines(accuracy)
    return _Estimate("", f"{line} ({interval})", 100 * accuracy.mean_fraction, low, high, accuracy.decision)


def _share_row(share: Share, added: Ratio | None, stacked: Ratio | None) -> _Row:
    if share.why_not:
        return share.technique, [], "not measured"
    return share.technique, [_of_ratio(added, "added"), _of_ratio(stacked, "in the stack")], ""


def _forest(title: str, rows: Sequence[_Row], margin: float, *, ratios: bool) -> Forest:
    """Draw ``rows`` on a common scale. No difference is a ratio of 1, or 0 percentage points."""
    none, band = (1.0, (1 / (1 + margin), 1 + margin)) if ratios else (0.0, (-margin, margin))
    known = [*band, none]
    for _, estimates, _ in rows:
        for each in estimates:
            known += [value for value in (each.estimate, each.low, each.high) if value is not None]
    scale = padded(known, 0.04, logarithmic=ratios)
    left, right = scale.at(band[0]), scale.at(band[1])
    numbers = [
        f"{label}{f' {each.caption}' if each.caption else ''}: {each.value}"
        for label, estimates, _ in rows
        for each in estimates
    ]
    return Forest(
        title, f"Intervals. {'; '.join(numbers)}.",
        tuple(Row(label, tuple(_mark(each, scale) for each in estimates), note) for label, estimates, note in rows),
        scale.ticks(plain), (left, round(right - left, 2)), scale.at(none),
    )  # fmt: skip


def _mark(each: _Estimate, scale: Scale) -> Mark:
    if each.estimate is None:
        return Mark(each.caption, each.value, None)
    low, high = (None if end is None else scale.at(end) for end in (each.low, each.high))
    return Mark(each.caption, each.value, Whisker(scale.at(each.estimate), low, high, each.look))
