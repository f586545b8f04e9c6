"""Take short samples before the rounds, to find out how many steps fill a window and how long a round takes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.benchmark.server import ArmSpec
from pipeline.results import Window

CALIBRATION_STEPS = 10
CALIBRATIONS = 5
"""Largest number of short samples that ``steps_of`` takes. Other load on the machine can spoil a sample."""
FEWEST_STEPS = 5
"""Fewest steps of a window. Also the steps of a short sample that does not decide a window's length."""
OPENING_SECONDS = 1.7
"""For arms with this start-up time, windows of 1.5 s turned out to be the best (docs/measuring.md)."""


class Calibration(NamedTuple):
    """A short sample of an arm, taken before the rounds."""

    answer: dict[str, Any]
    """The answer of ``Server.close``."""
    opening_seconds: float
    """Time from the start of the arm's processes to the first measured step."""
    step_seconds: float

    def seconds(self, steps: int) -> float:
        """Estimate how long the arm takes in a round of ``steps`` steps."""
        return self.opening_seconds + steps * self.step_seconds


def calibrate(arm: ArmSpec, steps: int = FEWEST_STEPS, *, ledgers: bool = False) -> Calibration:
    """Measure ``steps`` steps of ``arm``. The returned times do not include the time for ledgers."""
    began = time.monotonic()
    arm.server.open(arm.name, arm.plan, steps, ledgers=ledgers)
    opened = time.monotonic()
    arm.server.turn(arm.name, steps)
    ended = time.monotonic()
    # The turn includes an extra step that counts samples.
    return Calibration(arm.server.close(arm.name), opened - began, (ended - opened) / (steps + 1))


def steps_of(arm: ArmSpec, seconds: float, others: Sequence[Calibration] = ()) -> tuple[int, Calibration]:
    """Take short samples of ``arm`` until one is not rejected; return the steps of a window, and the last sample.

    A window takes about ``seconds``, but has at least ``FEWEST_STEPS``. If the mean start-up of ``arm`` and ``others``
    takes r times ``OPENING_SECONDS``, with r > 1, a window takes sqrt(r) times as long. This yields the most
    information per minute (Kalibera and Jones, ISMM 2013). If all ``CALIBRATIONS`` samples are rejected, a window has
    ``CALIBRATION_STEPS``.
    """
    for _ in range(CALIBRATIONS):
        sample = calibrate(arm, CALIBRATION_STEPS)
        window = Window.model_validate(sample.answer["window"])
        if window.step_p50_ms:
            opening = statistics.fmean(each.opening_seconds for each in (sample, *others))
            seconds *= max(1.0, math.sqrt(opening / OPENING_SECONDS))
            return max(FEWEST_STEPS, round(seconds / (window.step_p50_ms / 1e3))), sample
    return CALIBRATION_STEPS, sample
