"""The script that writes the report of the GPU workflow into its summary and into the pull request."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.workflows.runner import FIGURES, RATIO, REPOSITORY, ROW, GitHub

Post = Callable[..., subprocess.CompletedProcess[str]]


def gate(outcome: Any = "passed", *rows: Any) -> dict[str, Any]:
    """Return the values of gate.json."""
    return {"outcome": outcome, "variants": rows or [FIGURES], "together": None}


@pytest.fixture
def post(github: GitHub, tmp_path: Path) -> Post:
    """Return a function that runs the report job's script. ``gated`` has the values of gate.json, ``said`` is the text
    of gate.md, and ``comparison`` has the values of comparison.json. The script writes summary.md."""

    def run(gated: Any, said: str = "", comparison: Any = None, **variables: str) -> subprocess.CompletedProcess[str]:
        reports = tmp_path / "gpu" / "reports"
        shutil.rmtree(reports, ignore_errors=True)
        reports.mkdir(parents=True)
        for name, content in (("gate.json", gated), ("gate.md", said), ("comparison.json", comparison)):
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


def test_the_report_is_one_comment_updated_in_place(github: GitHub, post: Post) -> None:
    for number in range(150):  # more than a page
        github.add("somebody", f"remark {number}")
    first = post(gate())
    assert first.returncode == 0, first.stderr
    assert post(gate("worse")).stdout == "comment/151\n"
    assert len(github.comments) == 151
    said = github.comments[-1]["body"]
    address = f"https://github.example/{REPOSITORY}/actions/runs/42"
    for part in ("**Worse than the base.**", "Measured in one session", ROW, "0123456789ab", address):
        assert part in said
    assert "Nothing" not in said
    post(None)  # an old verdict does not outlive a run that failed
    assert len(github.comments) == 151
    assert "No decision: the run ended" in github.comments[-1]["body"]
    assert "Worse" not in github.comments[-1]["body"]


def test_nobody_elses_comment_is_touched(github: GitHub, post: Post) -> None:
    post(gate())
    copied = github.comments[0]["body"]
    github.comments.clear()
    theirs = github.add("somebody", copied)
    comment = github.add("github-actions[bot]", "from another workflow")
    post(gate("worse"))
    assert (theirs["body"], comment["body"]) == (copied, "from another workflow")
    assert len(github.comments) == 3
    assert "Worse" in github.comments[2]["body"]


def test_the_summary_equals_the_comment(github: GitHub, post: Post, tmp_path: Path) -> None:
    post(gate(), "Nothing got worse.\n")
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == github.comments[0]["body"]
    (tmp_path / "summary.md").unlink()
    assert post(gate(), "Nothing got worse.\n", PULL_REQUEST="", GITHUB_TOKEN="").returncode == 0
    assert "Nothing got worse" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert len(github.comments) == 1


COMPARED = {"variants": [FIGURES | {"variant": "baseline", "verdict": None}, FIGURES | {"verdict": "pays"}]}


def test_gate_and_comparison_are_shown_if_they_fit(github: GitHub, post: Post) -> None:
    post(gate(), "a remark\n", COMPARED)
    said = github.comments[0]["body"]
    shown = r"<details>.*<pre>\na remark\n</pre>.*</details>.*<details>.*\| ddp: pays \| 1\.062"
    assert re.search(shown, said, re.DOTALL)
    assert "| baseline" not in said
    post(gate(), "x" * 65_500, COMPARED)
    assert "xxx" not in github.comments[0]["body"]
    assert "ddp: pays" in github.comments[0]["body"]
    post(gate("passed", *[FIGURES] * 10_000))
    said = github.comments[0]["body"]
    assert len(said) == 65_536
    assert said.endswith("with its log and files.\n")


FORGED = "@everyone https://evil.example ![x](https://evil.example/x.png) </pre></details><!-- [ok](//evil.example)"


@pytest.mark.parametrize(
    "gated",
    [
        FORGED,
        "[" * 100_000,
        gate(FORGED),
        gate([]),
        gate("passed", FIGURES | {"variant": FORGED}),
        gate("passed", FIGURES | {"throughput": RATIO | {"decision": FORGED}}),
        gate("passed", FIGURES | {"memory": RATIO | {"estimate": FORGED}}),
        gate("passed", FIGURES | {"memory": RATIO | {"low": 10**400}}),
        gate() | {"variants": 1},
    ],
)
def test_forged_values_are_text_or_not_shown(gated: Any, github: GitHub, post: Post) -> None:
    """The comment bears the workflow's name. Forged mentions would notify people, and forged links look trusted."""
    done = post(gated, f"{FORGED}\n", {"variants": [FIGURES | {"verdict": FORGED}]})
    assert done.returncode == 0, done.stderr
    said = github.comments[0]["body"]
    assert "No decision" in said
    outside = re.sub(r"<pre>.*?</pre>", "", said, flags=re.DOTALL)
    inside = said.partition("<pre>")[2].partition("</pre>")[0]
    assert not re.search("@|evil", outside)
    assert "evil.example" in inside
    assert not set("<>") & set(inside)


def test_a_refusal_by_github_is_an_error(github: GitHub, post: Post) -> None:
    github.refuses = True
    done = post(gate())
    assert done.returncode == 1
    assert "403" in done.stderr
    assert "Traceback" not in done.stderr
