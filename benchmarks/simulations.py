"""Simulate the costs and benefits of the rules of the bench and the comparison, with seeded random numbers.

    python -m benchmarks.simulations [NAME ...]

The command writes ``figures/simulations.json``. Logarithms of speeds are normally distributed. ``within`` is the
standard deviation of the logarithm of a round's ratio; each arm contributes half of the variance. ``autocorrelation``
is the correlation of an arm's speed in a round with its speed in the next round.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.machines import FIGURES
from pipeline import files
from pipeline.benchmark.settling import NEGLIGIBLE, SETTLED_ROUNDS, equal, settled
from pipeline.comparison.champion import choices, no_narrower
from pipeline.comparison.planning import pairs_needed
from pipeline.comparison.sessions import over_sessions
from pipeline.comparison.stats import Interval, decide, distrust, paired_ratio, widened

FILE = FIGURES / "simulations.json"
AUTOCORRELATIONS = (0.0, 0.3, 0.6)
MARGIN = 0.03
MAX_SPREAD = 0.15
RESAMPLES = 1000
COUNTS = (6, 8, SETTLED_ROUNDS, 12)
SHAPES = ("plain", "half_width", "with_offset")

Logs = np.ndarray[Any, np.dtype[np.float64]]


def rounds_of(
    random: np.random.Generator, within: float, autocorrelation: float, arms: int, rounds: int
) -> Sequence[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Draw logarithms of speeds; return one array per arm. ``within``: here the standard deviation of one arm.

    Each round is correlated with the round before (AR(1))."""
    drawn = random.normal(0, within, (arms, rounds))
    for index in range(1, rounds):
        drawn[:, index] = autocorrelation * drawn[:, index - 1] + (1 - autocorrelation**2) ** 0.5 * drawn[:, index]
    return list(drawn)


def interval_of(logs: Logs, reference: Logs, confidence: float = 0.95) -> Interval:
    return paired_ratio(np.exp(logs), np.exp(reference), confidence=confidence, resamples=RESAMPLES)


def half_width(aa: Interval) -> float:
    return math.log(aa.high / aa.low) / 2


def doubt_of(aa: Interval) -> float:
    """Compute ``verdicts.Noise.doubt`` for an A/A interval."""
    return math.hypot(half_width(aa), math.log(aa.estimate))


def shapes(plain: Interval, aa: Interval) -> dict[str, Interval]:
    """Return ``plain``, and ``plain`` widened in quadrature by each of two measures of the A/A interval."""
    return {
        "plain": plain,
        "half_width": widened(plain, half_width(aa)),
        "with_offset": widened(plain, doubt_of(aa)),
    }


