"""What was measured as curves: speed-ups with intervals, the parts of a step, projections and their tests, prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby, takewhile
from operator import attrgetter

from pipeline.comparison import sessions, stats
from pipeline.comparison.stats import Difference
from pipeline.comparison.summaries import over_rounds
from pipeline.params import Config
from pipeline.results import Exchange, Record
from pipeline.results.figures import ENERGY, INPUT_WAIT, MEMORY, THROUGHPUT, Figure
from pipeline.results.records import Operation
from pipeline.scaling import projection
from pipeline.scaling.points import Measured, Mode, Place
from pipeline.scaling.probe import LINKS
from pipeline.scaling.projection import Collective, Parts

DOUBT = 0.25
"""Half-width of a projection's interval, on the logarithmic scale, for twice the devices that were measured; more if
the largest number that was measured is projected worse (docs/how-we-know/scaling.md)."""

Projections = Sequence[tuple[tuple[str, Mode, int], Difference]]
"""Job, mode and number of processes, and a projected speed-up."""


class Point(Record):
    """A number of devices on a curve."""

    place: Place
    samples_per_second: float | None
    """The median over the rounds."""
    speedup: Difference
    """The throughput in ratio to one device's."""
    efficiency: Difference
    """The speed-up in ratio to the processes."""
    more: Difference | None
    """The throughput in ratio to the point before, with the margin up to which its devices do not pay; None for one
    device."""
    peak_memory_bytes: float | None
    """The median over the rounds; None if it is projected."""
    memory: Difference | None
    """Its ratio to one device's."""
    joules_per_sample: float | None
    parts: Parts | None
    """The parts of a step; None if they are not known."""
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
    def step_seconds(self) -> float | None:
        return self.samples_per_second and self.place.batch_size / self.samples_per_second


class Curve(Record):
    """A variant on more and more devices, one device first."""

    variant: str
    mode: Mode
    points: tuple[Point, ...]

    @property
    def best(self) -> int:
        """The index of the last measured point up to which all further devices pay."""
        pays = (point.place.measured and point.more and point.more.decision == "better" for point in self.points[1:])
        return len([*takewhile(bool, pays)])

    @property
    def ranked(self) -> dict[str, Point]:
        """The cheapest and the fastest point that were measured."""
        known = [point for point in self.points if point.place.measured and point.samples_per_second and point.money]
        ranks = {"cheapest": attrgetter("money"), "fastest": attrgetter("step_seconds")}
        return {rank: min(known, key=key) for rank, key in ranks.items() if known}


