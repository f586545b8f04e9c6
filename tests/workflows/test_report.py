"""The script that writes the report of the GPU workflow into its summary and into the pull request."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.workflows.github import REPOSITORY, GitHub


@pytest.fixture
def post(github: GitHub, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the report job's script. ``gate`` is the gate's outcome or the values of gate.json;
    ``said`` is the text of gate.md, and ``comparison`` the values of comparison.json. The script writes summary.md."""

    def run(gate: Any, said: str = "", comparison: Any = None, **variables: str) -> subprocess.CompletedProcess[str]:
        reports = tmp_path / "gpu" / "reports"
        reports.mkdir(parents=True, exist_ok=True)
        gated = {"outcome": gate, "variants": [FIGURES], "together": None} if isinstance(gate, str) else gate
        for name, content in (("gate.json", gated), ("gate.md", said), ("comparison.json", comparison)):
            (reports / name).unlink(missing_ok=True)
            if content is not None:
                text = content if isinstance(content, str) else json.dumps(content)
                (reports / name).write_text(text, encoding="utf-8")
        given = {
            "COMMIT": "0123456789abcdef",
            "GITHUB_API_URL": github.address,
            "GITHUB_REPOSITORY": REPOSITORY,
            "GITHUB_RUN_ID": "42",
            "GITHUB_SERVER_URL": "https://github.example",
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
            "GITHUB_TOKEN": "token",
            "NO_PROXY": "*",
            "PULL_REQUEST": "7",
        }
        command = [sys.executable, str(ROOT / ".github" / "report.py"), "gpu"]
        environment = os.environ | given | variables
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


Post = Callable[..., subprocess.CompletedProcess[str]]
RATIO = {"estimate": 1.0625, "low": 1.03125, "high": 1.09375, "decision": "better"}
ACCURACY = {"mean_fraction": -0.005, "low_fraction": -0.0125, "high_fraction": 0.0025, "decision": "same"}
FIGURES = {"variant": "ddp", "throughput": RATIO, "memory": None, "accuracy": ACCURACY}


def test_the_report_is_one_comment_that_is_updated_in_place(github: GitHub, post: Post) -> None:
    for number in range(150):  # more than a page
        github.add("somebody", f"remark {number}")
    first = post("passed")
    assert first.returncode == 0, first.stderr
    assert post("worse").stdout == "comment/151\n"
    assert len(github.comments) == 151
    said = github.comments[-1]["body"]
    assert "**Worse than the base.**" in said
    assert "Measured in one session: in other sessions the ratios may differ" in said
    assert "Nothing" not in said
    assert "| ddp | 1.062 (1.031 to 1.094) better | not known | -0.50 (-1.25 to +0.25) same |" in said
    assert "0123456789ab" in said
    assert f"https://github.example/{REPOSITORY}/actions/runs/42" in said


def test_nobody_elses_comment_is_touched(github: GitHub, post: Post) -> None:
    post("passed")
    copied = github.comments[0]["body"]
    github.comments.clear()
    theirs = github.add("somebody", copied)
    other = github.add("github-actions[bot]", "from another workflow")
    post("worse")
    assert (theirs["body"], other["body"]) == (copied, "from another workflow")
    assert len(github.comments) == 3
    assert "Worse" in github.comments[2]["body"]


def test_an_old_verdict_does_not_outlive_a_run_that_failed(github: GitHub, post: Post) -> None:
    post("passed")
    post(None)
    [only] = github.comments
    assert "No decision: the run ended" in only["body"]
    assert "Nothing" not in only["body"]


def test_the_summary_equals_the_comment_and_needs_no_pull_request(github: GitHub, post: Post, tmp_path: Path) -> None:
    post("passed", "Nothing got worse.\n")
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == github.comments[0]["body"]
    (tmp_path / "summary.md").unlink()
    assert post("passed", "Nothing got worse.\n", PULL_REQUEST="", GITHUB_TOKEN="").returncode == 0
    assert "Nothing got worse" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert len(github.comments) == 1


COMPARED = {"variants": [FIGURES | {"variant": "baseline", "verdict": None}, FIGURES | {"verdict": "pays"}]}


def test_the_gates_text_and_the_comparison_are_shown_if_they_fit(github: GitHub, post: Post) -> None:
    post("passed", "a remark\n", COMPARED)
    said = github.comments[0]["body"]
    shown = r"<details>.*<pre>\na remark\n</pre>.*</details>.*<details>.*\| ddp: pays \| 1\.062"
    assert re.search(shown, said, re.DOTALL)
    assert "| baseline" not in said
    post("passed", "x" * 65_500, COMPARED)
    assert "xxx" not in github.comments[0]["body"]
    assert "ddp: pays" in github.comments[0]["body"]
    post({"outcome": "passed", "variants": [FIGURES] * 10_000, "together": None})
    said = github.comments[0]["body"]
    assert len(said) == 65_536
    assert said.endswith("with its log and files.\n")


FORGED = "@everyone https://evil.example ![x](https://evil.example/x.png) </pre></details><!-- [ok](//evil.example)"


@pytest.mark.parametrize(
    "gate",
    [
        FORGED,
        "[" * 100_000,
        {"outcome": FORGED, "variants": [], "together": None},
        {"outcome": [], "variants": [], "together": None},
        {"outcome": "passed", "variants": [FIGURES | {"variant": FORGED}], "together": None},
        {"outcome": "passed", "variants": [FIGURES | {"throughput": RATIO | {"decision": FORGED}}], "together": None},
        {"outcome": "passed", "variants": [FIGURES | {"memory": RATIO | {"estimate": FORGED}}], "together": None},
        {"outcome": "passed", "variants": [FIGURES | {"memory": RATIO | {"low": 10**400}}], "together": None},
        {"outcome": "passed", "variants": 1, "together": None},
    ],
)
def test_values_forged_by_a_pull_request_are_shown_as_text_or_not_at_all(gate: Any, github: GitHub, post: Post) -> None:
    """The comment bears the workflow's name. Forged mentions would notify people, and forged links look trusted."""
    done = post(gate, f"{FORGED}\n", {"variants": [FIGURES | {"verdict": FORGED}]})
    assert done.returncode == 0, done.stderr
    said = github.comments[0]["body"]
    assert "No decision" in said
    outside = re.sub(r"<pre>.*?</pre>", "", said, flags=re.DOTALL)
    inside = said.partition("<pre>")[2].partition("</pre>")[0]
    assert "@" not in outside
    assert "evil" not in outside
    assert "evil.example" in inside
    assert not set("<>") & set(inside)


def test_a_refusal_by_github_is_an_error_with_its_status(github: GitHub, post: Post) -> None:
    github.refuses = True
    done = post("passed")
    assert done.returncode == 1
    assert "403" in done.stderr
    assert "Traceback" not in done.stderr
