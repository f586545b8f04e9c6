"""Write the peers' figures on one machine as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.comparison import stats
from pipeline.errors import count
from pipeline.pages import JOINED, points
from pipeline.params import Compare

OURS, CONTROL, BAREST = "ours", "ours, again", "the barest loop"
LATER = "later epochs with evaluation (Lightning: and checkpoint)"
SECONDS, EPOCH, STEP, ACCURACY = "seconds", "epoch_seconds", "step_microseconds", "test_accuracy"

Rounds = Sequence[Mapping[str, Mapping[str, float]]]
"""For each round: arm -> figures. The figures are the seconds of the process, the seconds of a later epoch with its
evaluation, and the test accuracy, 0 to 1. In the job "step", the only figure is the microseconds of a step."""


def page(figures: Mapping[str, Any]) -> str:
    """Return the page of all figures in ``peers-<machine>.json``."""
    parts = [f"# Peers on {figures['machine']}"]
    parts.append(
        "Times and speeds are medians over rounds; accuracies are means of differences. Intervals are at 95%. The "
        "difference between *ours* and *ours, again* widens the intervals of all other ratios of times and speeds."
    )
    for name, figure in figures["peers"].items():
        parts += [f"## {name}", *(_agreement(figure) if "ours_over" in figure else _job(figure))]
    return "\n\n".join(parts).replace(JOINED, " ") + "\n"


def noise(rounds: Rounds, key: str) -> stats.Difference:
    """Return the noise of the figure ``key``: the ratio of ours to itself, paired by round."""
    aa, wide = (_paired(rounds, key, CONTROL, OURS, confidence) for confidence in (0.95, 0.99))
    most = Compare().max_spread
    return aa.model_copy(update={"margin": most, "why_untrusted": stats.distrust(aa, wide, most)})


def ratio(rounds: Rounds, key: str, arm: str, reference: str) -> stats.Difference:
    """Return the ratio of an arm's figure to the reference's, paired by round. The noise widens the interval, as in the
    comparison of variants, unless the ratio is that of ours to itself."""
    doubt = 0.0 if (arm, reference) == (CONTROL, OURS) else noise(rounds, key).bias
    return stats.widened(_paired(rounds, key, arm, reference), doubt)


def _paired(rounds: Rounds, key: str, arm: str, reference: str, confidence: float = 0.95) -> stats.Difference:
    mine, base = ([round_[name][key] for round_ in rounds] for name in (arm, reference))
    return stats.paired_ratio(mine, base, confidence=confidence)


def _job(figure: Mapping[str, Any]) -> Iterator[str]:
    job, rounds, why = figure["job"], figure["rounds"], dict(figure["why"])
    steps = STEP in rounds[0][OURS]
    notes = []
    if steps:
        reference, heads = BAREST, ["microseconds", f"over {BAREST}"]
    else:
        reference, heads = OURS, ["whole process, s", "ours is faster", f"samples/s, {LATER}", "ours is faster"]
        heads.append("accuracy over ours, points")
        notes.append(
            f"The seconds do not include the {figure['prepare_seconds']:.1f} s in which ours prepares the data once."
        )
    rows = [["", *heads], ["---"] * (len(heads) + 1)]
    for arm in rounds[0]:
        row = [arm]
        for key in [STEP] if steps else [SECONDS, EPOCH]:
            middle, speed = statistics.median(round_[arm][key] for round_ in rounds), ratio(rounds, key, arm, reference)
            row.append(f"{figure['samples'] / middle:,.0f}" if key == EPOCH else f"{middle:.1f}")
            row.append("1" if arm == reference else _interval(speed))
            if arm not in (OURS, CONTROL) and ratio(rounds, key, arm, OURS).bounds[1] < 1:
                row[-1] = f"**{row[-1]}**"
                notes.append(
                    f"{arm} is faster than ours ({heads[len(row) - 3]}): {why.get(arm, 'the reason is not known')}."
                )
        if not steps and arm != OURS:
            accuracy = accuracy_over_ours(rounds, arm)
            row.append(f"{points(accuracy.estimate)} ({points(accuracy.low)} to {points(accuracy.high)})")
            low, high = accuracy.bounds
            if low > 0 or high < 0:
                notes.append(f"{arm}: the accuracy differs from ours by more than noise explains.")
        rows.append(row + [""] * (len(heads) + 1 - len(row)))
    for key in [STEP] if steps else [SECONDS, EPOCH]:
        if doubt := noise(rounds, key).why_untrusted:
            notes.append(f"The figures of {key} cannot be trusted: {doubt}.")
    versions = ", ".join(f"{package} {version}" for package, version in figure["versions"].items())
    yield (
        f"{job['model']}, batch {job['batch_size']}, {count(job['epochs'], 'epoch')} of {figure['samples']:,} samples, "
        f"{count(job['processes'], 'process')}; {count(len(rounds), 'round')}, the last on {figure['measured_on']}; "
        f"{versions}."
    )
    yield "\n".join(f"| {' | '.join(row)} |" for row in rows)
    if notes:
        yield "\n".join(f"* {note}" for note in notes)


def accuracy_over_ours(rounds: Rounds, arm: str) -> stats.Difference:
    """Return the arm's accuracy minus ours. The differences are paired by round, because a round's arms share a seed.
    ``low`` and ``high`` are the ends of the 95% interval."""
    differences = [round_[arm][ACCURACY] - round_[OURS][ACCURACY] for round_ in rounds]
    return stats.equivalence(differences, Compare().margins.accuracy, confidence=0.975)


def _agreement(figure: Mapping[str, Any]) -> Iterator[str]:
    rates = {name: f"{statistics.median(values):,.0f}" for name, values in figure["samples_per_second"].items()}
    yield f"The same steps timed by other tools, on {figure['measured_on']}."
    rows = ["| | samples/s | ours over it |", "| --- | --- | --- |", f"| ours | {rates['ours']} | |"]
    for name, (estimate, low, high) in figure["ours_over"].items():
        rows.append(f"| {name} | {rates[name]} | {estimate:.4f} ({low:.4f} to {high:.4f}) |")
    yield "\n".join(rows)


def _interval(difference: stats.Difference) -> str:
    if difference.low is None:
        return f"{difference.estimate:.2f} (too few rounds for an interval: {difference.pairs})"
    return f"{difference.estimate:.2f} ({difference.low:.2f} to {difference.high:.2f})"
