"""What the report says of a comparison, the same in the Markdown, the page and the pictures: facts, some in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pipeline import pages
from pipeline.comparison import advice as advices
from pipeline.comparison.advice import percentage_points
from pipeline.comparison.comparison_file import Compared, Comparison, Share
from pipeline.comparison.stats import Difference
from pipeline.errors import count
from pipeline.files import differing
from pipeline.pages import JOINED, UNTRUSTED, bare, between, heading, percent, plain_percent, points, times
from pipeline.params import Bench as BenchSettings
from pipeline.results import Bench, Ledger, ScoreName, rejections
from pipeline.results.figures import FOREIGN_LOAD, QUANTITIES, THROUGHPUT

FEW_TEST_SAMPLES = 2_000
"""With fewer test samples than this, the accuracy depends strongly on which samples were chosen. An interval over seeds
does not show this dependence."""

BETWEEN_SESSIONS = 1.2
"""The speeds of two sessions on one machine can differ by this factor, and so can the speeds of two trainings that run
one after the other."""

LEDGER_PARTS = ("parameters", "gradients", "optimizer_state", "activations", "communication", "data", "rest")
"""Parts of ``results.Ledger`` (fields without the ending ``_bytes``), in the order in which they are shown."""


def ledgers(comparison: Comparison) -> list[tuple[str, str, Ledger]]:
    """Return each variant's memory ledgers: the variant, "measured" or "predicted", and the ledger."""
    return [
        (compared.variant, kind, ledger)
        for compared in comparison.variants
        if (ledgers := comparison.bench.ledgers.get(compared.variant))
        for kind, ledger in (("measured", ledgers.measured), ("predicted", ledgers.predicted))
        if ledger
    ]


def quantities(compared: Compared) -> dict[str, Difference]:
    """Return the differences from the baseline on which a variant's verdict depends, by their names."""
    judged: dict[str, Difference] = {figure.noun: ratio for figure, ratio in compared.ratios.items() if ratio.margin}
    return judged | ({"accuracy": compared.accuracy} if compared.accuracy else {})


def advice(comparison: Comparison) -> str:
    """Say in one sentence which variant to use, and what is decided of variants whose verdict cannot be trusted."""
    others = comparison.variants[1:]
    judged = [compared for compared in others if compared.verdict != UNTRUSTED]
    known = {
        compared.variant: _figures(compared, "better") + _figures(compared, "worse")
        for compared in others
        if compared.verdict == UNTRUSTED
    }
    has = [f"`{name}`, {' and '.join(text for _, text in figures)}" for name, figures in known.items() if figures]
    nevertheless = [f"decided nevertheless: {'; '.join(has)}"] if has else []
    if not judged:
        return "".join(sentences(nevertheless))
    take, best = [], comparison.champion
    if best:
        gain = f": {change(best.quantity, best.ratio)}" if best.quantity and best.ratio else ""
        later = next(compared.time_to_target_ratio for compared in others if compared.variant == best.variant)
        if later and later.bounds[0] > 1:  # such as after weak scaling
            gain += f", but {interval(later)} times the time to {percent(comparison.target_accuracy_fraction, 0)}"
        take.append(f"`{best.variant}`{gain}")
    saving = {compared.variant: said for compared in judged if compared.on_front and (said := _saving(compared))}
    take += saving.values()
    parts = [f"take {'; '.join(take)}"] if take else []
    speeds = {compared.throughput.decision for compared in others if compared.throughput}
    if take and not {"better", "undecided", "untrusted"} & speeds:
        parts.append("nothing here is faster")
    for verdict, words in ("undecided", "not decided yet"), (UNTRUSTED, "not to be trusted"):
        unclear = [
            f"`{compared.variant}`"
            for compared in others
            if compared.verdict == verdict and compared.variant not in saving
        ]
        if unclear:
            parts.append(f"{', '.join(unclear)} {'is' if len(unclear) == 1 else 'are'} {words}")
    return sentences(["; ".join([*parts, *nevertheless]) or f"keep `{comparison.baseline}`: nothing here is better"])[0]


