"""What was measured as curves: speed-ups with intervals, the parts of a step, projections and their tests, prices."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import groupby, takewhile
from operator import attrgetter

from pipeline.comparison import sessions, stats
from pipeline.comparison.stats import Difference
from pipeline.comparison.summaries import over_rounds
from pipeline.results import Arm, Exchange, Record
from pipeline.results.figures import ENERGY, INPUT_WAIT, MEMORY, THROUGHPUT, Figure
from pipeline.results.records import Operation
from pipeline.scaling import probe, projection
from pipeline.scaling.points import Measured, Mode, Place
from pipeline.scaling.projection import Collective, Parts

DOUBT = 0.25
"""Half-width of a projection's interval, on the logarithmic scale, for twice the devices that were measured; more if
the largest number that was measured is projected worse (docs/how-we-know/scaling.md)."""
UNEVEN = 1.1
"""A process is slow if its steps take so many times the mean, in most rounds."""


class Point(Record):
    """A number of devices on a curve."""

    place: Place
    samples_per_second: float | None
    """The median over the rounds."""
    speedup: Difference
    """The throughput in ratio to one device's."""
    more: Difference | None
    """The throughput in ratio to the point before, with the margin up to which its devices do not pay; None for one
    device."""
    peak_memory_bytes: float | None
    """The median over the rounds; None if it is projected."""
    memory: Difference | None
    """Its ratio to one device's."""
    joules_per_sample: float | None
    parts: dict[str, float] | None
    """The parts of a step (``projection.Parts``), in seconds; None if they are not known. Hidden communication is left
    out if the place is not ``modelled``."""
    slow: str | None
    """The process that is slower than the others, if there is one."""
    left_out: Difference | None
    """Of a point that is measured: what it would be projected to be without its own measurement."""
    earlier: tuple[Difference, ...]
    """What earlier curves of the job projected for this number of devices."""
    epoch_seconds: float | None
    price: float | None
    """Of the training; None without a price of a device-hour."""
    money: float | None
    """The price in ratio to one device's."""

    @property
    def efficiency(self) -> Difference:
        """The speed-up in ratio to the processes."""
        ends = {end: getattr(self.speedup, end) for end in ("estimate", "low", "high")}
        return Difference(**{end: value and value / self.place.processes for end, value in ends.items()})

    @property
    def step_seconds(self) -> float | None:
        return self.samples_per_second and self.place.batch_size / self.samples_per_second

    @property
    def pays(self) -> bool:
        return self.more is not None and self.more.decision == "better"


class Curve(Record):
    """A variant on more and more devices, one device first."""

    variant: str
    mode: Mode
    points: tuple[Point, ...]

    @property
    def best(self) -> int:
        """The index of the last measured point up to which all further devices pay."""
        return len([*takewhile(lambda point: point.pays and point.place.measured, self.points[1:])])

    @property
    def ranked(self) -> dict[str, Point]:
        """The cheapest and the fastest point that were measured."""
        priced = [point for point in self.points if point.place.measured and point.samples_per_second and point.money]
        cheapest = sorted(priced, key=lambda point: point.money or math.inf)[:1]
        fastest = sorted(priced, key=lambda point: -(point.samples_per_second or 0.0))[:1]
        return dict(zip(("cheapest", "fastest"), cheapest + fastest, strict=False))


Projections = Mapping[tuple[str, Mode, int], Sequence[Difference]]
"""Job, mode and number of processes -> the projected speed-ups."""


