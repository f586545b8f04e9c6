"""The report names what makes a figure doubtful."""

from __future__ import annotations

import pytest

from pipeline.report import facts
from tests.factories import make_bench, make_comparison, make_result, make_run


@pytest.mark.parametrize(
    ("trained", "benched", "suspected"),
    [
        ((20_000.0, 20_000.0), 1.3, True),
        ((20_000.0, 20_000.0), 1.15, False),  # two sessions may differ by this much
        ((20_000.0, 24_000.0), 1.3, False),  # the seeds differ by 20%
        ((9_000.0, 14_000.0), 1.3, False),  # a machine on which seeds differ so much can slow down all of them
        ((20_000.0, 20_000.0), 0.7, True),
        ((20_000.0,), 1.3, False),  # a single seed shows no noise
        ((20_000.0, None), 1.3, False),
    ],
)
def test_a_bench_that_contradicts_the_trainings_is_named(
    trained: tuple[float | None, ...], benched: float, suspected: bool
) -> None:
    measured = [
        make_result(name, [make_run(seed, samples_per_second=speed) for seed, speed in enumerate(speeds)])
        for name, speeds in (("baseline", (20_000.0,) * len(trained)), ("tried", trained))
    ]
    bench = make_bench(measured, throughput={"tried": benched}, rejected={})
    baseline, tried = make_comparison(measured, bench).variants
    assert facts.contradiction(tried, baseline) == ((1.0, 1.0) if suspected else None)
