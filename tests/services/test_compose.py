"""Check compose.yaml without starting its services."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.services import compose

SECRETS = ("POSTGRES_PASSWORD", "S3_ROOT_KEY", "S3_SECRET_KEY", "MLFLOW_PASSWORD", "MLFLOW_SECRET_KEY")
SERVICES: dict[str, Any] = compose.read({name: f"the {name}" for name in SECRETS})["services"]


@pytest.mark.parametrize("name", SECRETS)
def test_a_missing_secret_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(KeyError, match=rf"{name}: copy .env.example to .env"):
        compose.read({other: "given" for other in SECRETS if other != name})


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
    assert yaml.safe_load(compose.FILE.read_text(encoding="utf-8"))["networks"]["store"] == {"internal": True}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_may_do_nothing_to_the_machine_or_to_its_own_image(name: str) -> None:
    service = SERVICES[name]
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert service["read_only"] is True
    assert any(each.partition(":")[0] == "/tmp" for each in service["tmpfs"])
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"}


def test_a_service_starts_after_those_that_it_needs() -> None:
    waits = {name: service.get("depends_on", {}) for name, service in SERVICES.items()}
    healthy, completed = {"condition": "service_healthy"}, {"condition": "service_completed_successfully"}
    assert waits["pipeline"] == waits["pipeline-cpu"] == {"mlflow": healthy}
    assert waits["mlflow"] == {"postgres": healthy, "bucket": completed}
    assert waits["bucket"] == {"s3": healthy}
    needed = {name for wait in waits.values() for name, how in wait.items() if how == healthy}
    assert all("healthcheck" in SERVICES[name] for name in needed)


def test_state_is_in_named_volumes() -> None:
    named = yaml.safe_load(compose.FILE.read_text(encoding="utf-8"))["volumes"]
    mounted = {name: service["volumes"] for name, service in SERVICES.items() if not name.startswith("pipeline")
               if "volumes" in service}  # fmt: skip
    volumes = {volume.partition(":")[0]: name for name, each in mounted.items() for volume in each}
    assert volumes == {"postgres": "postgres", "s3": "s3", "s3-users": "s3"}
    assert volumes.keys() == named.keys()


def test_one_service_builds_the_image_that_several_use() -> None:
    """If several services built it at the same time under one name, a build could fail because the name is taken."""
    using = {name for name, service in SERVICES.items() if service["image"] == SERVICES["mlflow"]["image"]}
    assert using == {"mlflow", "pipeline", "pipeline-cpu"}
    assert {name for name, service in SERVICES.items() if "build" in service} == {"mlflow"}


@pytest.mark.filterwarnings("ignore")  # warnings during the import of MLflow's server
@pytest.mark.parametrize("name", [None, "mlflow.example.org"])
def test_the_page_works_under_the_name_that_a_proxy_gives_it(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.server import security_utils

    given = dict.fromkeys(SECRETS, "given") | ({"MLFLOW_NAME": name} if name else {})
    for variable, value in compose.read(given)["services"]["mlflow"]["environment"].items():
        monkeypatch.setenv(variable, value)
    hosts, origins = security_utils.get_allowed_hosts_from_env(), security_utils.get_allowed_origins_from_env()
    assert hosts
    for host in ("mlflow.example.org", "evil.example.org"):
        let_in = host == name
        assert security_utils.is_allowed_host_header(hosts, host) is let_in
        assert security_utils.should_block_cors_request(f"https://{host}", "POST", origins) is not let_in
    assert security_utils.is_allowed_host_header(hosts, "127.0.0.1:5000")
    assert not security_utils.should_block_cors_request("http://127.0.0.1:5000", "POST", origins)


def test_images_are_pinned_to_a_version() -> None:
    for name in ("bucket", "postgres", "s3"):
        version = SERVICES[name]["image"].rpartition(":")[2]
        assert version.removeprefix("v").replace(".", "").isdigit(), version


def test_the_gpus_are_reserved_for_the_pipeline_alone() -> None:
    assert {name for name, service in SERVICES.items() if "gpu" in str(service.get("deploy"))} == {"pipeline"}
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {
        "bucket",
        "mlflow",
        "postgres",
        "s3",
    }
