"""The command ``scale``: how many devices pay, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pipeline import files
from pipeline.benchmark.stage import file_name
from pipeline.errors import ConfigError, say
from pipeline.params import Config, Machine
from pipeline.report import write_pages
from pipeline.report.pictures import Chart, loglog
from pipeline.results import REPORTS, Document, ResultError, read_document, session_files
from pipeline.scaling import points, probe
from pipeline.scaling.curves import Analysis, Curve
from pipeline.scaling.points import Measured, Mode
from pipeline.scaling.projection import Parts

KEPT = Path("scaling")
"""Each report is a file of this folder, kept in git like the sessions of the bench."""


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
    """Measure the curves of the variants ``names``; write ``reports/scaling.*``, and keep the report.

    ``up_to``: the most devices of a projection. ``price``: of a device-hour. ``link``: what connects hosts that are not
    here. ``mode``: this kind of scaling only. Raises PipelineError, and KeyboardInterrupt, whose message says what is
    kept.
    """
    for option, value in ("price", price), ("minutes", minutes):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{option}: found {value:g}; expected a number above 0.")
    if link not in (None, *probe.LINKS):
        raise ConfigError(f"--link: found {link!r}; expected one of {', '.join(probe.LINKS)}.")
    measured = points.measured(config, machine, names, up_to, minutes, (mode,) if mode else get_args(Mode))
    report = reported(config, measured, [*_earlier()], price=price, link=link)
    kept = KEPT / file_name(measured.bench)
    files.write_text(kept, report.to_json())
    write(report)
    say(f"scale: {REPORTS / 'scaling.html'}")
    if measured.bench.interrupted:
        raise KeyboardInterrupt(f"the complete rounds are kept in {kept}")


def _earlier() -> Iterator[Report]:
    """Yield the kept reports that this version can read; name the others."""
    for file in session_files(KEPT):
        try:
            yield read_document(file, Report, "it is left out")
        except ResultError as error:
            say(f"scale: {error}")


def reported(
    config: Config, measured: Measured, earlier: Sequence[Report], *, price: float | None, link: str | None
) -> Report:
    """Return the report. ``earlier``: reports whose projections are compared with this measurement."""
    price, epochs, to_target = (
        price or config.compare.price_on(measured.bench.arms[0].device),
        config.train.epochs,
        False,
    )
    with suppress(OSError, ValueError, KeyError, TypeError):  # without a comparison of this job, nothing is known
        comparison = files.read_json(REPORTS / "comparison.json")
        if comparison["train"] == config.job and (samples := comparison["variants"][0]["time_to_target"]["samples"]):
            epochs, to_target = samples / measured.train_count, True
    projected = [
        ((report.measured.jobs[curve.variant], curve.mode, point.place.processes), point.speedup)
        for report in earlier
        for curve in report.curves
        for point in curve.points
        if not point.place.measured
    ]
    analysis = Analysis(measured, config, link=link, price=price, epochs=epochs, before=projected)
    return Report(
        curves=tuple(analysis.curves()),
        measured=measured,
        worth=config.scale.worth,
        price=price,
        epochs=epochs,
        to_target=to_target,
        link=link,
    )


def write(report: Report, directory: Path = REPORTS) -> None:
    """Write the report as JSON, Markdown and a page, all or none; print the Markdown."""
    charts = [_speedups(curve) for curve in report.curves]
    content: dict[str, Any] = {"report": report, "parts": [*Parts.model_fields], "charts": charts}
    say(write_pages("scaling", directory, report.to_json(), **content), end="")


def _speedups(curve: Curve) -> Chart | None:
    """Return the speed-ups over the number of devices; None if a measured one is unknown."""
    measured, projected = (
        [
            (float(point.place.processes), point.speedup.estimate)
            for point in curve.points
            if point.place.measured is is_measured and point.speedup.estimate
        ]
        for is_measured in (True, False)
    )
    if len(measured) < 2:
        return None
    last = float(curve.points[-1].place.processes)
    lines = {"measured": measured, "as fast as ideal": [(1.0, 1.0), (last, last)]}
    if projected:
        lines["projected"] = [measured[-1], *projected]
    return loglog(lines, lambda value, _: f"{value:g}", lambda value, _: f"{value:g}")
