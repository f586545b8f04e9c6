"""The records of ``bench.json``: each arm's windows, each variant's memory ledger, and the session's conditions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from pipeline.errors import count
from pipeline.params import VariantName
from pipeline.results.records import Dataset, Document, Record, RunConditions, Window


class Ledger(Record):
    """How the memory is used at its peak. The parts add up to ``peak_bytes``."""

    parameters_bytes: int
    """Parameters and buffers."""
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    """Tensors saved for the backward pass, temporary tensors, and memory that kernels allocate internally."""
    communication_bytes: int
    """Buckets of the gradients' all-reduce beyond the gradients themselves; with fsdp, gathered parameters and
    gradients being reduced."""
    data_bytes: int
    """The resident data set (not the memory-mapped file on a CPU), the epoch's random draws and the input batch."""
    rest_bytes: int
    """Everything else: libraries' workspaces, the allocator's rounding; on a CPU also its free blocks."""
    peak_bytes: int
    """The largest rank's peak, as defined by ``Window.peak_memory_rank_bytes``."""
    tensors_bytes: int
    """The tensors' part of the peak, as the allocator counts it. CUDA: the whole peak."""


class Ledgers(Record):
    """One variant's ledger, measured and predicted."""

    measured: Ledger
    predicted: Ledger | None
    """Predicted with fake tensors, without the device. It covers tensors only, so compare its peak with
    ``measured.tensors_bytes``."""
    why_not_predicted: str | None


class Flops(Record):
    """Floating-point operations of training, counted for matrix products, convolutions and attention."""

    model_per_sample: int
    """One forward and one backward pass of the model for one sample. A multiplication and an addition count as two."""
    executed_per_sample: int
    """Operations that the variant executes, recomputation included."""
    peak_per_second: float | None
    """Peak dense rate of all the variant's devices at its precision; None for an unknown device."""


class Arm(RunConditions):
    """One configuration that the bench measures, in a fresh process each round."""

    name: str
    role: Literal["variant", "aa_control", "with", "without"]
    """In this order: the variant itself; the baseline again (A/A); the baseline plus one technique; ``variant`` minus
    one technique."""
    variant: VariantName
    technique: str | None
    """The technique that is added or removed."""
    samples: tuple[Window, ...]
    """One per round, perhaps of the first rounds only. Arms' samples with the same index were measured side by side."""
    settled: bool = False
    """Whether the arm's ratios were settled, so that it was not measured in further rounds."""


