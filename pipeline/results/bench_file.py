"""The records of ``bench.json``: each arm's windows, each variant's memory ledger, and the session's conditions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from pipeline.errors import count
from pipeline.params import Margins, VariantName
from pipeline.results.records import Dataset, Document, Positive, Record, RunConditions, Window


class Ledger(Record):
    """What the memory contains at its peak. All parts up to ``rest_bytes`` add up to ``peak_bytes``."""

    parameters_bytes: int
    """Parameters and buffers."""
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    """Tensors saved for the backward pass, temporary tensors, and memory that kernels allocate internally."""
    communication_bytes: int
    """Buckets of the gradients' all-reduce, without the gradients themselves. With fsdp: gathered parameters, and
    gradients during their reduction."""
    data_bytes: int
    """The resident data set (not the memory-mapped file on a CPU), the epoch's random draws and the input batch."""
    rest_bytes: int
    """Everything else: libraries' workspaces and the allocator's rounding; on a CPU also its free blocks."""
    peak_bytes: int
    """The largest peak of a rank, as defined by ``Window.peak_memory_rank_bytes``."""
    tensors_bytes: int
    """The tensors' part of the peak, as the allocator counts it. CUDA: the whole peak."""


class Ledgers(Record):
    """One variant's ledger, measured and predicted."""

    measured: Ledger
    predicted: Ledger | None
    """The ledger that fake tensors predict, without the device. It covers only tensors, so its peak is comparable with
    ``measured.tensors_bytes``."""
    why_not_predicted: str | None


class Flops(Record):
    """Floating-point operations of training, counted for matrix products, convolutions and attention."""

    model_per_sample: int
    """One forward and one backward pass of the model for one sample. A multiplication and an addition count as two."""
    executed_per_sample: int
    """Operations that the variant executes, recomputation included."""
    peak_per_second: float | None
    """Peak rate of all the variant's devices for dense matrices at its precision; None for an unknown device."""


class Arm(RunConditions):
    """One configuration that the bench measures, in fresh processes each round."""

    name: str
    role: Literal["variant", "aa_control", "with", "without"]
    """The arm runs the variant itself ("variant"), the baseline again for an A/A comparison ("aa_control"), the
    baseline plus one technique ("with"), or ``variant`` minus one technique ("without")."""
    variant: VariantName
    technique: str | None
    """The technique that is added or removed."""
    samples: tuple[Window, ...]
    """One sample per round. A settled arm has samples of the first rounds only. Samples of different arms with the same
    index were measured side by side."""
    settled: bool = False
    """True if the last rounds left the arm out, because ``benchmark.settling`` found its ratios settled."""


