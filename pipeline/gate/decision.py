"""Decide on each variant and quantity from the samples of base and head, and then on the outcome of the gate."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from pipeline import environment, files
from pipeline.comparison import stats, verdicts
from pipeline.comparison.comparison_file import ByFigure, fields_of
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.sessions import Column, SharedRounds, column
from pipeline.comparison.stats import Decision, Difference
from pipeline.errors import PipelineError
from pipeline.params import Compare, Margins
from pipeline.results import Arm, DatasetFacts, Document, Record, ScoreName, Unit, Window
from pipeline.results.figures import ALWAYS_MEASURED, MEMORY, THROUGHPUT, Figure
from pipeline.results.rejections import by_kind

Outcome = Literal["passed", "worse", "untrusted", "undecided"]
EXIT_CODES: dict[Outcome, int] = {"passed": 0, "worse": 1, "untrusted": 3, "undecided": 3}
"""Exit code 2 means a user's mistake, as in every command."""


class GateError(PipelineError):
    """Base and head cannot be compared. The message says why and what to do."""


class Held(ByFigure):
    """One variant of the head, compared with the same variant of the base."""

    variant: str
    throughput: Difference
    memory: Difference | None = None
    """None if this machine cannot measure memory."""
    accuracy: Difference | None
    """None if accuracy was not compared."""

    @property
    def known(self) -> dict[str, Difference]:
        """Quantity, in words -> the decision on it, with the figures."""
        ratios = {figure.noun: ratio for figure, ratio in self.ratios.items()}
        return ratios | ({"accuracy": self.accuracy} if self.accuracy else {})


class Judged(ByFigure):
    """The decisions that the samples of both sides support."""

    prefixes = ("noise_",)
    outcome: Outcome
    noise_throughput: Difference
    """Ratio of the base's baseline to itself, in throughput; ``noise_memory`` is the same ratio in peak memory."""
    noise_memory: Difference
    variants: tuple[Held, ...]
    together: Held | None
    """The ratios of geometric means: in each round, the mean over all variants. A change that affects all variants
    shows here first. None if there is only one variant."""
    hidden: tuple[str, ...]
    """Quantities, in words, that most of the base's samples have and most of the head's samples lack. Such a quantity
    may be worse, so the gate does not pass."""
    unseen: tuple[str, ...]
    """Quantities, in words, whose interval does not exclude that they are worse by ``gate.must_see``. If there is one,
    the gate does not pass."""


class Side(Record):
    """The measurement of base or head."""

    commit: str | None
    """Ends with "+" if the files differed from the commit. None if unknown."""
    environment: str
    """Hash of the environment that the side's variants depend on, computed by the side's own code."""
    made_of: str | None
    """Digest of the code, settings and plans of the side's stages and variants. None if the side's version has no
    such digest."""
    arms: tuple[Arm, ...]
    """Arms with their raw samples. Samples with the same index belong to the same round, on both sides."""
    test_accuracies: dict[str, dict[int, float]]
    """Variant -> seed -> fraction."""


