from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.comparison.pareto import pareto_front


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=12), st.tuples(*[st.booleans()] * 3))
def test_every_point_off_the_front_is_beaten_by_one_on_it(
    points: list[tuple[int, int, int]], higher_is_better: tuple[bool, bool, bool]
) -> None:
    def beats(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        gains = [(a - b) * (1 if higher else -1) for a, b, higher in zip(one, other, higher_is_better, strict=True)]
        return min(gains) >= 0 and max(gains) > 0

    front = pareto_front(points, higher_is_better)
    for index, point in enumerate(points):
        beaten = any(beats(points[best], point) for best in front)
        assert beaten == (index not in front)
