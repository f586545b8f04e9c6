"""Decide each variant and quantity from the samples of base and head, then the outcome of the gate."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from pipeline import environment
from pipeline.comparison import verdicts
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.verdicts import MEMORY, THROUGHPUT, Accuracy, Noise, Quantity, Ratio
from pipeline.errors import PipelineError
from pipeline.params import Margins
from pipeline.results import Arm, Dataset, Document, Record, ScoreName, Unit, Window

Outcome = Literal["passed", "worse", "untrusted", "undecided"]
EXIT_CODES: dict[Outcome, int] = {"passed": 0, "worse": 1, "untrusted": 3, "undecided": 3}
"""Exit code 2 is a user's mistake, as in every command."""


CONFIDENCE_OF_LOOKS = 0.995
"""After each round the gate tests whether everything is decided already. These interim tests use a higher confidence
than the final one, so that testing often adds few errors: the Haybittle-Peto rule. Source: Haybittle, "Repeated
assessment of results in clinical trials of cancer treatment", British Journal of Radiology 44 (1971)."""


class GateError(PipelineError):
    """Base and head cannot be compared. The message says why and what to do."""


class Held(Record):
    """One variant of the head against the same variant of the base."""

    variant: str
    throughput: Ratio
    memory: Ratio | None
    """None: memory cannot be measured on this machine."""
    accuracy: Accuracy | None
    """None: not compared."""


class Judged(Record):
    """The decisions that the samples of both sides support."""

    outcome: Outcome
    noise_throughput: Noise
    """The base's baseline against itself."""
    noise_memory: Noise
    variants: tuple[Held, ...]
    together: Held | None
    """The geometric mean of all variants' ratios in each round: a change that hits all variants shows here first. None
    for a single variant."""
    hidden: tuple[str, ...]
    """Quantities that most samples of the base have and most of the head lack, in words. They may be worse, so the gate
    does not pass."""
    unseen: tuple[str, ...]
    """Quantities whose interval does not exclude a loss of ``gate.must_see``, in words. If there is one, the gate
    does not pass."""