def _saving(compared: Compared) -> str:
    """Say when to use a variant whose verdict is trades or undecided, what it gains, and at what price. Return an empty
    text if there is no gain."""
    gains, price = (_figures(compared, decision) for decision in ("better", "worse"))
    price += _figures(compared, "undecided")
    if compared.verdict not in ("trades", "undecided") or not gains:
        return ""
    (need, gain), *_ = gains
    return f"`{compared.variant}` if {need}: {gain}, but {' and '.join(text for _, text in price)}"


_NEEDS = {figure.noun: figure.need for figure in QUANTITIES} | {"accuracy": "accuracy counts most"}
"""Quantity -> when it matters."""
_CHANGES = {figure.noun: (f"less {figure.word}", f"more {figure.word}") for figure in QUANTITIES}
_CHANGES[THROUGHPUT.noun] = "slower", "faster"


def change(noun: str, difference: Difference) -> str:
    """Return the interval in words, such as "17 to 21% slower"; from twice the baseline's figure on, as a ratio."""
    low, high = difference.bounds
    if difference.unit == "fraction":
        return f"{interval(difference)} points of accuracy"
    if difference.low is None or low >= 2:
        return f"{interval(difference)} times the {noun}"
    less, more = _CHANGES[noun]
    ends = (1 - high, 1 - low) if high <= 1 else (low - 1, high - 1)
    if low < 1 < high:
        return f"{percent(1 - low, 0)} {less} to {percent(high - 1, 0)} {more}"
    decimals = 0 if round(100 * ends[0]) < round(100 * ends[1]) else 1
    nearest, furthest = (f"{100 * end:.{decimals}f}" for end in ends)
    return f"{nearest if nearest == furthest else between(nearest, furthest)}% {less if high <= 1 else more}"


def _figures(compared: Compared, decision: str) -> list[tuple[str, str]]:
    """Return, for each quantity with this ``decision``, when the quantity matters and how large the difference is. A
    difference that is not decided is marked as such."""
    figures = []
    for noun, difference in quantities(compared).items():
        if difference.decision == decision:
            remark = " (not decided yet)" if decision == "undecided" else ""
            known = f"{change(noun, difference)}{remark}"
            unknown = f"an unknown {noun}, with {interval(difference)}"
            figures.append((_NEEDS[noun], unknown if difference.low is None else known))
    return figures


def banner(comparison: Comparison) -> list[str]:
    """Return why the A/A noise makes verdicts untrusted, with a remedy for each reason; and a sentence if the
    interruption of the bench left a verdict open, if other processes took much of the CPU (``beside_load``), or if the
    baseline's score is that of a constant answer. The report shows these sentences once, at the top."""
    others = comparison.variants[1:]
    nouns: dict[str, list[str]] = {}
    for figure, noise in comparison.noises.items():
        ratios = [compared.ratios.get(figure) for compared in others]
        if ratios and not any(ratio and ratio.why_untrusted for ratio in ratios):
            continue  # other sessions make all these ratios trusted
        if noise.why_untrusted:
            nouns.setdefault(noise.why_untrusted, []).append(figure.noun)
    reasons = [f"untrusted {' and '.join(untrusted)}: {why}" for why, untrusted in nouns.items()]
    is_open = any(advices.is_open(ratio) for compared in others for ratio in compared.ratios.values())
    reasons += [advices.interrupted(comparison.bench)] if comparison.bench.interrupted and is_open else []
    return sentences([*reasons, *filter(None, [beside_load(comparison.bench), comparison.learnt_nothing])])


def beside_load(bench: Bench) -> str:
    """Say that speeds hold only beside the load that other processes caused, if ``bench.max_foreign_load`` allowed more
    than it does by default."""
    accepted = [sample for arm in bench.arms for sample in arm.samples if THROUGHPUT.of(sample)]
    load = statistics.median(FOREIGN_LOAD.known(accepted) or [0.0])
    if load <= BenchSettings().max_foreign_load:
        return ""
    return (
        f"other processes took {load:.0%} of the CPU time during the bench, so its speeds hold beside such a load: on "
        "an idle machine, a variant that is slower here can be the faster one"
    )


def sentences(fragments: Sequence[str]) -> list[str]:
    """Return each fragment as a sentence, with a capital and a full stop."""
    return [f"{heading(text).rstrip('.')}." for text in fragments]


