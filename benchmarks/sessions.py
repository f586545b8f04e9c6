"""How often an interval over sessions holds the truth, by simulation.

    python -m benchmarks.sessions --between 0.06 --within 0.05

``between``: standard deviation of a sitting's draw, ``within``: of a round's, both of the logarithm of a ratio. Rounds
may resemble each other: ``autocorrelation`` is that of one round with the next.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.comparison.sessions import over_sessions
from pipeline.comparison.stats import paired_ratio

SESSIONS = (1, 2, 3, 5, 10)
AUTOCORRELATIONS = (0.0, 0.3, 0.6)


def coverage(
    between: float, within: float, sessions: int, *, autocorrelation: float = 0.0, rounds: int = 8, trials: int = 2000
) -> dict[str, float]:
    """Of ``trials``, the share whose 95% interval holds a true ratio of 1, and the median relative width of these."""
    random = np.random.default_rng(0)
    held, widths = 0, []
    for _ in range(trials):
        interval = over_sessions(
            [
                paired_ratio(np.exp(random.normal(0, between) + each), np.ones(rounds), resamples=2000)
                for each in rounds_of(random, within, autocorrelation, sessions, rounds)
            ]
        )
        held += interval.low <= 1 <= interval.high
        widths.append(interval.spread)
    return {"coverage": held / trials, "median_width": float(np.median(widths))}


def rounds_of(
    random: np.random.Generator, within: float, autocorrelation: float, sessions: int, rounds: int
) -> Sequence[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """[sessions, rounds], of standard deviation ``within``, each round resembling the one before (AR(1))."""
    drawn = random.normal(0, within, (sessions, rounds))
    for index in range(1, rounds):
        drawn[:, index] = autocorrelation * drawn[:, index - 1] + (1 - autocorrelation**2) ** 0.5 * drawn[:, index]
    return list(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions", description=__doc__)
    parser.add_argument("--between", type=float, required=True)
    parser.add_argument("--within", type=float, required=True)
    parser.add_argument("--trials", type=int, default=2000)
    asked = parser.parse_args()
    found: dict[str, Any] = {
        f"{sessions} session(s), autocorrelation {each}": coverage(
            asked.between, asked.within, sessions, autocorrelation=each, trials=asked.trials
        )
        for sessions in SESSIONS
        for each in AUTOCORRELATIONS
    }
    print(json.dumps({"between": asked.between, "within": asked.within, "trials": asked.trials, **found}, indent=1))


if __name__ == "__main__":
    main()
