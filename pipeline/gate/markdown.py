"""The gate's decisions as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.comparison import advice
from pipeline.comparison.verdicts import HEAP_BYTES
from pipeline.gate.decision import Gated, Held
from pipeline.pages import render
from pipeline.results.figures import QUANTITIES


def markdown(gated: Gated) -> str:
    """Return the outcome in the first line, then the figures in a table, then the remarks."""
    rows = [*gated.variants, *([gated.together] if gated.together else [])]
    least = any(row.memory and row.memory.margin > gated.margins.memory for row in rows)
    return render(
        "gate.md",
        gated=gated,
        rows=rows,
        decided=lambda decision: _decided(rows, decision),
        rounds=min(len(arm.samples) for side in (gated.base, gated.head) for arm in side.arms),
        remarks=dict.fromkeys([*_open(gated, rows), *gated.hidden, *gated.unseen, *gated.remarks]),
        confidences=advice.confidences(row.known for row in rows),
        least_mib=HEAP_BYTES // 2**20 if least else 0,
        margin_of_accuracy=advice.percentage_points(gated.margins.accuracy),
    )


def _decided(rows: Sequence[Held], decision: str) -> str:
    """Return the quantities with this ``decision``, such as "throughput (baseline, ddp), accuracy (ddp)"."""
    variants: dict[str, list[str]] = {noun: [] for noun in (*(figure.noun for figure in QUANTITIES), "accuracy")}
    for row in rows:
        for noun, difference in row.known.items():
            variants[noun] += [row.variant] if difference.decision == decision else []
    return ", ".join(f"{noun} ({', '.join(names)})" for noun, names in variants.items() if names)


def _open(gated: Gated, rows: Sequence[Held]) -> Iterator[str]:
    """Yield the reasons why figures are untrusted or undecided, and what correlated rounds did to intervals. If
    something is worse, leave out the reasons of undecided ratios."""
    explained = ("untrusted",) if gated.outcome == "worse" else ("untrusted", "undecided")
    for row in rows:
        for figure, ratio in row.ratios.items():
            if ratio.decision in explained:
                of_all = ratio.decision == gated.noises[figure].decision == "untrusted"  # the machine's noise
                whose = "" if of_all else f"{row.variant}: "
                yield from (whose + why for why in advice.ratio_reasons(ratio, figure, gated.cost))
            yield from (f"{row.variant}: {why}" for why in advice.correlation_reasons(ratio, figure))
        yield from (f"{row.variant}: {why}" for why in (advice.accuracy_reasons(row.accuracy) if row.accuracy else []))
