"""Scales that map values to positions on a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeline.report import formats


class Tick(NamedTuple):
    at: float
    label: str


class Scale(NamedTuple):
    """Maps values to positions, in percent of the plot."""

    low: float
    high: float
    logarithmic: bool = False
    down: bool = False
    """True if positions are measured from the top of the plot."""

    def at(self, value: float) -> float:
        low, high, value = (math.log(each) if self.logarithmic else each for each in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return round(100 * (1 - share if self.down else share), 2)

    def ticks(self, label: Callable[[float, int], str], most: int = 5) -> tuple[Tick, ...]:
        """Return at most ``most`` + 1 ticks at round values. ``label`` gets a value and the number of its decimals.

        On a logarithmic scale over a factor of more than 4, the ticks are powers of 2, and ``label`` is not used.
        """
        if self.logarithmic and self.high / self.low > 4:
            first, last = math.ceil(math.log2(self.low)), math.floor(math.log2(self.high))
            stride = math.ceil((last - first + 1) / most)
            values = [2.0**power for power in range(first, last + 1) if power % stride == 0]
            return tuple(Tick(self.at(value), f"{value:g}") for value in values)
        rough = (self.high - self.low) / most
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough * (1 - 1e-9))
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [round(index * step, decimals + 1) for index in range(first, last + 1)]
        return tuple(Tick(self.at(value), label(value, decimals)) for value in values)


def plain(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}".replace("-", formats.MINUS)


def padded(values: Sequence[float], share: float, *, logarithmic: bool, down: bool = False) -> Scale:
    """Return a scale over the range of ``values``, extended at both ends by ``share`` of this range."""
    low, high = min(values), max(values)
    if logarithmic:
        padding = (high / low) ** share
        return Scale(low / padding, high * padding, logarithmic, down)
    return Scale(low - share * (high - low), high + share * (high - low), logarithmic, down)
