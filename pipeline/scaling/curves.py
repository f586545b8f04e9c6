"""What was measured as curves: speed-ups with intervals, the parts of a step, projections and their tests, prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, takewhile
from operator import attrgetter

from pipeline.comparison import sessions, stats
from pipeline.comparison.stats import Difference
from pipeline.comparison.summaries import over_rounds
from pipeline.results import Arithmetic, Bench, Document, Exchange, Record
from pipeline.results.figures import ENERGY, INPUT_WAIT, MEMORY, THROUGHPUT, Figure
from pipeline.scaling import projection
from pipeline.scaling.probe import Probe

DOUBT = 0.25
"""Half-width of a projection's interval, on the logarithmic scale, for twice the devices that were measured; more if
the largest number that was measured is projected worse (docs/how-we-know/scaling.md)."""


class Place(Record):
    """A number of processes of a variant: a point of a curve."""

    name: str
    """The name of its arm; of a point that is projected, the name of the point."""
    variant: str
    """Also a variant of params.yaml with "-weak": with weak scaling."""
    mode: str
    """strong or weak."""
    processes: int
    hosts: int
    batch_size: int
    devices: int
    """What is paid for: the GPUs or, without GPUs, the hosts."""
    replicas: int
    """Groups of processes that each share one model (fsdp)."""
    alone: str | None
    """The name of the arm that exchanges nothing; None with one process, or if the variant is not modelled."""
    measured: bool


class Measured(Document):
    """What ``scale`` measured: the raw samples, from which ``curves`` computes all else."""

    bench: Bench
    places: tuple[Place, ...]
    """By variant and number."""
    probe: Probe
    jobs: dict[str, str]
    """Variant -> digest of its settings, the job, the data and the kind of device: projections of equal jobs can be
    compared with what is measured."""
    epoch_samples: int


class Point(Record):
    """A number of devices on a curve."""

    place: Place
    samples_per_second: float | None
    """The median over the rounds."""
    speedup: Difference
    """The throughput in ratio to one device's."""
    efficiency: Difference
    """The speed-up in ratio to the processes."""
    more: Difference
    """The throughput in ratio to the point before, or for one device to itself, with the margin up to which its devices
    do not pay."""
    peak_memory_bytes: float | None
    """The median over the rounds; None if it is projected."""
    memory: Difference | None
    """Its ratio to one device's."""
    joules_per_sample: float | None
    alone: Arithmetic | None
    """The steps of the arm that exchanges nothing."""
    parts: projection.Parts | None
    """The parts of a step; None if they are not known."""
    left_out: Difference | None
    """Of a point that is measured: what it would be projected to be without its own measurement."""
    earlier: tuple[Difference, ...]
    """What earlier curves of the job projected for this number of devices."""
    epoch_seconds: float | None
    price: float | None
    """Of the training; None without a price of a device-hour."""
    money: float | None
    """The price in ratio to one device's."""


class Curve(Record):
    """A variant on more and more devices, one device first."""

    variant: str
    mode: str
    points: tuple[Point, ...]

    @property
    def best(self) -> int:
        """The index of the last measured point up to which all further devices pay."""
        pays = (point.place.measured and point.more.decision == "better" for point in self.points[1:])
        return len([*takewhile(bool, pays)])

    @property
    def ranked(self) -> dict[str, Point]:
        """The cheapest and the fastest point that were measured."""
        known = [point for point in self.points if point.place.measured and point.money]
        ranks = {"cheapest": "money", "fastest": "epoch_seconds"}
        return {rank: min(known, key=attrgetter(field)) for rank, field in ranks.items() if known}


class Report(Document):
    """``reports/scaling.json``: all that the pages show, and the samples from which it was computed."""

    measured: Measured
    worth: float
    """How much more throughput twice the devices must bring, so that they pay; such as 0.1."""
    price: float | None
    """Of a device-hour."""
    epochs: float
    """What ``Point.price`` is for."""
    to_target: bool
    """True if ``epochs`` lead to the target accuracy; False if they are those of the whole training."""
    link: str | None
    """What joins hosts that are not here."""
    curves: tuple[Curve, ...] = ()