class Side(Record):
    """Base or head."""

    commit: str | None
    """Ends with "+" if the files differed from the commit. None: not known."""
    environment: str
    """Hash of all that the side's variants depend on, taken by the side's own code."""
    made_of: str | None
    """Digest of the code, settings and plans of the side's stages and variants. None: its version reports none."""
    arms: tuple[Arm, ...]
    """Arms with their raw samples. Samples of one index on both sides belong to one round."""
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
    """What the accuracies of both sides are."""
    unit: Unit
    """What the accuracies count; samples where they were not compared."""
    base: Side
    head: Side
    remarks: tuple[str, ...]
    """Notes: jobs that differ, variants that only one side has, an interruption."""
    seconds: float
    """Duration of the rounds."""
    budget: str
    """The key of params.yaml that ended the measurement."""

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

    ``noise``: of throughput and of memory. Samples of one index were measured side by side. ``must_see``: the loss
    that an interval has to exclude, such as 0.1. ``confidence``: of the ratios' intervals.
    """

    def ratio(of_head: Arm, of_base: Arm, quantity: Quantity) -> Ratio:
        if quantity is THROUGHPUT:
            margin, machine = margins.throughput, noise[0]
        else:
            margin, machine = max(margins.memory, verdicts.heap_share(of_base)), noise[1]
        return verdicts.ratio(of_head, of_base, quantity, margin, machine, confidence)

    def memory(of_head: Arm, of_base: Arm) -> Ratio | None:
        return None if verdicts.unmeasurable((of_head, of_base), MEMORY) else ratio(of_head, of_base, MEMORY)

    names = [name for name in base if name in head]
    held = [
        Held(
            variant=name,
            throughput=ratio(head[name], base[name], THROUGHPUT),
            memory=memory(head[name], base[name]),
            accuracy=accuracies.get(name),
        )
        for name in names
    ]
    together = None
    if len(names) > 1:
        arms = [head[name] for name in names], [base[name] for name in names]
        together = Held(
            variant="all together",
            throughput=ratio(*_means(*arms, THROUGHPUT), THROUGHPUT),
            memory=memory(*_means(*arms, MEMORY)),
            accuracy=None,
        )
    hidden = [
        f"{name}: most of the base's samples have a {quantity.noun} and most of the head's lack it, so it may have got "
        "worse"
        for name in names
        for quantity in (THROUGHPUT, MEMORY)
        if not _mostly_known(head[name], quantity) and _mostly_known(base[name], quantity)
    ]
    rows = [*held, together] if together else held
    unseen = [
        f"{row.variant}: a loss of {must_see:.0%} of {quantity.noun} is neither shown nor excluded"
        for row in rows
        for quantity, found in ((THROUGHPUT, row.throughput), (MEMORY, row.memory))
        if found and not _excludes(found, quantity, must_see)
    ]
    return Judged(
        outcome=_outcome(rows, bool(hidden), bool(unseen)),
        noise_throughput=noise[0],
        noise_memory=noise[1],
        variants=tuple(held),
        together=together,
        hidden=tuple(hidden),
        unseen=tuple(unseen),
    )


def noises(baseline: Arm, control: Arm, max_spread: float, cost: RoundCost) -> tuple[Noise, Noise]:
    """The noise of throughput and of memory, from two equal arms."""
    return (
        verdicts.noise_between(baseline, control, THROUGHPUT, max_spread, cost),
        verdicts.noise_between(baseline, control, MEMORY, max_spread, cost),
    )


def supported(gated: Gated, baseline: str, max_spread: float, must_see: float) -> Outcome:
    """Judge the raw samples of ``gated`` anew and return the outcome that they support. Raises ValueError for arms that
    do not fit together."""
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
    """True if the interval excludes a loss of ``loss``, or of the margin if that is larger. Also True for untrusted and
    worse ratios, which are reported as such."""
    if ratio.decision in ("untrusted", "worse"):
        return True
    worst = ratio.low and 1 / ratio.low if quantity.higher_is_better else ratio.high
    return worst is not None and worst < 1 + max(loss, ratio.margin)


def settled(judged: Judged) -> bool:
    """True if the gate may end early: ``judged``, at ``CONFIDENCE_OF_LOOKS``, found something worse, or passed with
    every quantity trusted and decided. An undecided quantity could hide a smaller loss."""
    ratios = [each for row in judged.variants for each in (row.throughput, row.memory) if each]
    decided = all(each.decision in ("same", "better") for each in ratios)
    return judged.outcome == "worse" or (judged.outcome == "passed" and decided)


def _outcome(held: Sequence[Held], hides: bool, leaves_open: bool) -> Outcome:
    """The gate's outcome: "worse" if anything is worse; else "untrusted" if a quantity is untrusted for all variants or
    the head ``hides`` one; else "undecided" if a loss that must be seen is left open; else "passed"."""
    columns = zip(*((each.throughput, each.memory, each.accuracy) for each in held), strict=True)
    decisions = [{each.decision for each in column if each} for column in columns]
    if any("worse" in each for each in decisions):
        return "worse"
    if {"untrusted"} in decisions or hides:
        return "untrusted"
    return "undecided" if leaves_open else "passed"


def _means(head: Sequence[Arm], base: Sequence[Arm], quantity: Quantity) -> tuple[Arm, Arm]:
    """One arm per side: in every round the geometric mean over the variants whose figures are known on both sides."""
    sides: tuple[list[Window], list[Window]] = ([], [])
    for windows in zip(*(arm.samples for arm in (*head, *base)), strict=True):
        figures = [getattr(window, quantity.field) for window in windows]
        pairs = zip(figures[: len(head)], figures[len(head) :], strict=True)
        known = [pair for pair in pairs if all(pair)]
        why = tuple(dict.fromkeys(reason for window in windows for reason in window.rejections))
        for side, samples in enumerate(sides):
            mean = statistics.geometric_mean(pair[side] for pair in known) if known else None
            samples.append(windows[0].model_copy(update={quantity.field: mean, "rejections": why}))
    of_head, of_base = (head[0].model_copy(update={"samples": tuple(samples)}) for samples in sides)
    return of_head, of_base


# For samples of both kinds: measured side by side, or recorded.


def held_variants(base: Iterable[str], head: Iterable[str], against: str) -> list[str]:
    """The names of the base's variants. Raises GateError unless the head has them all."""
    names = list(base)
    if lacking := ", ".join(name for name in names if name not in set(head)):
        raise GateError(
            f"variants: {against} has {lacking}, which was not measured here, so its losses would go unseen. "
            "Put it back into params.yaml and run `dvc repro`, or compare this work tree with a revision."
        )
    return names


