"""Statistics of paired measurements: ratios with intervals, equivalence over seeds, and a decision at a margin."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

from pipeline.errors import count
from pipeline.results import Record
from pipeline.results.bench_file import FEWEST_PAIRS, NEGLIGIBLE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

Verdict = Literal["pays", "trades", "costs", "neutral", "undecided", "untrusted"]
Decision = Literal["better", "worse", "same", "undecided", "untrusted"]
"""The decision on one quantity. Only ``verdicts`` sets *untrusted*, depending on the samples; ``decide`` never does. Of
a difference that is *better* or *worse* and has a ``why_untrusted``, only the side is known: its size is uncertain."""

ERROR = 0.05
"""How often at least one of the decisions on a figure may be wrong, over all variants of a comparison or gate."""
SHARE_OF_LOOKS = 0.1
"""The share of ``ERROR`` that a look has. A measurement looks, while it goes on, whether everything is decided; looks
are stricter than the final decision, so that many of them add few errors (the Haybittle-Peto rule). Source: Haybittle,
"Repeated assessment of results in clinical trials of cancer treatment", British Journal of Radiology 44 (1971)."""
FEWEST_SEEDS = 3
"""Fewer seeds give no decision on accuracy, because the differences of two seeds say little about further seeds. If the
weights equal the baseline's, any number of seeds gives a decision."""
FIXED_SHARE = 0.9
"""If this share of an interval's half-width is fixed, further rounds do not make the interval narrower."""

Outcomes = tuple[Decision, ...]
"""The possible decisions on a difference: its decision or, if undecided, every decision that its interval allows."""

ANY: Outcomes = ("better", "same", "worse")