def looking(
    truth: float, within: float, autocorrelation: float, counts: Sequence[int] = COUNTS, *, rounds: int = 30,
    trials: int = 600,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Simulate a variant with the ratio ``truth``; return the results of several stopping rules.

    One rule measures all ``rounds``. For each number in ``counts``, another rule looks at that many of the latest
    rounds. This rule stops as soon as they settle the variant, and the control looks equal to the baseline in them.

    The results are the fractions of trials whose interval contains the truth (``coverage``), whose decision is
    ``wrong``, and which are ``decided`` or ``untrusted``; and the mean number of rounds. If several decisions
    are wrong (``_wrong``), ``wrong`` is the fraction of the most frequent of them.
    """
    random = np.random.default_rng(0)
    found: dict[str, list[tuple[bool, str, int]]] = {}
    for _ in range(trials):
        base, control, variant = rounds_of(random, within / math.sqrt(2), autocorrelation, 3, rounds)
        logs = variant + math.log(truth)
        ratios = np.exp(np.stack([logs - base, logs - control], axis=1)).tolist()
        against_itself = np.exp(control - base).tolist()

        def ends(number: int, count: int, ratios: Any = ratios, against_itself: Any = against_itself) -> bool:
            calm = equal(against_itself[:number], NEGLIGIBLE, MAX_SPREAD, count)
            return calm and settled(ratios[:number], MARGIN, count)

        stops = {f"all {rounds} rounds": rounds}
        for count in counts:
            stops[f"settled in {count}"] = next((each for each in range(count, rounds) if ends(each, count)), rounds)
        told = {}
        for number in set(stops.values()):
            aa, wide = (interval_of(control[:number], base[:number], confidence) for confidence in (0.95, 0.99))
            interval = widened(interval_of(logs[:number], base[:number]), doubt_of(aa))
            decision = "untrusted" if distrust(aa, wide, MAX_SPREAD) else decide(interval, MARGIN)
            told[number] = interval.low <= truth <= interval.high, decision, number
        for name, number in stops.items():
            found.setdefault(name, []).append(told[number])
    return {
        name: {
            "coverage": sum(one[0] for one in each) / trials,
            "wrong": max([one[1] for one in each].count(wrong) / trials for wrong in _wrong(truth)),
            "decided": sum(one[1] not in ("undecided", "untrusted") for one in each) / trials,
            "untrusted": sum(one[1] == "untrusted" for one in each) / trials,
            "rounds": float(np.mean([one[2] for one in each])),
        }
        for name, each in found.items()
    }


def _wrong(truth: float) -> list[str]:
    """Return the wrong decisions to count if the ratio is ``truth``. For ratios at or above the margin, *worse*
    is not counted, because it hardly ever occurs."""
    if math.isclose(truth, 1 + MARGIN):
        return ["better", "same"]
    return ["same"] if truth > 1 + MARGIN else ["better", "worse"]


def equal_arms(bias: float, within: float, *, rounds: int = 12, trials: int = 1000) -> dict[str, Any]:
    """Simulate a control and a variant that equal the baseline, but seem faster by ``bias``.

    In the result, ``unseen`` is the fraction of trials in which the control is trusted. ``beside`` is, for each of
    ``shapes``, the fraction in which the control is trusted but the variant's interval misses the truth.
    """
    random = np.random.default_rng(0)
    unseen, beside = 0, dict.fromkeys(SHAPES, 0)
    for _ in range(trials):
        base, control, variant = rounds_of(random, within / math.sqrt(2), 0.0, 3, rounds)
        aa, wide = (interval_of(control + bias, base, confidence) for confidence in (0.95, 0.99))
        if distrust(aa, wide, MAX_SPREAD) is None:
            unseen += 1
            for name, each in shapes(interval_of(variant + bias, base), aa).items():
                beside[name] += not each.low <= 1 <= each.high
    return {"unseen": unseen / trials, "beside": {name: number / trials for name, number in beside.items()}}


def decided(truth: float, within: float, *, rounds: int = 12, trials: int = 1000) -> dict[str, float]:
    """Return, for each of ``shapes``, the fraction of trials in which a variant with the ratio ``truth``, and without
    bias, is decided."""
    random = np.random.default_rng(0)
    found = dict.fromkeys(SHAPES, 0)
    for _ in range(trials):
        base, control, variant = rounds_of(random, within / math.sqrt(2), 0.0, 3, rounds)
        plain, aa = interval_of(variant + math.log(truth), base), interval_of(control, base)
        for name, each in shapes(plain, aa).items():
            found[name] += decide(each, MARGIN) != "undecided"
    return {name: number / trials for name, number in found.items()}


def forecasts(truth: float, within: float, *, rounds: int = 8, most: int = 400, trials: int = 400) -> dict[str, float]:
    """Return how often a forecast of the pairs that a decision still needs (``planning.pairs_needed``) is right.

    A forecast is made after ``rounds`` rounds, and counts if it is at least 1 and at most ``most`` pairs.
    ``forecasts`` is the number of these forecasts. ``by_as_many`` is the fraction of them after which the forecast
    number of pairs led to a decision; ``by_twice_as_many`` is the fraction after which twice this number did.
    """
    random = np.random.default_rng(0)
    held: list[list[bool]] = []
    for _ in range(trials):
        base, variant = rounds_of(random, within / math.sqrt(2), 0.0, 2, rounds + 2 * most)
        logs = variant + math.log(truth)
        more = pairs_needed(interval_of(logs[:rounds], base[:rounds]), MARGIN)
        if more and more <= most:
            ends = (rounds + more, rounds + 2 * more)
            held.append([decide(interval_of(logs[:end], base[:end]), MARGIN) != "undecided" for end in ends])
    by_as_many, by_twice = (sum(each) / len(held) for each in zip(*held, strict=True))
    return {"by_as_many": by_as_many, "by_twice_as_many": by_twice, "forecasts": len(held)}


def over_many(
    sessions: int, autocorrelation: float = 0.0, *, between: float = 0.11, within: float = 0.05, rounds: int = 8,
    trials: int = 1000,
) -> dict[str, float]:  # fmt: skip
    """Simulate a variant equal to the baseline, over ``sessions`` trusted sessions that differ by ``between``.

    Returns how often the interval over the sessions contains the truth, its median relative width, and the share of
    untrusted benches. ``between``: standard deviation over sessions of the logarithm of the ratio.
    """
    random = np.random.default_rng(0)
    held, widths, untrusted = 0, [], 0
    for _ in range(trials):
        known: list[Interval] = []
        while len(known) < sessions:
            base, control, variant = rounds_of(random, within / math.sqrt(2), autocorrelation, 3, rounds)
            aa, wide = (interval_of(control, base, confidence) for confidence in (0.95, 0.99))
            if distrust(aa, wide, MAX_SPREAD) is None:
                known.append(widened(interval_of(variant + random.normal(0, between), base), doubt_of(aa)))
            else:
                untrusted += 1
        interval = over_sessions(known)
        held += interval.low <= 1 <= interval.high
        widths.append(interval.spread)
    return {
        "coverage": held / trials,
        "median_width": float(np.median(widths)),
        "untrusted": untrusted / (untrusted + sessions * trials),
    }


def best_of(
    variants: int, truth: float, *, within: float = 0.04, rounds: int = 12, sessions: int = 1, between: float = 0.0,
    trials: int = 1000,
) -> dict[str, float]:  # fmt: skip
    """Simulate the choice of the best of ``variants`` that all have the ratio ``truth``.

    Returns the best variant's ratio over all parts of the measurement (``seen``), and its ratio if some parts choose
    the best and other parts measure it (``told``). Parts are the rounds of one session, or sessions that differ by
    ``between``. ``ahead``: how often the best is called better than the next by more than the margin, although all
    variants are equal. ``coverage``: how often the interval of ``told`` contains the truth.
    """
    random, one, reference = np.random.default_rng(0), within / math.sqrt(2), np.zeros(rounds)
    seen, told, held, ahead = [], [], 0, 0
    for _ in range(trials):
        base, control = random.normal(0, one, (2, sessions, rounds))
        effects = random.normal(0, between, (variants, sessions, 1))
        logs = math.log(truth) + effects + random.normal(0, one, (variants, sessions, rounds)) - base
        doubts = [doubt_of(interval_of(control[part], base[part])) for part in range(sessions)]
        medians = np.median(logs, axis=2)
        first, second = np.argsort(medians.mean(axis=1))[:-3:-1]

        def over(ratios: Sequence[Logs], doubts: Sequence[float] = doubts) -> Interval:
            known = [interval_of(each, reference) for each in ratios]
            return over_sessions([widened(each, doubt) for each, doubt in zip(known, doubts, strict=True)])

        if sessions == 1:
            chosen = over([logs[choices(logs[:, 0], middle=np.median), 0, range(rounds)]])
        else:
            chosen = over([logs[best, part] for part, best in enumerate(choices(medians))])
        interval = no_narrower(chosen, over(list(logs[first])))
        seen.append(medians[first].mean())
        told.append(math.log(interval.estimate))
        held += interval.low <= truth <= interval.high
        ahead += decide(over(list(logs[first] - logs[second])), MARGIN) == "better"
    return {
        "truth": truth,
        "seen": math.exp(float(np.mean(seen))),
        "told": math.exp(float(np.mean(told))),
        "coverage": held / trials,
        "ahead": ahead / trials,
    }


SIMULATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "looking": lambda: {
        f"ratio {truth:g}, noise {within:g}, autocorrelation {each}": looking(truth, within, each)
        for truth, within in (*product((1 + MARGIN, 1.0, 1.1), (0.02, 0.05)), (1.6, 0.08))
        for each in AUTOCORRELATIONS
    },
    "equal_arms": lambda: {
        f"bias {bias:g}, noise {within:g}": equal_arms(bias, within)
        for bias in (0.0, 0.01, 0.02, 0.03)
        for within in (0.02, 0.05, 0.08)
    },
    "decided": lambda: {
        f"ratio {truth:g}, noise {within:g}": decided(truth, within)
        for truth in (1.0, 1.05, 1.1, 1.36)
        for within in (0.01, 0.02, 0.05)
    },
    "forecasts": lambda: {
        f"ratio {truth:g}, noise {within:g}": forecasts(truth, within)
        for truth in (1.0, 1.06, 1.1)
        for within in (0.03, 0.06, 0.1)
    },
    "sessions": lambda: {
        f"{sessions} session(s) that differ by {between:g}, noise {within:g}, autocorrelation {each}": over_many(
            sessions, each, between=between, within=within
        )
        for between, within in ((0.11, 0.05), (0.06, 0.02), (0.02, 0.05))
        for sessions in (1, 2, 3, 5, 10)
        for each in AUTOCORRELATIONS
    },
    "best_of": lambda: {
        "one session": best_of(10, 1.06),
        "three sessions": best_of(10, 1.06, sessions=3, between=0.03),
        "five sessions": best_of(10, 1.06, sessions=5, between=0.03),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(SIMULATIONS)}; default: all")
    names = parser.parse_args().names or list(SIMULATIONS)
    if unknown := set(names) - set(SIMULATIONS):
        parser.error(f"no such simulation: {', '.join(sorted(unknown))}")
    figures = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name in names:
        figures[name] = SIMULATIONS[name]()
        files.write_text(FILE, json.dumps(figures, indent=1) + "\n")
        print(json.dumps(figures[name], indent=1))


if __name__ == "__main__":
    main()
