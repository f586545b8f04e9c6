"""Strip charts of every sample of the bench."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeline.comparison.comparison_file import Comparison
from pipeline.report import formats
from pipeline.report.formats import UNKNOWN
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
    range: str
    """The range of values that a strip's height stands for, as text."""
    strips: tuple[Strip, ...]


def strips(comparison: Comparison) -> list[Strips]:
    """Return strips of the throughput and the peak memory of every sample of every arm, in the order of the rounds."""
    arms = comparison.bench.arms
    return [
        _strips("Throughput of every sample", arms, "samples_per_second", lambda v: formats.speed(v, comparison.unit)),
        _strips("Peak memory of every sample", arms, "peak_memory_bytes", formats.size),
    ]


def _strips(title: str, arms: Sequence[Arm], field: str, shown: Callable[[float | None], str]) -> Strips:
    values = [[getattr(sample, field) for sample in arm.samples] for arm in arms]
    medians = [statistics.median(known) if (known := [v for v in arm if v]) else None for arm in values]
    deviations = [
        abs(math.log(value / median))
        for arm, median in zip(values, medians, strict=True)
        if median
        for value in arm
        if value
    ]
    furthest = min(max([*deviations, math.log(1.02)]), math.log(FURTHEST))
    rounds = max(map(len, values))
    drawn = []
    for arm, each, median in zip(arms, values, medians, strict=True):
        dots = []
        for index, value in enumerate(each):
            x = round(100 * (index + 0.5) / rounds, 2)
            about = f"round {index + 1}: "
            if value and median:
                y = 50 - 40 * max(-1.0, min(1.0, math.log(value / median) / furthest))
                dots.append(Dot(x, round(y, 2), False, about + shown(value)))
            else:
                why = "; ".join(arm.samples[index].rejections) or UNKNOWN
                dots.append(Dot(x, 50, True, f"{about}rejected, {why}"))
        drawn.append(Strip(arm.name, shown(median), tuple(dots)))
    counts = "; ".join(
        f"{strip.label}: median {strip.value}, {sum(dot.rejected for dot in strip.dots)} of {len(strip.dots)} rejected"
        for strip in drawn
    )
    return Strips(
        title, f"Strips with one dot per round. {counts}.", f"{100 * (math.exp(furthest) - 1):.0f}%",
        tuple(drawn),
    )  # fmt: skip