class Gated(Judged, Document, extra="allow"):
    """``reports/gate.json``."""

    schema_: Literal[4] = Field(default=4, alias="schema")
    indent = 1
    against: str
    """The revision as the user wrote it."""
    margins: Margins
    dataset: DatasetFacts | None
    """The data set of both sides; None if it is unknown."""
    score: ScoreName
    """The score that both sides report as accuracy."""
    unit: Unit
    """The unit that the accuracies count; samples if accuracies were not compared."""
    base: Side
    head: Side
    sides_are_equal: bool = False
    """True if both sides have the same code, settings, environment and packages, so that the gate compared nothing."""
    remarks: tuple[str, ...]
    """Notes, such as differing settings, variants that only one side has, or an interruption."""
    seconds: float
    """Duration of the rounds."""
    budget: str
    """The key of params.yaml that limits the measurement: ``bench.max_rounds`` if this number of rounds was measured,
    else ``gate.max_minutes``."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    @property
    def cost(self) -> RoundCost:
        return RoundCost(self.budget, len(self.base.arms[0].samples), self.seconds)


HEAD = "head"
"""The role of the head's arms, beside the base's arms of the same variants."""
TOGETHER = "all together"
"""The name of the row that has the means over all variants."""


def rounds_of_sides(base: Sequence[Arm], head: Sequence[Arm], compare: Compare, cost: RoundCost) -> SharedRounds:
    """Return the rounds of both sides: the base's arms, its control included, and the head's.

    Raises ValueError if the two sides have different variants.
    """
    if {arm.variant for arm in base} != {arm.variant for arm in head}:
        raise ValueError("base and head have different variants")
    arms: dict[Column, Arm] = {arm.column: arm for arm in base}
    arms |= {(HEAD, arm.variant, None): arm for arm in head}
    return SharedRounds(arms, compare.baseline, cost, compare.max_spread)


def judge(
    rounds: SharedRounds, compared: Mapping[str, Difference], compare: Compare, must_see: float, *, look: bool = False
) -> Judged:
    """Decide on all variants: the comparison with the pairs of head and base in place of variant and baseline.

    ``rounds``: those of ``rounds_of_sides``. ``compared``: variant -> the head's test accuracy minus the base's.
    ``compare``: the margins. ``must_see``: a fraction, such as 0.1; every interval must exclude that the head is worse
    by this fraction. ``look``: with the intervals of a look.
    """
    margins, names = compare.margins, [variant for role, variant, _ in rounds.arms if role == HEAD]
    pairs = {name: (rounds.arms[HEAD, name, None], rounds.arms[column(name)]) for name in names}
    if len(names) > 1:
        pairs[TOGETHER] = of_head, of_base = _means(*zip(*pairs.values(), strict=True))
        rounds = replace(rounds, arms={**rounds.arms, (HEAD, TOGETHER, None): of_head, column(TOGETHER): of_base})

    def ratios_of(figure: Figure) -> dict[str, Difference]:
        def ratios(undecided: int) -> dict[str, Difference]:
            confidence = stats.confidence_of(undecided, look=look)
            return {
                name: rounds.ratio((HEAD, name, None), column(name), figure, margin, confidence, heaps_differ=False)
                for name, margin in margin_of.items()
            }

        # A speed that is unknown on both sides is untrusted, because without speeds nothing was measured.
        margin_of = {
            name: max(figure.margin_in(margins), verdicts.heap_share(base) if figure is MEMORY else 0.0)
            for name, (head, base) in pairs.items()
            if figure is THROUGHPUT or not verdicts.unmeasurable((head, base), figure)
        }
        return stats.decided_together(ratios, len(margin_of))

    figures = [figure for figure in ALWAYS_MEASURED if figure.margin_in(margins)]
    by_figure = {figure: ratios_of(figure) for figure in figures}
    held = [
        Held(
            variant=name,
            accuracy=compared.get(name),
            **fields_of({figure: ratios[name] for figure, ratios in by_figure.items() if name in ratios}),
        )
        for name in pairs
    ]
    hidden = [
        f"{name}: most samples of the base have a {figure.noun}, but most samples of the head have none, so the "
        f"{figure.noun} may have got worse"
        for name in names
        for figure in figures
        if [_mostly_known(arm, figure) for arm in pairs[name]] == [False, True]
    ]
    unseen = [
        f"{row.variant}: it is unclear whether {figure.noun} is worse by {100 * must_see:g}%"
        for row in held
        for figure, ratio in row.ratios.items()
        if not _excludes(ratio, figure, must_see)
    ]
    return Judged(
        outcome=_outcome(held, bool(hidden), bool(unseen)),
        **fields_of({figure: rounds.noise(figure) for figure in figures}, "noise_"),
        variants=tuple(held[: len(names)]),
        together=held[-1] if len(names) > 1 else None,
        hidden=tuple(hidden),
        unseen=tuple(unseen),
    )


def supported(gated: Gated, compare: Compare, must_see: float) -> Outcome:
    """Judge the raw samples of ``gated`` again, at its own margins, and return the outcome that they support.

    Raises ValueError if the arms do not fit together.
    """
    compared = accuracies(
        gated.dataset.test_count * gated.unit.per_sample if gated.dataset else 0,
        gated.base.test_accuracies,
        gated.head.test_accuracies,
        gated.margins.accuracy,
    )
    if {arm.variant for arm in gated.head.arms} != {row.variant for row in gated.variants}:
        raise ValueError("the decisions are of other variants than the samples")
    settings = compare.model_copy(update={"margins": gated.margins})
    rounds = rounds_of_sides(gated.base.arms, gated.head.arms, settings, gated.cost)
    return judge(rounds, compared, settings, must_see).outcome


def _mostly_known(arm: Arm, figure: Figure) -> bool:
    known = sum(map(bool, figure.known(arm.samples)))
    return 0 < 2 * known >= len(arm.samples)


def _excludes(ratio: Difference, figure: Figure, loss: float) -> bool:
    """True if the interval excludes that the head is worse by ``loss``, or by the margin if the margin is larger.

    Also True for untrusted and worse ratios, because the gate reports these anyway.
    """
    if ratio.decision in ("untrusted", "worse"):
        return True
    worst = ratio.low and 1 / ratio.low if figure.higher_is_better else ratio.high
    return worst is not None and worst < 1 + max(loss, ratio.margin)


def settled(judged: Judged) -> bool:
    """True if the gate may end early: something is worse, or the gate passes and every ratio is decided.

    ``judged`` must be a look's. Every ratio must be decided, because an undecided
    ratio could still be worse by less than ``gate.must_see``.
    """
    decided = all(ratio.decision in ("same", "better") for row in judged.variants for ratio in row.ratios.values())
    return judged.outcome == "worse" or (judged.outcome == "passed" and decided)


def memory_known(judged: Judged) -> bool:
    """True if further rounds need not measure memory: every ratio of it is decided. ``judged`` must be a look's."""
    ratios = [row.memory for row in (*judged.variants, judged.together) if row and row.memory]
    return all(ratio.decision in ("same", "better", "worse") for ratio in ratios)


