"""Why numbers of a sample or a run are not believed, as a code and facts; ``KINDS`` turns them into sentences."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.errors import count


class Kind(NamedTuple):
    """How rejections of one code are worded, and what they void."""

    sentence: str
    """The sentence, with the facts in braces. "{retries:# time}" counts: "1 time", "2 times". "{share:%}" is a
    percentage with three digits."""
    advice: str = ""
    """The text that replaces "{advice}" if the rejection advises a value."""
    voids_memory: bool = False
    """True if the peak memory cannot be trusted either. Every rejection voids speeds and step times."""
    of_machine: bool = False
    """True if the machine was disturbed, and nothing is wrong with the sample's own steps."""
    so: str = ""
    """What follows from what happened, as the end of the text."""


_NOT_COMPARED = ", so the measured speed cannot be compared"


KINDS = {
    "recompiled": Kind(
        "torch.compile compiled for {seconds:.2f} s after the warm-up; raise train.warmup_steps, or set "
        "TORCH_LOGS=recompiles to find what changes from step to step"
    ),
    "foreign_load": Kind(
        "other processes took {taken_seconds:.2f} of the {due_seconds:.2f} s of CPU time that the job would have had "
        "({share:%}; at most {limit:%} is allowed); stop other work on this machine and measure again{advice}",
        ", or accept this load with {setting}: {value}",
        of_machine=True,
    ),
    "cpu_throttled": Kind(
        "the CPU got too hot and was throttled for {throttled_seconds:.2f} of {window_seconds:.2f} s; cool it better "
        "or limit its clock, and measure again",
        of_machine=True,
    ),
    "gpu_throttled": Kind(
        "{gpu} throttled ({slowdowns}) in {slow} of {queries} queries (at most {limit:%} are allowed); improve its "
        "cooling and power supply, and measure again",
        of_machine=True,
    ),
    "gpu_shared": Kind(
        "{others:# other process} used {gpu}; end all other processes (nvidia-smi lists them) and measure again"
    ),
    "clocks_disagree": Kind(
        "step times add up to {steps_seconds:.3f} s, but the wall clock around them shows {wall_seconds:.3f} s (more "
        "than {limit:%} apart)"
    ),
    "input_wait": Kind(
        "the steps waited for input {share:%} of the time (at most {limit:%} is allowed): this measures the input, "
        "not the technique; {advice}shorten train.augment, or raise bench.max_input_wait",
        "set {setting} to '{value}', ",
    ),
    "allocator_retried": Kind(
        "the allocator ran out of memory and flushed its cache {retries:# time}; lower train.batch_size or apply a "
        "technique that saves memory",
        voids_memory=True,
    ),
    "worked_between_turns": Kind(
        "the arm used {aside_seconds:.2f} s of CPU time between its turns; the limit on this time is {of_measured:%} "
        "of the arm's measured time ({measured_seconds:.2f} s) plus {of_waited:%} of the time between turns "
        "({waited_seconds:.2f} s). This work is missing in the arm's own figures and disturbs the other arms; a "
        "technique's threads and processes must wait while no step runs"
    ),
    "steps_differ": Kind("the ranks measured different numbers of steps: [{steps}]"),
    "no_step": Kind(
        "no step was measured: the run ended within the {warmup} steps of its warm-up; raise train.epochs or lower "
        "train.warmup_steps"
    ),
    "few_steps": Kind("{measured} of {requested} steps were measured: the run ended early; raise train.epochs"),
    "samples_repeated": Kind("two steps took the same {credited:,} samples", voids_memory=True, so=_NOT_COMPARED),
    "samples_left_out": Kind(
        "of a step's {credited:,} samples, {model:,} entered the model", voids_memory=True, so=_NOT_COMPARED
    ),
    "samples_left_out_of_loss": Kind(
        "of a step's {credited:,} samples, {model:,} entered the model and {loss:,} entered the loss",
        voids_memory=True,
        so=_NOT_COMPARED,
    ),
    "no_energy_counter": Kind("{place} lists no CPU package, as is usual in a virtual machine"),
    "energy_unreadable": Kind("the device's energy counter cannot be read: {error} (docs/measuring.md, Energy)"),
    "energy_stands": Kind("the device's energy counter did not advance"),
    "energy_windows_short": Kind(
        "the device's energy counter needs windows of at least {shortest_seconds:g} s, but the windows took "
        "{mean_seconds:.3f} s: {remedy}"
    ),
    "told": Kind("{text}"),
}
"""Code -> how its rejections are worded. A text in a file of an older version has the code ``told``."""


Number = Annotated[int, Field(ge=0, lt=2**63)] | Annotated[float, Field(ge=0, lt=1e15)]
Fact = Number | Annotated[str, Field(max_length=2000)]


