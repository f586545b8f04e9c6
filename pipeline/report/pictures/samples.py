"""Strip charts of every sample of the bench: one strip per arm, such as a variant or the A/A control."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeline.comparison.comparison_file import Comparison
from pipeline.comparison.figures import median_of
from pipeline.report import formats
from pipeline.report.formats import UNKNOWN
from pipeline.report.pictures.scales import padded
from pipeline.results import Arm

FURTHEST = 1.5
"""Samples further than this factor from their arm's median are drawn at the strip's edge. Otherwise one outlier would
make all other samples look equal."""


class Dot(NamedTuple):
    x: float
    y: float
    rejected: bool
    title: str


class Strip(NamedTuple):
    label: str
    value: str
    """The median of the samples that were not rejected."""
    dots: tuple[Dot, ...]


class Strips(NamedTuple):
    title: str
    alt: str
    factor: str
    """The largest factor, such as "1.50", by which a sample may differ from the median of its arm and still be drawn at
    its value."""
    strips: tuple[Strip, ...]


def strips(comparison: Comparison) -> list[Strips]:
    """Return strips of the throughput and the peak memory of every sample of every arm, in the order of the rounds."""
    arms = comparison.bench.arms
    return [
        _strips("Throughput of every sample", arms, "samples_per_second", lambda v: formats.speed(v, comparison.unit)),
        _strips("Peak memory of every sample", arms, "peak_memory_bytes", formats.size),
    ]


def _strips(title: str, arms: Sequence[Arm], field: str, shown: Callable[[float | None], str]) -> Strips:
    medians = [median_of(arm, field) for arm in arms]
    ratios = [
        [value / median if median and (value := getattr(sample, field)) else None for sample in arm.samples]
        for arm, median in zip(arms, medians, strict=True)
    ]
    furthest = max([1.02, *(max(ratio, 1 / ratio) for each in ratios for ratio in each if ratio)])
    edge, rounds = min(furthest, FURTHEST), max(map(len, ratios))
    scale = padded([1 / edge, edge], 0.125, logarithmic=True, down=True)
    drawn = []
    for arm, each, median in zip(arms, ratios, medians, strict=True):
        dots = []
        for index, ratio in enumerate(each):
            x, about = round(100 * (index + 0.5) / rounds, 2), f"round {index + 1}: "
            if ratio and median:
                y = scale.at(min(max(ratio, 1 / edge), edge))
                dots.append(Dot(x, y, False, about + shown(ratio * median)))
            else:
                why = "; ".join(arm.samples[index].rejections) or UNKNOWN
                dots.append(Dot(x, 50, True, f"{about}rejected, {why}"))
        drawn.append(Strip(arm.name, shown(median), tuple(dots)))
    counts = "; ".join(
        f"{strip.label}: median {strip.value}, {sum(dot.rejected for dot in strip.dots)} of {len(strip.dots)} rejected"
        for strip in drawn
    )
    alt = f"Strips with one dot per round. {counts}."
    return Strips(title, alt, f"{edge:.2f}", tuple(drawn))
