"""The command ``scale``: how many devices pay, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.benchmark.stage import file_name
from pipeline.errors import ConfigError, say
from pipeline.params import Config, Machine
from pipeline.report import write_pages
from pipeline.report.pictures import Chart, loglog
from pipeline.results import REPORTS, read_documents
from pipeline.scaling import points, probe
from pipeline.scaling.curves import Analysis, Curve, Report
from pipeline.scaling.points import Measured
from pipeline.scaling.projection import Parts

KEPT = Path("scaling")
"""Each report is a file of this folder, kept in git like the sessions of the bench."""


def run(
    config: Config,
    machine: Machine,
    names: Sequence[str],
    *,
    up_to: int | None,
    price: float | None,
    minutes: float,
    link: str | None,
) -> None:
    """Measure the curves of the variants ``names``; write ``reports/scaling.*``, and keep the report.

    ``up_to``: the most devices of a projection. ``price``: of a device-hour. ``link``: what connects hosts that are not
    here. Raises PipelineError, and KeyboardInterrupt, whose message says what is kept.
    """
    for option, value in ("price", price), ("minutes", minutes):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{option}: found {value:g}; expected a number above 0.")
    if link not in (None, *probe.LINKS):
        raise ConfigError(f"--link: found {link!r}; expected one of {', '.join(probe.LINKS)}.")
    measured = points.measured(config, machine, names, up_to, minutes)
    earlier = read_documents(KEPT, Report, "it is left out")
    report = reported(config, measured, earlier, price=price, link=link)
    kept = KEPT / file_name(measured.bench)
    files.write_text(kept, report.to_json())
    write(report)
    say(f"scale: {REPORTS / 'scaling.html'}")
    if measured.bench.interrupted:
        raise KeyboardInterrupt(f"the complete rounds are kept in {kept}")


def reported(
    config: Config, measured: Measured, earlier: Sequence[Report], *, price: float | None, link: str | None
) -> Report:
    """Return the report. ``earlier``: reports whose projections are compared with this measurement."""
    price = price or config.compare.price_on(measured.bench.arms[0].device)
    epochs, to_target = float(config.train.epochs), False
    with suppress(OSError, ValueError, KeyError, TypeError):  # without a comparison of this job, nothing is known
        comparison = files.read_json(REPORTS / "comparison.json")
        if comparison["train"] == config.job and (samples := comparison["variants"][0]["time_to_target"]["samples"]):
            epochs, to_target = samples / measured.epoch_samples, True
    report = Report(
        measured=measured, worth=config.scale.worth, price=price, epochs=epochs, to_target=to_target, link=link
    )
    curves = Analysis(report, config.compare.max_spread, earlier).curves()
    return report.model_copy(update={"curves": tuple(curves)})


def write(report: Report, directory: Path = REPORTS) -> None:
    """Write the report as JSON, Markdown and a page, all or none; print the Markdown."""
    charts = [_speedups(curve) for curve in report.curves]
    content: dict[str, Any] = {"report": report, "parts": [*Parts.__annotations__], "charts": charts}
    say(write_pages("scaling", directory, report.to_json(), **content), end="")


def _speedups(curve: Curve) -> Chart | None:
    """Return the speed-ups over the number of devices; None if one is unknown."""
    here = sum(point.place.measured for point in curve.points)
    line = [(float(point.place.processes), point.speedup.estimate or 0.0) for point in curve.points]
    if here < 2 or not all(speedup for _, speedup in line):
        return None
    lines = {"measured": line[:here], "projected": line[here - 1 :], "as fast as ideal": [line[0], (line[-1][0],) * 2]}
    lines = {name: of for name, of in lines.items() if len(of) > 1}
    return loglog(lines, lambda value, _: f"{value:g}", lambda value, _: f"{value:g}")
