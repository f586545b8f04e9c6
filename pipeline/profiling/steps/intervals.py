"""Interval arithmetic on a time line. Times are whole nanoseconds, so that parts add up exactly to their whole.

Spans are half-open, [start, end). ``Spans`` are sorted, disjoint and not empty.
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


def intersection(a: Spans, b: Spans) -> Spans:
    """Return the time that both ``a`` and ``b`` cover."""
    common: Spans = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: Spans, b: Spans) -> Spans:
    """Return the time that ``a`` covers and ``b`` does not."""
    if not a:
        return []
    first, last = a[0][0], a[-1][1]
    edges = [first, *(edge for span in b for edge in span), last]
    gaps = union((max(start, first), min(end, last)) for start, end in zip(edges[::2], edges[1::2], strict=True))
    return intersection(a, gaps)


def length(spans: Spans) -> int:
    """Return the number of nanoseconds covered."""
    return sum(end - start for start, end in spans)


def partition(whole: Span, claims: Mapping[str, Spans], rest: str) -> dict[str, Spans]:
    """Assign each instant of ``whole`` to the first of ``claims`` that covers it, or to ``rest`` if none does."""
    left, shares = union([whole]), {}
    for name, claimed in claims.items():
        shares[name] = intersection(left, claimed)
        left = difference(left, claimed)
    return {**shares, rest: left}
