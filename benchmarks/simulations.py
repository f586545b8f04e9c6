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
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from benchmarks.machines import FIGURES
from benchmarks.races import chosen, raced, wrongly_dropped
from pipeline import files
from pipeline.comparison.champion import choices, no_narrower
from pipeline.comparison.looks import FEWEST_LOOKED_AT
from pipeline.comparison.planning import pairs_needed
from pipeline.comparison.stats import (
    FEWEST_SEEDS,
    Difference,
    confidence_of,
    confidence_of_tests,
    decide,
    distrust,
    equivalence,
    over_sessions,
    paired_ratio,
    step_down,
    widened,
)
from pipeline.comparison.verdicts import SURE, of_rounds, side_of
from pipeline.results.bench_file import FEWEST_PAIRS

FILE = FIGURES / "simulations.json"
AUTOCORRELATIONS = (0.0, 0.3, 0.6)
MARGIN = 0.03
MAX_SPREAD = 0.15

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


def interval_of(logs: Logs, reference: Logs, confidence: float = 0.95) -> Difference:
    return paired_ratio(np.exp(logs), np.exp(reference), confidence=confidence)


def pairs_of(logs: Logs, reference: Logs) -> list[tuple[float, float]]:
    return list(zip(np.exp(logs), np.exp(reference), strict=True))


def covers(interval: Difference, truth: float) -> bool:
    low, high = interval.bounds
    return low <= truth <= high


class Measured(NamedTuple):
    """Three arms as ``comparison`` judges them."""

    plain: Difference
    """The ratio of the variant to the baseline and its control, not widened by the bias that the control shows."""
    widened: Difference
    trusted: bool


def machine_of(base: Logs, control: Logs, fewest: int = FEWEST_PAIRS) -> tuple[Difference, bool]:
    """Return the noise, and whether the machine is quiet enough to be trusted."""
    pairs = pairs_of(control, base)
    noise, wide = (of_rounds(pairs, confidence=level, fewest=fewest) for level in (0.95, 0.99))
    return noise, distrust(noise, wide, MAX_SPREAD, fewest=fewest) is None


def measured(
    base: Logs, control: Logs, variant: Logs, confidence: float = 0.95, machine: tuple[Difference, bool] | None = None
) -> Measured:
    """Judge the rounds of three arms (``comparison.verdicts``). ``machine``: ``machine_of`` these rounds, if known."""
    noise, quiet = machine or machine_of(base, control)
    pairs = pairs_of(variant, (base + control) / 2)
    ratio = of_rounds(pairs, noise, confidence)
    plain = of_rounds(pairs, noise.model_copy(update={"estimate": 1.0}), confidence) if noise.bias else ratio
    return Measured(plain, ratio, quiet and not (ratio.drifts and decide(ratio, MARGIN) == "undecided"))


def recorded() -> Logs:
    """Return the logarithms of recorded speeds of three equal arms, an array per arm, in the rounds that have all."""
    arms = json.loads((FIGURES / "gate-pool-amd-epyc-avx2-2-cores.json").read_text(encoding="utf-8"))["arms"]
    names = ("base baseline", "base baseline again", "head baseline")
    rows = [row for row in zip(*(arms[name]["samples_per_second"] for name in names), strict=True) if all(row)]
    return np.log(np.array(rows, dtype=np.float64)).T


