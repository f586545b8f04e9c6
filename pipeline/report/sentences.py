"""A comparison in words, the same in the Markdown, the page and the pictures."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.comparison.ablation import Share
from pipeline.comparison.advice import interrupted, percentage_points
from pipeline.comparison.comparison_file import Compared, Comparison
from pipeline.comparison.verdicts import Accuracy, Ratio
from pipeline.errors import count
from pipeline.params import sections
from pipeline.report import formats
from pipeline.report.formats import UNKNOWN, UNTRUSTED, estimate, heading, interval, plain_percent
from pipeline.results import Bench, Dataset, Ledger, ScoreName, differing, rejected, rejections

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
        (each.variant, kind, ledger)
        for each in comparison.variants
        if each.ledgers
        for kind, ledger in (("measured", each.ledgers.measured), ("predicted", each.ledgers.predicted))
        if ledger
    ]


def sentence(each: Compared, comparison: Comparison) -> str:
    """Return the figures behind a variant's verdict in one sentence; for the baseline, its own figures."""
    if not (judged := quantities(each)):
        return (
            f"The reference: throughput {formats.speed(each.samples_per_second, comparison.unit)}, peak memory "
            f"{formats.size(each.peak_memory_bytes)}, {score(comparison)} "
            f"{formats.percent(each.test_accuracy_mean_fraction)} (mean of {count(len(each.runs), 'seed')})."
        )
    return sentences([", ".join(_part(noun, one) for noun, one in judged.items())])[0]


def quantities(each: Compared) -> dict[str, Ratio | Accuracy]:
    """Return the differences from the baseline on which a variant's verdict depends, by their names."""
    energy = each.energy if each.energy and each.energy.margin else None
    found = {"throughput": each.throughput, "peak memory": each.memory, "energy a sample": energy}
    return {noun: one for noun, one in {**found, "accuracy": each.accuracy}.items() if one}


def _part(noun: str, each: Ratio | Accuracy) -> str:
    if each.decision == "untrusted":
        return f"{noun} {formats.text(each)}"
    if each.decision == "same":
        within = percentage_points(each.margin_fraction) if isinstance(each, Accuracy) else plain_percent(each.margin)
        return f"{noun} unchanged within {within} ({interval(each)})"
    if each.decision == "undecided":
        return f"{noun} undecided at {estimate(each)} ({interval(each)})"
    shown = f"{noun} {estimate(each)}" if isinstance(each, Accuracy) else f"{estimate(each)} the {noun}"
    return f"{shown} ({interval(each)})"


def advice(comparison: Comparison) -> str:
    """Say in one sentence which variant to use, and what is decided of variants whose verdict cannot be trusted."""
    others = comparison.variants[1:]
    judged = [each for each in others if each.verdict != UNTRUSTED]
    known = {
        each.variant: _figures(each, "better") + _figures(each, "worse") for each in others if each.verdict == UNTRUSTED
    }
    has = [f"`{name}` has {' and '.join(text for _, text in found)}" for name, found in known.items() if found]
    nevertheless = [f"decided nevertheless: {'; '.join(has)}"] if has else []
    if not judged:
        return "".join(sentences(nevertheless))
    take, best = [], comparison.champion
    if best:
        gain = f": {interval(best.ratio)} times the {best.quantity}" if best.ratio else ""
        take.append(f"`{best.variant}`{gain}")
    saving = {each.variant: said for each in judged if each.on_front and (said := _saving(each))}
    take += saving.values()
    parts = [f"take {'; '.join(take)}"] if take else []
    speeds = {each.throughput.decision for each in others if each.throughput}
    if take and not {"better", "undecided", "untrusted"} & speeds:
        parts.append("nothing here is faster")
    for verdict, words in ("undecided", "not decided yet"), (UNTRUSTED, "not to be trusted"):
        unclear = [f"`{each.variant}`" for each in others if each.verdict == verdict and each.variant not in saving]
        if unclear:
            parts.append(f"{', '.join(unclear)} {'is' if len(unclear) == 1 else 'are'} {words}")
    return sentences(["; ".join([*parts, *nevertheless]) or f"keep `{comparison.baseline}`: nothing here is better"])[0]