def accuracy_of(correct: float, count: int, of: str) -> float:
    """Accuracy as a fraction. Raises GateError if the counts give none."""
    if count > 0 and 0 <= correct <= count:
        return correct / count
    raise GateError(f"{of}: found {correct} right of {count} test samples: train it again.")


def check_seeds(base: Iterable[int], head: Iterable[int]) -> None:
    """Raise GateError unless the head trains every seed of the base: with fewer, less would be decided."""
    there, here = sorted(base), sorted(head)
    if not there or not set(there) <= set(here):
        raise GateError(
            f"train.seeds: base {there}, head {here}: test accuracies are compared over the base's seeds, so the head "
            "has to train all of them."
        )


def accuracies(
    test_count: int, base: Mapping[str, Mapping[int, float]], head: Mapping[str, Mapping[int, float]], margin: float
) -> dict[str, Accuracy]:
    """Variant -> the head's test accuracies (variant -> seed -> fraction of ``test_count`` samples or tokens) minus the
    base's.

    Raises GateError if the head lacks an accuracy.
    """
    found = {}
    for name, there in base.items():
        here = head.get(name, {})
        check_seeds(there, here)
        differences = [here[seed] - there[seed] for seed in sorted(there)]
        found[name] = verdicts.accuracy(differences, margin, statistics.fmean(there.values()), 1 / test_count)
    return found


def own_modules(train: Mapping[str, Any]) -> list[str]:
    """The user's own modules, which the settings task, model, loss and metric name as ``module:function``."""
    return [
        name.partition(":")[0] for key in ("task", "model", "loss", "metric") if ":" in (name := str(train.get(key)))
    ]


def unshared(base: Iterable[str], head: Iterable[str]) -> list[str]:
    """A line for each side with variants that only it has."""
    there, here = list(base), list(head)
    gone, new = (", ".join(name for name in one if name not in other) for one, other in ((there, here), (here, there)))
    return [
        *([f"Only the base has: {gone}; the head was measured with it as the base defines it."] if gone else []),
        *([f"Only the head has: {new}."] if new else []),
    ]


def unexplained(judged: Judged, base: Mapping[str, Any], head: Mapping[str, Any]) -> list[str]:
    """A question about each variant, or about all together, that got better or worse though nothing that runs changed.

    ``base``, ``head``: the content of each side's ``environment.json``, with the digests of code, plans and settings.
    """

    def ran(fingerprint: Mapping[str, Any], name: str) -> list[Any]:
        stages = [fingerprint["stages"][stage] for stage in ("train", "bench")]
        return [environment.hash_of(fingerprint, "variants", name), fingerprint["variants"].get(name), *stages]

    if not all("stages" in each for each in (base, head)):
        return []
    rows = [([row.variant], row) for row in judged.variants]
    if judged.together:
        rows.append(([row.variant for row in judged.variants], judged.together))
    requested: list[str] = []
    for names, row in rows:
        columns = (("throughput", row.throughput), ("peak memory", row.memory), ("accuracy", row.accuracy))
        moved = [f"{noun} {each.decision}" for noun, each in columns if each and each.decision in ("better", "worse")]
        asked_already = bool(requested) and row is judged.together  # about a variant, which is nearer to the cause
        if moved and not asked_already and all(ran(base, name) == ran(head, name) for name in names):
            requested.append(
                f"{row.variant}: {', '.join(moved)}, yet by their digests the code, the settings and the packages that "
                "it runs are the same on both sides. Find the cause before you believe it: gate again, and look at "
                "what no digest covers, such as files that the code reads."
            )
    return requested


def differing(base: Any, head: Any, path: str) -> list[str]:
    """A line for each value that differs, with its dotted path."""
    if isinstance(base, Mapping) and isinstance(head, Mapping):
        keys = dict.fromkeys([*base, *head])
        return [line for key in keys for line in differing(base.get(key), head.get(key), f"{path}.{key}")]
    return [f"{path}: base {json.dumps(base)}, head {json.dumps(head)}"] if base != head else []
