"""The records of ``bench.json``: each arm's windows, each variant's memory ledger, and the session's conditions."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from pipeline.params import Margins, VariantName
from pipeline.results.figures import THROUGHPUT
from pipeline.results.records import DatasetFacts, Document, Positive, Record, RunConditions, Share, Window

FEWEST_PAIRS = THROUGHPUT.fewest_pairs
"""Fewer rounds decide nothing about speed."""
NEGLIGIBLE = 0.001
"""A bias up to this size between equal arms disturbs no comparison: of speed or energy, or of memory that differs by a
page."""


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


class SameJob(Record):
    """Whether a variant computes what the baseline computes: its parameters after a few steps, beside the baseline's.
    For the baseline: its control beside it."""

    steps: int
    equal_bits: bool
    difference: float | None
    """The largest difference of a parameter's update, relative to the baseline's update, among the parameters whose
    gradients are more than rounding errors; None if a value is not finite
    or the parameters have other shapes."""
    parameter: str = Field("", exclude_if=operator.not_)
    """The parameter with the largest difference."""
    rounding: float
    """A difference up to this one can come from rounding, or from what the baseline itself does not repeat."""
    samples_per_step: int | None
    """None if unknown."""

    @property
    def in_words(self) -> str:
        """How the variant's parameters relate to the baseline's. The bench prints it, so it is not in the report."""
        if self.equal_bits:
            return "equal the baseline's to the bit"
        if self.difference is None:
            return "cannot be compared with the baseline's"
        most = f" (most in {self.parameter})" if self.parameter else ""
        size = f"by {float(f'{100 * self.difference:.2g}'):g}% of their update{most}"
        if self.difference <= self.rounding:
            return f"differ from the baseline's {size}, which rounding can explain"
        causes = "a lower precision, other data or random numbers, or another method"
        return f"differ from the baseline's {size}, more than rounding explains: {causes}"


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
    """True if the last rounds left the arm out, because ``benchmark.rounds`` found its ratios settled."""

    @property
    def column(self) -> tuple[str, str, str | None]:
        """The role, variant and technique, by which a bench has the arm only once."""
        return self.role, self.variant, self.technique

    def undisturbed(self, load: float = math.inf) -> Arm:
        """Return this arm with the speeds that were rejected for disturbances: all, or foreign load up to ``load``."""
        none: dict[str, Any] = {"disturbed_samples_per_second": None, "rejections": ()}
        samples = (
            sample.model_copy(update=none | {"samples_per_second": speed})
            if (speed := sample.disturbed_samples_per_second)
            and all(float(why.facts.get("share", math.inf)) <= load for why in sample.rejections)
            else sample
            for sample in self.samples
        )
        return self.model_copy(update={"samples": tuple(samples)})

    def advising(self, values: Mapping[str, float]) -> Arm:
        """Return this arm with ``Rejection.advising`` applied to all its rejections."""
        if not values or not any(sample.rejections for sample in self.samples):
            return self
        rejections = [tuple(rejection.advising(values) for rejection in sample.rejections) for sample in self.samples]
        pairs = zip(self.samples, rejections, strict=True)
        samples = tuple(sample.model_copy(update={"rejections": advising}) for sample, advising in pairs)
        return self.model_copy(update={"samples": samples})


def _utc(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo != UTC:
        raise ValueError("expected a time in UTC")
    return text


Utc = Annotated[str, AfterValidator(_utc)]
"""ISO 8601, to the second."""


class Session(Record):
    """When one bench ran, and the state of the machine. The times and ``boot_id`` decide which benches form a session
    (``sessions_of``); no figure is computed from the other values."""

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
    """None in a file of an older version, which did not record the end, nor ``spins``."""
    hosts: tuple[str, ...] = Field((), exclude_if=operator.not_)
    """The names of the hosts, the one that ran the bench first. Empty if it was alone."""
    spins: int | None = None
    """How often a waiting OpenMP thread looked for work before it slept (``processes.set_openmp_spins``)."""


ONE_SESSION = 3600.0
"""Benches of one boot belong to one session if the second bench begins within this time (in seconds) after the first
bench's end. Such benches are not independent, because they share the host's other guests and the time of day."""
CLOCKS_AGREE = 60.0
"""Within one boot, wall clock and uptime show the same duration up to this many seconds, unless the clock was set."""


class Bench(Document):
    """``bench.json``, and each file of ``sessions``."""

    schema_: Annotated[Literal[4], BeforeValidator(lambda schema: 4 if schema == 3 else schema)] = Field(
        default=4, alias="schema"
    )
    """Schema 3, in which rejections are texts, is read as the present one. Older files are refused, because a new
    measurement takes only minutes."""
    indent = 1
    environment: str
    """Hash of the environment on which all variants' numbers depend."""
    commit: str | None
    """The commit that was checked out during the measurement, plus "+" if files differed from the commit. None without
    git."""
    config: dict[str, dict[str, Any]]
    """``train``, ``bench`` and ``variants`` as params.yaml asked for them."""
    dataset: DatasetFacts | None
    """None if unknown."""
    baseline: VariantName
    """Name of the baseline, which the bench measures twice per round."""
    steps: int
    """Number of steps of each sample."""
    turns: int
    """Number of turns into which these steps were divided. If there are several, the arms took turns alternately."""
    seconds: Positive
    """Duration of the whole measurement."""
    window_fraction: Share | None = None
    """Share of ``seconds`` that accepted windows took (``windows_seconds``). The rest is the start of processes, steps
    before the windows, memory, ends, and rejected windows. None in a file of an older version."""
    budget: str = "bench.max_minutes"
    """What sets the minutes of the rounds: a key of params.yaml, or an option."""
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
    same_job: dict[VariantName, SameJob] = Field({}, exclude_if=operator.not_)
    """Variant -> its parameters beside the baseline's. Empty if no digests were taken."""
    keys: dict[VariantName, str]
    """Variant -> digest of the code, plan, settings and environment of its measurement (``stages.key``). Benches with
    equal keys measured the variant in the same way, but perhaps on other data."""

    @property
    def rounds(self) -> int:
        """Number of rounds. An arm that was settled early has samples of the first rounds only."""
        return max(len(arm.samples) for arm in self.arms)

    @property
    def windows_seconds(self) -> float:
        """Time of all windows whose speed is known, summed over the arms, of which only one runs at a time."""
        windows = ((arm.batch_size * window.measured_steps, window) for arm in self.arms for window in arm.samples)
        return float(sum(samples / speed for samples, window in windows if (speed := THROUGHPUT.of(window))))

    @property
    def lasted_seconds(self) -> float:
        """Time from the session's start to its end by the wall clock."""
        end = self.session.end_utc
        return self.seconds if end is None else _between(self.session.start_utc, end)

    def goes_on_in(self, later: Session) -> bool:
        """Return True if the bench with the session record ``later`` belongs to the same session as this bench.

        Both have the same hosts. In one boot, both the wall clock and the uptime must show that the session is over. An
        uptime that goes on shows that there was no boot in between, whatever the ids of the boots say.
        """
        by_wall = by_uptime = _between(self.session.start_utc, later.start_utc)
        one_boot = later.boot_id == self.session.boot_id
        if self.session.uptime_seconds is not None and later.uptime_seconds is not None:
            by_uptime = later.uptime_seconds - self.session.uptime_seconds
            one_boot &= later.boot_id is not None  # two unknown boots are not one boot
            one_boot |= abs(by_wall - by_uptime) < CLOCKS_AGREE
        same_hosts = later.hosts == self.session.hosts
        return same_hosts and one_boot and min(by_wall, by_uptime) - self.lasted_seconds < ONE_SESSION

    def problems(self) -> list[str]:
        problems = []
        if (windows := self.windows_seconds) > self.seconds:
            problems.append(f"the bench took {self.seconds:g} s, although its windows alone took {windows:g} s")
        if self.lasted_seconds < max(0.0, self.seconds - CLOCKS_AGREE):
            times = f"from {self.session.start_utc} to {self.session.end_utc}"
            problems.append(f"the bench ran {times}, although it took {self.seconds:g} s")
        for arm in self.arms:
            rounds: dict[str, int] = {}
            for number, sample in enumerate(arm.samples, 1):
                where = f"{arm.name}, round {number}"
                problems += [f"{where}: {problem}" for problem in sample.problems(arm.batch_size)]
                if sample.measured_steps != self.steps and not sample.rejections:
                    steps = f"{sample.measured_steps} of {self.steps} steps"
                    problems.append(f"{where}: only {steps} were measured, and no reason is given")
                first = rounds.setdefault(sample.model_dump_json(), number)
                if first != number and THROUGHPUT.of(sample):
                    same = f"rounds {first} and {number} are equal in every figure"
                    problems.append(f"{arm.name}: {same}, so one is a copy")
        for first_arm, second_arm in combinations(self.arms, 2):
            pairs = zip(first_arm.samples, second_arm.samples, strict=False)
            speeds = [tuple(map(THROUGHPUT.of, pair)) for pair in pairs]
            known = [pair for pair in speeds if all(pair)]
            if known and all(first_speed == second_speed for first_speed, second_speed in known):
                problems.append(f"{first_arm.name} and {second_arm.name} are equal in every sample, so one is a copy")
        return problems

    def arm(self, role: str, variant: str, technique: str | None = None) -> Arm | None:
        """Return the arm of this role, variant and technique; None if there is none."""
        return next((arm for arm in self.arms if arm.column == (role, variant, technique)), None)


def _between(start_utc: str, end_utc: str) -> float:
    """Return the seconds between two times."""
    return (datetime.fromisoformat(end_utc) - datetime.fromisoformat(start_utc)).total_seconds()


def sessions_of(benches: Iterable[Bench]) -> list[list[Bench]]:
    """Group benches into sessions. Sessions, and the benches of a session, are sorted from the oldest to the newest.

    A bench belongs to the session of the previous bench if this bench ``goes_on_in`` it.
    """
    sessions: list[list[Bench]] = []
    for bench in sorted(benches, key=lambda bench: bench.session.start_utc):
        if not sessions or not sessions[-1][-1].goes_on_in(bench.session):
            sessions.append([])
        sessions[-1].append(bench)
    return sessions