def _saving(each: Compared) -> str:
    """Say when to use a variant whose verdict is trades or undecided, what it gains, and at what price. Return an empty
    text if there is no gain."""
    gains, price = (_figures(each, decision) for decision in ("better", "worse"))
    if each.verdict == "undecided":
        price += _figures(each, "undecided")
    if each.verdict not in ("trades", "undecided") or not gains:
        return ""
    (need, gain), *_ = gains
    return f"`{each.variant}` if {need}: {gain} at {' and '.join(text for _, text in price)}"


_NEEDS = {
    "throughput": ("speed counts most", "times the speed"),
    "peak memory": ("memory is short", "times the memory"),
    "energy a sample": ("energy counts most", "times the energy"),
    "accuracy": ("accuracy counts most", "points of accuracy"),
}
"""Quantity -> when it matters, and the unit of its interval."""


def _figures(each: Compared, decision: str) -> list[tuple[str, str]]:
    """Return, for each quantity with this ``decision``, when the quantity matters and how large the difference is. A
    difference that is not decided is marked as such."""
    found = []
    for noun, one in quantities(each).items():
        known = (one.low_fraction if isinstance(one, Accuracy) else one.low) is not None
        open_ = " (not decided yet)" if decision == "undecided" else ""
        text = f"{interval(one)} {_NEEDS[noun][1]}{open_}" if known else f"an unknown {noun}, with {interval(one)}"
        found += [(_NEEDS[noun][0], text)] if one.decision == decision else []
    return found


def banner(comparison: Comparison) -> list[str]:
    """Return why the A/A noise makes verdicts untrusted, with a remedy for each reason; and a sentence if the
    interruption of the bench left a verdict open. The report shows these sentences once, at the top."""
    nouns: dict[str, list[str]] = {}
    judged = comparison.variants[1:]
    for field in ("throughput", "memory", "energy"):
        noise = getattr(comparison, f"noise_{field}")
        if not noise or (judged and all(getattr(each, field).decision != "untrusted" for each in judged)):
            continue  # other sessions make all these ratios trusted
        noun, _, why = (noise.why_untrusted or "").partition(": ")
        nouns.setdefault(why, []).append(noun)
    found = [f"untrusted {' and '.join(each)}: {why}" for why, each in nouns.items() if why]
    stopped = interrupted(comparison.bench)
    found += [stopped] if any(stopped in each.reasons for each in comparison.variants) else []
    return sentences(found)


def reasons(each: Compared, comparison: Comparison) -> list[str]:
    """Return the reasons beside a variant's verdict, without the reasons that are in the banner."""
    noises = (comparison.noise_throughput, comparison.noise_memory, comparison.noise_energy)
    everybodys = [each.why_untrusted for each in noises if each]
    stopped = interrupted(comparison.bench)
    return sentences([reason for reason in each.reasons if reason not in [*everybodys, stopped]])


def sentences(fragments: Sequence[str]) -> list[str]:
    """Return each fragment as a sentence, with a capital and a full stop."""
    return [f"{heading(text).rstrip('.')}." for text in fragments]


def sessions(comparison: Comparison) -> str:
    """Say how many sessions the ratios come from, and what this means for other sessions."""
    ratios = [ratio for each in comparison.variants for ratio in (each.throughput, each.memory) if ratio]
    starts = sorted({each.start_utc for ratio in ratios for each in ratio.sessions if each.counts})
    most = max((ratio.session_count for ratio in ratios), default=1)
    aside = comparison.sessions_set_aside
    unused = f" Number of benches that are not used, because code, settings, data or machine differ: {aside:,}."
    others = unused if aside else ""
    if most == 1:
        said = (
            "These ratios come from one session and may differ in other sessions by an unknown amount. To add a "
            "session, run `python -m pipeline bench --again`, then `dvc repro`."
        )
        return said + others
    shown = comparison.bench.session.start_utc
    first, last, present = (each[:16].replace("T", " ") for each in (starts[0], starts[-1], shown))
    return (
        f"These ratios come from up to {count(most, 'session')}, from {first} to {last} UTC. A ratio is the mean of "
        "the sessions' ratios, and its interval covers the differences between sessions. All other figures come from "
        f"the session of {present}.{others}"
    )