def _outcome(held: Sequence[Held], hides: bool, leaves_open: bool) -> Outcome:
    """Return "worse" if anything is worse; else "untrusted" if ``hides``, or if a quantity is untrusted for all
    variants; else "undecided" if ``leaves_open``; else "passed".

    ``hides``: the head hides a quantity (``Judged.hidden``). ``leaves_open``: an interval does not exclude that the
    head is worse by ``gate.must_see`` (``Judged.unseen``).
    """
    decisions: dict[str, set[Decision]] = {}
    for row in held:
        for noun, difference in row.known.items():
            if row.variant != TOGETHER or difference.decision == "worse":  # a mean makes no variant trusted
                decisions.setdefault(noun, set()).add(difference.decision)
    if any("worse" in of_rows for of_rows in decisions.values()):
        return "worse"
    if {"untrusted"} in decisions.values() or hides:
        return "untrusted"
    return "undecided" if leaves_open else "passed"


def _means(head: Sequence[Arm], base: Sequence[Arm]) -> tuple[Arm, Arm]:
    """Return one arm per side. Its figures in a round are the geometric means over the variants that have a figure on
    both sides in this round."""
    sides: tuple[list[Window], list[Window]] = ([], [])
    for windows in zip(*(arm.samples for arm in (*head, *base)), strict=True):
        why = tuple(first for first, _ in by_kind(enumerate(window.rejections for window in windows)))
        means: tuple[dict[str, Any], dict[str, Any]] = ({"rejections": why}, {"rejections": why})
        for figure in ALWAYS_MEASURED:
            values = [figure.of(window) for window in windows]
            pairs = zip(values[: len(head)], values[len(head) :], strict=True)
            known = [pair for pair in pairs if all(pair)]
            for side, mean in enumerate(means):
                mean[figure.field] = statistics.geometric_mean(pair[side] for pair in known) if known else None
        for samples, mean in zip(sides, means, strict=True):
            samples.append(windows[0].model_copy(update=mean))
    of_head, of_base = (head[0].model_copy(update={"samples": tuple(samples)}) for samples in sides)
    return of_head, of_base


