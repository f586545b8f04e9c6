"""The container's files and compose.yaml agree with the project's other files. `make image-check` builds and tries the
image, and `make services-check` starts the services."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands import executable
from tests.pages import ROOT, commands

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = (ROOT / "compose.yaml").read_text(encoding="utf-8")
CONTENT = yaml.safe_load(re.sub(r"\$\{(\w+):\?[^}]*\}", r"the \1", COMPOSE).replace("$$", "$"))
SERVICES: dict[str, Any] = CONTENT["services"]
CLIENTS, STORE = ("pipeline", "pipeline-cpu"), ("bucket", "postgres", "s3")
SECRETS = ("POSTGRES_PASSWORD", "S3_ROOT_KEY", "S3_SECRET_KEY", "MLFLOW_PASSWORD", "MLFLOW_SECRET_KEY")


def test_the_devcontainer_is_the_image_with_test_tools() -> None:
    """An editor ignores a key that it does not know, so the keys are checked here."""
    content = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert " ".join(content) == "name initializeCommand build remoteUser runArgs hostRequirements customizations"
    assert content["build"] == {"dockerfile": "Dockerfile", "context": "..", "args": {"IMAGE": "pipeline"}}
    assert content["initializeCommand"] == "make image IMAGE=pipeline"
    assert f"--create-home {content['remoteUser']} " in DOCKERFILE


def test_the_base_image_has_the_locked_cuda() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    [locked] = re.findall(r"^cuda-toolkit==(\d+\.\d+)\.", lock, flags=re.MULTILINE)
    [base] = re.findall(r"^ARG BASE=nvidia/cuda:(\d+\.\d+)\.", DOCKERFILE, flags=re.MULTILINE)
    assert base == locked


def test_the_image_gets_every_file_of_the_package() -> None:
    """`.dockerignore` admits each folder by a line of its own, and keeps no line of a folder that went."""
    text = (ROOT / ".dockerignore").read_text(encoding="utf-8")
    lines = re.findall("^!((?:pipeline|variants)/.+)$", text, re.MULTILINE)
    admitted = {line: {path.relative_to(ROOT).as_posix() for path in ROOT.glob(line)} for line in lines}
    assert [line for line, files in admitted.items() if not files] == []
    tracked = subprocess.check_output(["git", "ls-files", "pipeline", "variants"], cwd=ROOT, text=True).splitlines()
    assert [file for file in tracked if file not in set().union(*admitted.values())] == []


def test_packages_are_built_with_the_locked_build_tool() -> None:
    """No build fetches a build tool of its own."""
    build, lock = ((ROOT / f"requirements{of}.lock").read_text(encoding="utf-8") for of in ("-build", ""))
    assert build.partition("    #")[0] in lock
    assert "--no-build-isolation" in DOCKERFILE
    assert "--no-build-isolation" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_base_image_refuses_no_usable_driver() -> None:
    variables = DOCKERFILE.rpartition("\nENV ")[2].partition("\n\n")[0]
    assert "NVIDIA_DISABLE_REQUIRE=true" in variables.split()


@pytest.mark.skipif(shutil.which("make") is None, reason="it is about the Makefile, which the image has no use for")
@pytest.mark.parametrize(
    ("remote", "label"),
    [
        ("https://github.com/owner/name.git", "https://github.com/owner/name.git"),
        ("git@github.com:owner/name.git", "https://github.com/owner/name.git"),
        ("https://me:t0ken@github.com/owner/name", "https://github.com/owner/name"),
        ("https://t0ken@github.com/owner/name", "https://github.com/owner/name"),
        ("https://me:t0@ken@github.com/owner/name?t=t0ken", "https://github.com/owner/name"),
        ("https://github.com/owner/name?access_token=t0ken#t0ken", "https://github.com/owner/name"),
        ("http://t0ken@github.com/owner/name", ""),
        ("ssh://t0ken@github.com/owner/name", ""),
    ],
)
def test_the_source_label_contains_no_secret(remote: str, label: str) -> None:
    rule = "source: ; @printf '%s\\n' \"$$REMOTE\" | sed -nE '$(PUBLIC)'"
    command = ["make", "--no-print-directory", "--directory", str(ROOT), "--eval", rule, "source"]
    done = subprocess.run(command, env=os.environ | {"REMOTE": remote}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == label


def test_the_documented_container_has_gpus_and_checkout() -> None:
    """MLflow writes absolute paths into mlflow.db, and `make ui` on the host has to find these paths."""
    [run] = [command for command in commands(ROOT / "docs" / "containers.md") if command[:2] == ["docker", "run"]]
    wanted = {"--gpus": "all", "--user": "$(id -u):$(id -g)", "--volume": "$PWD:$PWD", "--workdir": "$PWD"}
    assert wanted.items() <= dict(itertools.pairwise(run)).items()
    assert "--shm-size=8g" in run
    assert run[-1] == "pipeline"


def test_every_secret_is_asked_for_and_named() -> None:
    used = re.findall(r"\$\{(\w+)(:\?[^}]*)?\}", COMPOSE)
    assert {name for name, _ in used} == set(SECRETS)
    assert {remedy for _, remedy in used} == {":?copy .env.example to .env and set it there"}
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == [f"{name}=" for name in SECRETS]
    assert "/.env" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_every_published_port_is_on_loopback() -> None:
    [port] = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert port.startswith("127.0.0.1:")


def test_who_knows_which_secret() -> None:
    """The pipeline knows only its own password. The server does not know the root key of the object store."""
    knowing = {name: {secret for secret in SECRETS if f"the {secret}" in str(text)} for name, text in SERVICES.items()}
    assert knowing == {
        "bucket": {"S3_ROOT_KEY", "S3_SECRET_KEY"},
        "mlflow": set(SECRETS) - {"S3_ROOT_KEY"},
        **{name: {"MLFLOW_PASSWORD"} for name in CLIENTS},
        "postgres": {"POSTGRES_PASSWORD"},
        "s3": {"S3_ROOT_KEY"},
    }


TOOL = """#!/bin/sh
echo "$ADMIN_ACCESS_KEY $ADMIN_SECRET_KEY" "$@" >>asked
case " $* " in *" create-"*) exit "$TAKEN";; esac
"""
"""Replaces the object store's own tool. TAKEN: 1 if the user and the bucket exist already, else 0."""