def champion(comparison: Comparison) -> str:
    """Name the best of the variants that pay, its gain, and how it compares with the second best. Return an empty text
    if fewer than two variants pay by the same quantity."""
    best = comparison.champion
    if best is None or best.runner_up is None:
        return ""
    said = "the gain is unknown, because too few rounds measured all these variants"
    if best.ratio:
        parts = "sessions" if best.ratio.session_count > 1 else "rounds"
        open_ = "" if best.ratio.decision == "better" else f" {best.ratio.decision},"
        said = (
            f"{estimate(best.ratio)} the {best.quantity} ({interval(best.ratio)}),{open_} in {parts} that were not "
            "used for this choice"
        )
    found = f"The best of the {best.among} variants that pay by {best.quantity} is {best.variant}: {said}."
    if pair := best.head_to_head:
        found += (
            f" In the rounds that measured both, its ratio to {best.runner_up}, the second best, is {estimate(pair)} "
            f"({interval(pair)}): {pair.decision}."
        )
    return found


def share_notes(comparison: Comparison) -> list[str]:
    """Say which techniques' shares were not measured or depend on other techniques, and how to read the verdicts."""
    notes = []
    for share in comparison.shares:
        name = f"{share.technique} in {share.variant}"
        if share.why_not:
            notes.append(f"{name} was not measured: {share.why_not.rstrip('.')}.")
        if share.interaction:
            notes.append(f"{name}: {share.interaction}")
    if any(share.verdict and share.accuracy is None for share in comparison.shares):
        notes.append(
            "A technique's verdict does not include accuracy if no variant with only this technique was trained."
        )
    return notes


def share_accuracy(share: Share) -> tuple[str, ...]:
    """Return lines on the accuracy of the variant that adds only this technique to the baseline, with this variant's
    name. If no such variant was trained, return "not trained alone"; if no speed was measured alone, return nothing."""
    if share.accuracy is None:
        return ("not trained alone",) if share.verdict else ()
    return (*formats.lines(share.accuracy), f"variant {share.accuracy_from}")


def basis(comparison: Comparison) -> list[str]:
    """Say how the figures behind the verdicts were measured, and how the differences were judged."""
    bench, margins, samples = comparison.bench, comparison.margins, comparison.dataset.test_count
    seeds = count(len(comparison.seeds), "seed")
    few = f", on these {samples:,} test samples" if samples < FEW_TEST_SAMPLES else ""
    rounds = bench.rounds
    stopped = ", after which the bench was interrupted" if bench.interrupted else ""
    ended = {arm.variant: len(arm.samples) for arm in bench.arms if len(arm.samples) < rounds}
    early = ", ".join(f"{variant} after {count(each, 'round')}" for variant, each in ended.items())
    energy = f", {plain_percent(margins.energy)} of energy a sample" if margins.energy else ""
    noises = {"throughput": comparison.noise_throughput, "peak memory": comparison.noise_memory}
    noises |= {"energy a sample": comparison.noise_energy} if comparison.noise_energy else {}
    margins_then = (bench.margins or margins).model_dump()
    moved = differing(margins_then, margins.model_dump(), "compare.margins")
    changed = [f"{key} from {then} to {now}" for key, then, now in moved]
    turns = "" if bench.turns == 1 else f", in {bench.turns} turns that alternate with the other variants"
    return [
        f"Speed and memory: {count(rounds, 'round')}{stopped}. In each round, every variant took "
        f"{count(bench.steps, 'step')} in a fresh process{turns}. The order is drawn at random, and reversed in every "
        "second round. A session's ratio is the median over the rounds; the A/A noise widens its 95% interval.",
        *(
            [
                "Some variants ended early, because all their ratios were clearly above, below or within the margins: "
                f"{early}."
            ]
            if early
            else []
        ),
        f"Accuracy: {seeds}, paired, with two one-sided tests{few}. If one training in ten fails, "
        f"{0.9 ** len(comparison.seeds):.0%} of all comparisons with {seeds} do not show it.",
        *_not_new(comparison.dataset),
        f"A difference counts if the whole interval lies beyond the margin: {plain_percent(margins.throughput)} of "
        f"throughput, {plain_percent(margins.memory)} of memory, {percentage_points(margins.accuracy)} of "
        f"accuracy{energy}.",
        *([f"The margins were changed after the measurement: {', '.join(changed)}."] if changed else []),
        f"A/A, {comparison.baseline} against itself: "
        f"{', '.join(f'{noun} {formats.text(noise)}' for noun, noise in noises.items())}.",
    ]