class Difference(Record):
    """One arm against another in one figure, with a confidence interval: the ratio of the two figures, or the first
    minus the second.

    A *ratio* is paired by round (``paired_ratio``). In one session, a bias that the A/A noise shows widens its
    interval. Over several sessions, it is the geometric mean of the sessions' ratios (``sessions.combined``). The
    *noise* is the ratio of the baseline to itself; it is *same* or *untrusted*.

    A difference of *fractions*, such as test accuracies, is the mean over the seeds, by which it is paired. Positive
    values mean more than the baseline.
    """

    unit: Literal["ratio", "fraction"] = "ratio"
    estimate: float | None = None
    """None if no pair has both figures."""
    low: float | None = None
    high: float | None = None
    """``low`` and ``high``: the interval of a ratio; of fractions the interval that lies inside the margins exactly
    when two one-sided tests reject, cut off where a fraction would be below 0 or above 1. None if there are too few
    pairs for bounds."""
    pairs: int = 0
    """Number of pairs: rounds, or seeds, that have both figures."""
    confidence: float = 0.95
    """Confidence of the interval; of fractions, that of each of the two one-sided tests."""
    rejected: int = 0
    """Number of rounds in which a figure is missing or was rejected."""
    margin: float = 0.0
    """A difference up to the margin is the *same*. For the noise, the largest accepted relative width of the interval;
    if the interval is wider, the machine is not trusted."""
    decision: Decision = "undecided"
    why_untrusted: str | None = None
    """Why the estimate and its interval are not to be used; None if they are."""
    more_pairs: int | None = None
    """About how many more pairs a decision needs; for a ratio, in one session. None if there is a decision, or no
    forecast."""
    more_sessions: int | None = None
    """About how many more sessions a decision over several sessions needs. None if there is a decision or no
    forecast."""
    correlation: float = 0.0
    """Of a ratio in one session: the correlation of a round with the next one for which its interval allows; of the
    noise, its own (``autocorrelation``)."""
    drift: float = 1.0
    """Of a ratio in one session: how much it drifted over the rounds, like ``correlation`` (``drift_of``)."""
    fixed: float = 0.0
    """The part of a ratio's half-width, on the logarithmic scale, that more rounds do not reduce."""
    deviation: float | None = None
    """Sample standard deviation of the fractions' differences, or their resolution if that is larger; None for a single
    seed, and for a ratio."""
    parts: Mapping[str, Difference] = {}
    """Start of a session -> the ratio in this session alone, the oldest first; for a champion with a runner-up, the
    ratio of the variant that the session chose. Or seed -> the difference with this seed. Empty in the gate and in
    ablations."""

    @property
    def bounds(self) -> tuple[float, float]:
        """``low`` and ``high``; an unknown bound is 0 or infinite for a ratio, infinite for fractions."""
        lowest = 0.0 if self.unit == "ratio" else -math.inf
        return lowest if self.low is None else self.low, math.inf if self.high is None else self.high

    @property
    def logs(self) -> tuple[float, float, float]:
        """The logarithms of estimate, low and high, of a ratio that has bounds."""
        low, high = self.bounds
        return math.log(self.estimate or 1.0), math.log(low), math.log(high)

    @property
    def widths(self) -> tuple[float, float]:
        """How far the bounds of a ratio lie below and above its estimate, on the logarithmic scale."""
        (low, high), estimate = self.bounds, self.estimate or 1.0
        return math.log(estimate / low), math.log(high / estimate)

    @property
    def spread(self) -> float:
        """Relative width: 0.02 if ``high`` is 2% above ``low``."""
        low, high = self.bounds
        return high / low - 1 if low > 0 else math.inf

    @property
    def bias(self) -> float:
        """Of the noise: how far equal arms probably differ, on the logarithmic scale.

        Chance alone gives an estimate x a variance of e^2, where e is the standard error. So a bias is estimated by
        sqrt(x^2 - e^2), and by 0 if x is no larger than e. 0 too if the estimate or a bound is unknown.
        """
        if not self.estimate or self.low is None:
            return 0.0
        from scipy.special import stdtrit

        error = sum(self.widths) / 2 / float(stdtrit(self.pairs - 1, 0.975))
        return math.sqrt(max(0.0, math.log(self.estimate) ** 2 - error**2))

    def outcomes(self, *, higher_is_better: bool = True) -> Outcomes:
        """Return the possible decisions: all, if the difference is undecided and has no bounds or too few seeds."""
        if self.decision != "undecided":
            return (self.decision,)
        if self.low is None or (self.unit == "fraction" and self.pairs < FEWEST_SEEDS):
            return ANY
        return allowed(self, self.margin, higher_is_better=higher_is_better)

    def times(self, factor: float) -> Difference:
        """Return the ratio, multiplied by a factor that is known; with its old decision."""
        ends = {end: getattr(self, end) for end in ("estimate", "low", "high")}
        return self.model_copy(update={end: value and factor * value for end, value in ends.items()})

    @property
    def counts(self) -> bool:
        """True if the difference is trusted and has bounds."""
        return self.decision != "untrusted" and not self.why_untrusted and self.low is not None

    @property
    def drifts(self) -> bool:
        """True if the rounds drifted too much for an interval of their mean."""
        return self.low is not None and self.drift > LARGEST_DRIFT

    @property
    def widening(self) -> float:
        """How many times as wide as without the correlation of rounds a ratio's interval is in one session."""
        from scipy.special import stdtrit

        rounds = independent(self.pairs, self.correlation)
        quantiles = (float(stdtrit(max(2.0, number - 1), (1 + self.confidence) / 2)) for number in (rounds, self.pairs))
        wide, narrow = quantiles
        return wide / narrow * math.sqrt(self.pairs / rounds)

    @property
    def narrows(self) -> bool:
        """False if further rounds of a session do not make the interval narrower."""
        return self.low is None or self.fixed < FIXED_SHARE * max(self.widths)

    @property
    def session_count(self) -> int:
        """Number of sessions from which the ratio comes."""
        return max(1, sum(part.counts for part in self.parts.values()))


def confidence_of(undecided: int = 1, *, look: bool = False) -> float:
    """Return the confidence of a ratio's interval if so many variants are undecided: 95% for one or two, 99% for ten.

    A decision is wrong if the interval misses the truth on one certain side. So half of the interval's error counts,
    and ``undecided`` times this half is ``ERROR``. It is never less than 95%, and at a ``look`` never than 99%.
    """
    fewest = 1 if look else 2  # an interval of 90%, which one variant needs at the end, would be unusual
    return 1 - 2 * (1 - confidence_of_tests(max(fewest, undecided), look=look))


def confidence_of_tests(undecided: int = 1, *, look: bool = False) -> float:
    """Return the confidence of each of the two tests of a variant's accuracy if so many variants are undecided."""
    return 1 - ERROR / max(1, undecided) * (SHARE_OF_LOOKS if look else 1)


