"""Run the GitHub workflows unchanged on this machine, by ``act``, with stand-ins for what only GitHub has.

A job's steps run in a new folder under the test's temporary folder. The stand-ins are: the actions, which cannot be
cloned without a network; `gh`; GitHub's API for comments; and, for a test that asks for it, `docker`. Each records its
calls.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.commands import executable
from tests.conftest import Clone

REPOSITORY = "somebody/pipeline"
ACT = shutil.which("act", path=str(Path(sys.executable).parent))

ACTIONS = {  # what the stand-in of an action does, besides recording its inputs
    "actions/checkout": 'git clone --quiet "$RECORDS/origin" . && git checkout --quiet "$REF"',
    # In place of an installation. make compares the times of .venv and of the lock files, which are new in a checkout.
    "actions/setup-python": '[ -z "$VENV" ] || ln -s "$VENV" .venv; find . -name "*lock*" | xargs touch -d 2000-01-01',
    "actions/upload-artifact": '"$PYTHON" "$RECORDS/artifact.py" upload "$NAME" "$PATH_"',
    "actions/download-artifact": '"$PYTHON" "$RECORDS/artifact.py" download "$NAME" "$PATH_"',
    "docker/metadata-action": 'echo "tags=ghcr.io/somebody/pipeline:1.2" >>"$GITHUB_OUTPUT"',
    "docker/build-push-action": 'docker build . && echo "digest=sha256:12ab" >>"$GITHUB_OUTPUT"',
}

SHORT = {
    "fetch.dataset": "digits",
    "train.epochs": 1,
    "train.seeds": [0],
    "train.batch_size": 32,
    "bench.max_minutes": 0.2,
    "bench.hard_limit": True,
}
"""Settings of params.yaml for a job of seconds."""

ARTIFACT = """
import os, pathlib, shutil, sys
do, name, paths = sys.argv[1:]
kept = pathlib.Path(os.environ["RECORDS"], "artifacts", name or "artifact")
if do == "download":
    shutil.copytree(kept, paths or ".", dirs_exist_ok=True)
else:  # as GitHub does: several paths are kept relative to their common folder, and links are followed
    wanted = [pathlib.Path(path).absolute() for path in paths.split()]
    top = wanted[0] if len(wanted) == 1 and wanted[0].is_dir() else os.path.commonpath([path.parent for path in wanted])
    shutil.rmtree(kept, ignore_errors=True)
    for path in wanted:
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                (kept / file.relative_to(top)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, kept / file.relative_to(top))
"""

RATIO = {"estimate": 1.0625, "low": 1.03125, "high": 1.09375, "decision": "better"}
ACCURACY = {"unit": "fraction", "estimate": -0.005, "low": -0.0125, "high": 0.0025, "decision": "same"}
FIGURES = {"variant": "ddp", "throughput": RATIO, "memory": None, "accuracy": ACCURACY}
ROW = "| ddp | 1.062 (1.031 to 1.094) better | not known | -0.50 (-1.25 to +0.25) same |"
"""How the report shows FIGURES."""


class GitHub:
    """The part of GitHub's API for comments: at most 100 per page, oldest first."""

    def __init__(self) -> None:
        self.comments: list[dict[str, Any]] = []
        self.refuses = False
        self.address = ""

    def add(self, login: str, body: str) -> dict[str, Any]:
        identity = len(self.comments) + 1
        about = {"id": identity, "user": {"login": login}, "html_url": f"comment/{identity}", "body": body}
        self.comments.append(about)
        return about

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


def recording(name: str, words: str) -> str:
    """Return the command that records a call, in one write, because jobs run side by side."""
    return f'call=$(printf "%q " {name} {words}); echo "$call" >>"$RECORDS/calls"'


@dataclass
class Ran:
    """One run of a workflow."""

    jobs: dict[str, str]
    """Job -> "success" or "failure". A job that did not run is missing."""
    output: str
    """What the steps printed. act may lose the last lines of a step that fails, because it does not wait for them."""
    failed: list[str]
    """The names of the steps that failed."""
    calls: list[list[str]]
    """The words of each call of a stand-in, in order. An action's inputs are words of the form name=value."""
    obeyed: list[str]
    """The names of the commands to the runner that the steps printed and the runner obeyed, such as add-mask."""

    def called(self, *words: str) -> list[list[str]]:
        """Return the calls that begin with ``words``."""
        return [call for call in self.calls if call[: len(words)] == list(words)]


