"""The wheel and the sdist: what they contain, and that the pipeline runs from the wheel in a user's repository."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from pipeline.tools import init
from tests.conftest import Clone, Once

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make"),  # the container image has no make
]
NET = """
from torch import nn


def net(*, channels, height, width, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes))
"""
TINY = {
    "fetch": {"dataset": "digits"},
    "train": {"epochs": 1, "seeds": [0], "batch_size": 64},
    "bench": {"max_rounds": 1, "window_seconds": 0.05, "max_foreign_load": 1.0, "max_input_wait": 1.0},
    "profile": {"variants": []},
    "compare": {"max_spread": 1000.0},
    "gate": {"accuracy": False},
    "publish": {"live": False},
    "variants": {"baseline": {}},
}


@pytest.fixture(scope="module")
def source(once: Once) -> Clone:
    """A checkout in which `make packages` was run, with the wheel's installation in ``site``."""

    def make(folder: Path) -> None:
        made = Clone(folder, {})
        made.run("make", "--assume-old=.venv/installed", f"BIN={Path(sys.executable).parent}", "packages")
        [wheel] = (folder / "dist").glob("*.whl")
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
        subprocess.run([*install, str(folder / "site"), str(wheel)], check=True)

    return Clone.at(once("packages", make))


@pytest.fixture(scope="module")
def wheel(source: Clone) -> Path:
    [path] = (source.path / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(source: Clone) -> str:
    """The directory in which pip installed the wheel, for PYTHONPATH. This environment has the dependencies."""
    return str(source.path / "site")


def test_the_wheel_has_package_and_files_of_init(source: Clone, wheel: Path) -> None:
    """The release workflow compares its tag with the names of the packages."""
    about = tomllib.loads((source.path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert wheel.name.split("-")[:2] == [about["name"], about["version"]]
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = source.run("git", "ls-files", "pipeline", "variants").splitlines()
    project = {*init.WHOLE, *init.AT_THE_TOP, *init.ONCE, *init.LINES, "params.yaml"}
    project |= {name for name in tracked if name.startswith("variants/")}
    code = {name for name in tracked if name.startswith("pipeline/")}
    assert inside == code | {f"pipeline/project/{name}" for name in project}


def test_the_sdist_makes_the_same_wheel(source: Clone, wheel: Path, tmp_path: Path) -> None:
    [sdist] = (source.path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    assert {"LICENSE", "README.md", "pyproject.toml"} <= {path.name for path in unpacked.iterdir()}
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    source.run("sh", "-c", f'cd "{unpacked}" && exec python -c "{build}"')
    with zipfile.ZipFile(wheel) as made, zipfile.ZipFile(unpacked / "dist" / wheel.name) as rebuilt:
        assert sorted(made.namelist()) == sorted(rebuilt.namelist())


def test_an_empty_repository_can_plan(installed: str, tmp_path: Path) -> None:
    repository = Clone(tmp_path / "repository", {}, only="LICENSE")
    assert "init: wrote params.yaml" in repository.run("python", "-m", "pipeline", "init", PYTHONPATH=installed)
    planned = repository.run("python", "-m", "pipeline", "plan", "ddp", PYTHONPATH=installed)
    assert "ddp: 2 processes" in planned
    assert "After `dvc repro prepare`, this command also prints" in planned
    added = repository.run("python", "-m", "pipeline", "variants", "memory", "--add", PYTHONPATH=installed)
    assert "params.yaml: added checkpointing" in added
    stages = repository.run("dvc", "stage", "list", "--name-only", PYTHONPATH=installed).split()
    assert {"environment", "train@ddp", "train@checkpointing", "publish"} <= set(stages)


@pytest.mark.timeout(1800)
def test_a_repository_measures_its_own_model(installed: str, tmp_path: Path) -> None:
    """The repository has a params.yaml, a dvc.yaml and models/ already, so the pipeline has to be put into a folder."""
    repository = Clone(tmp_path / "repository", {}, only="LICENSE")
    theirs = {"params.yaml": "lr: 0.1\n", "dvc.yaml": "stages: {}\n", ".gitignore": "/data\n", "models/nets.py": NET}
    for name, text in theirs.items():
        (repository.path / name).parent.mkdir(exist_ok=True)
        (repository.path / name).write_text(text, encoding="utf-8")
    repository.run("dvc", "init", "--quiet")
    repository.commit()
    python = ("python", "-m", "pipeline")
    assert "cd performance" in repository.run(*python, "init", PYTHONPATH=installed, fails=True)
    folder = repository.path / "performance"
    folder.mkdir()
    (folder / "own").symlink_to("../models")
    inside = Clone.at(folder)
    inside.run(*python, "init", "--model", "own.nets:net", PYTHONPATH=installed)
    assert {name: (repository.path / name).read_text(encoding="utf-8") for name in theirs} == theirs
    values = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
    for section, change in TINY.items():
        values[section] = change if section == "variants" else values[section] | change
    (folder / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    repository.commit()
    inside.run("dvc", "repro", PYTHONPATH=installed)
    result = json.loads((folder / "results/baseline.json").read_text(encoding="utf-8"))
    assert result["runs"][0]["test_accuracy"] > 0.5
    repository.commit()
    nets = repository.path / "models/nets.py"
    nets.write_text(NET.replace("Flatten()", "Flatten(), nn.Identity()"), "utf-8")
    assert "Running stage 'train@baseline'" in inside.run("dvc", "repro", "train@baseline", PYTHONPATH=installed)
    values["bench"]["max_rounds"] = 6
    (folder / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    inside.run("sh", "-c", f"{' '.join(python)} gate --against HEAD; test -s reports/gate.json", PYTHONPATH=installed)