def step_down(undecided_at: Callable[[int], Collection[str]], compared: int) -> int:
    """Return the number of undecided variants with which the intervals of all ``compared`` variants are computed.

    ``undecided_at``: a number of undecided variants -> those that such intervals leave undecided (``confidence_of``).
    The variants that all together can be decided need no more allowance, so the others are tried again with their own
    number, until no further one is decided. So all intervals have the same confidence, and each agrees with its
    decision. Source: Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
    Statistics 6 (1979).
    """
    while (undecided := len(undecided_at(compared))) < compared:
        compared = undecided
    return compared


def decided_together(judged: Callable[[int], dict[str, Difference]], compared: int) -> dict[str, Difference]:
    """Return the differences of all ``compared`` variants by the number of undecided variants of ``step_down``."""

    def undecided(number: int) -> list[str]:
        return [name for name, difference in judged(number).items() if difference.decision == "undecided"]

    return judged(step_down(undecided, compared))


def decide(difference: Difference, margin: float, *, higher_is_better: bool = True) -> Decision:
    """Return the decision that the interval supports: the only one that it allows at ``margin``, or *undecided*."""
    decisions = allowed(difference, margin, higher_is_better=higher_is_better)
    return decisions[0] if len(decisions) == 1 else "undecided"


def allowed(difference: Difference, margin: float, *, higher_is_better: bool = True) -> Outcomes:
    """Return which of *better*, *same* and *worse* the interval allows. The decision for high values comes first.

    With a margin of 0.02, a ratio is *same* from 1 / 1.02 to 1.02, which is symmetric on the logarithmic scale. A
    difference of fractions is *same* from -0.02 to 0.02. An interval that touches a bound allows the decisions on both
    sides of this bound.

    >>> allowed(Difference(low=0.90, high=1.01), 0.02)
    ('same', 'worse')
    """
    low, high = difference.bounds
    lower, upper = (1 / (1 + margin), 1 + margin) if difference.unit == "ratio" else (-margin, margin)
    above, below = ("better", "worse") if higher_is_better else ("worse", "better")
    possible = {above: high >= upper, "same": low <= upper and high >= lower, below: low <= lower}
    return cast("Outcomes", tuple(decision for decision in possible if possible[decision]))


LARGEST_DRIFT = 2.6
"""If the mean drift of a ratio and of the noise is larger, the interval of the mean holds the truth too seldom. 2% of
the ratios drift more although their rounds are independent (``benchmarks.simulations.drifting``)."""
HIGHEST_CORRELATION = 0.8
"""A higher autocorrelation of the rounds is not assumed, because a few rounds cannot tell it from a trend."""


def paired_ratio(
    a: ArrayLike, b: ArrayLike, *, confidence: float = 0.95, correlation: float = 0.0, fewest: int = FEWEST_PAIRS
) -> Difference:
    """Return the ratio of ``a`` to ``b`` over the pairs, which are in the order of their rounds, with an interval.

    ``a`` and ``b`` must be positive and have the same length. On the logarithmic scale, the estimate is that of Hodges
    and Lehmann: the median of the means of any two pairs, a pair with itself included. So swapping ``a`` and ``b``
    gives exactly the reciprocals. For normal noise, its variance is pi / 3 of the mean's, but single outliers hardly
    move it. Source: Hodges and Lehmann, "Estimates of location based on rank tests", Annals of Mathematical Statistics
    34 (1963).

    The interval is a t interval around the estimate. ``correlation``: the correlation r of a round with the next one
    (``autocorrelation``). Of n rounds, n (1 - r) / (1 + r) are counted as independent. So the interval is wider by the
    root of this factor, and has fewer degrees of freedom. A negative r counts as 0. In simulations of 6 to 40 pairs, a
    nominal 95% interval contained the truth in 94 to 99% of the trials: the noise was normal, Student's t with 2 or 3
    degrees of freedom or had bad rounds, and r was up to 0.6 (``benchmarks.simulations``).

    Fewer than ``fewest`` pairs give no bounds. Raises ValueError for values that are not pairs of positive
    numbers.
    """
    import numpy as np  # in the functions, because ``publish`` reads comparisons and must start fast
    from scipy.special import stdtrit

    logs = _log_ratios(a, b)
    number = len(logs)
    first, second = np.triu_indices(number)
    center = float(np.median((logs[first] + logs[second]) / 2))
    if number < fewest:
        return Difference(estimate=math.exp(center), pairs=number)
    error = float(logs.std(ddof=1)) * math.sqrt(math.pi / 3 / independent(number, correlation))
    half = float(stdtrit(max(2.0, independent(number, correlation) - 1), (1 + confidence) / 2)) * error
    low, high = math.exp(center - half), math.exp(center + half)
    return Difference(estimate=math.exp(center), low=low, high=high, pairs=number, confidence=confidence)