def _not_new(dataset: Dataset) -> list[str]:
    """Say how many test samples are also training samples, and how many repeat another test sample. Return an empty
    list if there are none."""
    known, twice = dataset.test_in_train_count, dataset.test_repeated_count
    if not (known or twice):
        return []
    return [
        f"Of the {dataset.test_count:,} test samples, {known:,} also occur among the training samples, so a model "
        f"may have memorised them. {twice:,} test samples repeat another one (byte for byte)."
    ]


def remarks(each: Compared) -> list[str]:
    """Return remarks on skipped techniques and on the techniques' automatic choices. Also return remarks on what makes
    the variant hard to compare: another job, another model, a teacher, or processes whose memory is not counted."""
    found = [f"Skipped: {name}, because {reason.rstrip('.')}." for name, reason in each.skipped.items()]
    found += [f"Decided by {name}: {decision.rstrip('.')}." for name, decision in each.decided.items()]
    if "weak_scaling" in each.techniques:
        found.append(
            f"Weak scaling changes this variant's job: the global batch is {each.batch_size:,} and the peak learning "
            f"rate {each.learning_rate:g}. Compare its throughput with that of other variants, not its step time."
        )
    if each.another_model:
        found.append(f"This variant trains another model than the baseline: {each.another_model}.")
    if any(name.startswith("distillation=") for name in each.techniques):
        found.append("This variant has a teacher. Its steps include the teacher's forward pass, not its training.")
    if "dataloader" in each.techniques:
        found.append("Peak memory counts the training process only, not the DataLoader's worker processes (if any).")
    return found


def contradicted(each: Compared, baseline: Compared) -> list[str]:
    """Return a sentence if a variant's speed ratio in the trainings contradicts the ratio in the bench: they differ by
    more than the noise of both.

    The trainings' ratio is a range over all pairs of seeds, widened by BETWEEN_SESSIONS. Returns an empty list if the
    ratios agree, if the bench's ratio is unknown or untrusted, or if there are fewer than two seeds, because one seed
    shows no noise.
    """
    both, ratio = (each.runs, baseline.runs), each.throughput
    ours, theirs = ([run.samples_per_second for run in runs if run.samples_per_second] for runs in both)
    if not (ratio and ratio.low and ratio.high) or ratio.decision == "untrusted" or min(len(ours), len(theirs)) < 2:
        return []
    low, high = min(ours) / max(theirs), max(ours) / min(theirs)
    if low / BETWEEN_SESSIONS <= ratio.high and ratio.low <= high * BETWEEN_SESSIONS:
        return []
    return [
        f"Bench and trainings contradict each other: in the bench, the variant has {estimate(ratio)} the baseline's "
        f"throughput ({interval(ratio)}), but in the trainings {low:.2f} to {high:.2f} times. Sessions do not differ "
        "by so much. Find out what the variant does differently in the bench."
    ]


