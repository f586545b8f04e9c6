"""The workflow that trains and compares on the GPU machine, run by act. `docker` is a stand-in, so nothing trains."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from typing import Any

import pytest

from tests.workflows.github import REPOSITORY, GitHub
from tests.workflows.runner import SHORT, Runner

GATE = {
    "outcome": "passed",
    "together": None,
    "variants": [
        {
            "variant": "ddp",
            "throughput": {"estimate": 1.0625, "low": 1.03125, "high": 1.09375, "decision": "better"},
            "memory": None,
            "accuracy": None,
        }
    ],
}
CONTAINER = f"""
[ "$1" = run ] || exit 0
copy=$(printf '%s\\n' "$@" | sed -n 's,:/workspace$,,p')
[ -z "${{FAILS-}}" ] || exit 1
echo "${{AWS_SECRET_ACCESS_KEY-}}" >"$RECORDS/environment"
mkdir -p "$copy/reports" "$copy/sessions"
echo '{json.dumps(GATE)}' >"$copy/reports/gate.json"
echo '{{}}' >"$copy/sessions/20260108T000000.json"
echo known >>"$copy/sessions/README.md"
touch "$copy/evidence.zip"
ln -s "$RECORDS/event.json" "$copy/results"  # to a file of the machine
mkfifo "$copy/bench.json"  # a reader would wait forever
echo "::add-mask::PIPELINE"
"""
"""What the stand-in of docker does in place of a container with .ci/gpu."""


def pull_request(
    action: str = "labeled",
    label: str | None = "gpu",
    labels: tuple[str, ...] = ("gpu",),
    repository: str = REPOSITORY,
) -> dict[str, Any]:
    request = {
        "number": 7,
        "head": {"ref": "topic", "sha": "0123456789abcdef", "repo": {"full_name": repository}},
        "base": {"ref": "main"},
        "labels": [{"name": name} for name in labels],
    }
    return {"action": action, "pull_request": request} | ({"label": {"name": label}} if label else {})


@pytest.fixture
def gpu(runner: Runner) -> Runner:
    runner.tool("docker", CONTAINER)
    return runner


def options(call: list[str], name: str) -> list[str]:
    return [after for word, after in itertools.pairwise(call) if word == name]


@pytest.mark.parametrize(
    ("event", "payload", "label", "jobs"),
    [
        ("pull_request", pull_request(), "box", {"gpu", "report"}),
        ("pull_request", pull_request("synchronize", None), "box", {"gpu", "report"}),
        ("pull_request", pull_request(repository="a-fork/pipeline"), "box", set()),
        ("pull_request", pull_request("synchronize", None, repository="a-fork/pipeline"), "box", set()),
        ("pull_request", pull_request(label="docs"), "box", set()),
        ("pull_request", pull_request("synchronize", None, labels=("docs",)), "box", set()),
        ("pull_request", pull_request(), "", set()),
        ("workflow_dispatch", {"inputs": {"against": "v1"}}, "box", {"gpu", "report"}),
        ("schedule", {}, "box", {"gpu", "report", "evidence", "session"}),
        ("schedule", {}, "", set()),
    ],
    ids=["labelled", "pushed", "fork", "fork-pushed", "other-label", "unlabelled", "no-machine", "by-hand", "weekly",
         "weekly-no-machine"],
)  # fmt: skip
def test_these_jobs_run(event: str, payload: dict[str, Any], label: str, jobs: set[str], gpu: Runner) -> None:
    ran = gpu.run("gpu", event, payload, variables=[f"GPU_RUNNER={label}"] if label else [])
    assert ran.jobs == dict.fromkeys(jobs, "success"), ran.output
    assert bool(ran.called("docker")) is ("gpu" in jobs)


def test_a_pull_request_is_compared_with_its_base_and_gets_one_comment(gpu: Runner, github: GitHub) -> None:
    for _ in range(2):
        ran = gpu.run("gpu", "pull_request", pull_request())
    [build] = ran.called("docker", "build")
    [container] = ran.called("docker", "run")
    assert container[-3:] == [build[build.index("--tag") + 1], ".ci/gpu", "HEAD^"]
    [comment] = github.comments
    assert "### On the GPU: 0123456789ab" in comment["body"]
    assert "**Nothing was shown to be worse.**" in comment["body"]
    assert "| ddp | 1.062 (1.031 to 1.094) better |" in comment["body"]


def test_the_tested_code_runs_in_a_container_that_has_no_rights_on_the_machine(gpu: Runner) -> None:
    """It gets secrets by name, a copy of the checkout, and nothing that it prints is a command for the runner."""
    secrets = [f"--secret={name}=hush" for name in ("AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD")]
    ran = gpu.run("gpu", "pull_request", pull_request(), *secrets)
    [container] = ran.called("docker", "run")
    assert {"--gpus", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--shm-size=8g"} <= set(container)
    assert not any(word.startswith(("--ipc", "--net", "--pid", "--privileged", "--cap-add")) for word in container)
    [volume] = options(container, "--volume")
    assert volume.endswith("/copy:/workspace")
    assert {"AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD"} < set(options(container, "--env"))
    assert "hush" not in str(ran.calls)
    assert (gpu.folder / "environment").read_text(encoding="utf-8").split() == ["hush"]
    assert "add-mask" not in ran.obeyed
    assert "stop-commands" in ran.obeyed


@pytest.mark.parametrize(("event", "write"), [("pull_request", ""), ("workflow_dispatch", ""), ("schedule", "yes")])
def test_only_the_weekly_run_may_write_what_others_read(event: str, write: str, gpu: Runner) -> None:
    gpu.tool("docker", '[ "$1" != run ] || echo "$PUSH,$PROMOTE,$SESSION,$AGAINST" >"$RECORDS/environment"')
    gpu.run("gpu", event, pull_request() if event == "pull_request" else {"inputs": {"against": "v1; touch injected"}})
    *given, against = (gpu.folder / "environment").read_text(encoding="utf-8").strip().split(",")
    assert given == [write] * 3
    assert against == {"pull_request": "HEAD^", "workflow_dispatch": "v1; touch injected", "schedule": ""}[event]
    assert not list(gpu.folder.rglob("injected"))


@pytest.mark.parametrize("event", ["pull_request", "workflow_dispatch"])
def test_the_report_appears_although_the_gate_failed(event: str, gpu: Runner, github: GitHub) -> None:
    gpu.variables = {"FAILS": "yes"}
    ran = gpu.run("gpu", event, pull_request() if event == "pull_request" else {"inputs": {"against": "v1"}})
    assert ran.jobs == {"gpu": "failure", "report": "success"}
    assert ["No decision: the run ended" in comment["body"] for comment in github.comments] == (
        [True] if event == "pull_request" else []
    )


def test_the_report_is_written_by_the_bases_code(gpu: Runner, github: GitHub) -> None:
    (gpu.checkout.path / ".github" / "report.py").write_text("print('forged')", encoding="utf-8")
    gpu.checkout.commit()  # on the checked-out branch only
    ran = gpu.run("gpu", "pull_request", pull_request())
    assert ran.jobs["report"] == "success"
    assert "forged" not in ran.output
    assert len(github.comments) == 1


def test_each_job_starts_from_nothing_and_leaves_nothing_behind(gpu: Runner) -> None:
    """actions/upload-artifact follows links, even a link to the runner's own credentials."""
    ran = gpu.run("gpu", "pull_request", pull_request())
    name = ran.called("docker", "run")[0][-3]
    assert ran.called("docker")[2:] == [["docker", "rm", "--force", name], ["docker", "image", "rm", "--force", name]]
    uploaded = {
        str(path.relative_to(gpu.folder / "artifacts" / "gpu"))
        for path in gpu.folder.rglob("artifacts/gpu/**/*")
        if path.is_file()
    }
    assert {"evidence.zip", "reports/gate.json", "sessions/20260108T000000.json"} <= uploaded
    assert not {"bench.json", "results"} & uploaded
    assert not list((gpu.folder / "cache").rglob("hostexecutor"))