class Advice(BaseModel):
    """A setting of params.yaml, and the value that would avoid the rejection."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    setting: str = Field(max_length=100)
    value: float | Annotated[str, Field(max_length=100)]


class Rejection(BaseModel):
    """Why numbers cannot be believed. A text of an older version becomes a rejection with the code ``told``.

    Raises ValidationError for an unknown code, or for facts that do not fit its sentence.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    code: str
    """A key of ``KINDS``."""
    facts: dict[str, Fact] = Field({}, max_length=16, exclude_if=operator.not_)
    """Fact -> number or text. With several ranks, the fact ``rank`` says which rank was affected."""
    advice: Advice | None = Field(None, exclude_if=operator.not_)

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        return {"code": "told", "facts": {"text": value}} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _can_be_worded(self) -> Rejection:
        try:
            self.text  # noqa: B018
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"the code {self.code!r:.100} with the facts {', '.join(self.facts):.200} is no rejection that this "
                f"version knows ({error!r:.100})"
            ) from None
        return self

    @property
    def kind(self) -> tuple[str, str]:
        """Rejections of one kind have the same cause, perhaps with other facts."""
        return self.code, str(self.facts["text"]) if self.code == "told" else ""

    @property
    def voids_memory(self) -> bool:
        return KINDS[self.code].voids_memory

    @property
    def of_machine(self) -> bool:
        return KINDS[self.code].of_machine

    @property
    def text(self) -> str:
        """What happened and, if possible, to what extent and what to do. It has no full stop at its end."""
        return self.happened + KINDS[self.code].so

    @property
    def happened(self) -> str:
        """``text`` without what follows from it (``Kind.so``)."""
        kind, advice = KINDS[self.code], ""
        if self.advice:
            advice = kind.advice.format(setting=self.advice.setting, value=self.advice.value)
        host = f" on {self.facts['host']}" if "host" in self.facts else ""
        rank = f"rank {self.facts['rank']}{host}: " if "rank" in self.facts else ""
        return rank + _COUNTING.vformat(kind.sentence, (), self.facts | {"advice": advice}).rstrip(".")

    def of_rank(self, rank: int, host: str = "") -> Rejection:
        """Return this rejection as that of a rank. ``host``: the name of its host, if there are several."""
        place = {"rank": rank, "host": host} if host else {"rank": rank}
        return self.model_copy(update={"facts": {**self.facts, **place}})

    def advising(self, values: Mapping[str, float | str]) -> Rejection:
        """Return this rejection with the value that ``values`` has for its setting, if any."""
        if self.advice is None or self.advice.setting not in values:
            return self
        value = values[self.advice.setting]
        return self.model_copy(update={"advice": self.advice.model_copy(update={"value": value})})


class _Counting(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "%":  # a limit of 0.5% must not look like one of 0% or 1%
            return f"{100 * value:.3g}%"
        return count(value, format_spec[2:]) if format_spec.startswith("# ") else format(value, format_spec)


_COUNTING = _Counting()


def rejection(code: str, advice: tuple[str, float | str] | None = None, /, **facts: float | str) -> Rejection:
    """Return a rejection. ``advice``: a setting and its advised value."""
    advised = Advice(setting=advice[0], value=advice[1]) if advice else None
    return Rejection(code=code, facts=facts, advice=advised)


def advised(rejections: Iterable[Rejection]) -> dict[str, float]:
    """Return setting -> the largest number that a rejection advises for it."""
    values: dict[str, float] = {}
    for rejection in rejections:
        if rejection.advice and isinstance(rejection.advice.value, float):
            values[rejection.advice.setting] = max(rejection.advice.value, values.get(rejection.advice.setting, 0.0))
    return values


def by_kind(samples: Iterable[tuple[int, Sequence[Rejection]]]) -> list[tuple[Rejection, list[int]]]:
    """Return the first rejection of each kind, with the numbers of the samples that were rejected for this kind.

    ``samples``: pairs of a sample's number and its rejections.
    """
    kinds: dict[tuple[str, str], tuple[Rejection, dict[int, None]]] = {}
    for number, rejections in samples:
        for rejection in rejections:
            kinds.setdefault(rejection.kind, (rejection, {}))[1][number] = None
    return [(first, list(numbers)) for first, numbers in kinds.values()]


def most_common(rejections: Sequence[Rejection]) -> Rejection | None:
    """Return the first rejection of the most common kind; None if there are no rejections."""
    counts = Counter(rejection.kind for rejection in rejections)
    return max(rejections, key=lambda rejection: counts[rejection.kind], default=None)


def lines(rounds: Sequence[Sequence[Rejection]], values: Mapping[str, float] | None = None) -> list[str]:
    """Return one line per kind, with the number of rounds that were rejected for it. ``rounds``: each round's
    rejections; ``values``: as in ``Rejection.advising``."""
    return [
        f"rejected in {len(numbers)} of {count(len(rounds), 'round')}: in round {numbers[0]}, "
        f"{first.advising(values or {}).text}"
        for first, numbers in by_kind(enumerate(rounds, 1))
    ]
