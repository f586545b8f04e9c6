"""The Pareto front: the variants that no other variant beats in throughput, memory and accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.comparison.stats import Difference


def on_front(
    baseline: str,
    differences: Mapping[str, tuple[Difference, Difference, Difference | None]],
    noises: Sequence[Difference],
) -> set[str]:
    """Return the variants, the baseline included, that no other variant beats in throughput, memory and accuracy.

    ``differences``: each variant's ratios and accuracy relative to the baseline. A difference counts only if it is
    decided as better or worse. A variant with an unknown ratio is left out. ``noises``: if there are no
    differences because one of these is untrusted, nothing is known, and nothing is on the front.
    """
    if not differences and any(noise.why_untrusted for noise in noises):
        return set()
    points = {baseline: (1.0, 1.0, 0.0)}
    for variant, (throughput, memory, accuracy) in differences.items():
        if throughput.estimate is not None and memory.estimate is not None:
            points[variant] = (
                throughput.estimate if throughput.decision in _DECIDED else 1.0,
                memory.estimate if memory.decision in _DECIDED else 1.0,
                (accuracy.estimate or 0.0) if accuracy and accuracy.decision in _DECIDED else 0.0,
            )
    names = list(points)
    return {names[index] for index in pareto_front(list(points.values()), [True, False, True])}


_DECIDED = ("better", "worse")


def pareto_front(points: Sequence[Sequence[float]], higher_is_better: Sequence[bool]) -> list[int]:
    """Return the indices, ascending, of the points that no other point beats.

    A point beats another if it is at least as good in every coordinate and better in one, so equal points do not beat
    each other. ``higher_is_better`` has one entry per coordinate.
    """
    values = np.array(points, dtype=np.float64).reshape(len(points), len(higher_is_better))
    values *= np.where(higher_is_better, 1.0, -1.0)
    as_good = (values[:, None] >= values[None]).all(axis=2)
    better = (values[:, None] > values[None]).any(axis=2)
    return np.flatnonzero(~(as_good & better).any(axis=0)).tolist()
