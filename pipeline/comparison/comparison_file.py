"""The content of ``reports/comparison.json``."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from pipeline.comparison.stats import Difference, Verdict
from pipeline.params import Compare, Margins, VariantName
from pipeline.results import Bench, DatasetFacts, Document, Record, Run, RunConditions, Session, Unit
from pipeline.results.figures import QUANTITIES, Figure


class ByFigure(Record):
    """A record that holds differences of compared figures: a figure's ``margin``, after a prefix, is the key.

    A new figure needs no field. Fields are declared for those differences that code or templates name.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Difference] = Field(init=False)
    prefixes: ClassVar[Sequence[str]] = ("",)

    @model_validator(mode="after")
    def _of_compared_figures(self) -> Self:
        keys = {prefix + figure.margin for prefix in self.prefixes for figure in QUANTITIES}
        if undeclared := sorted(self.__pydantic_extra__.keys() - keys):
            raise ValueError(f"{', '.join(undeclared)}: extra inputs are not permitted")
        return self

    @property
    def ratios(self) -> dict[Figure, Difference]:
        """The known ratios, in the order of ``QUANTITIES``; empty if the record's keys have another prefix."""
        return self.by_figure("")

    @property
    def noises(self) -> dict[Figure, Difference]:
        """The baseline against itself, without figures that were not asked for."""
        return self.by_figure("noise_")

    def by_figure(self, prefix: str) -> dict[Figure, Difference]:
        """Return the known differences whose keys have this prefix, in the order of ``QUANTITIES``."""
        known = {figure: getattr(self, prefix + figure.margin, None) for figure in QUANTITIES}
        return {figure: difference for figure, difference in known.items() if difference}


def fields_of(differences: Mapping[Figure, Difference], prefix: str = "") -> dict[str, Any]:
    """Return the fields of a ``ByFigure``."""
    return {prefix + figure.margin: difference for figure, difference in differences.items()}


class SeedTarget(Record):
    """The step at which one seed's run reached the target accuracy."""

    seed: int
    steps: int | None
    """Optimizer steps at the first evaluation at or above the target; None if the target was not reached."""


class TimeToTarget(Record):
    """Training time until an evaluation shows the target accuracy, from the training runs' steps and the bench's speed.

    The time does not include evaluation and start-up. The first step counts like every other step.
    """

    seeds: tuple[SeedTarget, ...]
    reached_count: int
    """How many seeds reached the target."""
    samples: float | None
    """Median of the seeds' steps, times the global batch. None unless every seed reached the target; also None if the
    median is the first evaluation, because then the target was reached at an unknown time before it."""
    train_seconds: float | None
    """None if ``samples`` is None, or if the throughput is unknown or not trusted."""


class EqualTime(Record):
    """Test accuracies (means over seeds) of a variant and the baseline after the same training time.

    The time ends when the faster training ends. Each accuracy is that of the last evaluation in this time.
    """

    train_seconds: float
    accuracy_fraction: float
    baseline_accuracy_fraction: float
    difference_low_fraction: float | None = None
    difference_high_fraction: float | None = None
    """The smallest and the largest difference of the two accuracies at the throughputs' ratio and at both ends of its
    interval, which may lie in different epochs. None in a file older than these fields."""


class Slowest(Record):
    """The process, or the host, that the other processes wait for."""

    host: int
    """Its place among the hosts, from 0."""
    rank: int | None
    """None if the host's processes take turns at being the slowest."""
    rounds: int
    """Number of rounds in which it was the slowest."""
    wait_fraction: float
    """Median over rounds of the share of a step for which the fastest process waits for the slowest."""


