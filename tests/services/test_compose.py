"""Check compose.yaml without starting its services."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.services import compose

SECRETS = ("POSTGRES_PASSWORD", "S3_ROOT_KEY", "S3_SECRET_KEY", "MLFLOW_PASSWORD", "MLFLOW_SECRET_KEY")
TEXT = compose.FILE.read_text(encoding="utf-8")
FILLED = re.sub(r"\$\{(\w+):\?[^}]*\}", r"the \1", TEXT).replace("$$", "$")
SERVICES: dict[str, Any] = yaml.safe_load(FILLED)["services"]


def test_a_missing_secret_is_refused_with_what_to_do() -> None:
    used = re.findall(r"\$\{(\w+)(:\?[^}]*)?\}", TEXT)
    assert {name for name, _ in used} == set(SECRETS)
    assert {remedy for _, remedy in used} == {":?copy .env.example to .env and set it there"}


def test_the_example_names_every_secret_and_holds_none() -> None:
    lines = (compose.ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == [f"{name}=" for name in SECRETS]
    ignored = (compose.ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "/.env" in ignored


def test_every_published_port_is_on_loopback() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_who_knows_which_secret() -> None:
    """The pipeline knows only its own password. The server does not know the root key of the object store."""
    knowing = {name: {secret for secret in SECRETS if f"the {secret}" in str(each)} for name, each in SERVICES.items()}
    assert knowing == {
        "bucket": {"S3_ROOT_KEY", "S3_SECRET_KEY"},
        "mlflow": set(SECRETS) - {"S3_ROOT_KEY"},
        "pipeline": {"MLFLOW_PASSWORD"},
        "pipeline-cpu": {"MLFLOW_PASSWORD"},
        "postgres": {"POSTGRES_PASSWORD"},
        "s3": {"S3_ROOT_KEY"},
    }


STORE = """#!/bin/sh
echo "$ADMIN_ACCESS_KEY $ADMIN_SECRET_KEY" "$@" >>asked
case " $* " in *" create-"*) exit "$TAKEN";; esac
"""
"""Replaces the object store's own tool. TAKEN: 1 if the user and the bucket exist already, else 0."""


@pytest.mark.parametrize("taken", [0, 1])
def test_the_server_has_a_user_of_the_object_store_who_owns_one_bucket(taken: int, tmp_path: Path) -> None:
    (tmp_path / "versitygw").write_text(STORE, encoding="utf-8")
    (tmp_path / "versitygw").chmod(0o755)
    service, user = SERVICES["bucket"], SERVICES["mlflow"]["environment"]
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TAKEN": str(taken), **service["environment"]}
    subprocess.run([*service["entrypoint"], *service["command"]], cwd=tmp_path, env=variables, check=True)
    who = f"--access {user['AWS_ACCESS_KEY_ID']} --secret {user['AWS_SECRET_ACCESS_KEY']} --role user"
    whose = f"--bucket mlflow --owner {user['AWS_ACCESS_KEY_ID']}"
    wanted = [f"create-user {who}", f"update-user {who}", f"create-bucket {whose}", f"change-bucket-owner {whose}"]
    root = SERVICES["s3"]["environment"]
    start = f"{root['ROOT_ACCESS_KEY']} {root['ROOT_SECRET_KEY']} admin --endpoint-url http://s3:7070"
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert asked == [f"{start} {each}" for each in (wanted if taken else wanted[::2])]
    assert "--artifacts-destination=s3://mlflow" in SERVICES["mlflow"]["command"]
    assert root["ROOT_ACCESS_KEY"] != user["AWS_ACCESS_KEY_ID"]


def test_clients_reach_the_server_alone() -> None:
    networks = {name: set(service["networks"]) for name, service in SERVICES.items()}
    assert networks == {
        "mlflow": {"clients", "store"},
        **{name: {"clients"} for name in ("pipeline", "pipeline-cpu")},
        **{name: {"store"} for name in ("bucket", "postgres", "s3")},
    }
    assert yaml.safe_load(TEXT)["networks"]["store"] == {"internal": True}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_may_do_nothing_to_the_machine_or_to_its_own_image(name: str) -> None:
    service = SERVICES[name]
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert service["read_only"] is True
    assert any(each.partition(":")[0] == "/tmp" for each in service["tmpfs"])
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"}


def test_one_service_builds_the_image_that_several_use() -> None:
    """If several services built it at the same time under one name, a build could fail because the name is taken."""
    using = {name for name, service in SERVICES.items() if service["image"] == SERVICES["mlflow"]["image"]}
    assert using == {"mlflow", "pipeline", "pipeline-cpu"}
    assert {name for name, service in SERVICES.items() if "build" in service} == {"mlflow"}


def test_the_gpus_are_reserved_for_the_pipeline_alone() -> None:
    assert {name for name, service in SERVICES.items() if "gpu" in str(service.get("deploy"))} == {"pipeline"}
    started = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert started == {"bucket", "mlflow", "postgres", "s3"}
