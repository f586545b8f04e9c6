"""The workflows, run by act: that of the GPU machine, where `docker` is a stand-in, so that nothing trains, and those
of GitHub's own machines, where `make` is a stand-in unless a test says so."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.workflows.runner import FIGURES, REPOSITORY, ROW, SHORT, GitHub, Runner

CONTAINER = f"""
[ "$1" = run ] || exit 0
copy=$(printf '%s\\n' "$@" | sed -n 's,:/workspace$,,p')
[ -z "${{FAILS-}}" ] || exit 1
echo "${{AWS_SECRET_ACCESS_KEY-}}" >"$RECORDS/environment"
mkdir -p "$copy/reports" "$copy/sessions"
echo '{json.dumps({"outcome": "passed", "variants": [FIGURES], "together": None})}' >"$copy/reports/gate.json"
echo '{{}}' >"$copy/sessions/20260108T000000.json"
echo known >>"$copy/sessions/README.md"
touch "$copy/evidence.zip"
ln -s "$RECORDS/event.json" "$copy/results"  # to a file of the machine
mkfifo "$copy/bench.json"  # a reader would wait forever
echo "::add-mask::PIPELINE"
"""
"""What the stand-in of docker does in place of a container with .ci/gpu."""


def pull_request(label: str = "", labels: str = "gpu", repository: str = REPOSITORY) -> dict[str, Any]:
    """Return the event of a pull request that got ``label``, or, without one, to which somebody pushed."""
    head = {"ref": "topic", "sha": "0123456789abcdef", "repo": {"full_name": repository}}
    request = {"number": 7, "head": head, "base": {"ref": "main"}, "labels": [{"name": labels}]}
    event = {"action": "labeled", "label": {"name": label}} if label else {"action": "synchronize"}
    return {"pull_request": request, **event}


INSTALLED = (Path(sys.executable).parent.parent / "installed-dev").exists()
"""False in the container image, whose environment make did not install."""
LABELLED, FORK = pull_request("gpu"), "a-fork/pipeline"
EVENTS = {"pull_request": LABELLED, "workflow_dispatch": {"inputs": {"against": "v1; touch injected"}}, "schedule": {}}


@pytest.fixture
def gpu(runner: Runner) -> Runner:
    runner.tool("docker", CONTAINER)
    return runner


BOTH = {"gpu", "report"}
STARTS: dict[str, tuple[str, dict[str, Any], str, set[str]]] = {
    "labelled": ("pull_request", LABELLED, "box", BOTH),
    "pushed": ("pull_request", pull_request(), "box", BOTH),
    "fork": ("pull_request", pull_request("gpu", repository=FORK), "box", set()),
    "fork-pushed": ("pull_request", pull_request(repository=FORK), "box", set()),
    "other-label": ("pull_request", pull_request("docs"), "box", set()),
    "unlabelled": ("pull_request", pull_request(labels="docs"), "box", set()),
    "no-machine": ("pull_request", LABELLED, "", set()),
    "by-hand": ("workflow_dispatch", {"inputs": {"against": "v1"}}, "box", BOTH),
    "weekly": ("schedule", {}, "box", {*BOTH, "evidence", "session"}),
    "weekly-no-machine": ("schedule", {}, "", set()),
}
"""What happened -> the event, its values, the label of the GPU machine, and the jobs that run."""


@pytest.mark.parametrize(("event", "payload", "label", "jobs"), STARTS.values(), ids=STARTS)
def test_these_jobs_run(event: str, payload: dict[str, Any], label: str, jobs: set[str], gpu: Runner) -> None:
    ran = gpu.run("gpu", event, payload, variables=[f"GPU_RUNNER={label}"] if label else [])
    assert ran.jobs == dict.fromkeys(jobs, "success"), ran.output
    assert bool(ran.called("docker")) is ("gpu" in jobs)


def test_the_tested_code_runs_in_a_confined_container(gpu: Runner, github: GitHub) -> None:
    """It gets secrets by name, a copy of the checkout, and nothing that it prints is a command for the runner. The job
    compares with the base, writes one comment and leaves nothing behind."""
    secrets = [f"--secret={name}=hush" for name in ("AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD")]
    for _ in range(2):
        ran = gpu.run("gpu", "pull_request", LABELLED, *secrets)
    build, container, *ends = ran.called("docker")
    name = container[-3]
    assert name == build[build.index("--tag") + 1]
    assert container[-2:] == [".ci/gpu", "HEAD^"]
    assert {"--gpus", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--shm-size=8g"} <= set(container)
    assert not any(word.startswith(("--ipc", "--net", "--pid", "--privileged", "--cap-add")) for word in container)
    options = {(word, after) for word, after in itertools.pairwise(container)}
    assert [after.endswith("/copy:/workspace") for word, after in options if word == "--volume"] == [True]
    assert {("--env", "AWS_SECRET_ACCESS_KEY"), ("--env", "MLFLOW_TRACKING_PASSWORD")} < options
    assert "hush" not in str(ran.calls)
    assert (gpu.folder / "environment").read_text(encoding="utf-8").split() == ["hush"]
    assert "add-mask" not in ran.obeyed
    assert "stop-commands" in ran.obeyed

    assert ends == [["docker", "rm", "--force", name], ["docker", "image", "rm", "--force", name]]
    assert not list((gpu.folder / "cache").rglob("hostexecutor"))
    kept = gpu.folder / "artifacts" / "gpu"  # the upload follows links, even to the runner's own credentials
    uploaded = {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()}
    assert {"evidence.zip", "reports/gate.json", "sessions/20260108T000000.json"} <= uploaded
    assert not {"bench.json", "results"} & uploaded

    [comment] = github.comments
    for line in ("### On the GPU: 0123456789ab", "**Nothing was shown to be worse.**", ROW):
        assert line in comment["body"]


@pytest.mark.parametrize(("event", "write"), [("pull_request", ""), ("workflow_dispatch", ""), ("schedule", "yes")])
def test_only_the_weekly_run_may_write_what_others_read(event: str, write: str, gpu: Runner) -> None:
    gpu.tool("docker", '[ "$1" != run ] || echo "$PUSH,$PROMOTE,$SESSION,$AGAINST" >"$RECORDS/environment"')
    gpu.run("gpu", event, EVENTS[event])
    *given, against = (gpu.folder / "environment").read_text(encoding="utf-8").strip().split(",")
    assert given == [write] * 3
    assert against == {"pull_request": "HEAD^", "workflow_dispatch": "v1; touch injected", "schedule": ""}[event]
    assert not list(gpu.folder.rglob("injected"))


@pytest.mark.parametrize(("event", "comments"), [("pull_request", 1), ("workflow_dispatch", 0)])
def test_the_report_appears_although_the_gate_failed(event: str, comments: int, gpu: Runner, github: GitHub) -> None:
    gpu.variables = {"FAILS": "yes"}
    assert gpu.run("gpu", event, EVENTS[event]).jobs == {"gpu": "failure", "report": "success"}
    assert ["No decision: the run ended" in comment["body"] for comment in github.comments] == [True] * comments


def test_the_report_is_written_by_the_bases_code(gpu: Runner, github: GitHub) -> None:
    (gpu.checkout.path / ".github" / "report.py").write_text("print('forged')", encoding="utf-8")
    gpu.checkout.commit()  # on the checked-out branch only
    ran = gpu.run("gpu", "pull_request", LABELLED)
    assert ran.jobs["report"] == "success"
    assert "forged" not in ran.output
    assert len(github.comments) == 1


def test_a_new_session_becomes_a_pull_request(gpu: Runner) -> None:
    """A file of the machine may add a session, but it changes none that the default branch has."""
    ran = gpu.run("gpu", "schedule")
    changed = gpu.checkout.run("git", f"--git-dir={gpu.folder}/origin", "show", "--stat=200", "session-1")
    assert "sessions/20260108T000000.json" in changed
    assert "1 file changed" in changed
    assert [call[3:5] for call in ran.called("gh", "pr", "create")] == [["--head", "session-1"]]
    assert ran.called("actions/attest") == [["actions/attest", "name=", "path=", "subject-path=gpu/evidence.zip"]]
    (gpu.checkout.path / "sessions" / "20260108T000000.json").write_text("known", encoding="utf-8")
    gpu.checkout.commit()
    ran = gpu.run("gpu", "schedule")
    assert "no new session" in ran.output
    assert ran.called("gh") == []


@pytest.mark.slow
@pytest.mark.skipif("BUILD_OPTIONS" not in os.environ, reason="needs a Docker daemon: docker/check workflow")
def test_a_pull_request_is_gated_in_docker(runner: Runner, github: GitHub) -> None:
    """The stand-in for `docker` adds what a build needs on this machine, and leaves out the GPUs."""
    runner.tool(
        "docker",
        'words=(); for word; do case $word in --gpus|all) ;; *) words+=("$word");; esac; done\n'
        f'[ "$1" != build ] || words+=($BUILD_OPTIONS)\nexec {shutil.which("docker")} "${{words[@]}}"',
    )
    runner.variables = {name: value for name, value in os.environ.items() if name.startswith(("BUILD_", "DOCKER_"))}
    runner.checkout.commit(SHORT | {"variants.ddp": None, "profile.variants": [], "gate.max_minutes": 0.2})
    runner.checkout.commit({"train.learning_rate": 0.05})
    ran = runner.run("gpu", "pull_request", LABELLED)
    assert ran.jobs["report"] == "success", ran.output
    kept = runner.folder / "artifacts" / "gpu"
    wanted = ("reports/gate.json", "evidence.zip", "results/memory.json", "environment.json")
    assert all((kept / name).exists() for name in wanted), ran.output
    gate = json.loads((kept / "reports" / "gate.json").read_text(encoding="utf-8"))
    assert "train.learning_rate" in str(gate["remarks"])
    [comment] = github.comments
    assert {"passed": "Nothing was shown", "worse": "Worse than"}.get(gate["outcome"], "Not decided") in comment["body"]


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
@pytest.mark.parametrize(
    ("job", "options", "said"),
    [
        ("test", [f"--matrix=python:{sys.version_info.major}.{sys.version_info.minor}"], r"=+ \d+ passed in "),
        pytest.param("lint", [], "Success: no issues found in ", marks=pytest.mark.weekly),  # CI runs it anyway
    ],
)
def test_ci_runs_the_real_make(job: str, options: list[str], said: str, runner: Runner) -> None:
    runner.variables = {"PYTEST_ADDOPTS": "--color=no tests/test_files.py"}  # in place of all tests
    ran = runner.run("ci", "push", {}, f"--job={job}", *options)
    assert ran.jobs == {job: "success"}, ran.output
    assert re.search(said, ran.output)


def test_the_weekly_run_makes_the_larger_checks(runner: Runner) -> None:
    runner.tool("make", '[ -z "$ARGS" ] || echo "make $1 with $ARGS"')
    runner.tool("sudo", '"$@"')
    ran = runner.run("weekly", "schedule")
    assert set(ran.jobs.values()) == {"success"}
    targets = {
        "test-weekly",
        "fuzz",
        "chaos",
        "rehearse",
        "services-check",
        "peers",
        "image-check",
        "hosts-check",
        "slurm-check",
    }
    assert {call[1] for call in ran.called("make")} == targets
    checks = {word for call in ran.called("sudo") for word in call if word.endswith("-check")}
    assert checks == {"hosts-check", "slurm-check"}
    assert all(f"make {target} with --kills 30" in ran.output for target in checks)
    assert "make peers with --job step --minutes 1" in ran.output


WEEKLY = {
    "fuzz": ("tests", " passed", {"PYTEST_ADDOPTS": "tests/test_stats.py -k reciprocal"}),
    "chaos": ("tests", "seed 7", {"MAKEFLAGS": r"ARGS=--minutes\ 0.5\ --seed\ 7"}),
    "rehearse": ("tests", " passed", {"PYTEST_ADDOPTS": "-k events_"}),
    "services-check": ("tests", "all steps passed", {"PYTEST_ADDOPTS": "-k host_names"}),
    "hosts-check": ("hosts", "without a link", {}),
    "slurm-check": ("hosts", " passed", {"PYTEST_ADDOPTS": "-k exit_code"}),
    "image-check": ("image", "all steps passed", {"STEPS": "base image content"}),
}
"""Target of `make` -> its job, what it prints, and the settings that make it short."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif("RUNNER_IMAGE" not in os.environ, reason="takes minutes: docker/check weekly")
@pytest.mark.parametrize("target", WEEKLY)
def test_the_weekly_run_with_the_real_make(target: str, runner: Runner) -> None:
    job, said, short = WEEKLY[target]
    machine = {name: value for name, value in os.environ.items() if name.startswith(("BASE", "DOCKER_", "PIP_"))}
    runner.variables = machine | short
    runner.tool("sudo", '"$@"')
    matrix = [] if job == "image" else [f"--matrix=target:{target}"]
    ran = runner.run("weekly", "schedule", {}, f"--job={job}", *matrix)
    assert set(ran.jobs.values()) == {"success"}, ran.output
    assert said in ran.output