def accuracy_of(correct: float, count: int, of: str) -> float:
    """Return the accuracy as a fraction. Raises GateError if the counts are impossible."""
    if count > 0 and 0 <= correct <= count:
        return correct / count
    raise GateError(
        f"{of}: found {correct} correct of {count} test samples, which is impossible; train the variant again."
    )


def check_seeds(base: Iterable[int], head: Iterable[int]) -> None:
    """Raise GateError unless the head trains every seed of the base. With fewer seeds, a worse accuracy would
    be found less often."""
    base_seeds, head_seeds = sorted(base), sorted(head)
    if not base_seeds or not set(base_seeds) <= set(head_seeds):
        raise GateError(
            f"train.seeds: the base has {base_seeds} and the head {head_seeds}. Test accuracies are compared over the "
            "base's seeds, so the head has to train all these seeds."
        )


def accuracies(
    test_count: int, base: Mapping[str, Mapping[int, float]], head: Mapping[str, Mapping[int, float]], margin: float
) -> dict[str, Difference]:
    """Return variant -> the head's test accuracy minus the base's, decided together (``stats.step_down``).

    ``base``, ``head``: variant -> seed -> test accuracy as a fraction. ``test_count``: the number of samples or tokens
    that the accuracies count; 0 if it is unknown. Raises GateError if the head lacks an accuracy.
    """
    for variant, of_base in base.items():
        check_seeds(of_base, head.get(variant, {}))

    def judged(undecided: int) -> dict[str, Difference]:
        compared, confidence = {}, stats.confidence_of_tests(undecided)
        for variant, of_base in base.items():
            differences = {seed: head[variant][seed] - of_base[seed] for seed in sorted(of_base)}
            mean = statistics.fmean(of_base.values())
            resolution = 1 / test_count if test_count else 0.0
            compared[variant] = verdicts.accuracy(differences, margin, mean, resolution, confidence)
        return compared

    return stats.decided_together(judged, len(base))


def unshared(base: Iterable[str], head: Iterable[str]) -> list[str]:
    """Return a line for each side that has variants that the other side lacks."""
    base_names, head_names = dict.fromkeys(base), dict.fromkeys(head)
    gone = ", ".join(name for name in base_names if name not in head_names)
    new = ", ".join(name for name in head_names if name not in base_names)
    return [
        *([f"Only the base has: {gone}; the head was measured with the base's definition."] if gone else []),
        *([f"Only the head has: {new}."] if new else []),
    ]


def unexplained(judged: Judged, base: Mapping[str, Any], head: Mapping[str, Any]) -> list[str]:
    """Return a remark on each variant that got better or worse although both sides have the same digests for it.

    ``base``, ``head``: the content of each side's ``environment.json``, with the digests of code, plans and settings.
    """

    def ran(fingerprint: Mapping[str, Any], name: str) -> list[Any]:
        stages = [fingerprint["stages"][stage] for stage in ("train", "bench")]
        return [environment.hash_of(fingerprint, "variants", name), fingerprint["variants"].get(name), *stages]

    remarks: list[str] = []
    for row in judged.variants:
        decisions = {noun: difference.decision for noun, difference in row.known.items()}
        moved = [f"{noun} {decision}" for noun, decision in decisions.items() if decision in ("better", "worse")]
        if moved and ran(base, row.variant) == ran(head, row.variant):
            remarks.append(
                f"{row.variant}: {', '.join(moved)}, although the digests of code, settings and packages are equal on "
                "both sides. Find the cause before you trust this result: run the gate again, and check everything "
                "that has no digest, such as files that the code reads."
            )
    return remarks


def differing(base: Any, head: Any, path: str) -> list[str]:
    """Return a line for each value that differs, with its dotted path."""
    return [
        f"{key}: base {json.dumps(of_base)}, head {json.dumps(of_head)}"
        for key, of_base, of_head in files.differing(base, head, path)
    ]