class Compared(ByFigure):
    """One variant compared with the baseline. The baseline has an entry, too; its comparisons are None."""

    variant: VariantName
    techniques: tuple[str, ...]
    """Names of the techniques that were in effect."""
    conditions: RunConditions
    """How the variant was trained. With weak scaling, batch size and learning rate differ from the job's."""

    verdict: Verdict | None = None
    """None for the baseline, like throughput, memory and accuracy."""
    possible: tuple[Verdict, ...] = Field((), exclude_if=operator.not_)
    """The verdicts between which further rounds would choose, if the verdict is undecided."""
    reasons: tuple[str, ...] = ()
    """What is decided although the verdict is not; why a quantity is untrusted or undecided, and what would help; what
    correlated rounds did to an interval. If the variant's techniques are skipped, so that it trains like the baseline,
    a sentence that says so instead."""
    shared_reasons: tuple[str, ...] = Field((), exclude_if=operator.not_)
    """Further reasons, which hold for all variants: the machine's noise, and an interruption of the bench."""
    throughput: Difference | None = None
    memory: Difference | None = None
    """``throughput``, ``memory`` and, if energy was asked for, ``energy`` are ratios to the baseline. The margin is 0
    if the figure does not count for the verdict."""
    accuracy: Difference | None = None
    on_front: bool
    """On the Pareto front of throughput, memory and accuracy; see ``compare``. False for a variant with an unknown
    ratio or an untrusted verdict."""

    figures: dict[str, int | float | None]
    """``Figure.field`` -> its value in the bench, joined over the rounds in which it is known; for a figure that the
    bench does not measure, its value in training, joined over seeds. For a variant that was settled early, all except
    fractions and counts are scaled (``summaries.of_variant``). None if unknown or not trusted; then, optional figures
    are left out."""
    peak_memory_rank_bytes: tuple[int, ...] = ()
    """Each rank's median over the bench's samples that have a peak. Empty if no peak is known or trusted."""
    arithmetic_rank_ms: tuple[float, ...] = Field((), exclude_if=operator.not_)
    """Each rank's time to compute a step alone; medians over the bench's samples. Empty if unknown."""
    slowest: Slowest | None = Field(None, exclude_if=operator.not_)
    rejected: int
    """Number of this variant's samples in the bench that were rejected, in part or as a whole."""

    trained: dict[str, int | float | None]
    """The figures of the training runs, joined over seeds (``summarise``)."""
    findings: dict[str, float] = Field({}, exclude_if=operator.not_)
    """The task's further figures of the trained models: means over the seeds."""

    time_to_target: TimeToTarget
    time_to_target_ratio: Difference | None
    """Ratio to the baseline's time: the ratio of the samples divided by the ratio of the throughputs. The interval
    covers only the uncertainty of the throughputs, because evaluations are too rare to show how much the steps differ
    between seeds. None for the baseline itself, if a time is unknown, or if the throughput's ratio is untrusted or has
    no interval."""
    another_model: str | None = Field(None, exclude_if=operator.not_)
    """The variant's model, if it is not the baseline's."""
    equal_time: EqualTime | None = Field(None, exclude_if=operator.not_)
    """Only for a variant with another model or a teacher. None if the ratio of the throughputs is not trusted or has
    no interval, or if the time is too short for an evaluation."""
    runs: tuple[Run, ...]

    def of(self, figure: Figure) -> Any:
        """Return the value of ``figure``; None if it is unknown or not trusted."""
        return self.figures.get(figure.field)

    @property
    def badge(self) -> str | None:
        """The verdict or, if only two verdicts are possible, both."""
        return " or ".join(self.possible) if len(self.possible) == 2 else self.verdict


class Share(ByFigure):
    """The effect of one technique of an ablated variant, alone and combined with the variant's other techniques."""

    prefixes = ("added_", "stacked_")
    variant: str
    technique: str
    added_throughput: Difference | None = None
    """The baseline plus the technique, divided by the baseline. A ratio that was not measured is None."""
    added_memory: Difference | None = None
    stacked_throughput: Difference | None = None
    """The variant divided by the variant without the technique."""
    stacked_memory: Difference | None = None
    accuracy: Difference | None = None
    """Accuracy of a trained variant that adds only this technique to the baseline, compared with the baseline. None if
    there is no such variant."""
    accuracy_from: str | None = None
    """Name of the variant that has this accuracy."""
    verdict: Verdict | None = None
    """Verdict on the technique added alone to the baseline. Accuracy and memory count only if they are known. None if
    the technique was not measured alone."""
    interaction: str | None = None
    """One sentence for each quantity whose added and stacked ratios disagree; None if none does."""
    why_not: str | None = None
    """Reason why the technique was not measured. With a reason, all other fields except the two names are None."""


class Champion(Record):
    """The best of the variants that pay."""

    variant: VariantName
    quantity: str | None = None
    """The quantity by which the champion was chosen. None if all variants that pay do so by accuracy alone; then the
    ratios are None."""
    among: int
    """Number of variants that pay by this quantity; without a quantity, of all variants that pay."""
    ratio: Difference | None = None
    """Ratio to the baseline. With several candidates, it comes from other sessions than the choice or, with a
    single session, from other rounds (``champion``). None also if no session has enough rounds of all candidates."""
    runner_up: VariantName | None = None
    """The second best."""
    head_to_head: Difference | None = None
    """Ratio of the champion to the runner-up, from the rounds that have both. None without a runner-up, or if no
    session counts for both."""


