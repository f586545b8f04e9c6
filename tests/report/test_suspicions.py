"""The report names what makes a figure doubtful."""

from __future__ import annotations

import pytest

from pipeline.report import sentences
from tests.factories import make_bench, make_comparison, make_result, make_run


@pytest.mark.parametrize(
    ("trained", "benched", "told"),
    [
        ((20_000.0, 20_000.0), 1.3, True),
        ((20_000.0, 20_000.0), 1.15, False),  # two sessions may differ by this much
        ((20_000.0, 24_000.0), 1.3, False),  # the seeds differ by 20%
        ((20_000.0, 20_000.0), 0.7, True),
        ((20_000.0,), 1.3, False),  # a single seed shows no noise
        ((20_000.0, None), 1.3, False),
    ],
)
def test_a_bench_that_contradicts_the_trainings_is_named(
    trained: tuple[float | None, ...], benched: float, told: bool
) -> None:
    measured = [
        make_result(name, [make_run(seed, samples_per_second=speed) for seed, speed in enumerate(speeds)])
        for name, speeds in (("baseline", (20_000.0,) * len(trained)), ("tried", trained))
    ]
    bench = make_bench(measured, throughput={"tried": benched}, rejected={})
    notes = sentences.notes(make_comparison(measured, bench))
    said = [(name, text) for name, text in notes if "contradict each other" in text]
    assert [name for name, _ in said] == ["tried"] * told
    assert not told or "but in the trainings 1.00 to 1.00 times" in said[0][1]


def test_test_images_that_also_occur_in_training_are_named() -> None:
    result = make_result()
    for counts, told in (((12, 3), True), ((0, 0), False), ((None, None), False)):
        seen = dict(zip(("test_in_train_count", "test_repeated_count"), counts, strict=True))
        about = result.dataset.model_copy(update=seen)
        basis = "\n".join(sentences.basis(make_comparison([make_result(dataset=about)])))
        assert ("12 also occur among the training samples" in basis) is told