@pytest.mark.slow
@pytest.mark.skipif("RUNNER_IMAGE" not in os.environ, reason="needs a Docker daemon: docker/check weekly")
def test_a_first_run_on_a_fresh_machine(runner: Runner) -> None:
    """It has Python, make and git: the real make installs the packages and runs the tests, of which few are chosen."""
    runner.image = os.environ["RUNNER_IMAGE"]
    runner.variables = {"PYTEST_ADDOPTS": "--color=no tests/test_files.py"}
    asked = {"check": "test-all", "machine": "hosted"}
    inputs = [f"--input={name}={value}" for name, value in asked.items()]
    ran = runner.run("first-run", "workflow_dispatch", {"inputs": asked}, *inputs)
    assert ran.jobs == {"check": "success"}, ran.output
    kept = runner.folder / "artifacts" / "first-run" / "first-run.txt"
    assert re.search(r"=+ \d+ passed in ", kept.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("machine", "variables", "job"),
    [("hosted", [], "failure"), ("self-hosted", ["GPU_RUNNER=box"], "failure"), ("self-hosted", [], None)],
)
def test_a_first_run_keeps_its_output(machine: str, variables: list[str], job: str | None, runner: Runner) -> None:
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
def test_a_release_has_image_packages_and_evidence(tag: str, runner: Runner) -> None:
    """The job that is measured is a short one. Nothing is pushed, published or signed: these actions are stand-ins."""
    runner.tool("docker", "")
    runner.tool("make", f'case $1 in repro|packages) exec {shutil.which("make")} "$@";; esac')
    runner.checkout.commit(SHORT | {"variants.memory": None, "profile.variants": []})
    options = [] if tag == "v0.1.0" else ["--job=pypi"]
    ran = runner.run("release", "push", {"ref": f"refs/tags/{tag}"}, *options, variables=["PYPI=yes"])
    if tag != "v0.1.0":
        assert ran.jobs["packages"] == "failure"
        [failed] = ran.failed
        assert "is not the version of pyproject.toml" in failed
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