class Analysis:
    """The arms of a measurement, and further arms for what is projected: their samples are computed, one a round."""

    def __init__(self, measured: Measured, link: str | None, max_spread: float) -> None:
        self._measured, self._link = measured, link
        kind = attrgetter("operation", "processes")
        timings = sorted(measured.probe.timings, key=kind) if measured.probe else []
        self._timings = {of_kind: [*of] for of_kind, of in groupby(timings, kind)}
        self._collective = cache(self._collective_of)  # fits take long
        self._blocking = bool(measured.probe and measured.probe.backend == "gloo")
        self._arms = {arm.variant: arm for arm in measured.bench.arms if arm.role == "variant"}
        with_twin = [place for place in measured.places if place.alone and place.modelled]
        self._beside = {place: self._beside_in(place) for place in with_twin if place.measured}
        computed = [self._computed(place) for place in with_twin]
        keys = measured.bench.keys | {arm.variant: arm.name for arm in computed}
        bench = measured.bench.model_copy(update={"arms": (*measured.bench.arms, *computed), "keys": keys})
        self._arms |= {arm.variant: arm for arm in computed}
        self._table = sessions.table_of([bench], max_spread, {})
        self._confidence = stats.confidence_of(len(measured.places))

    def curves(
        self, worth: float, price: float | None, epochs: float, projected_before: Projections
    ) -> tuple[Curve, ...]:
        """Return all curves. ``worth``: how much more throughput twice the devices must bring, such as 0.1. ``price``:
        of a device-hour. ``epochs``: of the training that is paid for."""
        single = {place.variant: place for place in self._measured.places if place.processes == 1}
        curves: dict[tuple[str, Mode], list[Place]] = {}
        for place in self._measured.places:
            if place.processes > 1:
                curves.setdefault((place.variant, place.mode), [single[place.variant]]).append(place)
        return tuple(
            Curve(
                variant=variant,
                mode=mode,
                points=tuple(
                    self._point(place, places[0], before, worth, price and price * epochs / 3600, projected_before)
                    for before, place in zip([None, *places], places, strict=False)
                ),
            )
            for (variant, mode), places in curves.items()
        )

    def _point(
        self,
        place: Place,
        single: Place,
        before: Place | None,
        worth: float,
        price: float | None,
        projected_before: Projections,
    ) -> Point:
        """``price``: of a device for as many seconds as an epoch takes, times the epochs."""
        samples = self._arms[place.name].samples
        medians = {figure: over_rounds(figure, samples) for figure in (THROUGHPUT, MEMORY, ENERGY)}
        speed = medians[THROUGHPUT]
        speedup, pays = self._ratio(place, single), 0.0
        if before:
            pays = (1 + worth) ** math.log2(place.processes / before.processes) - 1
        epoch_seconds = self._measured.epoch_samples / speed if speed else None
        job = self._measured.jobs[place.variant], place.mode, place.processes
        return Point(
            place=place,
            samples_per_second=speed,
            speedup=speedup,
            more=self._ratio(place, before, pays) if before else None,
            peak_memory_bytes=medians[MEMORY] if place.measured else None,
            memory=self._ratio(place, single, figure=MEMORY) if place.measured else None,
            joules_per_sample=medians[ENERGY] if place.measured else None,
            parts=self._parts(place, speed),
            slow=self._slow(place),
            left_out=self._ratio(place, single, computed=True) if place in self._beside else None,
            earlier=tuple(projected_before.get(job, ())) if place.measured else (),
            epoch_seconds=epoch_seconds,
            price=price * place.devices * epoch_seconds if price and epoch_seconds else None,
            money=place.devices / single.devices / speedup.estimate if speedup.estimate else None,
        )

    def _ratio(
        self, above: Place, below: Place, margin: float = 0.0, *, computed: bool = False, figure: Figure = THROUGHPUT
    ) -> Difference:
        """Return the ratio of two places' figures; ``computed``: although ``above`` was measured."""
        name = _computed_name(above) if computed else above.name
        ratios = [*self._table.ratios(name, below.name, figure, margin, self._confidence).values()]
        ratio = ratios[0] if ratios else Difference()
        if above.measured and not computed:
            return ratio
        doublings = math.log2(above.processes / max(below.processes, self._measured.devices))
        ratio = stats.widened(ratio, self._doubt(above) * math.sqrt(max(1.0, doublings)))
        return ratio if ratio.why_untrusted else ratio.model_copy(update={"decision": stats.decide(ratio, margin)})

    def _doubt(self, place: Place) -> float:
        """Return the doubt of a projection: the least one, or how far off the largest number is that was measured."""
        largest = self._largest(place, self._measured.devices)
        if not largest or place == largest:
            return DOUBT
        names = (_computed_name(largest), largest.name)
        computed, measured = (over_rounds(THROUGHPUT, self._arms[name].samples) for name in names)
        return max(DOUBT, abs(math.log(computed / measured))) if computed and measured else DOUBT

    def _largest(self, place: Place, most: int) -> Place | None:
        """Return the place of the curve of ``place`` with the most processes, but no more than ``most``, of those that
        were measured with and without the exchange, also within a host or also between hosts."""
        on_hosts = {number: timings[0].hosts for (_, number), timings in self._timings.items()}

        def kind(point: Place) -> tuple[str, Mode, bool]:
            return point.variant, point.mode, on_hosts.get(point.processes, self._measured.hosts) > 1

        alike = (point for point in self._beside if point.processes <= most and kind(point) == kind(place))
        return max(alike, key=attrgetter("processes"), default=None)

    def _beside_in(self, place: Place) -> float:
        """Return how much longer communication takes beside arithmetic: the median over the rounds."""
        rounds = [
            (place.batch_size / speed, parts_with)
            for number, sample in enumerate(self._arms[place.name].samples)
            if (speed := THROUGHPUT.of(sample)) and (parts_with := self._in_round(place, number))
        ]
        return statistics.median(projection.beside(*one_round) for one_round in rounds) if rounds else 1.0

    def _in_round(self, place: Place, number: int) -> Callable[[float], Parts] | None:
        """Return the parts of a step by the samples of a round, as a function of how much longer communication takes
        beside arithmetic. None if the samples were rejected, or if there are none."""
        assert place.alone
        samples, alone = self._arms[place.alone].samples, self._measured.alone.get(place.alone, ())
        if number >= len(samples) or not THROUGHPUT.of(samples[number]):
            return None
        waits = INPUT_WAIT.of(samples[number]) or 0.0
        of_round = (alone[number], waits, place.processes, partial(self._seconds, place))
        return partial(projection.parts, *of_round, blocking=self._blocking)

    def _computed(self, place: Place) -> Arm:
        """Return an arm with what ``place`` takes by the samples without an exchange, without its own samples: the arm
        of a projected place, or one beside the arm of a measured place."""
        assert place.alone
        smaller = self._largest(place, place.processes - 1)
        beside = self._beside[smaller] if smaller else 1.0
        samples = []
        for number, sample in enumerate(self._arms[place.alone].samples):
            parts_with = self._in_round(place, number)
            speed = place.batch_size / parts_with(beside).step if parts_with else None
            samples.append(sample.model_copy(update={THROUGHPUT.field: speed}))
        name = _computed_name(place) if place.measured else place.name
        changes = {"name": name, "variant": name, "batch_size": place.batch_size, "samples": tuple(samples)}
        return self._arms[place.alone].model_copy(update=changes)

    def _seconds(self, place: Place, exchange: Exchange) -> float:
        """Return the seconds of an exchange alone. Replicas of a model also average what its processes have scattered;
        a host's processes do this beside each other, over the host's link. A group that several hosts hold is as slow
        as all processes together: a probe of fewer may have been within a host."""
        if not place.modelled:
            return 0.0
        hosts, within = self._measured.hosts, self._measured.devices // self._measured.hosts
        shares, size = place.processes // place.replicas, exchange.size_bytes
        seconds = self._collective(exchange.operation, shares if shares <= within else place.processes)(size)
        if place.replicas > 1 and exchange.operation == "reduce_scatter":
            average = self._collective("all_reduce", place.processes if hosts > 1 else place.replicas)
            seconds += average((min(shares, within) if hosts > 1 else 1) * size / shares)
        return seconds

    def _collective_of(self, operation: Operation, processes: int) -> Collective:
        """Return the seconds of an operation alone. For more processes than were measured, the latency grows with the
        messages that follow each other, and further devices have links as those here or, between hosts, the assumed
        one: a host's devices then reduce or gather among themselves first."""
        assert self._measured.probe
        within = self._measured.devices // self._measured.hosts
        if (operation, processes) in self._timings or not self._link or processes <= within:
            probed = max(number for of, number in self._timings if of == operation and number <= processes)
            return projection.collective(self._timings[operation, probed], processes, self._measured.probe.backend)
        link = probe.LINKS[self._link]
        hosts = processes // within
        across = probe.Fit(
            processes=hosts,
            latency_seconds=link.latency_of(hosts),
            bytes_per_second=link.bytes_per_second,
            relative_error_fraction=0.0,
        )
        inner = self._collective(operation, within) if within > 1 else lambda _: 0.0
        half = 1.0 if operation == "all_reduce" else 0.5  # an all-reduce is a scatter and a gather
        return lambda size: inner(size) + half * across.seconds(size)

    def _parts(self, place: Place, speed: float | None) -> dict[str, float] | None:
        """Return the median parts of a step, of which measured ones add up to the measured step."""
        if not speed:
            return None
        step = place.batch_size / speed
        if place.processes == 1:
            waits = statistics.median(INPUT_WAIT.known(self._arms[place.name].samples) or [0.0])
            return Parts((1 - waits) * step, waits * step, 0.0, 0.0, 0.0)._asdict()
        if not place.alone:
            return None
        largest = self._largest(place, place.processes)
        beside = self._beside[largest] if largest else 1.0
        rounds = range(len(self._arms[place.alone].samples))
        of_rounds = [parts_with(beside) for number in rounds if (parts_with := self._in_round(place, number))]
        if not of_rounds:
            return None
        parts = Parts(*map(statistics.median, zip(*of_rounds, strict=True)))
        arithmetic = min(parts.arithmetic, step - parts.input)
        waiting = min(parts.waiting, step - parts.input - arithmetic)
        exposed = step - parts.input - arithmetic - waiting
        hidden = max(0.0, parts.hidden + parts.exposed - exposed)
        by_part = Parts(arithmetic, parts.input, waiting, exposed, hidden)._asdict()
        return by_part if place.modelled else {part: seconds for part, seconds in by_part.items() if part != "hidden"}

    def _slow(self, place: Place) -> str | None:
        """Name the process whose steps take ``UNEVEN`` times the mean in most rounds."""
        rounds = self._measured.alone.get(place.alone or "", ())
        slow = [alone for alone in rounds if alone.slowest_seconds > UNEVEN * alone.mean_seconds]
        if not slow or len(slow) <= len(rounds) / 2 or len({alone.slowest_rank for alone in slow}) > 1:
            return None
        times = statistics.median(alone.slowest_seconds / alone.mean_seconds for alone in slow)
        return f"rank {slow[0].slowest_rank} on {slow[0].slowest_host} takes {times:.2f} times the mean process's step"


def _computed_name(place: Place) -> str:
    return f"{place.name}-computed"


def projections(curves: Sequence[Curve], jobs: Mapping[str, str]) -> Iterator[tuple[tuple[str, Mode, int], Difference]]:
    """Yield the projections of curves, for ``Projections``."""
    for curve in curves:
        for point in curve.points:
            if not point.place.measured:
                yield (jobs[curve.variant], curve.mode, point.place.processes), point.speedup
