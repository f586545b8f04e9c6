"""The workflows for GitHub's own machines, run by act. Where a test says so, `make` is a stand-in."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.workflows.runner import SHORT, Runner

MAKE = shutil.which("make")
INSTALLED = (Path(sys.executable).parent.parent / "installed-dev").exists()
"""False in the container image, whose environment make did not install."""


LARGER = {"fuzz", "chaos", "rehearse", "services-check", "peers", "image-check"}


def test_ci_makes_what_a_laptop_makes(runner: Runner) -> None:
    runner.tool("make", "")
    ran = runner.run("ci", "push")
    assert set(ran.jobs.values()) == {"success"}
    local = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    targets = [call[1] for call in ran.called("make")]
    assert targets.count("test-all") == 3  # each Python that the project supports
    assert all(f"make {target}" in local for target in set(targets))


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs the .venv of make")
def test_ci_runs_tests_with_the_real_make(runner: Runner) -> None:
    runner.variables = {"PYTEST_ADDOPTS": "--color=no tests/test_files.py"}  # in place of all tests
    python = f"--matrix=python:{sys.version_info.major}.{sys.version_info.minor}"
    ran = runner.run("ci", "push", {}, "--job=test", python)
    assert ran.jobs == {"test": "success"}, ran.output
    assert re.search(r"=+ \d+ passed in ", ran.output)


def test_the_weekly_run_makes_the_larger_checks(runner: Runner) -> None:
    runner.tool("make", '[ -z "$ARGS" ] || echo "make $1 with $ARGS"')
    ran = runner.run("weekly", "schedule")
    assert set(ran.jobs.values()) == {"success"}
    assert {call[1] for call in ran.called("make")} == LARGER
    assert "make peers with --job step --minutes 1" in ran.output


@pytest.mark.parametrize(
    ("machine", "variables", "job"),
    [
        ("hosted", [], "failure"),
        ("self-hosted", ["GPU_RUNNER=box"], "failure"),
        ("self-hosted", [], None),
    ],
)
def test_a_first_run_makes_the_chosen_target_and_keeps_its_output(
    machine: str, variables: list[str], job: str | None, runner: Runner
) -> None:
    runner.tool("make", "echo the output; exit 3")
    asked = {"check": "gpu-check; rm x", "machine": machine}
    inputs = [f"--input={name}={value}" for name, value in asked.items()]
    ran = runner.run("first-run", "workflow_dispatch", {"inputs": asked}, *inputs, variables=variables)
    assert ran.jobs == ({"check": job} if job else {})
    assert ran.called("make") == ([["make", "gpu-check; rm x"]] if job else [])
    if job:
        kept = runner.folder / "artifacts" / "first-run" / "first-run.txt"
        assert kept.read_text(encoding="utf-8") == "the output\n"


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs the .venv of make")
@pytest.mark.parametrize("tag", ["v0.1.0", "v0.1.1"])
def test_a_release_names_the_image_and_has_packages_and_evidence(tag: str, runner: Runner) -> None:
    """The job that is measured is a short one. Nothing is pushed, published or signed: these actions are stand-ins."""
    runner.tool("docker", "")
    runner.tool("make", f'case $1 in repro|packages) exec {MAKE} "$@";; esac')
    runner.checkout.edit(SHORT)
    runner.checkout.commit()
    options = [] if tag == "v0.1.0" else ["--job=pypi"]
    ran = runner.run("release", "push", {"ref": f"refs/tags/{tag}"}, *options, variables=["PYPI=yes"])
    if tag != "v0.1.0":
        assert ran.jobs["packages"] == "failure"
        assert "is not the version of pyproject.toml" in ran.output
        assert not ran.called("docker/build-push-action")
        assert not {"pypi", "notes"} & set(ran.jobs)
        return
    assert set(ran.jobs.values()) == {"success"}, ran.output
    [release] = ran.called("gh", "release", "create")
    assert release[3] == tag
    assert {"evidence.zip", "dist/pipeline-0.1.0.tar.gz", "--verify-tag"} < set(release)
    assert release[-1] == "Image: `ghcr.io/somebody/pipeline@sha256:12ab`"  # a registry allows no capitals
    [build] = ran.called("docker/build-push-action")
    assert {"push=true", "sbom=true", "provenance=mode=max"} < set(build)
    assert len(ran.called("pypa/gh-action-pypi-publish")) == 1
    assert len(ran.called("actions/attest")) == 1