def disturbed(each: Compared) -> tuple[str, ...]:
    """Return a line that names the seeds whose training times are not trusted, because figures were rejected. Return an
    empty tuple if there are no such seeds."""
    seeds = [run.seed for run in each.runs if run.rejections]
    return (f"seed {_listed(seeds)} disturbed",) if seeds else ()


def notes(comparison: Comparison) -> list[tuple[str, str]]:
    """Return pairs (variant or arm, note) about all that was skipped, rejected, resumed, not predicted or
    contradicted."""
    found: list[tuple[str, str]] = []
    for each in comparison.variants:
        name = each.variant
        found += [(name, text) for text in remarks(each)]
        ledgers = each.ledgers
        if ledgers and ledgers.why_not_predicted:
            found.append((name, f"Memory not predicted: {ledgers.why_not_predicted.rstrip('.')}."))
        found += [
            (name, f"Rejected in training, seed {_listed(seeds)}: {reason.rstrip('.')}.")
            for reason, seeds in rejected([(run.seed, run) for run in each.runs]).items()
        ]
        found += [(name, text) for text in contradicted(each, comparison.variants[0])]
        resumed = [run.seed for run in each.runs if run.resumes]
        if resumed:
            found.append((name, f"Interrupted and resumed: seed {_listed(resumed)}."))
    return found + [(arm.name, text) for arm in comparison.bench.arms for text in sentences(rejections(arm))]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def title(comparison: Comparison) -> str:
    return f"{comparison.train['model']} on {comparison.dataset.name}"


def target(comparison: Comparison) -> str:
    return plain_percent(comparison.target_accuracy_fraction)


def score(comparison: Comparison) -> str:
    """Return the report's name for ``test_accuracy``, such as "test accuracy"."""
    return f"test {ScoreName(name=comparison.train.get('metric', 'accuracy')).in_words}"


def counted(comparison: Comparison) -> str:
    """Say what the throughput counts, for use before "of the global batch"."""
    unit = comparison.unit
    return heading(unit.name) if unit.per_sample == 1 else f"{heading(unit.name)} ({unit.per_sample:,} a sample)"


def metric(comparison: Comparison) -> str:
    """Describe the job's metric, for use before "over all test samples"."""
    name = comparison.train["metric"]
    return "Share of correct predictions" if name == "accuracy" else f"Mean of {name}, a score per sample from 0 to 1,"


def setup(each: Compared) -> str:
    """Return a variant's number of processes, and their backend."""
    backend = f" over {each.backend}" if each.backend else ""
    return f"{count(each.world_size, 'process')}{backend}"


def techniques(each: Compared) -> str:
    return ", ".join(each.techniques) or "no technique"


def job(comparison: Comparison) -> list[str]:
    """Describe the device and the job that every variant trained."""
    train, data = comparison.train, comparison.dataset
    parts = [
        comparison.device,
        count(comparison.parameter_count, "parameter"),
        f"{data.train_count:,} training and {data.test_count:,} test samples",
        count(train["epochs"], "epoch"),
        f"global batch {train['batch_size']}",
    ]
    if ":" in train["task"]:
        parts.append(f"task {train['task']}")
    if train["loss"] not in ("cross_entropy", sections.OF_OWN_TASK[0]):
        parts.append(f"loss {train['loss']}")
    if train["metric"] != "accuracy":
        parts.append(f"accuracy is the mean of {train['metric']}")
    return [*parts, f"seed{'s' if len(comparison.seeds) > 1 else ''} {_listed(comparison.seeds)}"]


def measured_at(bench: Bench) -> str:
    """Name the commit that was measured."""
    if bench.commit is None:
        return UNKNOWN
    commit = bench.commit.rstrip("+")[:12]
    return f"{commit}, with uncommitted changes" if bench.commit.endswith("+") else commit