def sessions(comparison: Comparison) -> tuple[int, list[str]]:
    """Return the largest number of sessions behind a ratio, and the start of each session, to the minute."""
    ratios = [ratio for compared in comparison.variants for ratio in (compared.throughput, compared.memory) if ratio]
    starts = sorted({start for ratio in ratios for start, part in ratio.parts.items() if part.counts})
    return max((ratio.session_count for ratio in ratios), default=1), [pages.minute(start) for start in starts]


def share_accuracy(share: Share) -> tuple[str, ...]:
    """Return lines on the accuracy of the variant that adds only this technique to the baseline, with this variant's
    name. If no such variant was trained, return "not trained alone"; if no speed was measured alone, return nothing."""
    if share.accuracy is None:
        return ("not trained alone",) if share.verdict else ()
    return (*lines(share.accuracy), f"variant {share.accuracy_from}")


def ended_early(bench: Bench) -> list[str]:
    """Return the variants that the bench settled early, each with its number of rounds."""
    rounds = {arm.variant: len(arm.samples) for arm in bench.arms if len(arm.samples) < bench.rounds}
    return [f"{variant} after {count(number, 'round')}" for variant, number in rounds.items()]


def confidences(comparison: Comparison) -> str:
    """Return the confidence of the intervals on which verdicts depend."""
    return advices.confidences(map(quantities, comparison.variants))


def moved_margins(comparison: Comparison) -> list[str]:
    """Return the margins that differ from those with which the bench measured."""
    then = (comparison.bench.margins or comparison.margins).model_dump()
    moved = differing(then, comparison.margins.model_dump(), "compare.margins")
    return [f"{key} from {before} to {now}" for key, before, now in moved]


def share_machines(comparison: Comparison) -> bool:
    """Return True if some hosts are one machine."""
    links = comparison.environment.get("hardware", {}).get("hosts", ())
    return len({link["machine"] for link in links}) < len(links)


def has_few_samples(comparison: Comparison) -> bool:
    return comparison.dataset is not None and comparison.dataset.test_count < FEW_TEST_SAMPLES


def has_teacher(compared: Compared) -> bool:
    return any(name.startswith("distillation=") for name in compared.techniques)


def contradiction(compared: Compared, baseline: Compared) -> tuple[float, float] | None:
    """Return the range of a variant's speed ratio in the trainings if it contradicts the ratio in the bench: they
    differ by more than the noise of both.

    The trainings' ratio is a range over all pairs of seeds. For the decision it is widened by BETWEEN_SESSIONS, and by
    how much the seeds of one variant differ, because other work on the machine can slow down a whole variant. Returns
    None if the ratios agree, if the bench's ratio is unknown or untrusted, or if there are fewer than two seeds,
    because one seed shows no noise.
    """
    ours, theirs, ratio = THROUGHPUT.known(compared.runs), THROUGHPUT.known(baseline.runs), compared.throughput
    if not (ratio and ratio.low and ratio.high) or ratio.why_untrusted or min(len(ours), len(theirs)) < 2:
        return None
    low, high = min(ours) / max(theirs), max(ours) / min(theirs)
    noise = BETWEEN_SESSIONS * max(max(speeds) / min(speeds) for speeds in (ours, theirs))
    agree = low / noise <= ratio.high and ratio.low <= high * noise
    return None if agree else (low, high)


def disturbed(compared: Compared) -> tuple[str, ...]:
    """Return a line that names the seeds whose training times are not trusted, because figures were rejected. Return an
    empty tuple if there are no such seeds."""
    seeds = [run.seed for run in compared.runs if run.rejections]
    return (f"seed {', '.join(map(str, seeds))} disturbed",) if seeds else ()


def rejected_in_training(compared: Compared) -> list[tuple[str, list[int]]]:
    """Return the reason of each kind for rejected figures of the trainings, with its seeds."""
    return [
        (first.text, seeds) for first, seeds in rejections.by_kind((run.seed, run.rejections) for run in compared.runs)
    ]