class Analysis:
    """What the samples of a report say of each place.

    The speed of a place that was not measured is that of its arm without an exchange, times a factor.
    """

    def __init__(self, report: Report, max_spread: float, earlier: Sequence[Report] = ()) -> None:
        self._report, self._measured, self._reports_before = report, report.measured, earlier
        bench, places = report.measured.bench, report.measured.places
        self._samples = {arm.variant: arm.samples for arm in bench.arms if arm.role == "variant"}
        self._table = sessions.table_of([bench], max_spread, {})
        self._here = max((place for place in places if place.measured), key=attrgetter("processes"))
        self._parts: dict[Place, projection.Parts] = {}
        self._projected: dict[str, tuple[str, float, float]] = {}
        """Name of a place -> the arm without an exchange, how many times as fast the place is by the projection, and
        the doubt of it."""
        self._take_apart()

    def _take_apart(self) -> None:
        """Project each place by the largest one before it that was measured, also within a host or also between hosts:
        it tells how much longer communication takes beside arithmetic, and how far off a projection is."""
        largest: dict[tuple[str, bool], tuple[float, float]] = {}
        for place in self._measured.places:
            speed = over_rounds(THROUGHPUT, self._samples.get(place.name, ()))
            step = place.batch_size / speed if speed else None
            if place.alone:
                kind = place.variant, min(place.hosts, self._here.hosts) > 1
                beside, doubt = largest.get(kind, (1.0, DOUBT))
                parts_with = self._parts_with(place, place.alone)
                projected, of_arm = parts_with(beside).step, over_rounds(THROUGHPUT, self._samples[place.alone]) or 1.0
                self._projected[place.name] = place.alone, place.batch_size / projected / of_arm, doubt
                if step:
                    beside = projection.beside(step, parts_with)
                    largest[kind] = beside, max(DOUBT, abs(math.log(projected / step)))
                if step or not place.measured:
                    self._parts[place] = parts_with(beside).within(step or projected)
            elif step and place.processes == 1:
                waits = step * (over_rounds(INPUT_WAIT, self._samples[place.name]) or 0.0)
                self._parts[place] = projection.Parts(step - waits, waits)

    def curves(self) -> Iterator[Curve]:
        for variant, of_curve in groupby(self._measured.places, attrgetter("variant")):
            single, *more = of_curve
            pairs = zip([single, *more], [single, single, *more], strict=False)
            points = tuple(self._point(place, before, single) for place, before in pairs)
            yield Curve(variant=variant, mode=single.mode, points=points)

    def _point(self, place: Place, before: Place, single: Place) -> Point:
        samples, speedup = self._samples.get(place.name, ()), self._ratio(place, single)
        speed = over_rounds(THROUGHPUT, samples) if place.measured else place.batch_size / self._parts[place].step
        doublings = math.log2(place.processes / before.processes)
        epoch_seconds = speed and self._measured.epoch_samples / speed
        hours = epoch_seconds and place.devices * epoch_seconds * self._report.epochs / 3600
        left_out = place.model_copy(update={"measured": False})
        return Point(
            place=place,
            samples_per_second=speed,
            speedup=speedup,
            efficiency=speedup.times(1 / place.processes),
            more=self._ratio(place, before, (1 + self._report.worth) ** doublings - 1),
            peak_memory_bytes=over_rounds(MEMORY, samples),
            memory=self._ratio(place, single, figure=MEMORY) if place.measured else None,
            joules_per_sample=over_rounds(ENERGY, samples),
            alone=projection.joined(self._samples[place.alone]) if place.alone else None,
            parts=self._parts.get(place),
            left_out=self._ratio(left_out, single) if place.measured and place.alone else None,
            earlier=tuple(self._earlier(place)) if place.measured else (),
            epoch_seconds=epoch_seconds,
            price=self._report.price and hours and self._report.price * hours,
            money=speedup.estimate and place.devices / single.devices / speedup.estimate,
        )

    def _earlier(self, place: Place) -> Iterator[Difference]:
        """Yield what earlier reports of the job projected for a place."""
        for report in self._reports_before:
            if report.measured.jobs.get(place.variant) == self._measured.jobs[place.variant]:
                points = (point for curve in report.curves for point in curve.points)
                yield from (of.speedup for of in points if of.place.name == place.name and not of.place.measured)

    def _ratio(self, above: Place, below: Place, margin: float = 0.0, figure: Figure = THROUGHPUT) -> Difference:
        """Return the ratio of two places' figures."""
        arm, factor, doubt = (above.name, 1.0, 0.0) if above.measured else self._projected[above.name]
        base, of_base, _ = (below.name, 1.0, 0.0) if below.measured else self._projected[below.name]
        confidence = stats.confidence_of(len(self._measured.places))
        (ratio,) = self._table.ratios(arm, base, figure, margin, confidence).values()
        if above.measured:
            return ratio
        doublings = max(1.0, math.log2(above.processes / max(below.processes, self._here.processes)))
        ratio = stats.widened(ratio.times(factor / of_base), doubt * math.sqrt(doublings))
        return ratio if ratio.why_untrusted else ratio.model_copy(update={"decision": stats.decide(ratio, margin)})

    def _parts_with(self, place: Place, arm: str) -> Callable[[float], projection.Parts]:
        """Return the parts of a step by its ``arm`` without an exchange, as a function of how much longer communication
        takes beside arithmetic."""
        alone, waits = projection.joined(self._samples[arm]), over_rounds(INPUT_WAIT, self._samples[arm]) or 0.0
        taken = [self._seconds(place, exchange) for exchange in alone.buckets]
        blocking = self._measured.probe.backend == "gloo"
        return partial(projection.parts, alone, waits, place.processes, taken, blocking=blocking)

    def _seconds(self, place: Place, exchange: Exchange) -> float:
        """Return the seconds of an exchange alone. Replicas of a model also average what its processes have scattered;
        a host's processes do this beside each other, over the host's link."""
        taken = partial(self._measured.probe.taken, self._report.link)
        within = self._here.processes // self._here.hosts
        shares, hosts = place.processes // place.replicas, math.ceil(place.processes / within)
        size, of_shares = exchange.size_bytes, math.ceil(shares / within)
        seconds = taken(exchange.operation, shares, of_shares, size)
        if place.replicas > 1 and exchange.operation == "reduce_scatter":
            beside = min(shares, within) if hosts > 1 else 1
            of_replicas = min(place.replicas, hosts)
            seconds += taken("all_reduce", place.replicas, of_replicas, beside * size / shares)
        return seconds
