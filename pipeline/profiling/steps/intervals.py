"""Interval arithmetic on a time line. Times are whole nanoseconds, so that parts add up exactly to their whole.

A span is half-open, [start, end). The spans in ``Spans`` are sorted and disjoint, and none is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Span = tuple[int, int]
Spans = list[Span]


def union(spans: Iterable[Span]) -> Spans:
    """Return the time that at least one of ``spans`` covers; they may come in any order, overlap, or be empty."""
    joined: Spans = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def covered(spans: Iterable[Span], whole: Span) -> int:
    """Return the nanoseconds of ``whole`` that at least one of ``spans`` covers."""
    return sum(end - start for start, end in union((max(a, whole[0]), min(b, whole[1])) for a, b in spans))


def partition(whole: Span, claims: Mapping[str, Iterable[Span]]) -> dict[str, int]:
    """Assign each instant of ``whole`` to the first of ``claims`` that covers it; return the nanoseconds of each."""
    claimed: Spans = []
    shares = {}
    for name, spans in claims.items():
        before = covered(claimed, whole)
        claimed = union([*claimed, *spans])
        shares[name] = covered(claimed, whole) - before
    return shares