class SessionSummary(ByFigure, Session, extra="allow"):
    """One session of the bench, in short."""

    prefixes = ("noise_",)
    benches: int
    """Number of benches in the session. ``rounds`` counts the rounds of all these benches."""
    commit: str | None
    """Commit of the last bench. The fields of ``Session`` are the first bench's."""
    rounds: int
    baseline_figures: dict[str, int | float | None]
    """The baseline's figures, joined over the session's rounds."""
    noise_throughput: Difference
    noise_memory: Difference
    variants: tuple[str, ...]
    """The variants that the session measured in their present form, even if their ratios are untrusted."""


class Past(Record):
    """The ratio of one session, in which the code stayed the same."""

    start_utc: str
    commit: str | None
    ratio: Difference


class Change(Record):
    """The place in a trend where the sessions before and after it differ most."""

    sessions_before: int
    ratio: Difference
    """The sessions after the place in ratio to those before it. Its interval allows for the choice of the place."""


class Trend(Record):
    """A variant's ratio to the baseline in one figure, the oldest session first."""

    variant: str
    noun: str
    """The figure's."""
    past: tuple[Past, ...]
    change: Change | None
    """None if no change is larger than the sessions' scatter explains."""

    @property
    def since(self) -> Past | None:
        """The first session after the change."""
        return self.past[self.change.sessions_before] if self.change else None

    @property
    def until(self) -> Past | None:
        """The last session before the change."""
        return self.past[self.change.sessions_before - 1] if self.change else None


class Comparison(ByFigure, Document, extra="allow"):
    """``reports/comparison.json``."""

    prefixes = ("noise_",)
    schema_: Literal[2] = Field(2, alias="schema")
    baseline: VariantName
    target_accuracy_fraction: float
    margins: Margins
    environment: dict[str, Any]
    """The content of environment.json, its hash included, but without the digests of code, plans and settings."""
    device: str
    dataset: DatasetFacts | None
    """None if unknown."""
    train: dict[str, Any]
    """The job that every variant trained: ``train`` in params.yaml."""
    parameter_count: int
    unit: Unit = Unit()
    """The unit that throughputs count in the report. In this file, throughputs count samples."""
    directions: Mapping[str, str] = {}
    """Name in ``Compared.findings`` -> which values are better."""
    seeds: tuple[int, ...]
    noise_throughput: Difference
    noise_memory: Difference
    """The baseline against itself, like the ``noise_`` of every further figure that was asked for."""
    variants: tuple[Compared, ...]
    """The baseline first, the others in the order of params.yaml."""
    learnt_nothing: str = Field("", exclude_if=operator.not_)
    """Why comparisons of accuracy may say nothing: the baseline's score is that of a constant answer."""
    champion: Champion | None = None
    """None if no variant pays."""
    sessions: tuple[SessionSummary, ...] = ()
    """The sessions that measured the baseline as ``bench`` did, the oldest first. Only ratios use all sessions. The
    noise is from the session of ``bench``, and the other figures are from ``bench``."""
    sessions_set_aside: int = 0
    """Number of benches that do not count, because their code, settings, data or environment differ."""
    shares: tuple[Share, ...]
    """Effects of the techniques of ablated variants, in the bench's order."""
    trends: tuple[Trend, ...] = Field((), exclude_if=operator.not_)
    """Of the variants that two or more sessions measured, whatever the code was."""
    advised: Mapping[str, float] = Field({}, exclude_if=operator.not_)
    """Setting -> the largest value that a rejection in any of the sessions advises. All texts advise this value."""
    bench: Bench
    """The whole bench as in its file, raw samples included."""
    made_of: Mapping[str, str] = {}
    """File -> SHA-256 of the results, histories, bench and sessions. Empty in a file older than this field."""
    settings: Compare | None = None
    """``compare`` in params.yaml when the comparison was made. None in a file older than this field."""

    def shown(self, figure: Figure) -> bool:
        """True unless the figure is optional and no variant has it."""
        asked = bool(figure.margin) and figure in self.noises
        return not figure.optional or asked or any(compared.of(figure) is not None for compared in self.variants)