def looking(
    truth: float, within: float, autocorrelation: float, *, rounds: int = 40, trials: int = 600, levels: float = 0.0,
    alive: int = 1, pool: Logs | None = None, consecutive: bool = False,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Simulate a variant with the ratio ``truth``; return the results of two stopping rules.

    One rule measures all ``rounds``. The other looks after each round, and stops as soon as a 99% interval
    decides.

    The results are the fractions of trials whose interval contains the truth (``coverage``), whose decision is
    ``wrong``, and which are ``decided`` or ``untrusted``; the mean number of rounds; and the median half-width of the
    interval, on the logarithmic scale. If several decisions are wrong (``_wrong``), ``wrong`` is the fraction of the
    most frequent of them.

    ``levels``: standard deviation of the logarithm of the ratio over processes, which take part in
    ``alive`` rounds. ``pool``: recorded rounds, which are drawn in place of normal ones, or ``consecutive`` ones.
    """
    random = np.random.default_rng(0)
    results: dict[str, list[tuple[Difference, str, int]]] = {f"all {rounds} rounds": [], "looks": []}
    for _ in range(trials):
        if pool is None:
            arms = rounds_of(random, within / math.sqrt(2), autocorrelation, 3, rounds)
        elif consecutive:
            start = random.integers(0, pool.shape[1] - rounds + 1)
            arms = list(pool[:, start : start + rounds])
        else:
            arms = list(pool[:, random.integers(0, pool.shape[1], rounds)])
        if levels:
            drawn = random.normal(0, levels / math.sqrt(2), (3, -(-rounds // alive)))
            arms = list(arms + np.repeat(drawn, alive, axis=1)[:, :rounds])

        def after(number: int, confidence: float = 0.95, arms: Sequence[Logs] = arms) -> Measured:
            base, control, variant = (arm[:number] for arm in arms)
            return measured(base, control, variant + math.log(truth), confidence)

        looks = ((number, after(number, confidence_of(look=True))) for number in range(FEWEST_PAIRS, rounds))
        decisive = (number for number, seen in looks if seen.trusted and decide(seen.widened, MARGIN) != "undecided")
        for rule, number in zip(results, (rounds, next(decisive, rounds)), strict=True):
            seen = after(number)
            decision = decide(seen.widened, MARGIN) if seen.trusted else "untrusted"
            results[rule].append((seen.widened, decision, number))
    return {
        rule: {
            "coverage": sum(covers(ratio, truth) for ratio, _, _ in trials_of) / trials,
            "wrong": max([decision for _, decision, _ in trials_of].count(wrong) / trials for wrong in _wrong(truth)),
            "decided": sum(decision not in ("undecided", "untrusted") for _, decision, _ in trials_of) / trials,
            "untrusted": sum(decision == "untrusted" for _, decision, _ in trials_of) / trials,
            "rounds": float(np.mean([number for _, _, number in trials_of])),
            "half_width": float(np.median([sum(ratio.widths) / 2 for ratio, _, _ in trials_of])),
        }
        for rule, trials_of in results.items()
    }


def sides(
    truth: float, within: float, autocorrelation: float = 0.0, *, rounds: int = 12, trials: int = 1000,
    pool: Logs | None = None,
) -> dict[str, float]:  # fmt: skip
    """Simulate a variant with the ratio ``truth`` on a noisy machine, and one look with the rules of `try`.

    Returns the fraction of benches that are ``untrusted``, because of the control or of drift; the fractions of all and
    of these benches that show a side (``told``, ``told_untrusted``: ``verdicts.side_of``); and of how many benches the
    side is ``wrong``, because the truth lies on the other side of the margin. ``pool``: recorded rounds, of which
    consecutive ones are drawn.
    """
    random = np.random.default_rng(0)
    untrusted = told = told_untrusted = wrong = 0
    for _ in range(trials):
        if pool is None:
            arms = list(rounds_of(random, within / math.sqrt(2), autocorrelation, 3, rounds))
        else:
            start = random.integers(0, pool.shape[1] - rounds + 1)
            arms = list(pool[random.permutation(3), start : start + rounds])
        base, control, variant = arms
        noise, quiet = machine_of(base, control, FEWEST_LOOKED_AT)
        pairs = pairs_of(variant + math.log(truth), (base + control) / 2)
        sure = of_rounds(pairs, noise, SURE, fewest=FEWEST_LOOKED_AT)
        decision = decide(sure, MARGIN)
        trusted = quiet and rounds >= FEWEST_PAIRS and not (sure.drifts and decision == "undecided")
        if not trusted:
            decision = (not sure.drifts and side_of(sure, noise, MARGIN, higher_is_better=True)) or "untrusted"
        has_side = decision in ("better", "worse")
        untrusted += not trusted
        told += has_side
        told_untrusted += has_side and not trusted
        wrong += has_side and (truth <= 1 + MARGIN if decision == "better" else truth >= 1 / (1 + MARGIN))
    return {
        "untrusted": untrusted / trials,
        "told": told / trials,
        "told_untrusted": told_untrusted / max(1, untrusted),
        "wrong": wrong,
    }


def racing(within: float, *, candidates: int = 20, trials: int = 1000) -> dict[str, float]:
    """Simulate races of ``advise``, each of other candidates, whose arms get six windows each in the mean.

    Speeds scatter between candidates by 25%, memories by 30%. Returns how often the fastest or the leanest is
    ``dropped`` although none truly beats it; how often a finalist has at most 3% less speed than the fastest, and one
    at most 3% more memory than the leanest (``found``); the mean number of rounds; and how often a ``stopwatch``, which
    takes one window of each on a machine whose speed does not change meanwhile, names one that is more than 3% slower
    than the fastest. ``within``: of a round's ratio.
    """
    random, size, bound = np.random.default_rng(0), candidates + 1, math.log1p(MARGIN)
    dropped = found = misled = total = 0
    for _ in range(trials):
        truth = np.array([np.r_[0, random.normal(0, 0.25, candidates)], np.r_[0, random.normal(-0.1, 0.3, candidates)]])

        def windows(truth: Logs = truth) -> Logs:
            scatter = random.normal(0, within / math.sqrt(2), size)
            scatter[0] /= math.sqrt(2)  # the baseline and its control
            drawn: Logs = truth + np.array([scatter + random.normal(0, 0.1), random.normal(0, 0.003, size)])
            return drawn

        running, race, rounds = raced(windows, np.ones(size), 6 * candidates)
        front, (speeds, memories) = chosen(running, race), truth
        dropped += len(wrongly_dropped(truth, running))
        near = speeds[front].max() >= speeds.max() - bound and memories[front].min() <= memories.min() + bound
        found += bool(near)
        total += rounds
        once = speeds + random.normal(0, within / math.sqrt(2), size)
        misled += bool(speeds[once.argmax()] < speeds.max() - bound)
    return {
        "dropped": dropped / trials,
        "found": found / trials,
        "rounds": total / trials,
        "stopwatch": misled / trials,
    }


def drifting(
    rounds: int, *, correlation: float = 0.0, walk: float = 0.0, within: float = 0.02, trials: int = 1000
) -> dict[str, float]:
    """Simulate a variant equal to the baseline, on a machine where each arm drifts by itself.

    ``correlation``: that of an arm's round with its next one (AR(1)). ``walk``: an arm also walks at random; the
    standard deviation of its step, over that of a round. Returns how many ratios are ``refused``, because the control
    or the drift shows that the machine is not to be trusted, and how many are refused or contain the ratio before the
    first step (``held``) or the mean ratio of the walks in this session (``held_mean``); ``before``: like ``held``,
    without the rule on drift.
    """
    random, deviation = np.random.default_rng(0), within / math.sqrt(2)
    refused = held = held_mean = before = 0
    for _ in range(trials):
        steps = random.normal(0, walk * deviation, (3, rounds))
        walks = np.cumsum(steps, axis=1)
        base, control, variant = walks + rounds_of(random, deviation, correlation, 3, rounds)
        mean = math.exp(float(np.mean(walks[2] - (walks[0] + walks[1]) / 2)))
        noise, quiet = machine_of(base, control)
        seen = measured(base, control, variant, machine=(noise, quiet))
        alone = of_rounds(pairs_of(variant, (base + control) / 2), noise.model_copy(update={"drift": -math.inf}))
        refused += not seen.trusted
        held += covers(seen.widened, 1) or not seen.trusted
        held_mean += covers(seen.widened, mean) or not seen.trusted
        before += covers(alone, 1) or not quiet
    counts = {"refused": refused, "held": held, "held_mean": held_mean, "before": before}
    return {name: count / trials for name, count in counts.items()}


def many(
    variants: int, truth: float, *, together: bool, within: float = 0.03, rounds: int = 20, trials: int = 500
) -> dict[str, float]:
    """Simulate a bench of ``variants`` that all have the ratio ``truth``, with looks after each round.

    ``together``: decide all variants together (``stats.step_down``), or each by itself. Returns the fraction of benches
    in which at least one decision is ``wrong`` (``_wrong``), that of ``decided`` variants, and the mean number of
    rounds of a variant.
    """
    random, benches = np.random.default_rng(0), []
    for _ in range(trials):
        base, control, *arms = rounds_of(random, within / math.sqrt(2), 0.0, 2 + variants, rounds)
        benches.append(_looked(base, control, [arm + math.log(truth) for arm in arms], together=together))
    decided = [decision for decisions, _ in benches for decision in decisions if decision not in _NO_DECISION]
    return {
        "wrong": max(sum(wrong in decisions for decisions, _ in benches) / trials for wrong in _wrong(truth)),
        "decided": len(decided) / (variants * trials),
        "rounds": float(np.mean([ends for _, ends in benches])),
    }


_NO_DECISION = ("undecided", "untrusted")


def _looked(base: Logs, control: Logs, arms: Sequence[Logs], *, together: bool) -> tuple[list[str], list[int]]:
    """Return the decision on each of ``arms``, and the number of rounds after which a look settled it."""
    ends, rounds = [len(base)] * len(arms), len(base)

    @cache
    def machine(end: int) -> tuple[Difference, bool]:
        return machine_of(base[:end], control[:end])

    @cache
    def decision_on(place: int, end: int, confidence: float) -> str:
        seen = measured(base[:end], control[:end], arms[place][:end], confidence, machine(end))
        return decide(seen.widened, MARGIN) if seen.trusted else "untrusted"

    def decisions_at(number: int, *, look: bool) -> list[str]:
        def decisions(undecided: int) -> list[str]:
            confidence = confidence_of(undecided if together else 1, look=look)
            return [decision_on(place, min(end, number), confidence) for place, end in enumerate(ends)]

        return decisions(step_down(lambda undecided: [x for x in decisions(undecided) if x in _NO_DECISION], len(arms)))

    for number in range(FEWEST_PAIRS, rounds):
        for place, decision in enumerate(decisions_at(number, look=True)):
            if decision not in _NO_DECISION:
                ends[place] = min(ends[place], number)
    return decisions_at(rounds, look=False), ends


def seeds(points: float, deviation: float, *, most: int = 12, trials: int = 2000) -> dict[str, float]:
    """Simulate a variant whose accuracy is better by ``points``, with this deviation over seeds; the margin is 1 point.

    Returns how often three seeds decide it, and ``most`` seeds or fewer, which are added one at a time until a look
    decides; of these, also how often it is *same*, *worse* and *better*, and the mean number of seeds.
    """
    random, at_once = np.random.default_rng(0), 0
    decisions, numbers = [], []
    for _ in range(trials):
        differences = random.normal(points, deviation, most)

        def decision(number: int, *, look: bool, differences: Logs = differences) -> str:
            return equivalence(differences[:number], 1.0, confidence=confidence_of_tests(look=look)).decision

        at_once += decision(FEWEST_SEEDS, look=False) != "undecided"
        looks = (number for number in range(FEWEST_SEEDS, most) if decision(number, look=True) != "undecided")
        numbers.append(next(looks, most))
        decisions.append(decision(numbers[-1], look=False))
    shares = {name: decisions.count(name) / trials for name in ("same", "worse", "better")}
    return {"three": at_once / trials, **shares, "seeds": float(np.mean(numbers))}


def _wrong(truth: float) -> list[str]:
    """Return the wrong decisions to count if the ratio is ``truth``. At or beyond a margin, the decision for the other
    margin is not counted, because it hardly ever occurs."""
    if math.isclose(truth, 1 + MARGIN):
        return ["better", "same"]
    return ["same"] if abs(math.log(truth)) > math.log1p(MARGIN) else ["better", "worse"]


def equal_arms(bias: float, within: float, *, rounds: int = 12, trials: int = 1000) -> dict[str, float]:
    """Simulate a control and a variant that equal the baseline, but seem faster by ``bias``.

    In the result, ``unseen`` is the fraction of trials in which the control is trusted. ``plain`` and ``widened`` are
    the fractions in which the control is trusted but the variant's interval misses the truth.
    """
    random = np.random.default_rng(0)
    unseen = plain = wide = 0
    for _ in range(trials):
        base, control, variant = rounds_of(random, within / math.sqrt(2), 0.0, 3, rounds)
        seen = measured(base, control + bias, variant + bias)
        unseen += seen.trusted
        plain += seen.trusted and not covers(seen.plain, 1)
        wide += seen.trusted and not covers(seen.widened, 1)
    return {"unseen": unseen / trials, "plain": plain / trials, "widened": wide / trials}


def kept(bias: float, noises: Sequence[float], *, rounds: int = 12, trials: int = 600) -> dict[str, dict[str, float]]:
    """Simulate trusted sessions with the scatters ``noises``, in which control and variant equal the baseline, but seem
    faster by ``bias``; widen each ratio by the bias that its ``own`` A/A ratio shows, or that ``all`` of them show.

    All of them show the mean of x^2 - e^2 (``Difference.bias``), in which a session weighs 1 / e^2. Returns, for the
    ratio of the last session (``one``) and for that over all sessions, how often the interval contains the truth, and
    its mean half-width on the logarithmic scale.
    """
    random = np.random.default_rng(0)
    results: dict[str, list[Difference]] = {
        f"{of}, {rule}": [] for of in ("one", "over all") for rule in ("own", "all")
    }
    for _ in range(trials):
        sessions: list[Measured] = []
        excesses: list[float] = []
        weights: list[float] = []
        for within in noises:
            quiet = False
            while not quiet:
                base, control, variant = rounds_of(random, within / math.sqrt(2), 0.0, 3, rounds)
                noise, quiet = machine = machine_of(base, control + bias)
            sessions.append(measured(base, control + bias, variant + bias, machine=machine))
            variance = (sum(noise.widths) / 2 / float(stdtrit(rounds - 1, 0.975))) ** 2
            excesses.append(noise.logs[0] ** 2 - variance)
            weights.append(1 / variance)
        shared = math.sqrt(max(0.0, float(np.average(excesses, weights=weights))))
        for rule, ratios in (
            ("own", [seen.widened for seen in sessions]),
            ("all", [widened(seen.plain, shared) for seen in sessions]),
        ):
            results[f"one, {rule}"].append(ratios[-1])
            results[f"over all, {rule}"].append(over_sessions(ratios))
    return {
        rule: {
            "coverage": sum(covers(ratio, 1) for ratio in ratios) / trials,
            "half_width": float(np.mean([sum(ratio.widths) / 2 for ratio in ratios])),
        }
        for rule, ratios in results.items()
    }


def decided(truth: float, within: float, *, rounds: int = 12, trials: int = 1000) -> dict[str, float]:
    """Return the fraction of trials in which a variant with the ratio ``truth``, and without bias, is decided, by the
    interval that is not widened and by the widened one."""
    random = np.random.default_rng(0)
    plain = wide = 0
    for _ in range(trials):
        base, control, variant = rounds_of(random, within / math.sqrt(2), 0.0, 3, rounds)
        seen = measured(base, control, variant + math.log(truth))
        plain += decide(seen.plain, MARGIN) != "undecided"
        wide += decide(seen.widened, MARGIN) != "undecided"
    return {"plain": plain / trials, "widened": wide / trials}


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
    by_as_many, by_twice = (sum(figures) / len(held) for figures in zip(*held, strict=True))
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
        known: list[Difference] = []
        while len(known) < sessions:
            base, control, variant = rounds_of(random, within / math.sqrt(2), autocorrelation, 3, rounds)
            seen = measured(base, control, variant + random.normal(0, between))
            if seen.trusted:
                known.append(seen.widened)
            else:
                untrusted += 1
        interval = over_sessions(known)
        held += covers(interval, 1)
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
    random, deviation, reference = np.random.default_rng(0), within / math.sqrt(2), np.zeros(rounds)
    seen, seen_best, held, ahead = [], [], 0, 0
    for _ in range(trials):
        base, control = random.normal(0, deviation, (2, sessions, rounds))
        effects = random.normal(0, between, (variants, sessions, 1))
        logs = math.log(truth) + effects + random.normal(0, deviation, (variants, sessions, rounds))
        logs -= (base + control) / 2
        doubts = [interval_of(control[part], base[part]).bias for part in range(sessions)]
        medians = np.median(logs, axis=2)
        first, second = np.argsort(medians.mean(axis=1))[:-3:-1]

        def over(ratios: Sequence[Logs], doubts: Sequence[float] = doubts) -> Difference:
            known = [interval_of(ratio, reference) for ratio in ratios]
            return over_sessions([widened(interval, doubt) for interval, doubt in zip(known, doubts, strict=True)])

        if sessions == 1:
            chosen = over([logs[choices(logs[:, 0], middle=np.median), 0, range(rounds)]])
        else:
            chosen = over([logs[best, part] for part, best in enumerate(choices(medians))])
        interval = no_narrower(chosen, over(list(logs[first])))
        seen.append(medians[first].mean())
        seen_best.append(interval.logs[0])
        held += covers(interval, truth)
        ahead += decide(over(list(logs[first] - logs[second])), MARGIN) == "better"
    return {
        "truth": truth,
        "seen": math.exp(float(np.mean(seen))),
        "told": math.exp(float(np.mean(seen_best))),
        "coverage": held / trials,
        "ahead": ahead / trials,
    }


SIMULATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "looking": lambda: {
        f"ratio {truth:g}, noise {within:g}, autocorrelation {autocorrelation}": looking(truth, within, autocorrelation)
        for truth, within in (*product((1 + MARGIN, 1.0, 1.1), (0.02, 0.05)), (1.6, 0.08))
        for autocorrelation in AUTOCORRELATIONS
    },
    "aims": lambda: {
        f"{name}, ratio {truth:g}, {rounds} rounds": looking(
            truth, 0.02, 0.0, rounds=rounds, pool=pool, consecutive="consecutive" in name
        )
        for name, pool in (("normal", None), ("recorded", recorded()), ("recorded, consecutive", recorded()))
        for truth, rounds in ((1.1, 40), (1.0, 40), (0.95, 40), (0.95, 12))
    },
    "many": lambda: {
        f"{variants} variants, ratio {truth:g}": {
            "each by itself": many(variants, truth, together=False),
            "together": many(variants, truth, together=True),
        }
        for truth in (1 + MARGIN, 1.0)
        for variants in (1, 2, 7, 10)
    },
    "racing": lambda: {f"noise {within:g}": racing(within) for within in (0.04, 0.08)},
    "sides": lambda: (
        {
            f"ratio {truth:g}, noise {within:g}, autocorrelation {correlation}, {rounds} rounds": sides(
                truth, within, correlation, rounds=rounds
            )
            for truth in (1.0, 1 + MARGIN, 0.8, 0.32)
            for within in (0.1, 0.2, 0.4)
            for correlation, rounds in ((0.0, 3), (0.0, 6), (0.0, 12), (0.6, 4), (0.6, 12))
        }
        | {
            f"ratio {truth:g}, recorded, {rounds} rounds": sides(truth, 0.0, rounds=rounds, pool=recorded())
            for truth in (1.0, 1 + MARGIN, 0.8, 0.32)
            for rounds in (3, 4, 6, 12)
        }
    ),
    "drifting": lambda: {
        f"correlation {correlation}, walk {walk}, {rounds} rounds": drifting(rounds, correlation=correlation, walk=walk)
        for correlation, walk in ((0.0, 0.0), (0.3, 0.0), (0.6, 0.0), (0.8, 0.0), (0.0, 0.3), (0.0, 1.0), (0.0, 3.0))
        for rounds in (6, 8, 12, 20, 40)
    },
    "seeds": lambda: {
        f"points {points:g}, deviation {deviation:g}": seeds(points, deviation)
        for points in (0.0, -1.0, -1.5, -2.0)
        for deviation in (0.3, 0.6, 1.0)
    },
    "alive": lambda: {
        f"ratio {truth:g}, noise {within:g}, levels {levels:g}, {alive} rounds": looking(
            truth, within, 0.0, rounds=24, trials=400, levels=levels, alive=alive
        )["looks"]
        for truth, within in ((1 + MARGIN, 0.03), (1.1, 0.03))
        for levels in (0.0, 0.01, 0.02, 0.03)
        for alive in (1, 2, 3)
    },
    "equal_arms": lambda: {
        f"bias {bias:g}, noise {within:g}": equal_arms(bias, within)
        for bias in (0.0, 0.01, 0.02, 0.03)
        for within in (0.02, 0.05, 0.08)
    },
    "kept": lambda: {
        f"bias {bias:g}, noises {', '.join(f'{noise:g}' for noise in noises)}": kept(bias, noises)
        for noises in ((0.02,) * 4, (0.05,) * 4, (0.05, 0.05, 0.05, 0.02))
        for bias in (0.0, 0.02, 0.03)
    },
    "decided": lambda: {
        f"ratio {truth:g}, noise {within:g}": decided(truth, within)
        for truth in (1.0, 1.05, 1.1, 1.36)
        for within in (0.01, 0.02, 0.05)
    },
    "forecasts": lambda: {
        f"ratio {truth:g}, noise {within:g}": forecasts(truth, within)
        for truth in (1.0, 1.05, 1.08)
        for within in (0.03, 0.06, 0.1)
    },
    "sessions": lambda: {
        f"{sessions} session(s) that differ by {between:g}, noise {within:g}, autocorrelation {correlation}": over_many(
            sessions, correlation, between=between, within=within
        )
        for between, within in ((0.11, 0.05), (0.06, 0.02), (0.02, 0.05))
        for sessions in (1, 2, 3, 5, 10)
        for correlation in AUTOCORRELATIONS
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
