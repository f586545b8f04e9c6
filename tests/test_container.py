"""The container's files agree with the rest. `make image-check` builds the image and tries it."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent


def patterns(file: Path) -> list[str]:
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def as_docker_says_it(pattern: str) -> str:
    """Docker's patterns begin at the root; git's do so only with a slash before their last character."""
    return pattern.strip("/") if "/" in pattern[:-1] else f"**/{pattern.rstrip('/')}"


def test_what_git_ignores_stays_out_of_the_image() -> None:
    ignored = {as_docker_says_it(pattern) for pattern in patterns(ROOT / ".gitignore")}
    ignored |= {f".dvc{pattern}" for pattern in patterns(ROOT / ".dvc" / ".gitignore")}
    assert not {*ignored, ".git"} - set(patterns(ROOT / ".dockerignore"))


def test_the_base_has_the_cuda_of_the_locked_torch() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    [locked] = re.findall(r"^cuda-toolkit==(\d+\.\d+)\.", lock, flags=re.MULTILINE)
    [base] = re.findall(r"^ARG BASE=nvidia/cuda:(\d+\.\d+)\.", dockerfile, flags=re.MULTILINE)
    assert base == locked


def test_a_driver_that_torch_can_use_is_not_refused_for_the_bases_sake() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    variables = dockerfile.rpartition("\nENV ")[2].partition("\n\n")[0]
    assert "NVIDIA_DISABLE_REQUIRE=true" in variables.split()


def test_the_readmes_container_gets_the_gpus_and_keeps_the_checkouts_path() -> None:
    """MLflow writes absolute paths into mlflow.db, which `make ui` on the host is to find."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [line] = re.findall(r"^\$ (docker run .*)$", readme, flags=re.MULTILINE)
    *words, image = shlex.split(line)
    following = dict(itertools.pairwise(words))
    assert {name: following[name] for name in ("--gpus", "--user", "--volume", "--workdir")} == {
        "--gpus": "all",
        "--user": "$(id -u):$(id -g)",
        "--volume": "$PWD:$PWD",
        "--workdir": "$PWD",
    }
    assert "--ipc=host" in words
    assert image == "pipeline"
