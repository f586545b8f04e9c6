"""Decide on each variant and quantity from the samples of base and head, and then on the outcome of the gate."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from pipeline import environment, results
from pipeline.comparison import verdicts
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.verdicts import MEMORY, THROUGHPUT, Accuracy, Noise, Quantity, Ratio
from pipeline.errors import PipelineError
from pipeline.params import Margins
from pipeline.results import Arm, Dataset, Document, Record, ScoreName, Unit, Window

Outcome = Literal["passed", "worse", "untrusted", "undecided"]
EXIT_CODES: dict[Outcome, int] = {"passed": 0, "worse": 1, "untrusted": 3, "undecided": 3}
"""Exit code 2 means a user's mistake, as in every command."""


CONFIDENCE_OF_LOOKS = 0.995
"""After each round except the first few, the gate tests whether everything is decided already. These interim tests use
a higher confidence than the final test, so that frequent testing adds few errors (the Haybittle-Peto rule). Source:
Haybittle, "Repeated assessment of results in clinical trials of cancer treatment", British Journal of Radiology 44
(1971)."""


class GateError(PipelineError):
    """Base and head cannot be compared. The message says why and what to do."""


class Held(Record):
    """One variant of the head, compared with the same variant of the base."""

    variant: str
    throughput: Ratio
    memory: Ratio | None
    """None if this machine cannot measure memory."""
    accuracy: Accuracy | None
    """None if accuracy was not compared."""

    @property
    def figures(self) -> dict[str, Ratio | Accuracy | None]:
        """Quantity, in words -> the decision on it, with the figures."""
        return {"throughput": self.throughput, "peak memory": self.memory, "accuracy": self.accuracy}


class Judged(Record):
    """The decisions that the samples of both sides support."""

    outcome: Outcome
    noise_throughput: Noise
    """Ratio of the base's baseline to itself, in throughput; ``noise_memory`` is the same ratio in peak memory."""
    noise_memory: Noise
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


class Gated(Judged, Document):
    """``reports/gate.json``."""

    schema_: Literal[3] = Field(default=3, alias="schema")
    indent = 1
    against: str
    """The revision as the user wrote it."""
    margins: Margins
    dataset: Dataset
    """The data set of both sides."""
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


def judge(
    base: Mapping[str, Arm],
    head: Mapping[str, Arm],
    noise: tuple[Noise, Noise],
    margins: Margins,
    accuracies: Mapping[str, Accuracy],
    must_see: float,
    confidence: float = 0.95,
) -> Judged:
    """Decide on the variants that both sides have. ``base``, ``head``: variant -> arm.

    Samples with the same index were measured side by side. ``noise``: the noise of throughput and of memory.
    ``must_see``: a fraction, such as 0.1. Every interval must exclude that the head is worse by this fraction.
    ``confidence``: the confidence of the ratios' intervals.
    """

    def held(variant: str, of_head: Arm, of_base: Arm, accuracy: Accuracy | None) -> Held:
        least = max(margins.memory, verdicts.heap_share(of_base))
        unknown = verdicts.unmeasurable((of_head, of_base), MEMORY)
        return Held(
            variant=variant,
            throughput=verdicts.ratio(of_head, of_base, THROUGHPUT, margins.throughput, noise[0], confidence),
            memory=None if unknown else verdicts.ratio(of_head, of_base, MEMORY, least, noise[1], confidence),
            accuracy=accuracy,
        )

    names = [name for name in base if name in head]
    variants = [held(name, head[name], base[name], accuracies.get(name)) for name in names]
    arms = [head[name] for name in names], [base[name] for name in names]
    together = held("all together", *_means(*arms), None) if len(names) > 1 else None
    hidden = [
        f"{name}: most samples of the base have a {quantity.noun}, but most samples of the head have none, so "
        f"the {quantity.noun} may have got worse"
        for name in names
        for quantity in (THROUGHPUT, MEMORY)
        if not _mostly_known(head[name], quantity) and _mostly_known(base[name], quantity)
    ]
    rows = [*variants, together] if together else variants
    unseen = [
        f"{row.variant}: it is unclear whether {quantity.noun} is worse by {must_see:.0%}"
        for row in rows
        for quantity, found in ((THROUGHPUT, row.throughput), (MEMORY, row.memory))
        if found and not _excludes(found, quantity, must_see)
    ]
    return Judged(
        outcome=_outcome(rows, bool(hidden), bool(unseen)),
        noise_throughput=noise[0],
        noise_memory=noise[1],
        variants=tuple(variants),
        together=together,
        hidden=tuple(hidden),
        unseen=tuple(unseen),
    )


def noises(baseline: Arm, control: Arm, max_spread: float, cost: RoundCost) -> tuple[Noise, Noise]:
    """Return the noise of throughput and of memory, from two equal arms."""
    return (
        verdicts.noise_between(baseline, control, THROUGHPUT, max_spread, cost),
        verdicts.noise_between(baseline, control, MEMORY, max_spread, cost),
    )