class Analysis:
    """What the samples of a measurement say of each place.

    The speed of a place that was not measured is that of its arm without an exchange, times a factor.
    """

    def __init__(
        self,
        measured: Measured,
        settings: Config,
        *,
        link: str | None = None,
        price: float | None = None,
        epochs: float = 1.0,
        before: Projections = (),
    ) -> None:
        """``price``: of a device-hour. ``epochs``: of the training that is paid for. ``before``: earlier curves'."""
        self._measured, self._link, self._worth, self._before = measured, link, settings.scale.worth, before
        self._price = price and price * epochs / 3600
        self._arms = {arm.variant: arm for arm in measured.bench.arms if arm.role == "variant"}
        self._table = sessions.table_of([measured.bench], settings.compare.max_spread, {})
        self._confidence = stats.confidence_of(len(measured.places))
        self._here = max((place for place in measured.places if place.measured), key=attrgetter("processes"))
        self._within = self._here.processes // self._here.hosts
        self._beside = cache(self._beside_of)

    def curves(self) -> Iterator[Curve]:
        for (variant, mode), of_curve in groupby(self._measured.places, attrgetter("variant", "mode")):
            places = [*of_curve]
            pairs = zip(places, [None, *places], strict=False)
            points = tuple(self._point(place, before, places[0]) for place, before in pairs)
            yield Curve(variant=variant, mode=mode, points=points)

    def _point(self, place: Place, before: Place | None, single: Place) -> Point:
        samples = self._arms[place.name].samples if place.measured else ()
        speed = over_rounds(THROUGHPUT, samples) if place.measured else place.batch_size / self._projected(place).step
        speedup, more = self._ratio(place, single), None
        if before:
            doublings = math.log2(place.processes / before.processes)
            more = self._ratio(place, before, (1 + self._worth) ** doublings - 1)
        epoch_seconds = self._measured.train_count / speed if speed else None
        job = self._measured.jobs[place.variant], place.mode, place.processes
        return Point(
            place=place,
            samples_per_second=speed,
            speedup=speedup,
            efficiency=_times(speedup, 1 / place.processes),
            more=more,
            peak_memory_bytes=over_rounds(MEMORY, samples),
            memory=self._ratio(place, single, figure=MEMORY) if place.measured else None,
            joules_per_sample=over_rounds(ENERGY, samples),
            parts=self._parts(place, place.batch_size / speed) if speed else None,
            slow=self._measured.alone[place.alone].slow if place.alone else None,
            left_out=self._ratio(place, single, left_out=True) if place.measured and place.alone else None,
            earlier=tuple(projected for key, projected in self._before if place.measured and key == job),
            epoch_seconds=epoch_seconds,
            price=self._price * place.devices * epoch_seconds if self._price and epoch_seconds else None,
            money=place.devices / single.devices / speedup.estimate if speedup.estimate else None,
        )

    def _ratio(
        self, above: Place, below: Place, margin: float = 0.0, *, left_out: bool = False, figure: Figure = THROUGHPUT
    ) -> Difference:
        """Return the ratio of two places' figures; ``left_out``: as if ``above`` had not been measured."""
        (arm, factor), (base, of_base) = self._basis(above, left_out=left_out), self._basis(below)
        (ratio,) = self._table.ratios(arm, base, figure, margin, self._confidence).values()
        if above.measured and not left_out:
            return ratio
        doublings = max(1.0, math.log2(above.processes / max(below.processes, self._here.processes)))
        ratio = stats.widened(_times(ratio, factor / of_base), self._doubt(above) * math.sqrt(doublings))
        return ratio if ratio.why_untrusted else ratio.model_copy(update={"decision": stats.decide(ratio, margin)})

    def _basis(self, place: Place, *, left_out: bool = False) -> tuple[str, float]:
        """Return the arm that shows the speed of a place, and how many times as fast as this arm the place is."""
        if place.measured and not left_out:
            return place.name, 1.0
        assert place.alone
        speed = over_rounds(THROUGHPUT, self._arms[place.alone].samples)
        return place.alone, place.batch_size / self._projected(place).step / speed if speed else 1.0

    def _doubt(self, place: Place) -> float:
        """Return the doubt of a projection: the least one, or how far off the largest number is that was measured."""
        largest = self._largest(place, self._here.processes)
        if not largest or largest[0] == place:
            return DOUBT
        return max(DOUBT, abs(math.log(self._projected(largest[0]).step / largest[1])))

    def _largest(self, place: Place, most: int) -> tuple[Place, float] | None:
        """Return the place of the curve of ``place`` with the most processes, but no more than ``most``, of those that
        were measured with and without the exchange, also within a host or also between hosts; and a step's seconds."""

        def kind(of: Place) -> tuple[str, Mode, bool]:
            return of.variant, of.mode, min(of.hosts, self._here.hosts) > 1

        alike = [
            (of, of.batch_size / speed)
            for of in self._measured.places
            if of.measured and of.alone and of.processes <= most and kind(of) == kind(place)
            if (speed := over_rounds(THROUGHPUT, self._arms[of.name].samples))
        ]
        return max(alike, key=lambda known: known[0].processes, default=None)

    def _beside_of(self, place: Place, most: int) -> float:
        """Return how much longer communication takes beside arithmetic with ``most`` processes or fewer."""
        largest = self._largest(place, most)
        return projection.beside(largest[1], self._parts_with(largest[0])) if largest else 1.0

    def _projected(self, place: Place) -> Parts:
        return self._parts_with(place)(self._beside(place, place.processes - 1))

    def _parts(self, place: Place, step_seconds: float) -> Parts | None:
        """Return the parts of a step, which add up to it."""
        if place.processes == 1:
            waits = step_seconds * (over_rounds(INPUT_WAIT, self._arms[place.name].samples) or 0.0)
            return Parts(arithmetic=step_seconds - waits, input=waits)
        if not place.alone:
            return None
        return self._parts_with(place)(self._beside(place, place.processes)).within(step_seconds)

    def _parts_with(self, place: Place) -> Callable[[float], Parts]:
        """Return the parts of a step by its arm without an exchange, as a function of how much longer communication
        takes beside arithmetic."""
        assert place.alone
        waits = over_rounds(INPUT_WAIT, self._arms[place.alone].samples) or 0.0
        alone, blocking = self._measured.alone[place.alone], self._measured.probe.backend == "gloo"
        taken = [self._seconds(place, exchange) for exchange in alone.buckets]
        return partial(projection.parts, alone, waits, place.processes, taken, blocking=blocking)

    def _seconds(self, place: Place, exchange: Exchange) -> float:
        """Return the seconds of an exchange alone. Replicas of a model also average what its processes have scattered;
        a host's processes do this beside each other, over the host's link."""
        shares, hosts = place.processes // place.replicas, math.ceil(place.processes / self._within)
        of_shares = math.ceil(shares / self._within)
        seconds = self._collective(exchange.operation, shares, of_shares)(exchange.size_bytes)
        if place.replicas > 1 and exchange.operation == "reduce_scatter":
            beside = min(shares, self._within) if hosts > 1 else 1
            average = self._collective("all_reduce", place.replicas, min(place.replicas, hosts))
            seconds += average(beside * exchange.size_bytes / shares)
        return seconds

    def _collective(self, operation: Operation, processes: int, hosts: int) -> Collective:
        """Return the seconds of an operation alone, among processes on so many hosts.

        For another number of processes than were probed, the latency grows with the messages that follow each other.
        Further devices have links as those here or, between hosts, the assumed one: a host's devices then reduce or
        gather among themselves first."""
        probe = self._measured.probe
        numbers = [of for of in probe.numbers if (probe.of(of)[0].hosts > 1) == (hosts > 1)] or probe.numbers
        if not self._link or hosts == 1 or processes in numbers:
            probed = max((of for of in numbers if of <= processes), default=numbers[0])
            return projection.collective(probe.of(probed, operation), processes, probe.backend)
        link, of_host = LINKS[self._link], processes // hosts
        inner = self._collective(operation, of_host, 1) if of_host > 1 else lambda _: 0.0
        half = 1.0 if operation == "all_reduce" else 0.5  # an all-reduce is a scatter and a gather
        return lambda size: inner(size) + half * link.seconds(hosts, size)


def _times(ratio: Difference, factor: float) -> Difference:
    ends = {end: getattr(ratio, end) for end in ("estimate", "low", "high")}
    return ratio.model_copy(update={end: value and factor * value for end, value in ends.items()})