@dataclass
class Runner:
    """GitHub as a workflow sees it: a repository, its API, and machines that run jobs."""

    checkout: Clone
    """The commit whose workflows run, checked out."""
    folder: Path
    """An empty folder for records, artifacts and the jobs' folders."""
    api: str
    """The address of GitHub's API."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More environment variables of the jobs."""
    image: str = ""
    """The image whose containers run the jobs. By default, they run on this machine, with this environment as .venv."""

    def __post_init__(self) -> None:
        self.tool("gh", '[ "$2" != view ]')  # there is no such pull request yet
        (self.folder / "artifact.py").write_text(ARTIFACT, encoding="utf-8")
        self.checkout.run("git", "remote", "add", "origin", f"https://github.com/{REPOSITORY}")
        self.checkout.run("git", "clone", "--quiet", "--bare", ".", str(self.folder / "origin"))

    def tool(self, name: str, ends: str) -> None:
        """Put a stand-in for a command on the jobs' path. ``ends``: what it does after recording its call, in bash."""
        record = recording(name, '"$@"')
        executable(self.folder / "tools" / name, f"#!/usr/bin/env bash\n{record}\n{ends}\n")

    def run(
        self,
        workflow: str,
        event: str,
        payload: Mapping[str, Any] | None = None,
        *options: str,
        variables: Sequence[str] = ("GPU_RUNNER=box",),
    ) -> Ran:
        """Run a workflow. ``payload``: the event's own values. ``options``: more options of act. ``variables``: the
        repository's variables."""
        (self.folder / "calls").write_text("", encoding="utf-8")
        about = {"repository": {"full_name": REPOSITORY, "default_branch": "main", "private": False}, **(payload or {})}
        (self.folder / "event.json").write_text(json.dumps(about), encoding="utf-8")
        path = os.pathsep.join([str(self.folder / "tools"), str(Path(sys.executable).parent), os.environ["PATH"]])
        given = {
            "GITHUB_API_URL": self.api,
            "RECORDS": str(self.folder),
            "GIT_CONFIG_COUNT": "1",  # what is pushed to GitHub arrives in the folder
            "GIT_CONFIG_KEY_0": f"url.{self.folder}/origin.insteadOf",
            "GIT_CONFIG_VALUE_0": f"https://x-access-token:token@github.com/{REPOSITORY}",
            **({"PYTHON": "python3"} if self.image else {"PYTHON": sys.executable, "VENV": sys.prefix, "PATH": path}),
            **self.variables,
        }
        command = [
            str(ACT), event, "--json", "--no-cache-server", "--pull=false", "--defaultbranch=main",
            f"--workflows=.github/workflows/{workflow}.yml", f"--eventpath={self.folder / 'event.json'}",
            *(f"--platform={label}={self.image or '-self-hosted'}" for label in ("self-hosted", "ubuntu-latest")),
            f"--container-options=--volume={self.folder}:{self.folder}",
            *(f"--local-repository={uses}={self._action(uses, inputs)}" for uses, inputs in self._used().items()),
            *(f"--env={name}={value}" for name, value in given.items()),
            *(f"--var={variable}" for variable in variables), "--secret=GITHUB_TOKEN=token", *options,
        ]  # fmt: skip
        private = {"HOME": str(self.folder / "home"), "XDG_CACHE_HOME": str(self.folder / "cache"), "PATH": path}
        done = subprocess.run(
            command, cwd=self.checkout.path, env=self.checkout.environment(private), capture_output=True, text=True
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        calls = (self.folder / "calls").read_text(encoding="utf-8")
        return Ran(
            {line["jobID"]: line["jobResult"] for line in lines if "jobResult" in line},
            "".join(line["msg"] for line in lines if line.get("raw_output")) + done.stderr,
            [line["step"] for line in lines if line.get("stepResult") == "failure"],
            [shlex.split(line) for line in calls.splitlines()],
            [line["command"] for line in lines if line.get("command", "ignored") != "ignored"],
        )

    def _used(self) -> dict[str, set[str]]:
        """Return OWNER/NAME@REF -> the names of its inputs, of every action that the workflows use."""
        used: dict[str, set[str]] = {}
        for file in (self.checkout.path / ".github" / "workflows").glob("*.yml"):
            for job in yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values():
                for step in job.get("steps", []):
                    if "uses" in step:
                        used.setdefault(step["uses"], set()).update(step.get("with", {}))
        return used

    def _action(self, uses: str, given: set[str]) -> Path:
        """Write the stand-in of an action with the inputs ``given``; return its folder."""
        name, inputs = uses.partition("@")[0], sorted(given | {"name", "path"})
        variable = {key: re.sub(r"\W", "_", key).upper().replace("PATH", "PATH_") for key in inputs}
        words = " ".join(f'"{key}=${variable[key]}"' for key in inputs)
        outputs = {key: {"value": f"${{{{ steps.do.outputs.{key} }}}}"} for key in ("digest", "labels", "tags")}
        step = {
            "id": "do",
            "shell": "bash",
            "run": f"{recording(name, words)}\n{ACTIONS.get(name, '')}",
            "env": {variable[key]: f"${{{{ inputs.{key} }}}}" for key in inputs},
        }
        action = {"name": name, "inputs": {key: {"default": ""} for key in inputs}, "outputs": outputs}
        action["runs"] = {"using": "composite", "steps": [step]}
        folder = self.folder / "actions" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "action.yml").write_text(yaml.safe_dump(action), encoding="utf-8")
        return folder