def independent(rounds: int, correlation: float) -> float:
    """Return as how many independent rounds ``rounds`` with this correlation count (``paired_ratio``)."""
    correlation = min(max(correlation, 0.0), HIGHEST_CORRELATION)
    return rounds * (1 - correlation) / (1 + correlation)


def drift_of(a: ArrayLike, b: ArrayLike) -> float:
    """Return how much the log ratios of ``a`` to ``b`` drift over the rounds: 1 on average if the rounds are
    independent, and more, the slower they change. 1 for fewer than ``FEWEST_PAIRS`` rounds, or if all are equal.

    It is six times the statistic of Kwiatkowski, Phillips, Schmidt and Shin, which tests a level with noise against a
    random walk: the sum of the squared partial sums of the n deviations from the mean, over n times the sum of their
    squares. Source: "Testing the null hypothesis of stationarity against the alternative of a unit root", Journal of
    Econometrics 54 (1992).
    """
    logs = _log_ratios(a, b)
    deviations = logs - logs.mean()
    sums, total = deviations.cumsum(), float(deviations @ deviations)
    return 6 * float(sums @ sums) / (len(logs) * total) if len(logs) >= FEWEST_PAIRS and total else 1.0


def spanning(ratio: Difference, a: ArrayLike, b: ArrayLike) -> Difference:
    """Widen the interval of ``ratio``, which must have bounds, so that it has the ratio of every round."""
    logs, (_, low, high) = _log_ratios(a, b), ratio.logs
    ends = {"low": math.exp(min(low, float(logs.min()))), "high": math.exp(max(high, float(logs.max())))}
    return ratio.model_copy(update=ends)


def autocorrelation(a: ArrayLike, b: ArrayLike) -> float:
    """Return the correlation of a round's log ratio of ``a`` to ``b`` with that of the next round, corrected for the
    bias of few rounds. 0 for fewer than ``FEWEST_PAIRS`` rounds, or if all ratios are equal.

    The plain estimate r of n rounds is too low by (1 + 3 r) / n on average; so (n r + 1) / (n - 3) is returned. Source:
    Kendall, "Note on bias in the estimation of autocorrelation", Biometrika 41 (1954).
    """
    logs = _log_ratios(a, b)
    number, deviations = len(logs), logs - logs.mean()
    total = float(deviations @ deviations)
    if number < FEWEST_PAIRS or not total:
        return 0.0
    plain = float(deviations[1:] @ deviations[:-1]) / total
    return min(max((number * plain + 1) / (number - 3), -1.0), 1.0)


def widened(ratio: Difference, doubt: float) -> Difference:
    """Add ``doubt`` to each side of the interval in quadrature, on the logarithmic scale.

    A ratio without bounds stays as it is.
    """
    if ratio.estimate is None or ratio.low is None:
        return ratio
    below, above = (math.hypot(width, doubt) for width in ratio.widths)
    return ratio.model_copy(update={"low": ratio.estimate * math.exp(-below), "high": ratio.estimate * math.exp(above)})


def over_sessions(ratios: Sequence[Difference]) -> Difference:
    """Return the equally weighted geometric mean of the sessions' ratios with its interval.

    Every ratio must have bounds, of one confidence. The ratio of a single session is returned unchanged. Each session
    is an independent draw of the conditions. So the interval of S sessions is a t interval with S - 1 degrees of
    freedom on the logarithms of the ratios. On each side it is at least as wide as the median of the sessions' own
    intervals, because a few sessions can agree by chance.
    """
    if len(ratios) == 1:
        return ratios[0]
    logs, confidence = [ratio.logs[0] for ratio in ratios], ratios[0].confidence
    mean, half = statistics.fmean(logs), half_width(statistics.stdev(logs), len(logs), confidence)
    below, above = median_widths(ratios)
    low, high = mean - max(half, below), mean + max(half, above)
    pairs = sum(ratio.pairs for ratio in ratios)
    return Difference(
        estimate=math.exp(mean), low=math.exp(low), high=math.exp(high), pairs=pairs, confidence=confidence
    )


def half_width(deviation: float, sessions: int, confidence: float = 0.95) -> float:
    """Return half the width of the interval of a mean over sessions with this standard deviation."""
    from scipy.special import stdtrit

    return float(stdtrit(sessions - 1, (1 + confidence) / 2)) * deviation / math.sqrt(sessions)


def median_widths(ratios: Sequence[Difference]) -> tuple[float, float]:
    """Return the medians of ``Difference.widths``, below and above."""
    below, above = zip(*(ratio.widths for ratio in ratios), strict=True)
    return statistics.median(below), statistics.median(above)


def distrust(
    aa: Difference,
    wide: Difference,
    max_spread: float,
    negligible: float = NEGLIGIBLE,
    fewest: int = FEWEST_PAIRS,
) -> str | None:
    """Return why a machine with the A/A interval ``aa`` is too noisy to compare anything; None if it is quiet enough.

    ``aa`` is a 95% interval, and its width shows how noisy the machine was. ``wide`` is the 99% interval of the same
    pairs. If ``wide`` excludes 1 by more than ``negligible``, the machine changed between the arms of a pair. A 99%
    interval excludes 1 by chance in about 1% of all cases, so a quiet machine is distrusted that often. With too few
    pairs for a 99% interval, the 95% interval is used instead, because no machine is trusted without a check. Fewer
    than ``fewest`` pairs give no interval.
    """
    shown = f"the baseline measured against itself gave a ratio of {aa.estimate:.3f}"
    if aa.low is None:
        return (
            f"the baseline was measured against itself in {count(aa.pairs, 'accepted round')}, but at least "
            f"{fewest} are needed to know how noisy the machine is"
        )
    held, confidence = (wide, "99%") if wide.low is not None else (aa, "95%")
    low, high = held.bounds
    if low > 1 + negligible or high < 1 / (1 + negligible):
        return f"{shown} ({low:.3f} to {high:.3f}, {confidence}), which excludes 1: the machine changed within rounds"
    if aa.spread > max_spread:
        low, high = aa.bounds
        return f"{shown} ({low:.3f} to {high:.3f}), a spread of {aa.spread:.1%}; at most {max_spread:.1%} is allowed"
    return None


def equivalence(
    differences: ArrayLike,
    margin: float,
    *,
    confidence: float = 0.95,
    resolution: float = 0.0,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> Difference:
    """Test whether paired differences (variant minus baseline, one per seed, in the margin's unit) are too small to
    matter.

    There are two one-sided paired t-tests at alpha = 1 - ``confidence``. Both tests reject exactly when the 1 - 2 alpha
    interval of the mean lies inside the margins. For n differences with the standard deviation s, this interval is
    mean -+ t s / sqrt(n). Here t is the 1 - alpha quantile of Student's t distribution with n - 1 degrees of freedom.
    Source: Schuirmann, "A comparison of the two one-sided tests procedure and the power approach", J. Pharmacokinetics
    and Biopharmaceutics 15 (1987).

    One difference decides nothing, because its interval is infinite. Differences of counts are often equal by chance,
    and their interval would then have no width. So ``resolution``, the smallest step of the differences, is a lower
    bound of the deviation. The interval of two or more differences is cut off at ``limits``, beyond which no mean can
    lie. Raises ValueError if there are no differences, or if one is not finite.
    """
    import numpy as np
    from scipy.special import stdtrit

    values = np.asarray(differences, dtype=np.float64)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError("differences: expected a finite number per seed, and at least one seed.")
    count, mean = len(values), float(values.mean())
    if count == 1:
        return Difference(unit="fraction", estimate=mean, pairs=count, margin=margin)
    deviation = max(float(values.std(ddof=1)), resolution)
    half = float(stdtrit(count - 1, confidence)) * (deviation / math.sqrt(count))
    low, high = max(mean - half, limits[0]), min(mean + half, limits[1])
    difference = Difference(
        unit="fraction", estimate=mean, low=low, high=high, pairs=count, margin=margin, deviation=deviation,
        confidence=confidence,
    )  # fmt: skip
    return difference.model_copy(update={"decision": decide(difference, margin)})


def _log_ratios(a: ArrayLike, b: ArrayLike) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    import numpy as np

    over, under = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    values = np.concatenate([over, under]) if over.ndim == 1 and over.shape == under.shape else np.empty(0)
    if not len(values) or not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError("pairs: expected two lists of the same length, at least 1, of positive and finite numbers.")
    logs: np.ndarray[tuple[int], np.dtype[np.float64]] = np.log(over) - np.log(under)
    return logs