def test_a_new_session_becomes_a_pull_request(gpu: Runner) -> None:
    """A file of the machine may add a session, but it changes none that the default branch has."""
    ran = gpu.run("gpu", "schedule")
    changed = gpu.checkout.run("git", f"--git-dir={gpu.folder}/origin", "show", "--stat=200", "session-1")
    assert "sessions/20260108T000000.json" in changed
    assert "1 file changed" in changed
    assert [call[:5] for call in ran.called("gh", "pr", "create")] == [["gh", "pr", "create", "--head", "session-1"]]
    assert ran.called("actions/attest") == [["actions/attest", "name=", "path=", "subject-path=gpu/evidence.zip"]]
    (gpu.checkout.path / "sessions" / "20260108T000000.json").write_text("known", encoding="utf-8")
    gpu.checkout.commit()
    ran = gpu.run("gpu", "schedule")
    assert "no new session" in ran.output
    assert ran.called("gh") == []


@pytest.mark.slow
@pytest.mark.skipif("BUILD_OPTIONS" not in os.environ, reason="needs a Docker daemon: docker/check workflow")
def test_a_pull_request_is_built_trained_and_gated_in_docker(runner: Runner, github: GitHub) -> None:
    """The stand-in for `docker` adds what a build needs on this machine, and leaves out the GPUs."""
    runner.tool(
        "docker",
        'words=(); for word; do case $word in --gpus|all) ;; *) words+=("$word");; esac; done\n'
        f'[ "$1" != build ] || words+=($BUILD_OPTIONS)\nexec {shutil.which("docker")} "${{words[@]}}"',
    )
    runner.variables = {name: value for name, value in os.environ.items() if name.startswith(("BUILD_", "DOCKER_"))}
    runner.checkout.edit(SHORT | {"variants.ddp": None, "profile.variants": [], "gate.max_minutes": 0.2})
    runner.checkout.commit()
    runner.checkout.edit({"train.learning_rate": 0.05})
    runner.checkout.commit()
    ran = runner.run("gpu", "pull_request", pull_request())
    assert ran.jobs["report"] == "success", ran.output
    kept = runner.folder / "artifacts" / "gpu"
    assert (kept / "reports" / "gate.json").exists(), ran.output
    gate = json.loads((kept / "reports" / "gate.json").read_text(encoding="utf-8"))
    assert "train.learning_rate" in str(gate["remarks"])
    assert all((kept / name).exists() for name in ("evidence.zip", "results/memory.json", "environment.json"))
    [comment] = github.comments
    assert {"passed": "Nothing was shown", "worse": "Worse than"}.get(gate["outcome"], "Not decided") in comment["body"]
