"""The services of compose.yaml, run by Docker Compose under a project name of their own. `docker/check compose` sets
COMPOSE_FILE, and SERVICES_IMAGE: the pipeline's image."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.servers import free_port

ROOT = Path(__file__).parents[2]
FILE = ROOT / "compose.yaml"


class Services:
    """The services, for the checkout in whose folder Compose runs: the pipeline's containers mount it."""

    def __init__(self, secrets: Mapping[str, str], folder: Path) -> None:
        self.port = free_port()
        self.secrets = secrets
        for file in ("compose.yaml", "docker"):
            (shutil.copytree if (ROOT / file).is_dir() else shutil.copy)(ROOT / file, folder / file)
        self._folder = folder
        self._environment = os.environ | secrets | {
            "COMPOSE_PROJECT_NAME": f"services-{os.getpid()}",
            "IMAGE": os.environ["SERVICES_IMAGE"],
            "MLFLOW_PORT": str(self.port),
            "MLFLOW_NAME": "mlflow.example.org",
            "PIPELINE_USER": f"{os.getuid()}:{os.getgid()}",
        }  # fmt: skip

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *names: str) -> None:
        """Start these services, or all, and wait until they are healthy."""
        self("up", "--detach", "--wait", "--no-build", *names)

    def end(self) -> None:
        """Remove the services, their volumes, and containers of the pipeline that a failed test left."""
        left = 'docker ps --quiet --filter label=com.docker.compose.project="$COMPOSE_PROJECT_NAME"'
        self.shell(f"{left} | xargs --no-run-if-empty docker rm --force")
        self("down", "--volumes")

    def background(self, checkout: Path, log: Path, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the pipeline's container, on ``checkout``."""
        with log.open("w") as file:
            return subprocess.Popen(
                ["docker", "compose", "run", "--rm", "--no-deps", "--no-TTY", "pipeline-cpu", *command],
                cwd=checkout,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def inside(self, checkout: Path, *command: str, code: int = 0) -> str:
        """Run a command in the pipeline's container, on ``checkout``; return what it printed."""
        return self("run", "--rm", "--no-deps", "--no-TTY", "pipeline-cpu", *command, folder=checkout, code=code)

    def shell(self, script: str) -> None:
        """Run a script of the documentation in the folder of compose.yaml."""
        subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=self._folder, env=self._environment, check=True)

    def __call__(self, *arguments: str, folder: Path | None = None, code: int = 0) -> str:
        done = subprocess.run(
            ["docker", "compose", *arguments],
            cwd=folder or self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, f"docker compose {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr
