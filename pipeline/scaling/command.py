"""The command ``scale``: how many devices pay, and what they cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pipeline.comparison.stats import Difference
from pipeline.errors import ConfigError, say
from pipeline.files import read_json
from pipeline.params import Config, Machine
from pipeline.report import write_pages
from pipeline.report.pictures import Chart, loglog
from pipeline.results import REPORTS, Document, ResultError, read_document, session_files
from pipeline.scaling import points, probe
from pipeline.scaling.curves import Analysis, Curve, projections
from pipeline.scaling.points import KEPT, Measured, Mode
from pipeline.scaling.projection import Parts


class Report(Document):
    """``reports/scaling.json``: all that the pages show, and the samples from which it was computed."""

    curves: tuple[Curve, ...]
    measured: Measured
    worth: float
    """How much more throughput twice the devices must bring, so that they pay."""
    price: float | None
    """Of a device-hour."""
    epochs: float
    """What ``Point.price`` is for."""
    to_target: bool
    """True if ``epochs`` lead to the target accuracy; False if they are those of the whole training."""
    link: str | None
    on_gpu: bool

    @property
    def has_energy(self) -> bool:
        return any(point.joules_per_sample is not None for curve in self.curves for point in curve.points)


def run(
    config: Config,
    machine: Machine,
    names: Sequence[str],
    *,
    up_to: int | None,
    price: float | None,
    minutes: float,
    link: str | None,
    mode: Mode | None,
) -> None:
    """Measure the curves of the variants ``names``; write ``reports/scaling.*``.

    ``up_to``: the most devices of a projection. ``price``: of a device-hour. ``link``: what connects hosts that are not
    here. ``mode``: this kind of scaling only. Raises PipelineError, and KeyboardInterrupt, whose message says what is
    kept.
    """
    for option, value in ("price", price), ("minutes", minutes):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{option}: found {value:g}; expected a number above 0.")
    if link not in (None, *probe.LINKS):
        raise ConfigError(f"--link: found {link!r}; expected one of {', '.join(probe.LINKS)}.")
    modes = (mode,) if mode else get_args(Mode)
    before = [*_earlier()]
    measured = points.measured(config, machine, names, up_to, minutes, modes)
    price = price or config.compare.price_on(measured.bench.arms[0].device)
    report = reported(config, measured, before, price=price, link=link)
    write(report)
    say(f"scale: {REPORTS / 'scaling.html'}")
    if measured.bench.interrupted:
        raise KeyboardInterrupt(f"the complete rounds are kept in {KEPT}")


def _earlier() -> Iterator[Measured]:
    """Yield the kept measurements that this version can read; name the others."""
    for file in session_files(KEPT):
        try:
            yield read_document(file, Measured, "it is left out")
        except ResultError as error:
            say(f"scale: {error}")


def reported(
    config: Config, measured: Measured, before: Sequence[Measured], *, price: float | None, link: str | None
) -> Report:
    """Return the report. ``before``: earlier measurements, whose projections are compared with this one."""
    projected_before: dict[Any, list[Difference]] = defaultdict(list)
    worth, spread, epochs, to_target = config.scale.worth, config.compare.max_spread, float(config.train.epochs), False
    for earlier in before:
        curves = Analysis(earlier, None, spread).curves(worth, None, 1.0, {})
        for place, difference in projections(curves, earlier.jobs):
            projected_before[place].append(difference)
    with suppress(OSError, ValueError, KeyError, TypeError):  # without a comparison of this job, nothing is known
        comparison = read_json(REPORTS / "comparison.json")
        if comparison["train"] == config.job and (samples := comparison["variants"][0]["time_to_target"]["samples"]):
            epochs, to_target = samples / measured.epoch_samples, True
    curves = Analysis(measured, link, spread).curves(worth, price, epochs, projected_before)
    return Report(
        curves=curves,
        measured=measured,
        worth=worth,
        price=price,
        epochs=epochs,
        to_target=to_target,
        link=link,
        on_gpu=measured.probe is not None and measured.probe.backend == "nccl",
    )


def write(report: Report, directory: Path = REPORTS) -> None:
    """Write the report as JSON, Markdown and a page, all or none; print the Markdown."""
    charts = [_speedups(curve) for curve in report.curves]
    content: dict[str, Any] = {"report": report, "parts": Parts._fields, "charts": charts}
    say(write_pages("scaling", directory, report.to_json(), **content), end="")


def _speedups(curve: Curve) -> Chart | None:
    """Return the speed-ups over the number of devices; None if a measured one is unknown."""
    speedups = [(point.place.processes, point.speedup.estimate, point.place.measured) for point in curve.points]
    measured = [(number, speedup) for number, speedup, is_measured in speedups if speedup and is_measured]
    projected = [(number, speedup) for number, speedup, is_measured in speedups if speedup and not is_measured]
    if len(measured) < 2:
        return None
    lines = {"measured": measured, "projected": [measured[-1], *projected]}
    lines["as fast as ideal"] = [(1, 1.0), (speedups[-1][0], float(speedups[-1][0]))]
    return loglog({name: line for name, line in lines.items() if len(line) > 1}, _whole, _whole)


def _whole(value: float, _: int) -> str:
    return f"{value:g}"