def _utc(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo != UTC:
        raise ValueError("expected a time in UTC")
    return text


class Session(Record):
    """One session of the bench: its time and the state of the machine. No figure is computed from it."""

    start_utc: Annotated[str, AfterValidator(_utc)]
    """ISO 8601, to the second."""
    boot_id: str | None
    """Sessions of one boot share what is randomised at boot. None, here and below: the system does not report it."""
    uptime_seconds: float | None
    """The machine's uptime when the session started."""
    load_average: float
    """Over the minute before the session: processes that ran or waited for a processor."""
    steal_fraction: float | None
    """Share of all processors' time during the session that a hypervisor gave to other guests."""
    end_utc: str | None = None
    """ISO 8601, to the second. None: of an older version, which did not record it."""


ONE_SESSION = timedelta(hours=1)
"""A bench that begins within this time after another one has ended shares boot, neighbours and time of day with it."""


class Bench(Document):
    """``bench.json``, and each file of ``sessions``."""

    schema_: Literal[3] = Field(default=3, alias="schema")
    """1: with the role "again" instead of "aa_control". Version 1 is not read: measuring again takes minutes."""
    indent = 1
    environment: str
    """Hash of the environment on which all variants' numbers depend."""
    commit: str | None
    """The commit checked out during the measurement, with "+" if files differed from it. None: no git here."""
    config: dict[str, dict[str, Any]]
    """``train`` and ``bench`` as params.yaml asked for them."""
    dataset: Dataset
    baseline: VariantName
    """The variant that is measured twice a round."""
    steps: int
    """Steps of each sample."""
    turns: int
    """Turns in which these steps were taken, alternating with the other arms' turns. 1: each arm ran in one go."""
    seconds: float
    """Duration of the whole measurement."""
    interrupted: bool
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)]
    ledgers: dict[VariantName, Ledgers]
    """By variant."""
    flops: dict[VariantName, Flops]
    """By variant."""
    not_ablated: dict[VariantName, dict[str, str]]
    """Variant -> technique -> why its share was not measured."""
    session: Session
    keys: dict[VariantName, str]
    """By variant: digest of the code, plan, settings and environment it was measured with (``stages.key``). Sessions
    with equal keys measured the same thing."""

    @property
    def rounds(self) -> int:
        """Rounds of the baseline; a variant that was settled early has samples of the first rounds only."""
        return max(len(arm.samples) for arm in self.arms)

    def goes_on_in(self, later: Session) -> bool:
        """True if a bench that began as ``later`` says is of the same session as this one."""
        began, ended = (
            datetime.fromisoformat(each) for each in (later.start_utc, self.session.end_utc or self.session.start_utc)
        )
        if self.session.end_utc is None:
            ended += timedelta(seconds=self.seconds)
        return began - ended < ONE_SESSION and later.boot_id == self.session.boot_id

    def problems(self) -> list[str]:
        found = [
            f"{arm.name}, round {number}: {problem}"
            for arm in self.arms
            for number, sample in enumerate(arm.samples, 1)
            for problem in (
                *sample.problems(arm.batch_size),
                *([f"{sample.measured_steps} of {self.steps} steps measured, without a reason"]
                  if sample.measured_steps != self.steps and not sample.rejections else []),
            )
        ]  # fmt: skip
        for arm in self.arms:
            rounds: dict[str, int] = {}
            for number, sample in enumerate(arm.samples, 1):
                first = rounds.setdefault(sample.model_dump_json(), number)
                if first != number and sample.samples_per_second:
                    found.append(f"{arm.name}, rounds {first} and {number}: equal in every figure, so one is a copy")
        for one, other in combinations(self.arms, 2):
            speeds = [
                {each.samples_per_second for each in pair}
                for pair in zip(one.samples, other.samples, strict=False)
                if all(each.samples_per_second for each in pair)
            ]
            if speeds and all(len(each) == 1 for each in speeds):
                found.append(f"{one.name} and {other.name} are equal sample for sample: one is a copy")
        return found

    def arm(self, role: str, variant: str, technique: str | None = None) -> Arm | None:
        """Return the arm of this role, variant and technique; None if there is none."""
        wanted = (role, variant, technique)
        return next((arm for arm in self.arms if (arm.role, arm.variant, arm.technique) == wanted), None)


def sessions_of(benches: Iterable[Bench]) -> list[list[Bench]]:
    """Group benches into sessions, both the oldest first. A bench belongs to the session of the bench before it if it
    began less than ``ONE_SESSION`` after that one's end, and no boot lies between."""
    found: list[list[Bench]] = []
    for each in sorted(benches, key=lambda each: each.session.start_utc):
        if not found or not found[-1][-1].goes_on_in(each.session):
            found.append([])
        found[-1].append(each)
    return found


def kind_of(reason: str) -> str:
    """Return the kind of a rejection's reason: reasons that differ only in their numbers are of one kind."""
    return re.sub(r"\d+", "", reason)


def rejected(windows: Sequence[tuple[int, Window]]) -> dict[str, list[int]]:
    """Return the first reason of each kind -> the numbers of the windows that were rejected for this kind."""
    kinds: dict[str, tuple[str, dict[int, None]]] = {}
    for number, window in windows:
        for reason in window.rejections:
            kinds.setdefault(kind_of(reason), (reason, {}))[1][number] = None
    return {reason: list(numbers) for reason, numbers in kinds.values()}


def rejections(arm: Arm) -> list[str]:
    """Return in how many rounds of the bench an arm was rejected, and why: one line per kind of reason."""
    return [
        f"rejected in {len(rounds)} of {count(len(arm.samples), 'round')}: in round {rounds[0]}, {reason.rstrip('.')}"
        for reason, rounds in rejected(list(enumerate(arm.samples, 1))).items()
    ]