def rejected_in_bench(comparison: Comparison) -> list[tuple[str, str]]:
    """Return pairs (arm, sentence) about rejected samples."""
    arms = {arm.name: [sample.rejections for sample in arm.samples] for arm in comparison.bench.arms}
    return [(name, text) for name, of in arms.items() for text in sentences(rejections.lines(of, comparison.advised))]


def target(comparison: Comparison) -> str:
    return plain_percent(comparison.target_accuracy_fraction)


def score(comparison: Comparison) -> str:
    """Return the report's name for ``test_accuracy``, such as "test accuracy"."""
    return f"test {ScoreName(name=comparison.train.get('metric', 'accuracy')).in_words}"


def accuracy(compared: Compared) -> str:
    """Return the variant's test score, a mean over seeds."""
    return pages.percent(compared.trained["test_accuracy_mean_fraction"])


def counted(comparison: Comparison) -> str:
    """Say what the throughput counts, for use before "of the global batch"."""
    unit = comparison.unit
    return heading(unit.name) if unit.per_sample == 1 else f"{heading(unit.name)} ({unit.per_sample:,} a sample)"


def metric(comparison: Comparison) -> str:
    """Describe the job's metric, for use before "over all test samples"."""
    name = comparison.train.get("metric", "accuracy")
    if comparison.train.get("metric_over") == "test_set":
        return f"Value of {name}, from 0 to 1,"
    return "Share of correct predictions" if name == "accuracy" else f"Mean of {name}, a score per sample from 0 to 1,"


def hosts(comparison: Comparison, compared: Compared) -> list[str]:
    """Return the names of the hosts among which the variant's processes were divided; empty for one host."""
    number, known = compared.conditions.hosts, comparison.bench.session.hosts
    return [*known[:number], *(f"host {place + 1}" for place in range(len(known), number))] if number > 1 else []


def techniques(compared: Compared) -> str:
    return ", ".join(compared.techniques) or "no technique"


# Differences from the baseline: a ratio, or points of accuracy, with its interval.


def estimate(difference: Difference) -> str:
    """Return a ratio, or a difference in accuracy, without its interval."""
    if difference.unit == "fraction":
        return f"{points(difference.estimate)}{JOINED}points"
    return times(difference.estimate, _decimals(difference))


def interval(difference: Difference) -> str:
    """Return the ends of the interval, or the reason why there is none."""
    of_ratio = difference.unit == "ratio"
    if difference.low is None:
        return f"too few {'accepted rounds' if of_ratio else 'seeds'} ({difference.pairs}) for an interval"
    decimals = _decimals(difference)
    low, high = (bare(end, decimals) if of_ratio else points(end) for end in difference.bounds)
    return between(low, high)


def brief(ratio: Difference) -> str:
    """Return the estimate, with the interval if there is one."""
    return estimate(ratio) + (f" ({interval(ratio)})" if ratio.low is not None else "")


def margin(difference: Difference) -> str:
    """Return the margin at which the difference was decided."""
    shown = plain_percent if difference.unit == "ratio" else percentage_points
    return shown(difference.margin)


def _decimals(ratio: Difference) -> int:
    """Return the number of decimals: 2, or 3 if the interval is so narrow that its ends could look the same with 2."""
    return 3 if ratio.spread < 0.02 else 2


def lines(difference: Difference | None) -> tuple[str, ...]:
    """Return the lines of a table cell: the estimate and its interval, in brackets if they are untrusted. The page
    shows brackets in grey."""
    if difference is None:
        return ()
    value, ends = estimate(difference), interval(difference)
    if difference.decision == UNTRUSTED:
        return (UNTRUSTED,) if difference.estimate is None else (UNTRUSTED, f"[{value}, {ends}]")
    return f"{value}{' undecided' if difference.decision == 'undecided' else uncertain(difference)}", ends


def uncertain(difference: Difference) -> str:
    """Return ", size uncertain" if only the side of a decided difference is known; else an empty text."""
    return ", size uncertain" if difference.why_untrusted and difference.decision != UNTRUSTED else ""


def text(difference: Difference) -> str:
    """Return the texts of ``lines`` on one line."""
    value, *intervals = lines(difference)
    return " ".join([value, *(text if value == UNTRUSTED else f"({text})" for text in intervals)])
