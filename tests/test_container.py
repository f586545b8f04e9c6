"""The container's files agree with the project's other files. `make image-check` builds and tries the image."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.pages import commands

ROOT = Path(__file__).parent.parent


def test_the_devcontainer_is_the_image_with_the_tools_of_the_tests() -> None:
    """An editor ignores a key that it does not know, so the keys are checked here."""
    content = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    keys = "name initializeCommand build remoteUser runArgs hostRequirements customizations"
    assert [*content] == keys.split()
    assert content["build"] == {"dockerfile": "Dockerfile", "context": "..", "args": {"IMAGE": "pipeline"}}
    assert content["initializeCommand"] == "make image IMAGE=pipeline"
    assert f"--create-home {content['remoteUser']} " in (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_base_image_has_the_cuda_version_of_the_locked_torch() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    [locked] = re.findall(r"^cuda-toolkit==(\d+\.\d+)\.", lock, flags=re.MULTILINE)
    [base] = re.findall(r"^ARG BASE=nvidia/cuda:(\d+\.\d+)\.", dockerfile, flags=re.MULTILINE)
    assert base == locked


def test_packages_are_built_with_the_locked_build_tool() -> None:
    """No build fetches a build tool of its own."""
    build, lock = ((ROOT / f"requirements{of}.lock").read_text(encoding="utf-8") for of in ("-build", ""))
    assert build.partition("    #")[0] in lock
    for file in ("Dockerfile", "Makefile"):
        assert "--no-build-isolation" in (ROOT / file).read_text(encoding="utf-8")


def test_the_base_image_refuses_no_driver_that_torch_can_use() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    variables = dockerfile.rpartition("\nENV ")[2].partition("\n\n")[0]
    assert "NVIDIA_DISABLE_REQUIRE=true" in variables.split()


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
def test_the_source_label_of_the_image_contains_no_secret(remote: str, label: str) -> None:
    rule = "source: ; @printf '%s\\n' \"$$REMOTE\" | sed -nE '$(PUBLIC)'"
    command = ["make", "--no-print-directory", "--directory", str(ROOT), "--eval", rule, "source"]
    done = subprocess.run(command, env=os.environ | {"REMOTE": remote}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == label


def test_the_documented_container_gets_the_gpus_and_has_the_checkout_at_the_same_path() -> None:
    """MLflow writes absolute paths into mlflow.db, and `make ui` on the host has to find these paths."""
    [[*words, image]] = [each for each in commands(ROOT / "docs" / "containers.md") if each[:2] == ["docker", "run"]]
    following = dict(itertools.pairwise(words))
    assert {name: following[name] for name in ("--gpus", "--user", "--volume", "--workdir")} == {
        "--gpus": "all",
        "--user": "$(id -u):$(id -g)",
        "--volume": "$PWD:$PWD",
        "--workdir": "$PWD",
    }
    assert "--shm-size=8g" in words
    assert image == "pipeline"