def _utc(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo != UTC:
        raise ValueError("expected a time in UTC")
    return text


Utc = Annotated[str, AfterValidator(_utc)]
"""ISO 8601, to the second."""


class Session(Record):
    """One session of the bench: its time and the state of the machine. The times and ``boot_id`` decide which benches
    belong together; no figure is computed from the other values."""

    start_utc: Utc
    boot_id: str | None
    """Id of the boot. Sessions of one boot share everything that is randomised at boot. Here, in ``uptime_seconds`` and
    in ``steal_fraction``, None means that the system does not report the value."""
    uptime_seconds: float | None
    """The machine's uptime when the session started."""
    load_average: float
    """The system's load average over the minute before the session."""
    steal_fraction: float | None
    """Share of all processors' time during the session that a hypervisor gave to other guests."""
    end_utc: Utc | None = None
    """None in a file of an older version, which did not record the end."""


ONE_SESSION = 3600.0
"""Benches of one boot belong to one session if the second bench begins within this time (in seconds) after the first
bench's end. Such benches are not independent, because they share the host's other guests and the time of day."""
CLOCKS_AGREE = 60.0
"""Within one boot, wall clock and uptime show the same duration up to this many seconds, unless the clock was set."""


class Bench(Document):
    """``bench.json``, and each file of ``sessions``."""

    schema_: Literal[3] = Field(default=3, alias="schema")
    """Files of older versions are refused, because a new measurement takes only minutes."""
    indent = 1
    environment: str
    """Hash of the environment on which all variants' numbers depend."""
    commit: str | None
    """The commit that was checked out during the measurement, plus "+" if files differed from the commit. None without
    git."""
    config: dict[str, dict[str, Any]]
    """``train``, ``bench`` and ``variants`` as params.yaml asked for them."""
    dataset: Dataset
    baseline: VariantName
    """Name of the baseline, which the bench measures twice per round."""
    steps: int
    """Number of steps of each sample."""
    turns: int
    """Number of turns into which these steps were divided. If there are several, the arms took turns alternately."""
    seconds: Positive
    """Duration of the whole measurement."""
    interrupted: bool
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)]
    ledgers: dict[VariantName, Ledgers]
    """Variant -> its memory ledgers."""
    flops: dict[VariantName, Flops]
    """Variant -> its floating-point operations."""
    not_ablated: dict[VariantName, dict[str, str]]
    """Variant -> technique -> reason why the technique's effect was not measured separately."""
    session: Session
    margins: Margins | None = None
    """The margins at the time of the measurement. None in a file of an older version, which did not record them."""
    keys: dict[VariantName, str]
    """Variant -> digest of the code, plan, settings and environment of its measurement (``stages.key``). Benches with
    equal keys measured the variant in the same way, but perhaps on other data."""

    @property
    def rounds(self) -> int:
        """Number of rounds. An arm that was settled early has samples of the first rounds only."""
        return max(len(arm.samples) for arm in self.arms)

    @property
    def lasted_seconds(self) -> float:
        """Time from the session's start to its end by the wall clock."""
        end = self.session.end_utc
        return self.seconds if end is None else _between(self.session.start_utc, end)

    def goes_on_in(self, later: Session) -> bool:
        """Return True if the bench with the session record ``later`` belongs to the same session as this bench.

        In one boot, both the wall clock and the uptime must show that the session is over. An uptime that goes on shows
        that there was no boot in between, whatever the ids of the boots say.
        """
        by_wall = by_uptime = _between(self.session.start_utc, later.start_utc)
        one_boot = later.boot_id == self.session.boot_id
        if self.session.uptime_seconds is not None and later.uptime_seconds is not None:
            by_uptime = later.uptime_seconds - self.session.uptime_seconds
            one_boot &= later.boot_id is not None  # two unknown boots are not one boot
            one_boot |= abs(by_wall - by_uptime) < CLOCKS_AGREE
        return one_boot and min(by_wall, by_uptime) - self.lasted_seconds < ONE_SESSION

    def problems(self) -> list[str]:
        found = []
        windows = [
            window.measured_steps * arm.batch_size / window.samples_per_second
            for arm in self.arms
            for window in arm.samples
            if window.samples_per_second
        ]
        if sum(windows) > self.seconds:
            found.append(f"the bench took {self.seconds:g} s, although its windows alone took {sum(windows):g} s")
        if self.lasted_seconds < self.seconds - CLOCKS_AGREE:
            times = f"from {self.session.start_utc} to {self.session.end_utc}"
            found.append(f"the bench ran {times}, although it took {self.seconds:g} s")
        for arm in self.arms:
            rounds: dict[str, int] = {}
            for number, sample in enumerate(arm.samples, 1):
                where = f"{arm.name}, round {number}"
                found += [f"{where}: {problem}" for problem in sample.problems(arm.batch_size)]
                if sample.measured_steps != self.steps and not sample.rejections:
                    steps = f"{sample.measured_steps} of {self.steps} steps"
                    found.append(f"{where}: only {steps} were measured, and no reason is given")
                first = rounds.setdefault(sample.model_dump_json(), number)
                if first != number and sample.samples_per_second:
                    found.append(f"{arm.name}: rounds {first} and {number} are equal in every figure, so one is a copy")
        for one, other in combinations(self.arms, 2):
            pairs = zip(one.samples, other.samples, strict=False)
            speeds = [(mine.samples_per_second, theirs.samples_per_second) for mine, theirs in pairs]
            known = [pair for pair in speeds if all(pair)]
            if known and all(first == second for first, second in known):
                found.append(f"{one.name} and {other.name} are equal in every sample, so one is a copy")
        return found

    def arm(self, role: str, variant: str, technique: str | None = None) -> Arm | None:
        """Return the arm of this role, variant and technique; None if there is none."""
        wanted = (role, variant, technique)
        return next((arm for arm in self.arms if (arm.role, arm.variant, arm.technique) == wanted), None)


def _between(start_utc: str, end_utc: str) -> float:
    """Return the seconds between two times."""
    return (datetime.fromisoformat(end_utc) - datetime.fromisoformat(start_utc)).total_seconds()


def sessions_of(benches: Iterable[Bench]) -> list[list[Bench]]:
    """Group benches into sessions. Sessions, and the benches of a session, are sorted from the oldest to the newest.

    A bench belongs to the session of the previous bench if this bench ``goes_on_in`` it.
    """
    found: list[list[Bench]] = []
    for each in sorted(benches, key=lambda each: each.session.start_utc):
        if not found or not found[-1][-1].goes_on_in(each.session):
            found.append([])
        found[-1].append(each)
    return found


def kind_of(reason: str) -> str:
    """Return the kind of a rejection's reason. Reasons that differ only in their numbers have the same kind."""
    return re.sub(r"\d+", "", reason)


def rejected(windows: Sequence[tuple[int, Window]]) -> dict[str, list[int]]:
    """Return a dictionary: first reason of each kind -> numbers of the windows that were rejected for this kind."""
    kinds: dict[str, tuple[str, dict[int, None]]] = {}
    for number, window in windows:
        for reason in window.rejections:
            kinds.setdefault(kind_of(reason), (reason, {}))[1][number] = None
    return {reason: list(numbers) for reason, numbers in kinds.values()}


def rejections(arm: Arm) -> list[str]:
    """Return one line per kind of reason, with the number of the arm's rounds that were rejected for this kind."""
    return [
        f"rejected in {len(rounds)} of {count(len(arm.samples), 'round')}: in round {rounds[0]}, {reason.rstrip('.')}"
        for reason, rounds in rejected(list(enumerate(arm.samples, 1))).items()
    ]
