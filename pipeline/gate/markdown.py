"""The gate's decisions as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.comparison import advice
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.verdicts import HEAP_BYTES, MEMORY, THROUGHPUT, Accuracy, Noise, Ratio
from pipeline.gate.decision import Gated, Held


def markdown(gated: Gated) -> str:
    """Return the outcome in the first line, then the figures in a table, then the remarks."""
    rows = [*gated.variants, *([gated.together] if gated.together else [])]
    arm, margins = gated.base.arms[0], gated.margins
    rounds = min(len(each.samples) for side in (gated.base, gated.head) for each in side.arms)
    least = any(row.memory and row.memory.margin > margins.memory for row in rows)
    of_memory = f" (but at least {HEAP_BYTES // 2**20} MiB a process)" if least else ""
    remarks = dict.fromkeys([*_open(gated, rows), *gated.hidden, *gated.unseen, *gated.remarks])
    lines = [
        f"**{_headline(gated, rows)}**",
        "",
        f"| head against base | throughput | peak memory | test {gated.score.in_words}, points |",
        "| --- | --- | --- | --- |",
        *(
            f"| {row.variant} | {_ratio(row.throughput)} | {_ratio(row.memory)} | {_accuracy(row.accuracy)} |"
            for row in rows
        ),
        "",
        *(f"* {remark}" for remark in remarks),
        f"* Base {_commit(gated.base.commit)}, head {_commit(gated.head.commit)}; side by side, {rounds} rounds in "
        f"{gated.seconds:.0f} s, {arm.device}.",
        f"* The baseline against itself: throughput {_interval(gated.noise_throughput)}, peak memory "
        f"{_interval(gated.noise_memory)}.",
        "* Measured in one session: in other sessions the ratios may differ by an unknown amount.",
        "* The ratios are medians with 95% intervals. The accuracy is the mean difference over seeds, with the "
        "interval of two one-sided tests at 5%. Worse or better means that the whole interval lies beyond the margin: "
        f"{100 * margins.throughput:g}% of throughput, {100 * margins.memory:g}% of memory{of_memory}, "
        f"{advice.percentage_points(margins.accuracy)} of accuracy.",
    ]
    return "\n".join(lines) + "\n"


def _commit(commit: str | None) -> str:
    if commit is None:
        return "(commit unknown)"
    return f"`{commit[:12]}`" + (" with uncommitted changes" if commit.endswith("+") else "")


def _accuracy(accuracy: Accuracy | None) -> str:
    """Return the difference in percentage points, its interval if there is one, and the decision."""
    if accuracy is None:
        return "not compared"
    mean, low, high = accuracy.mean_fraction, accuracy.low_fraction, accuracy.high_fraction
    interval = "" if low is None or high is None else f" ({100 * low:+.2f} to {100 * high:+.2f})"
    return f"{100 * mean:+.2f}{interval} {_word(accuracy.decision)}"


def _headline(gated: Gated, rows: Sequence[Held]) -> str:
    if gated.outcome == "worse":
        return f"Worse than the base: {_decided(rows, 'worse')}."
    if gated.outcome == "untrusted":
        return f"Not decided, because the measurement is not to be trusted: {_decided(rows, 'untrusted')}."
    if gated.outcome == "undecided":
        return f"Not decided: {'; '.join(gated.unseen)}."
    left = [f"{decision}: {found}" for decision in ("undecided", "untrusted") if (found := _decided(rows, decision))]
    return f"Nothing was shown to be worse; {'; '.join(left)}." if left else "Nothing got worse."


def _decided(rows: Sequence[Held], decision: str) -> str:
    """Return the quantities with this ``decision``, such as "throughput (baseline, ddp), accuracy (ddp)"."""
    found = {
        noun: [row.variant for row in rows if (each := row.figures[noun]) and each.decision == decision]
        for noun in rows[0].figures
    }
    return ", ".join(f"{noun} ({', '.join(variants)})" for noun, variants in found.items() if variants)


def _open(gated: Gated, rows: Sequence[Held]) -> Iterator[str]:
    """Yield the reasons why figures are untrusted or undecided. If something is worse, leave out undecided ratios."""
    cost = RoundCost(gated.budget, len(gated.base.arms[0].samples), gated.seconds)
    everybodys = {gated.noise_throughput.why_untrusted, gated.noise_memory.why_untrusted}
    told = ("untrusted",) if gated.outcome == "worse" else ("untrusted", "undecided")
    for row in rows:
        ratios = [(row.throughput, THROUGHPUT), *([(row.memory, MEMORY)] if row.memory else [])]
        reasons = [
            *(why for each, of in ratios if each.decision in told for why in advice.ratio_reasons(each, of, cost)),
            *(advice.accuracy_reasons(row.accuracy) if row.accuracy else []),
        ]
        for reason in reasons:
            yield reason if reason in everybodys else f"{row.variant}: {reason}"


def _ratio(ratio: Ratio | None) -> str:
    return "not known" if ratio is None else f"{_interval(ratio)} {_word(ratio.decision)}"


def _interval(found: Ratio | Noise) -> str:
    if found.estimate is None:
        return "not known"
    bounds = "" if found.low is None or found.high is None else f" ({found.low:.3f} to {found.high:.3f})"
    return f"{found.estimate:.3f}{bounds}"


def _word(decision: str) -> str:
    return f"**{decision}**" if decision == "worse" else decision