@pytest.mark.parametrize("taken", [0, 1])
def test_the_server_s_user_owns_one_bucket(taken: int, tmp_path: Path) -> None:
    executable(tmp_path / "versitygw", TOOL)
    service, user = SERVICES["bucket"], SERVICES["mlflow"]["environment"]
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TAKEN": str(taken), **service["environment"]}
    subprocess.run([*service["entrypoint"], *service["command"]], cwd=tmp_path, env=variables, check=True)
    who = f"--access {user['AWS_ACCESS_KEY_ID']} --secret {user['AWS_SECRET_ACCESS_KEY']} --role user"
    whose = f"--bucket mlflow --owner {user['AWS_ACCESS_KEY_ID']}"
    wanted = [f"create-user {who}", f"update-user {who}", f"create-bucket {whose}", f"change-bucket-owner {whose}"]
    root = SERVICES["s3"]["environment"]
    start = f"{root['ROOT_ACCESS_KEY']} {root['ROOT_SECRET_KEY']} admin --endpoint-url http://s3:7070"
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert asked == [f"{start} {line}" for line in (wanted if taken else wanted[::2])]
    assert "--artifacts-destination=s3://mlflow" in SERVICES["mlflow"]["command"]
    assert root["ROOT_ACCESS_KEY"] != user["AWS_ACCESS_KEY_ID"]


def test_clients_reach_the_server_alone() -> None:
    networks = {name: set(service["networks"]) for name, service in SERVICES.items()}
    alone = {name: {"clients"} for name in CLIENTS} | {name: {"store"} for name in STORE}
    assert networks == {"mlflow": {"clients", "store"}, **alone}
    assert CONTENT["networks"]["store"] == {"internal": True}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert service["read_only"] is True
    assert any(mount.partition(":")[0] == "/tmp" for mount in service["tmpfs"])
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"}


def test_one_service_builds_the_image_that_several_use() -> None:
    """If several services built it at the same time under one name, a build could fail because the name is taken."""
    using = {name for name, service in SERVICES.items() if service["image"] == SERVICES["mlflow"]["image"]}
    assert using == {"mlflow", "pipeline", "pipeline-cpu"}
    assert {name for name, service in SERVICES.items() if "build" in service} == {"mlflow"}


def test_the_gpus_are_reserved_for_the_pipeline_alone() -> None:
    assert {name for name, service in SERVICES.items() if "gpu" in str(service.get("deploy"))} == {"pipeline"}
    started = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert started == {"mlflow", *STORE}