def supported(gated: Gated, baseline: str, max_spread: float, must_see: float) -> Outcome:
    """Judge the raw samples of ``gated`` again and return the outcome that they support.

    Raises ValueError if the arms do not fit together.
    """
    control, *of_base = gated.base.arms
    base, head = ({arm.variant: arm for arm in arms} for arms in (of_base, gated.head.arms))
    if not set(base) == set(head) == {each.variant for each in gated.variants}:
        raise ValueError("base, head and decisions have different variants")
    machine = noises(base[baseline], control, max_spread, RoundCost(gated.budget, len(control.samples), gated.seconds))
    compared = accuracies(
        gated.dataset.test_count * gated.unit.per_sample,
        gated.base.test_accuracies,
        gated.head.test_accuracies,
        gated.margins.accuracy,
    )
    return judge(base, head, machine, gated.margins, compared, must_see).outcome


def _mostly_known(arm: Arm, quantity: Quantity) -> bool:
    known = sum(bool(getattr(sample, quantity.field)) for sample in arm.samples)
    return 0 < 2 * known >= len(arm.samples)


def _excludes(ratio: Ratio, quantity: Quantity, loss: float) -> bool:
    """True if the interval excludes that the head is worse by ``loss``, or by the margin if the margin is larger.

    Also True for untrusted and worse ratios, because the gate reports these anyway.
    """
    if ratio.decision in ("untrusted", "worse"):
        return True
    worst = ratio.low and 1 / ratio.low if quantity.higher_is_better else ratio.high
    return worst is not None and worst < 1 + max(loss, ratio.margin)


def settled(judged: Judged) -> bool:
    """True if the gate may end early: something is worse, or the gate passes and every ratio is decided.

    ``judged`` must have been computed with ``CONFIDENCE_OF_LOOKS``. Every ratio must be decided, because an undecided
    ratio could still be worse by less than ``gate.must_see``.
    """
    ratios = [each for row in judged.variants for each in (row.throughput, row.memory) if each]
    decided = all(each.decision in ("same", "better") for each in ratios)
    return judged.outcome == "worse" or (judged.outcome == "passed" and decided)


def _outcome(held: Sequence[Held], hides: bool, leaves_open: bool) -> Outcome:
    """Return "worse" if anything is worse; else "untrusted" if ``hides``, or if a quantity is untrusted for all
    variants; else "undecided" if ``leaves_open``; else "passed".

    ``hides``: the head hides a quantity (``Judged.hidden``). ``leaves_open``: an interval does not exclude that the
    head is worse by ``gate.must_see`` (``Judged.unseen``).
    """
    columns = zip(*(each.figures.values() for each in held), strict=True)
    decisions = [{each.decision for each in column if each} for column in columns]
    if any("worse" in each for each in decisions):
        return "worse"
    if {"untrusted"} in decisions or hides:
        return "untrusted"
    return "undecided" if leaves_open else "passed"


def _means(head: Sequence[Arm], base: Sequence[Arm]) -> tuple[Arm, Arm]:
    """Return one arm per side. Its figures in a round are the geometric means over the variants that have a figure on
    both sides in this round."""
    sides: tuple[list[Window], list[Window]] = ([], [])
    for windows in zip(*(arm.samples for arm in (*head, *base)), strict=True):
        why = tuple(dict.fromkeys(reason for window in windows for reason in window.rejections))
        means: tuple[dict[str, Any], dict[str, Any]] = ({"rejections": why}, {"rejections": why})
        for quantity in (THROUGHPUT, MEMORY):
            figures = [getattr(window, quantity.field) for window in windows]
            pairs = zip(figures[: len(head)], figures[len(head) :], strict=True)
            known = [pair for pair in pairs if all(pair)]
            for side, mean in enumerate(means):
                mean[quantity.field] = statistics.geometric_mean(pair[side] for pair in known) if known else None
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
    there, here = sorted(base), sorted(head)
    if not there or not set(there) <= set(here):
        raise GateError(
            f"train.seeds: the base has {there} and the head {here}. Test accuracies are compared over the base's "
            "seeds, so the head has to train all these seeds."
        )


def accuracies(
    test_count: int, base: Mapping[str, Mapping[int, float]], head: Mapping[str, Mapping[int, float]], margin: float
) -> dict[str, Accuracy]:
    """Return variant -> the head's test accuracy minus the base's.

    ``base``, ``head``: variant -> seed -> test accuracy as a fraction. ``test_count``: the number of samples or tokens
    that the accuracies count. Raises GateError if the head lacks an accuracy.
    """
    found = {}
    for name, there in base.items():
        here = head.get(name, {})
        check_seeds(there, here)
        differences = [here[seed] - there[seed] for seed in sorted(there)]
        found[name] = verdicts.accuracy(differences, margin, statistics.fmean(there.values()), 1 / test_count)
    return found


def unshared(base: Iterable[str], head: Iterable[str]) -> list[str]:
    """Return a line for each side that has variants that the other side lacks."""
    there, here = list(base), list(head)
    gone, new = (", ".join(name for name in one if name not in other) for one, other in ((there, here), (here, there)))
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

    if not all("stages" in each for each in (base, head)):
        return []
    remarks: list[str] = []
    for row in judged.variants:
        known = {noun: each.decision for noun, each in row.figures.items() if each}
        moved = [f"{noun} {found}" for noun, found in known.items() if found in ("better", "worse")]
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
        f"{where}: base {json.dumps(there)}, head {json.dumps(here)}"
        for where, there, here in results.differing(base, head, path)
    ]
