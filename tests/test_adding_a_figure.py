"""To add a figure, one declares it and writes the line that measures it, and nothing else.
If verdicts shall use it, one also adds its margin's setting."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.commands import printed
from tests.pages import ROOT
from tests.report.conftest import plain

ENTRY = """
    Figure(
        "step_max_ms", "longest step", "ms", "Longest step",
        "The longest step of a window, in the process that took longest; median over rounds.",
        TIME, over_ranks="largest", over_rounds="median",
    ),"""
COMPARED = ENTRY.replace(
    '"median",\n',
    '"median", family="longest", margin="longest", metric="longest", word="longest step", need="no step may last",\n',
)
MARGIN = """
    longest: ProperFraction = 0.05"""
LINE = """
        "step_max_ms": percentile_ms(steps, 100),"""
ADDED = [
    ("pipeline/results/figures.py", "PREDICTION_ERROR),", ENTRY),
    ("pipeline/training/measured.py", '"allocator_retries": memory.retries,', LINE),
]
"""File, the text after which something is added, and what is added."""
ADDED_FOR_VERDICTS = [
    (*ADDED[0][:2], COMPARED),
    ADDED[1],
    ("pipeline/params/sections.py", '"""Margin of the ratio of peak memories."""', MARGIN),
]

PROGRAM = """
import json

from pipeline.report import markdown, metrics
from pipeline.report.tables import tables
from pipeline.tracking.contents import compared_points
from tests.factories import make_bench, make_comparison, with_samples
from tests.trainings import rank, window

measured = window(rank([0.1] * 4), rank([0.1] * 3 + [0.4])).model_dump()["step_max_ms"]
milliseconds = {"baseline": 2.5, "ddp": 5.0, "memory": 2.5}
bench = with_samples(
    make_bench(),
    lambda arm: [sample.model_copy(update={"step_max_ms": milliseconds[arm.variant]}) for sample in arm.samples],
)
comparison = make_comparison(bench=type(bench).model_validate_json(bench.to_json()))
table = next(table for table in tables(comparison) if "Longest step" in dict(table.columns))
place = list(dict(table.columns)).index("Longest step")
points = {point.key: point.value for point in compared_points(comparison.variants[1], {})}
print(json.dumps({
    "measured": measured,
    "table": [row.cells[place].value for row in table.rows],
    "dvc metrics": metrics(comparison.variants[1])["step_max_ms"],
    "MLflow": points["bench/step_max_ms"],
    "definitions": [line for line in markdown(comparison).splitlines() if line.startswith("- **Longest step**")],
}))
"""


PROGRAM_FOR_VERDICTS = (
    PROGRAM.partition("table = ")[0]
    + """
from pipeline.comparison.planning import RoundCost
from pipeline.gate.decision import judge, rounds_of_sides
from pipeline.gate.settings import STRICTER
from pipeline.params import Compare
from pipeline.results.figures import FIGURES
from pipeline.tracking.contents import columns
from tests.factories import make_arm

LONGEST = FIGURES[-1]
ddp = comparison.variants[1]
again = type(comparison).model_validate_json(comparison.to_json())


def arm_with(milliseconds, role="variant"):
    arm = make_arm(role=role)
    return arm.model_copy(update={"samples": tuple(
        sample.model_copy(update={"step_max_ms": milliseconds}) for sample in arm.samples
    )})


base, cost = [arm_with(2.5), arm_with(2.5, "aa_control")], RoundCost("gate.max_minutes", 12, 60.0)
judged = judge(rounds_of_sides(base, [arm_with(3.0)], Compare(), cost), {}, Compare(), 0.1)
rejected = window(rank([0.1] * 4), rank([0.1] * 3))
print(json.dumps({
    "rejected": [bool(rejected.rejections), rejected.model_dump()["step_max_ms"]],
    "ratio": [ddp.ratios[LONGEST].estimate, ddp.ratios[LONGEST].decision],
    "read again": again == comparison,
    "noise": [comparison.noises[LONGEST].estimate, again.sessions[0].noises[LONGEST].decision],
    "verdict": ddp.verdict,
    "dvc metrics": metrics(ddp)["longest_ratio"],
    "MLflow": columns(comparison)["ddp"]["longest step"],
    "page": [line for line in markdown(comparison).splitlines() if line.startswith("| **ddp**") and "5.00" in line],
    "gate": [judged.outcome, judged.variants[0].ratios[LONGEST].decision, "compare.margins.longest" in STRICTER],
}))
"""
)


def with_added(folder: Path, places: list[tuple[str, str, str]], program: str) -> Any:
    """Return what ``program`` prints in a copy of the package with the ``places`` changed."""
    shutil.copytree(ROOT / "pipeline", folder / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    for file, before, added in places:
        text = (folder / file).read_text(encoding="utf-8")
        assert text.count(before) == 1, file
        (folder / file).write_text(text.replace(before, before + added), encoding="utf-8")
    return json.loads(printed(program, cwd=folder, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}"))


def test_a_new_figure_is_an_entry_and_a_line(tmp_path: Path) -> None:
    shown = with_added(tmp_path, ADDED, PROGRAM)
    assert shown == {
        "measured": pytest.approx(400.0),
        "table": ["2.50\N{NO-BREAK SPACE}ms", "5.00\N{NO-BREAK SPACE}ms", "2.50\N{NO-BREAK SPACE}ms"],
        "dvc metrics": 5.0,
        "MLflow": 5.0,
        "definitions": [
            "- **Longest step**: The longest step of a window, in the process that took longest; median over rounds."
        ],
    }


def test_a_compared_figure_has_a_margin_s_setting(tmp_path: Path) -> None:
    assert (len(ADDED_FOR_VERDICTS), len({file for file, *_ in ADDED_FOR_VERDICTS})) == (3, 3)
    shown = with_added(tmp_path, ADDED_FOR_VERDICTS, PROGRAM_FOR_VERDICTS)
    [row] = shown.pop("page")
    assert plain(row).endswith("| 5.00 ms<br>2.000x<br>2.000 to 2.000 |")
    assert shown == {
        "rejected": [True, None],
        "ratio": [pytest.approx(2.0), "worse"],
        "read again": True,
        "noise": [1.0, "same"],
        "verdict": "trades",
        "dvc metrics": pytest.approx(2.0),
        "MLflow": "5.00 ms, \N{MULTIPLICATION SIGN}2.000 (2.000 to 2.000)",
        "gate": ["worse", "worse", True],
    }
