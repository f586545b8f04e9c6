"""Read compose.yaml, and run its services as plain processes on loopback, without Docker.

Commands, environments and health checks are read from compose.yaml, so that they cannot differ from it. PostgreSQL is
the one installed on this system. moto's S3 server replaces the object store of compose.yaml.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import yaml

from tests.servers import answers, free_port

ROOT = Path(__file__).parents[2]
FILE = ROOT / "compose.yaml"
AUTHORISATION = "/workspace/docker/auth.ini"
"""Path of docker/auth.ini in the image."""
S3_SERVER = "SERVICES_S3"
"""Environment variable with the path of moto's server; `make services-check` sets it."""

_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::([?-])([^}]*))?\})")


def read(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return compose.yaml's content with ``variables`` inserted. Raises KeyError, with the file's own message, if a
    required variable is missing."""

    def filled(match: re.Match[str]) -> str:
        escaped, name, operator, text = match.groups()
        if escaped:
            return "$"
        if variables.get(name):
            return variables[name]
        if operator == "-":
            return str(text)
        raise KeyError(f"{name}: {text}")

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return _VARIABLE.sub(filled, node) if isinstance(node, str) else node

    content: dict[str, Any] = walk(yaml.safe_load(FILE.read_text(encoding="utf-8")))
    return content


def postgresql() -> Path | None:
    """Return the folder of the newest PostgreSQL's programs, which Debian keeps off PATH; None if there is none."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    found = shutil.which("initdb") or (installed[-1] if installed else None)
    return Path(found).resolve().parent if found else None


class Services:
    """The services of compose.yaml. Each listens on a free port of 127.0.0.1 instead of the port in the file."""

    def __init__(self, directory: Path, variables: Mapping[str, str]) -> None:
        self.services: dict[str, Any] = read(variables)["services"]
        self.ports = {name: free_port() for name in ("mlflow", "postgres", "s3")}
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.ports['mlflow']}"

    def start(self) -> None:
        """Start the database, the object store and MLflow, each after the services that it needs."""
        self._start_postgres()
        self._spawn("s3", [os.environ[S3_SERVER], "--host", "127.0.0.1", "--port", str(self.ports["s3"])], {})
        self._wait("s3", lambda: answers(self.ports["s3"]))
        self.object_store().create_bucket(Bucket="mlflow")  # as compose.yaml's service bucket does with its own tool
        self.start_mlflow()

    def start_mlflow(self) -> None:
        self._spawn("mlflow", self.command("mlflow"), self.environment("mlflow"))
        self._wait("mlflow", lambda: self.is_healthy("mlflow"))

    def object_store(self) -> Any:
        """Return a client of the object store with the rights of MLflow's server."""
        storage = self.environment("mlflow")
        return boto3.client(
            "s3",
            endpoint_url=storage["MLFLOW_S3_ENDPOINT_URL"],
            region_name=storage["AWS_DEFAULT_REGION"],
            aws_access_key_id=storage["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=storage["AWS_SECRET_ACCESS_KEY"],
        )

    def kill(self, name: str) -> None:
        """Kill the service and its children with SIGKILL, so that they cannot clean up."""
        process = self._processes.pop(name)
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for name in [*self._processes]:
            self.kill(name)

    def command(self, name: str) -> list[str]:
        """Return the container's command, with local addresses and with the programs of this Python environment."""
        program, *arguments = [self._here(part, name) for part in self.services[name]["command"]]
        return [str(Path(sys.executable).with_name(program)), *arguments]

    def environment(self, name: str) -> dict[str, str]:
        return {key: self._here(value, name) for key, value in self.services[name].get("environment", {}).items()}

    def is_healthy(self, name: str) -> bool:
        """Run compose.yaml's health check; return whether it succeeds."""
        kind, program, *arguments = [self._here(part, name) for part in self.services[name]["healthcheck"]["test"]]
        assert kind == "CMD"
        folder = postgresql() if name == "postgres" else Path(sys.executable).parent
        assert folder
        port = {"PGPORT": str(self.ports[name])}
        done = subprocess.run([str(folder / program), *arguments], env=os.environ | port, capture_output=True)
        return done.returncode == 0

    def _here(self, text: str, name: str) -> str:
        """Return ``text`` of the service ``name``, with each service's address replaced by its local address."""
        text = re.sub(r"(?<=//|\w@)(mlflow|postgres|s3):\d+", lambda match: f"127.0.0.1:{self.ports[match[1]]}", text)
        if text == AUTHORISATION:
            path = self._directory / "auth.ini"
            settings = (ROOT / "docker" / "auth.ini").read_text(encoding="utf-8")
            path.write_text(self._here(settings, name), encoding="utf-8")
            return str(path)
        if name == "mlflow":  # its own port and address
            text = re.sub(r"^--port=\d+$", f"--port={self.ports[name]}", text)
            text = re.sub(r"(?<=//127\.0\.0\.1:)5000(?=/)", str(self.ports[name]), text)
            text = text.replace("0.0.0.0", "127.0.0.1")
        return text

    def _start_postgres(self) -> None:
        programs, settings = postgresql(), self.services["postgres"]["environment"]
        assert programs
        data, password = self._directory / "postgres", self._directory / "password"
        data.mkdir(mode=0o700)
        password.write_text(settings["POSTGRES_PASSWORD"], encoding="utf-8")
        # PostgreSQL refuses to run as root.
        user = "postgres" if os.geteuid() == 0 else None
        if user:
            shutil.chown(data, user)
            shutil.chown(password, user)
        made = [f"--username={settings['POSTGRES_USER']}", f"--pwfile={password}", "--auth=scram-sha-256", "--no-sync"]
        subprocess.run(
            [programs / "initdb", "--pgdata", data, *made],
            check=True,
            user=user,
            cwd=data,
            stdout=subprocess.DEVNULL,
        )
        options = ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={data}"]
        command = [str(programs / "postgres"), "-D", str(data), "-p", str(self.ports["postgres"]), *options]
        self._spawn("postgres", command, {}, user)
        self._wait("postgres", lambda: self.is_healthy("postgres"))
        subprocess.run(
            [programs / "createdb", "--host=127.0.0.1", f"--port={self.ports['postgres']}",
             f"--username={settings['POSTGRES_USER']}", settings["POSTGRES_DB"]],
            env=os.environ | {"PGPASSWORD": settings["POSTGRES_PASSWORD"]},
            check=True,
        )  # fmt: skip

    def _spawn(self, name: str, command: list[str], environment: dict[str, str], user: str | None = None) -> None:
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                env=os.environ | environment,
                cwd=self._directory,
                user=user,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that `kill` reaches its children too
            )

    def _wait(self, name: str, ready: Any) -> None:
        """Wait until ``ready`` returns true. Fails if the service ends. The test's time limit ends an endless wait."""
        while not ready():
            if self._processes[name].poll() is not None:
                raise AssertionError(f"{name} ended:\n{(self._directory / f'{name}.log').read_text()}")
            time.sleep(0.2)
